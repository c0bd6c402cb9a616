"""Training speed: FLOPs of a step compared with a count by hand, MFU and data wait measured with a fake clock."""

import json
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import Chip, peak_memory
from redeqx.monitor import Work
from redeqx.training import _compilation

D, N_LAYERS, SEQ, VOCAB = 16, 3, 4, 32
RATES = Chip("cpu", 0, bfloat16=8e6, float32=4e6, bandwidth=1, link=1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Model(eqx.Module):
    """An embedding table, a scan over layers of one product each, and an output head."""

    table: jax.Array
    layers: jax.Array
    head: jax.Array
    remat: bool = eqx.field(static=True)

    def __init__(self, remat=False):
        keys = jax.random.split(jax.random.key(0), 3)
        self.table = 0.1 * jax.random.normal(keys[0], (VOCAB, D))
        self.layers = 0.1 * jax.random.normal(keys[1], (N_LAYERS, D, D))
        self.head = 0.1 * jax.random.normal(keys[2], (D, VOCAB))
        self.remat = remat

    def __call__(self, ids):
        def body(x, weight):
            return jnp.tanh(x @ weight), None

        x, _ = jax.lax.scan(jax.checkpoint(body) if self.remat else body, self.table[ids], self.layers)
        return x @ self.head


def speeds(workdir):
    """The rows of `speed.jsonl` without that of the end of a fit, which has no rates."""
    rows = [json.loads(line) for line in (workdir / "speed.jsonl").read_text().splitlines()]
    return [row for row in rows if "ended" not in row]


def flops(n_rows):
    """Return the FLOPs of a step: the backward pass takes twice the forward pass, as every product has two gradients."""
    return 3 * n_rows * SEQ * 2 * (N_LAYERS * D * D + D * VOCAB)


def loss_fn(model, ids, key):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(ids), ids).mean()


def make_trainer(workdir=None, *, remat=False, loggers=(), shards=(2, 2), **kwargs):
    deployer = redeqx.Deployer(0, *shards, workdir=workdir, verbose=False, loggers=loggers)
    options = {"collate_fn": np.stack, "loss_fn": loss_fn, **kwargs}
    return redeqx.Trainer(deployer, model=Model(remat), optimizer=optax.sgd(0.1), **options)


def examples(n):
    return np.random.default_rng(0).integers(0, VOCAB, (n, SEQ))


class Recorder:
    def __init__(self):
        self.metrics_by_step = {}

    def log(self, metrics, step):
        self.metrics_by_step[step] = metrics


class AdvanceClock(redeqx.Callback):
    """Advances the fake clock after each step."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def on_step(self, trainer, metrics):
        self.clock.now += self.seconds


@pytest.mark.sweep
def test_examples_per_second_counts_steps_after_a_compilation(clock, monkeypatch, capsys):
    """Each step takes 2 s; the last one has fewer rows and compiles."""
    deployer = redeqx.Deployer()
    beat = deployer.watch.beat  # called after each step

    def delayed(step=None):
        clock.now += 0.0 if step is None else 2.0
        beat(step)

    monkeypatch.setattr(deployer.watch, "beat", delayed)
    trainer = redeqx.Trainer(deployer, model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.fit(examples(68), batch_size=16, n_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "compiling" in line] == [
        "compiling train step", "compiling train step for another batch shape",
    ]  # fmt: skip
    (last,) = [line for line in lines if "step 5/5" in line]
    assert "  8 examples/s  " in last


def test_evaluation_shows_its_batch_count(capsys):
    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.eval_loss(examples(48), batch_size=16)
    assert "evaluate  batch 3  " in capsys.readouterr().out


def test_evaluation_rate_is_that_of_computed_batches(clock, monkeypatch, capsys):
    """A call returns at once, and the results of each batch take 2 s."""
    evaluate = _compilation.CalledSteps.call

    class Results:
        def __init__(self, vector):
            self.vector = vector

        def copy_to_host_async(self):
            pass

        def __array__(self, dtype=None, copy=None):
            clock.now += 2.0
            return np.asarray(self.vector, dtype)

    monkeypatch.setattr(_compilation.CalledSteps, "call", lambda *args: Results(evaluate(*args)))
    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.eval_loss(examples(80), batch_size=16)
    lines = capsys.readouterr().out.splitlines()
    assert "evaluate  batch 5  8 examples/s" in lines[-1]


def test_fused_attention_counts_without_its_recomputed_scores(clock, monkeypatch, tmp_path):
    """In the meter and in the dry run: how a kernel computes attention does not change the model's FLOPs."""
    monkeypatch.setattr(_compilation, "chip_of_kind", lambda kind: RATES)
    n, d = 16, 8
    trainer = redeqx.Trainer(
        redeqx.Deployer(0, workdir=tmp_path, verbose=False),
        model=jnp.eye(d),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda w, x, key: jnp.square(jax.vmap(lambda x: jax.nn.softmax(x @ w @ x.T) @ (x @ w))(x)).mean(),
    )
    rows = [np.ones((n, d), np.float32)] * 24
    # Two projections of data, whose backward pass has one product each, and the two products of attention.
    expected = 8 * (2 * 2 * (2 * n * d * d) + 2 * 3 * (2 * n * n * d))
    run = trainer.dry_run(rows, batch_size=8, search="none")
    trainer.fit(rows, batch_size=8, n_epochs=1, callbacks=[AdvanceClock(clock, 2.0)])
    line = speeds(tmp_path)[-1]
    assert (dict(run.model_flops), line["model_flops_per_second"] * 8 * 2) == ({"float32": expected}, expected)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"remat": True}, {"shards": (1, 8)}, {"accumulate_grad_batches": 2}],
    ids=["plain", "remat", "fsdp", "micro-batches"],
)
def test_mfu_is_relative_to_the_chip_rate(kwargs, clock, monkeypatch, tmp_path):
    """Steps of 2 s on 8 devices of 4e6 float32 FLOP/s; remat, the mesh and micro-batches do not change the FLOP count."""
    monkeypatch.setattr(_compilation, "chip_of_kind", lambda kind: RATES)
    trainer = make_trainer(tmp_path, loggers=[log := Recorder()], **kwargs)
    metrics = trainer.fit(examples(64), batch_size=16, n_epochs=1, callbacks=[AdvanceClock(clock, 2.0)])
    per_second = flops(16) / 8 / 2
    lines = speeds(tmp_path)
    assert [line["step"] for line in lines] == [2, 3, 4]
    for line in lines:
        assert line["model_flops_per_second"] == pytest.approx(per_second)
        assert line["mfu"] == pytest.approx(per_second / 4e6)
        assert line["examples_per_second"] == pytest.approx(8)
        assert line["tokens_per_second"] == pytest.approx(8 * SEQ)
        assert log.metrics_by_step[line["step"]].items() >= line.items() - {("step", line["step"])}
    assert set(metrics) == {"loss", "grad_norm"} and set(log.metrics_by_step[1]) == {"epoch", "loss", "grad_norm"}


def test_speed_of_a_custom_loop_counts_updates_only(clock, tmp_path):
    """Time between updates does not count."""

    def collate(rows):
        clock.now += 2
        return np.stack(rows)

    trainer = make_trainer(tmp_path, collate_fn=collate)
    trainer.train(examples(16), batch_size=16)
    for _ in range(3):
        clock.now += 100
        trainer.update(examples(16))
    lines = speeds(tmp_path)
    assert [line["step"] for line in lines] == [2, 3, 4]
    for line in lines:
        assert line["examples_per_second"] == pytest.approx(8)
        assert line["model_flops_per_second"] == pytest.approx(flops(16) / 8 / 2)


def test_mfu_in_bfloat16_uses_the_bfloat16_rate(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(_compilation, "chip_of_kind", lambda kind: RATES)
    trainer = make_trainer(tmp_path, compute=redeqx.Precision("bfloat16", gradients=None))
    trainer.fit(examples(32), batch_size=16, n_epochs=1, callbacks=[AdvanceClock(clock, 2.0)])
    line = speeds(tmp_path)[0]
    assert line["mfu"] == pytest.approx(flops(16) / 8 / 2 / 8e6)


def test_no_mfu_for_a_chip_without_published_rates(clock, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(examples(32), batch_size=16, n_epochs=1, callbacks=[AdvanceClock(clock, 2.0)])
    (line,) = speeds(tmp_path)
    times = {name for name in line if name.startswith("seconds_")}
    rates = {"examples_per_second", "tokens_per_second", "model_flops_per_second", "data_wait"}
    assert set(line) == {"step", *rates, "goodput", "unix_time", *times} and "seconds_steps" in times


def test_padding_micro_batches_do_not_count_as_work(clock, tmp_path):
    """24 examples, 16 per step in two micro-batches; the last step has one micro-batch and reuses the program."""
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    trainer.fit(examples(24), batch_size=16, n_epochs=1, callbacks=[AdvanceClock(clock, 2.0)])
    (line,) = speeds(tmp_path)
    assert line["step"] == 2 and line["model_flops_per_second"] == pytest.approx(flops(8) / 8 / 2)


def test_data_wait_is_the_share_of_time_without_a_batch(clock):
    """Each batch takes 3 s to arrive, and each update 1 s."""
    line = redeqx.Deployer(verbose=False).progress()
    for step in range(1, 6):
        with line.waiting():
            clock.now += 3
        clock.now += 1
        line.update(step, metrics={}, n_examples=16, work=Work(8.0))
    assert line.speed()["data_wait"] == pytest.approx(0.75)
    assert line.speed() == {}  # recorded at most once a second


# --- memory -------------------------------------------------------------------------------------------------------------


class FakeDevice:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_peak_memory_is_the_maximum_over_devices():
    devices = [
        FakeDevice({"peak_bytes_in_use": 5, "bytes_in_use": 9}),
        FakeDevice(None),
        FakeDevice({"peak_bytes_in_use": 7}),
    ]
    assert peak_memory(devices) == 7
    assert peak_memory([FakeDevice(None), FakeDevice({"bytes_in_use": 3})]) is None
    assert peak_memory(jax.devices()) is None  # CPU
