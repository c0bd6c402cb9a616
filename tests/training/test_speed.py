"""The speed of training: FLOPs of a step against a count by hand, MFU and waiting by a fake clock."""

import json
import time
from collections import deque
from contextlib import closing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import Chip, peak_memory
from redeqx.monitor import Work
from redeqx.training import _work, in_order
from redeqx.training._calls import Calls
from redeqx.training._passes import updates

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
    """A table, a scan over layers of one product each, and a head."""

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


def flops(n_rows):
    """Forward; twice that backward, as every product has a gradient for both of its operands."""
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
        self.seen = {}

    def log(self, metrics, step):
        self.seen[step] = metrics


class Tick(redeqx.Callback):
    """Lets the clock run between two steps."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def on_step(self, trainer, metrics):
        self.clock.now += self.seconds


def test_steps_around_a_compilation_count_with_their_time(clock, monkeypatch, capsys):
    """Steps of 2 s, of which the last one has fewer rows, and compiles."""
    train = Calls.train

    def slow(*args):
        outs = train(*args)
        clock.now += 2.0
        return outs

    monkeypatch.setattr(Calls, "train", slow)
    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.fit(examples(68), batch_size=16, n_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "compiling" in line] == [
        "compiling train step", "compiling train step for another batch shape",
    ]  # fmt: skip
    (last,) = [line for line in lines if "step 5/5" in line]
    assert "  8 examples/s  " in last


def test_an_evaluation_counts_its_batches(capsys):
    trainer = redeqx.Trainer(
        redeqx.Deployer(), model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.eval_loss(examples(48), batch_size=16)
    assert "evaluate  batch 3  " in capsys.readouterr().out


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"remat": True}, {"shards": (1, 8)}, {"accumulate_grad_batches": 2}],
    ids=["plain", "remat", "fsdp", "micro-batches"],
)
def test_mfu_is_the_share_of_the_chip_s_rate(kwargs, clock, monkeypatch, tmp_path):
    """Steps of 2 s on 8 devices of 4e6 FLOP/s in float32; recomputation, the mesh and micro-batches change no FLOP."""
    monkeypatch.setattr(_work, "chip_of_kind", lambda kind: RATES)
    trainer = make_trainer(tmp_path, loggers=[log := Recorder()], **kwargs)
    metrics = trainer.fit(examples(64), batch_size=16, n_epochs=1, callbacks=[Tick(clock, 2.0)])
    per_second = flops(16) / 8 / 2
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4]
    for line in lines:
        assert line["model_flops_per_second"] == pytest.approx(per_second)
        assert line["mfu"] == pytest.approx(per_second / 4e6)
        assert line["examples_per_second"] == pytest.approx(8)
        assert line["tokens_per_second"] == pytest.approx(8 * SEQ)
        assert log.seen[line["step"]].items() >= line.items() - {("step", line["step"])}
    assert set(metrics) == {"loss", "grad_norm"} and set(log.seen[1]) == {"epoch", "loss", "grad_norm"}


def test_a_loop_of_the_user_s_own_has_the_speed_of_its_updates(clock, tmp_path):
    """What it does between them does not count."""

    def collate(rows):
        clock.now += 2
        return np.stack(rows)

    trainer = make_trainer(tmp_path, collate_fn=collate)
    trainer.train(examples(16), batch_size=16)
    for _ in range(3):
        clock.now += 100
        trainer.update(examples(16))
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4]
    for line in lines:
        assert line["examples_per_second"] == pytest.approx(8)
        assert line["model_flops_per_second"] == pytest.approx(flops(16) / 8 / 2)


def test_bfloat16_has_the_chip_s_rate_of_bfloat16(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(_work, "chip_of_kind", lambda kind: RATES)
    trainer = make_trainer(tmp_path, compute_dtype=jnp.bfloat16)
    trainer.fit(examples(32), batch_size=16, n_epochs=1, callbacks=[Tick(clock, 2.0)])
    line = json.loads((tmp_path / "speed.jsonl").read_text().splitlines()[0])
    assert line["mfu"] == pytest.approx(flops(16) / 8 / 2 / 8e6)


def test_a_chip_without_published_rates_has_no_mfu(clock, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(examples(32), batch_size=16, n_epochs=1, callbacks=[Tick(clock, 2.0)])
    line = json.loads((tmp_path / "speed.jsonl").read_text())
    assert set(line) == {"step", "examples_per_second", "tokens_per_second", "model_flops_per_second", "data_wait"}


def test_micro_batches_that_repeat_rows_are_no_work(clock, tmp_path):
    """24 examples at 16 a step in two micro-batches: the last step is one of them in the same program."""
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    trainer.fit(examples(24), batch_size=16, n_epochs=1, callbacks=[Tick(clock, 2.0)])
    line = json.loads((tmp_path / "speed.jsonl").read_text())
    assert line["step"] == 2 and line["model_flops_per_second"] == pytest.approx(flops(8) / 8 / 2)


def test_the_share_of_time_without_a_batch(clock, monkeypatch):
    """Each batch takes 3 s to come, and each update 1 s."""
    trainer = make_trainer()
    engine = trainer._engine
    trainer.train(examples(16), batch_size=16)  # compiled
    size = engine.batch_size(None, 16)

    def slow(prepared):
        for batch in prepared:
            clock.now += 3
            yield batch

    def update(batch, line, position=None):
        clock.now += 1
        line.update(0, metrics={}, n_examples=batch.n_examples, work=Work(8.0))

    steps = [next(in_order(examples(16), size)) for _ in range(5)]
    line = engine.run.console.progress()
    monkeypatch.setattr(engine, "update", update)
    with closing(engine.batches(steps, size)) as upcoming:
        deque(updates(engine, slow(upcoming), line), maxlen=0)
    assert line.speed()["data_wait"] == pytest.approx(0.75)
    assert line.speed() == {}  # recorded once a second


# --- memory -------------------------------------------------------------------------------------------------------------


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_peak_memory_is_that_of_the_fullest_device():
    devices = [Device({"peak_bytes_in_use": 5, "bytes_in_use": 9}), Device(None), Device({"peak_bytes_in_use": 7})]
    assert peak_memory(devices) == 7
    assert peak_memory([Device(None), Device({"bytes_in_use": 3})]) is None
    assert peak_memory(jax.devices()) is None  # CPU
