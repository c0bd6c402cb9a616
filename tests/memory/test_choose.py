"""`memory="auto"`: the first strategy on the run's mesh with which the compiled step fits, before the step runs."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import TPUS
from redeqx.memory import Memory, SearchSpace, Strategy, Tried, choose, least_memory, memory_of, sizes_of, try_step
from tests._tree import drawn

EXAMPLES = list(np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32))
KEYS = jax.random.split(jax.random.key(0), 6)
STACK = drawn(
    eqx.filter_eval_shape(eqx.filter_vmap(lambda key: eqx.nn.MLP(32, 32, 256, 1, jax.nn.gelu, key=key)), KEYS), 0.1
)


def loss_fn(model, batch, key):
    arrays, static = eqx.partition(model, eqx.is_array)

    def block(x, arrays):
        return x + jax.vmap(eqx.combine(arrays, static))(jnp.tanh(x) ** 2), None

    return jnp.mean(jax.lax.scan(block, batch, arrays)[0] ** 2)


def mixing_loss_fn(model, batch, key):
    """A loss whose micro-batches cannot be divided."""
    return loss_fn(model, batch - batch.mean(), key) + jnp.var(batch)


def looping_loss_fn(model, batch, key):
    """A loss without a `scan`."""
    for i in range(6):
        layer = jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, model)  # noqa: B023
        batch = batch + jax.vmap(layer)(jnp.tanh(batch) ** 2)
    return jnp.mean(batch**2)


def make_trainer(shards=(1, 1), **options):
    compute = redeqx.Compute(remat=options.pop("remat", "none"), memory=options.pop("memory", "auto"))
    options = {"loss_fn": mixing_loss_fn, "compute": compute, **options}
    deployer = redeqx.Deployer(0, *shards, workdir=options.pop("workdir", None))
    return redeqx.Trainer(deployer, model=STACK, optimizer=optax.sgd(0.1), collate_fn=np.stack, **options)


def bytes_needed(remat, shards=(1, 1), **options):
    """Returns the bytes that a step needs at a level of recomputation."""
    found = make_trainer(shards, remat=remat, memory=None, **options).compile(EXAMPLES, batch_size=256).memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


@pytest.fixture
def set_device_memory(monkeypatch):
    """Returns a function that sets the device memory, as a CPU reports none."""
    return lambda n_bytes: monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: Memory(n_bytes))


def train(trainer, examples=EXAMPLES):
    trainer.train(examples, batch_size=256)
    return jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))


def chosen(capsys):
    """Returns the line about memory that was printed."""
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("memory: ") == 1
    return printed.partition("memory: ")[2]


@pytest.mark.sweep
@pytest.mark.parametrize("shards", [(2, 2), (1, 1, 2)], ids=str)
def test_chooses_the_least_recomputation_that_fits(shards, set_device_memory, capsys):
    """Bytes for none of the products are not tried before `"full"`. The shards are those of the script."""
    sizes = {remat: bytes_needed(remat, shards) for remat in ("none", "matmuls", "full")}
    assert sizes["full"] < sizes["matmuls"] < sizes["none"]
    expected = train(make_trainer(shards, memory=None))
    for remat, size in sizes.items():
        set_device_memory(size)
        capsys.readouterr()
        leaves = train(make_trainer(shards))
        for a, b in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        taken, *others = chosen(capsys).partition(" needs ")[0].split("; Deployer(")
        assert f'remat="{remat}"' in taken and len(others) == (remat != "none")
        assert ("n_sequence_shards=2)" in taken) == (len(shards) > 2)


def test_warns_and_continues_if_nothing_fits(set_device_memory, capsys):
    set_device_memory(1000)
    trainer = make_trainer()
    train(trainer)
    assert trainer.step == 1 and "Nothing fits: expect the step to fail. Take more shards" in chosen(capsys)


@pytest.mark.sweep
def test_divides_micro_batches_without_changing_results(set_device_memory, monkeypatch, capsys):
    """Includes a smaller last step with fewer micro-batches, and rows that do not divide evenly."""
    accumulate = 2

    def in_two_parts(space):
        rows, n = space.own.per_device_batch_size, space.own.accumulate_grad_batches
        yield replace(space.own, per_device_batch_size=rows // 2, accumulate_grad_batches=2 * n)

    examples = [*EXAMPLES, *EXAMPLES[:70]]
    options = {"accumulate_grad_batches": accumulate, "loss_fn": looping_loss_fn}
    expected = train(make_trainer((2, 2), memory=None, **options), examples)
    set_device_memory(bytes_needed("none", (2, 2), **options) - 1)
    monkeypatch.setattr(SearchSpace, "strategies", in_two_parts)
    capsys.readouterr()
    leaves = train(make_trainer((2, 2), **options), examples)
    first = " ".join(capsys.readouterr().out.split()).partition("memory: ")[2].partition(" needs ")[0]
    assert f"Trainer(accumulate_grad_batches={2 * accumulate}, compute=" in first.partition("; Deployer")[0]
    for a, b in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
def test_does_not_divide_micro_batches_of_draws_that_follow_no_row(set_device_memory, capsys):
    set_device_memory(1000)

    def random_loss(model, batch, key):
        return loss_fn(model, batch + jax.random.normal(key, (batch.shape[1], batch.shape[0])).T, key)

    train(make_trainer(loss_fn=random_loss))
    assert "accumulate_grad_batches=2" not in chosen(capsys)


def test_starts_at_the_requested_level(set_device_memory, capsys):
    set_device_memory(2**40)
    train(make_trainer(remat="full"))
    assert 'remat="full"' in chosen(capsys)


def test_compiles_each_strategy_once(set_device_memory, caplog):
    """The step compiled to measure its memory is the one that runs."""
    set_device_memory(bytes_needed("matmuls"))
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train(make_trainer())
    compiled = [each for each in caplog.messages if "Finished XLA compilation of jit(step_fn)" in each]
    assert len(compiled) == 2


@pytest.mark.sweep
def test_chooses_again_for_a_larger_batch(set_device_memory, capsys):
    set_device_memory(bytes_needed("none"))
    trainer = make_trainer()
    train(trainer)
    assert 'remat="none"' in chosen(capsys)
    trainer.train(EXAMPLES * 2, batch_size=512)
    assert 'remat="none"' not in chosen(capsys).partition("; ")[0]


@pytest.mark.sweep
def test_evaluation_is_not_compiled_again(set_device_memory, caplog):
    set_device_memory(bytes_needed("full"))
    trainer = make_trainer()
    before = trainer.eval_loss(EXAMPLES, batch_size=256)
    train(trainer)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert trainer.eval_loss(EXAMPLES, batch_size=256) != before
    assert not [each for each in caplog.messages if "Finished XLA compilation" in each]


@pytest.mark.sweep
def test_choice_is_not_saved_in_checkpoints(set_device_memory, tmp_path, capsys):
    """A run that starts on a small device can resume on a large one."""
    set_device_memory(bytes_needed("matmuls"))
    make_trainer(workdir=tmp_path).fit(EXAMPLES, batch_size=64, max_steps=2)
    assert "remat" not in (tmp_path / "ckpts" / "step_00000002" / "trainer.json").read_text()
    set_device_memory(2**40)
    capsys.readouterr()
    second = make_trainer(workdir=tmp_path)
    second.fit(EXAMPLES, batch_size=64, max_steps=4)
    assert second.step == 4 and 'remat="none"' in chosen(capsys)


# --- the memory of devices, and the need of a step -------------------------------------------------------------------------


def fake_mesh(platform, kind, stats):
    device = SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)
    return SimpleNamespace(local_devices=[device])


def test_device_memory_comes_from_its_stats_or_its_kind():
    assert memory_of(fake_mesh("gpu", "new", {"bytes_limit": 100, "bytes_in_use": 40})) == Memory(100, 40)
    assert memory_of(fake_mesh("tpu", "TPU v4", None)) == Memory(TPUS["v4"].memory)
    assert memory_of(fake_mesh("tpu", "new", None)) is None
    assert memory_of(redeqx.Deployer(verbose=False).mesh) is None  # a CPU has no memory of its own


OWN = Strategy(1, 1, 8, 1, "none")
ALONE = SimpleNamespace(gather=lambda topic, value: [value])


def fake_step(n_bytes, held=0):
    sizes = {"argument": held, "temp": n_bytes, "output": 45, "alias": 45, "generated_code": 0}
    found = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    return SimpleNamespace(memory_analysis=lambda: found)


def test_need_of_a_step_adds_to_the_memory_in_use():
    def need(memory, moved=0):
        tried = try_step(OWN, lambda: fake_step(37, held=50), memory, ALONE, moved)
        assert tried.fits == (tried.needs <= memory.limit)
        return tried.held, tried.needs

    assert need(Memory(1000)) == (50, 87)
    assert need(Memory(100, in_use=70)) == (70, 107)
    assert need(Memory(1000, in_use=70), moved=20) == (50, 87)


@pytest.mark.parametrize("platform, n_temporaries", [("tpu", 25), ("gpu", 37)])
def test_temporaries_of_a_tpu_are_those_of_the_peak(platform, n_temporaries):
    step = fake_step(37, held=50)
    step.memory_analysis().peak_memory_in_bytes = 75
    step.input_shardings = [SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])]
    assert sizes_of(step) == {"arguments": 50, "temporaries": n_temporaries, "outputs": 0, "code": 0}


def test_a_step_that_the_compiler_refuses_does_not_fit():
    def tried(text):
        def compiled():
            raise jax.errors.JaxRuntimeError(text)

        return try_step(OWN, compiled, Memory(1000), ALONE)

    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 4K of 1K hbm. Exceeded hbm capacity by 3K"
    assert tried(text) == Tried(OWN, 1000 + 3 * 2**10, 0, fits=False, is_refused=True)
    assert tried(text.replace("hbm", "host")) == tried(text)
    assert tried("RESOURCE_EXHAUSTED: the program (2.0K) exceeds available HBM").needs == 2**11
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        tried("UNIMPLEMENTED: no such operation")


class FakePeers:
    """Two processes of a run, simulated by threads; a missing peer raises after 10 seconds."""

    def __init__(self):
        self.values, self.barrier = [None, None], threading.Barrier(2, timeout=10)

    def process(self, index):
        def gather(topic, value):
            self.values[index] = (topic, value)
            self.barrier.wait()
            (first, own), (second, other) = self.values
            assert first == second
            self.barrier.wait()
            return [own, other]

        return SimpleNamespace(gather=gather)


@pytest.mark.parametrize("is_refused", [False, True])
def test_all_processes_try_the_same(monkeypatch, is_refused):
    """Even if one device has less memory, or one compiler needs more for the same step, or refuses it."""
    flops = {remat: {"bfloat16": 10**15} for remat in ("none", "matmuls", "full")}
    steps = [{"none": 900, "matmuls": 500, "full": 100}, {"none": 1300, "matmuls": 700, "full": 100}]
    devices = [Memory(1000, 100), Memory(990, 350)]
    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda index: devices[index])
    pair = FakePeers()

    def process(index):
        def compiled(strategy):
            if is_refused and index == 0 and strategy.remat == "none":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the program (2.0K) exceeds available HBM")
            return fake_step(steps[index][strategy.remat])

        def space(limit):
            return SearchSpace(OWN, 1, flops, 100, 100, limit, None, is_running=True)

        return choose(OWN, index, pair.process(index), compiled, space)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(process, range(2))
    assert one == other
    found = [(each.strategy.remat, each.held, each.needs - each.held, each.fits) for each in one[0]]
    assert found[1:] == [("matmuls", 350, 700, False), ("full", 350, 100, True)]
    assert one[0][0].is_refused == is_refused and (is_refused or found[0] == ("none", 350, 1300, False))


@pytest.mark.parametrize(("known", "least"), [(Memory(10), Memory(10)), (Memory(30, 5), Memory(20)), (None, None)])
def test_least_memory_over_all_processes(known, least):
    pair = FakePeers()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda index: least_memory((known, Memory(20))[index], pair.process(index)), range(2)))
    assert found == [least, least]
