"""`memory="auto"`: chooses the least recomputation with which the compiled step fits, before the step runs."""

import dataclasses
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.training import _engine, _memory
from redeqx.training._memory import Choice, Memory, Need, cannot_fit, choices, first_that_fits, least_memory, memory_of

EXAMPLES = list(np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32))
STACK = eqx.filter_vmap(lambda key: eqx.nn.MLP(32, 32, 256, 1, jax.nn.gelu, key=key))(jax.random.split(jax.random.key(0), 6))


def loss_fn(model, batch, key):
    arrays, static = eqx.partition(model, eqx.is_array)

    def block(x, arrays):
        return x + jax.vmap(eqx.combine(arrays, static))(jnp.tanh(x) ** 2), None

    return jnp.mean(jax.lax.scan(block, batch, arrays)[0] ** 2)


def make_trainer(shards=(1, 1), **options):
    options = {"loss_fn": loss_fn, "compute": redeqx.Compute(memory="auto", remat="none"), **options}
    deployer = redeqx.Deployer(0, *shards, workdir=options.pop("workdir", None))
    return redeqx.Trainer(deployer, model=STACK, optimizer=optax.sgd(0.1), collate_fn=np.stack, **options)


def bytes_needed(remat, shards=(1, 1), n_parts=1, **options):
    """Return the bytes that a step needs at a remat level, with its micro-batches split into `n_parts`."""
    trainer = make_trainer(shards, compute=redeqx.Compute(remat=remat), **options)
    trainer._engine.recipe = dataclasses.replace(trainer._engine.recipe, n_parts=n_parts)
    found = trainer.compile(EXAMPLES, batch_size=256).memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


@pytest.fixture
def set_device_memory(monkeypatch):
    """Returns a function that sets the device memory, as a CPU reports none."""

    def set_to(n_bytes):
        monkeypatch.setattr(_engine, "memory_of", lambda mesh: Memory(n_bytes))

    return set_to


def train(trainer):
    trainer.train(EXAMPLES, batch_size=256)
    return jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))


@pytest.fixture
def no_micro_batch_split(monkeypatch):
    """Disables splitting of micro-batches."""
    monkeypatch.setattr(_engine, "choices", lambda first, platform, n_rows: choices(first, platform, 1))


def test_chooses_the_least_recomputation_that_fits(set_device_memory, no_micro_batch_split, capsys):
    sizes = {remat: bytes_needed(remat, (2, 2)) for remat in ("none", "matmuls", "full")}
    assert sizes["full"] < sizes["matmuls"] < sizes["none"]
    expected = train(make_trainer((2, 2), compute=redeqx.Compute(remat="none")))
    capsys.readouterr()
    for remat, size in sizes.items():
        set_device_memory(size)
        trainer = make_trainer((2, 2))
        leaves = train(trainer)
        assert trainer._engine.recipe.compute.remat == remat
        for a, b in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count("memory: loops ") == 1 and f'(remat="{remat}"): ' in printed
        assert ('remat="none" needs' in printed) == (remat != "none") and ('remat="matmuls" needs' in printed) == (
            remat == "full"
        )


def test_warns_and_continues_if_nothing_fits(set_device_memory, no_micro_batch_split, capsys):
    set_device_memory(1000)
    trainer = make_trainer()
    train(trainer)
    printed = " ".join(capsys.readouterr().out.split())
    assert trainer.step == 1 and trainer._engine.recipe.compute.remat == "full"
    assert "Nothing fits: expect the step to fail. Take more micro-batches (`accumulate_grad_batches`) or more" in printed


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.sweep), 2])
@pytest.mark.sweep
def test_splits_micro_batches_without_changing_results(set_device_memory, accumulate, capsys):
    """Includes a smaller last step with fewer micro-batches, and rows that do not divide evenly."""
    examples = [*EXAMPLES, *EXAMPLES[:70]]
    options = {"accumulate_grad_batches": accumulate}
    expected = make_trainer((2, 2), compute=redeqx.Compute(remat="none"), **options)
    expected.train(examples, batch_size=256)
    set_device_memory(bytes_needed("none", (2, 2), n_parts=2, **options))
    trainer = make_trainer((2, 2), **options)
    trainer.train(examples, batch_size=256)
    recipe = trainer._engine.recipe
    assert recipe.n_parts == 2 and recipe.accumulate == accumulate
    assert '(remat="none" and micro-batches in 2 parts)' in " ".join(capsys.readouterr().out.split())
    for a, b in zip(*(jax.tree.leaves(eqx.filter(each.model, eqx.is_array)) for each in (trainer, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_all_parts_of_a_smaller_step_count():
    """The last step has one micro-batch of the two, and runs in the same program."""

    def train_in(n_parts):
        trainer = redeqx.Trainer(
            redeqx.Deployer(0, 2, 2, verbose=False), model=eqx.nn.Linear(32, 32, key=jax.random.key(0)),
            optimizer=optax.sgd(0.1), collate_fn=np.stack, accumulate_grad_batches=2,
            loss_fn=lambda model, batch, key: jnp.square(jax.vmap(model)(batch) - 1).mean(),
        )  # fmt: skip
        trainer._engine.recipe = dataclasses.replace(trainer._engine.recipe, n_parts=n_parts)
        trainer.train([*EXAMPLES, *EXAMPLES[:128]], batch_size=256)
        return trainer.step, np.asarray(trainer.model.weight)

    (n_steps, whole), (_, split) = train_in(1), train_in(2)
    assert n_steps == 2
    np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.sweep
def test_does_not_split_micro_batches_of_a_random_loss(set_device_memory):
    set_device_memory(1000)

    def random_loss(model, batch, key):
        return loss_fn(model, batch + jax.random.normal(key, batch.shape), key)

    trainer = make_trainer(loss_fn=random_loss)
    train(trainer)
    assert (trainer._engine.recipe.compute.remat, trainer._engine.recipe.n_parts) == ("full", 1)


def test_starts_at_the_requested_remat_level(set_device_memory):
    set_device_memory(2**40)
    trainer = make_trainer(compute=redeqx.Compute(memory="auto", remat="full"))
    train(trainer)
    assert trainer._engine.recipe.compute.remat == "full"


def test_compiles_each_remat_level_once(set_device_memory, no_micro_batch_split, caplog):
    """The step compiled to measure its memory is the one that runs."""
    set_device_memory(bytes_needed("matmuls"))
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train(make_trainer())
    compiled = [each for each in caplog.messages if "Finished XLA compilation of jit(step_fn)" in each]
    assert len(compiled) == 2


def test_chooses_again_for_a_larger_batch(set_device_memory, no_micro_batch_split):
    set_device_memory(bytes_needed("none"))
    trainer = make_trainer()
    train(trainer)
    assert trainer._engine.recipe.compute.remat == "none"
    trainer.train(EXAMPLES * 2, batch_size=512)
    assert trainer._engine.recipe.compute.remat in ("matmuls", "full")


def test_evaluation_program_is_kept(set_device_memory, no_micro_batch_split):
    set_device_memory(bytes_needed("full"))
    trainer = make_trainer()
    before = trainer.eval_loss(EXAMPLES, batch_size=256)
    step = trainer._engine.state.program.eval_step
    train(trainer)
    assert trainer._engine.recipe.compute.remat == "full" and trainer._engine.state.program.eval_step is step
    assert trainer.eval_loss(EXAMPLES, batch_size=256) != before


@pytest.mark.sweep
def test_choice_is_not_saved_in_checkpoints(set_device_memory, no_micro_batch_split, tmp_path):
    """A run that starts on a small device can resume on a large one."""
    set_device_memory(bytes_needed("matmuls"))
    first = make_trainer(workdir=tmp_path)
    first.fit(EXAMPLES, batch_size=64, max_steps=2)
    assert "remat" not in (tmp_path / "ckpts" / "step_00000002" / "trainer.json").read_text()
    set_device_memory(2**40)
    second = make_trainer(workdir=tmp_path)
    second.fit(EXAMPLES, batch_size=64, max_steps=4)
    assert second.step == 4 and second._engine.recipe.compute.remat == "none"


# --- device memory and choices ------------------------------------------------------------------------------------------


def fake_mesh(platform, kind, stats):
    device = SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)
    return SimpleNamespace(local_devices=[device])


def test_device_memory_comes_from_its_stats_or_its_kind():
    assert memory_of(fake_mesh("gpu", "new", {"bytes_limit": 100, "bytes_in_use": 40})) == Memory(100, 40)
    assert memory_of(fake_mesh("tpu", "TPU v4", None)) == Memory(redeqx.machine.TPUS["v4"].memory)
    assert memory_of(fake_mesh("tpu", "new", None)) is None
    assert memory_of(redeqx.Deployer(verbose=False).mesh) is None  # a CPU has no memory of its own


def test_choices_are_ordered():
    found = [(choice.remat, choice.n_parts, choice.offload_opt_state) for choice in choices(Choice("matmuls"), "tpu", 4)]
    expected_levels = [
        ("matmuls", 1), ("matmuls", 2), ("full", 1), ("matmuls", 4), ("full", 2), ("offload", 1), ("full", 4),
        ("offload", 2), ("offload", 4),
    ]  # fmt: skip
    assert found == [(*level, offload_opt_state) for offload_opt_state in (False, True) for level in expected_levels]
    assert [choice.remat for choice in choices(Choice("none"), "cpu", 1)] == ["none", "matmuls", "full"]
    all_choices = {(choice.remat, choice.n_parts) for choice in choices(Choice("none"), "cpu", 8)}
    assert all_choices == {(remat, n_parts) for remat in ("none", "matmuls", "full") for n_parts in (1, 2, 4, 8)}
    assert choices(Choice("offload", 2), "cpu", 3) == [Choice("offload", 2)]
    unrolled = choices(Choice("matmuls", 1, unroll=True), "gpu", 1)
    assert [(choice.remat, choice.unroll) for choice in unrolled if not choice.offload_opt_state] == [
        ("matmuls", True), ("matmuls", False), ("full", False), ("offload", False)
    ]  # fmt: skip
    assert unrolled[1].code() == 'remat="matmuls", unroll=False'
    tried = {Choice("full"): Need(400, 1200), Choice("matmuls"): Need(0, float("inf"))}
    assert cannot_fit(Choice("full", 1), tried, Memory(1000)) and not cannot_fit(Choice("full", 2), tried, Memory(1000))
    assert not cannot_fit(Choice("matmuls", 2), tried, Memory(1000))


def test_memory_need_adds_to_memory_in_use():
    found = SimpleNamespace(
        argument_size_in_bytes=50, temp_size_in_bytes=30, output_size_in_bytes=45, alias_size_in_bytes=40,
        generated_code_size_in_bytes=2,
    )  # fmt: skip
    compiled = lambda: SimpleNamespace(memory_analysis=lambda: found)  # noqa: E731
    assert _memory.memory_need(compiled, Memory(1000)) == Need(50, 30 + 5 + 2)
    assert _memory.memory_need(compiled, Memory(1000, in_use=70)) == Need(70, 30 + 5 + 2)
    assert _memory.memory_need(compiled, Memory(1000, in_use=70), moved=20) == Need(50, 30 + 5 + 2)


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


def fake_compiled_step(n_bytes):
    found = SimpleNamespace(
        argument_size_in_bytes=0, temp_size_in_bytes=n_bytes, output_size_in_bytes=0, alias_size_in_bytes=0,
        generated_code_size_in_bytes=0,
    )  # fmt: skip
    return SimpleNamespace(memory_analysis=lambda: found)


def test_all_processes_try_the_same_choices_in_order():
    """Even if one device has less memory, or one compiler needs more for the same step."""
    order = [Choice("none"), Choice("none", 2), Choice("matmuls"), Choice("full")]
    steps = [{"none": 900, "matmuls": 500, "full": 100}, {"none": 1300, "matmuls": 700, "full": 100}]
    devices = [Memory(1000, 100), Memory(990, 350)]
    pair = FakePeers()

    def process(index):
        peers = pair.process(index)
        memory = least_memory(devices[index], peers)
        tried = first_that_fits(
            order, memory, lambda choice: fake_compiled_step(steps[index][choice.remat] // choice.n_parts), peers
        )
        return memory, tried

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(process, range(2))
    assert (
        one
        == other
        == (
            Memory(990, 350),
            # A step of 1300 bytes, even if split in two, does not fit into 990 with 350 in use, though one of 900 would.
            {Choice("none"): Need(350, 1300), Choice("matmuls"): Need(350, 700), Choice("full"): Need(350, 100)},
        )
    )


@pytest.mark.parametrize(("known", "least"), [(Memory(10), Memory(10)), (Memory(30, 5), Memory(20)), (None, None)])
def test_least_memory_over_all_processes(known, least):
    pair = FakePeers()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda index: least_memory((known, Memory(20))[index], pair.process(index)), range(2)))
    assert found == [least, least]


def test_compiler_out_of_memory_in_one_process_applies_to_all():
    pair = FakePeers()

    def process(index):
        def compiled(choice):
            if index == 0 and choice.remat == "none":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: it exceeds available HBM")
            return fake_compiled_step(10)

        return first_that_fits([Choice("none"), Choice("full")], Memory(100), compiled, pair.process(index))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(process, range(2))
    assert one == other and one == {Choice("none"): Need(0, math.inf), Choice("full"): Need(0, 10)}


def test_compiler_out_of_memory_is_not_an_error():
    def raise_runtime_error(text):
        raise jax.errors.JaxRuntimeError(text)

    memory = Memory(1000)
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 34.13G of 30.75G hbm. Exceeded hbm capacity by 3G"
    )
    assert _memory.memory_need(lambda: raise_runtime_error(text), memory) == Need(0, float("inf"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        _memory.memory_need(lambda: raise_runtime_error("UNIMPLEMENTED: no such operation"), memory)
    tried = {Choice("matmuls"): Need(0, float("inf")), Choice("full", 2): Need(1, 2)}
    assert (
        "in 2 parts): 0.00 GiB" in (printed := _memory.describe_choice(tried, memory))
        and "needs more than there is" in printed
    )
