"""`memory="auto"`: the least recomputation with which the compiled step fits, chosen before the step runs."""

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
    options = {"memory": "auto", "loss_fn": loss_fn, "remat": "none", **options}
    deployer = redeqx.Deployer(0, *shards, workdir=options.pop("workdir", None))
    return redeqx.Trainer(deployer, model=STACK, optimizer=optax.sgd(0.1), collate_fn=np.stack, **options)


def needs_of(remat, shards=(1, 1), n_parts=1, **options):
    """Bytes of a step whose loops recompute that much, of micro-batches in that many parts."""
    trainer = make_trainer(shards, remat=remat, memory=None, **options)
    trainer._engine.recipe = dataclasses.replace(trainer._engine.recipe, n_parts=n_parts)
    found = trainer.compile(EXAMPLES, batch_size=256).memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


@pytest.fixture
def limit(monkeypatch):
    """Sets the memory of a device, which a CPU has not."""

    def set_to(n_bytes):
        monkeypatch.setattr(_engine, "memory_of", lambda mesh: Memory(n_bytes))

    return set_to


def trained(trainer):
    trainer.train(EXAMPLES, batch_size=256)
    return jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))


@pytest.fixture
def whole(monkeypatch):
    """Leaves micro-batches uncut."""
    monkeypatch.setattr(_engine, "choices", lambda first, platform, n_rows: choices(first, platform, 1))


def test_the_least_recomputation_that_fits_is_taken(limit, whole, capsys):
    sizes = {remat: needs_of(remat, (2, 2)) for remat in ("none", "matmuls", "full")}
    assert sizes["full"] < sizes["matmuls"] < sizes["none"]
    expected = trained(make_trainer((2, 2), memory=None))
    capsys.readouterr()
    for remat, size in sizes.items():
        limit(size)
        trainer = make_trainer((2, 2))
        leaves = trained(trainer)
        assert trainer._engine.recipe.remat == remat
        for a, b in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("memory: loops ") == 1 and f'(remat="{remat}"): ' in said
        assert ('remat="none" needs' in said) == (remat != "none") and ('remat="matmuls" needs' in said) == (remat == "full")


def test_where_nothing_fits_it_says_so_and_goes_on(limit, whole, capsys):
    limit(1000)
    trainer = make_trainer()
    trained(trainer)
    said = " ".join(capsys.readouterr().out.split())
    assert trainer.step == 1 and trainer._engine.recipe.remat == "full"
    assert "Nothing fits: expect the step to fail. Take more micro-batches (`accumulate_grad_batches`) or more" in said


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.sweep), 2])
@pytest.mark.sweep
def test_micro_batches_are_cut_where_that_changes_no_number(limit, accumulate, capsys):
    """Also those of the smaller last step, which are fewer than in a full one, and rows that do not divide."""
    examples = [*EXAMPLES, *EXAMPLES[:70]]
    options = {"accumulate_grad_batches": accumulate}
    expected = make_trainer((2, 2), memory=None, **options)
    expected.train(examples, batch_size=256)
    limit(needs_of("none", (2, 2), n_parts=2, **options))
    trainer = make_trainer((2, 2), **options)
    trainer.train(examples, batch_size=256)
    recipe = trainer._engine.recipe
    assert recipe.n_parts == 2 and recipe.accumulate == accumulate
    assert '(remat="none" and micro-batches in 2 parts)' in " ".join(capsys.readouterr().out.split())
    for a, b in zip(*(jax.tree.leaves(eqx.filter(each.model, eqx.is_array)) for each in (trainer, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
def test_a_loss_that_draws_is_not_cut(limit):
    limit(1000)

    def drawing(model, batch, key):
        return loss_fn(model, batch + jax.random.normal(key, batch.shape), key)

    trainer = make_trainer(loss_fn=drawing)
    trained(trainer)
    assert (trainer._engine.recipe.remat, trainer._engine.recipe.n_parts) == ("full", 1)


def test_a_level_that_is_asked_for_is_where_it_begins(limit):
    limit(2**40)
    trainer = make_trainer(remat="full")
    trained(trainer)
    assert trainer._engine.recipe.remat == "full"


def test_the_step_that_was_asked_is_the_one_that_runs(limit, whole, caplog):
    """Each level is compiled once."""
    limit(needs_of("matmuls"))
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trained(make_trainer())
    compiled = [each for each in caplog.messages if "Finished XLA compilation of jit(step_fn)" in each]
    assert len(compiled) == 2


def test_a_larger_batch_is_looked_at_again(limit, whole):
    limit(needs_of("none"))
    trainer = make_trainer()
    trained(trainer)
    assert trainer._engine.recipe.remat == "none"
    trainer.train(EXAMPLES * 2, batch_size=512)
    assert trainer._engine.recipe.remat in ("matmuls", "full")


def test_evaluations_keep_their_program(limit, whole):
    limit(needs_of("full"))
    trainer = make_trainer()
    before = trainer.eval_loss(EXAMPLES, batch_size=256)
    step = trainer._engine.state.program.eval_step
    trained(trainer)
    assert trainer._engine.recipe.remat == "full" and trainer._engine.state.program.eval_step is step
    assert trainer.eval_loss(EXAMPLES, batch_size=256) != before


@pytest.mark.sweep
def test_nothing_of_it_is_saved(limit, whole, tmp_path):
    """A run that begins on a small device goes on on a large one."""
    limit(needs_of("matmuls"))
    first = make_trainer(workdir=tmp_path)
    first.fit(EXAMPLES, batch_size=64, max_steps=2)
    assert "remat" not in (tmp_path / "ckpts" / "step_00000002" / "trainer.json").read_text()
    limit(2**40)
    second = make_trainer(workdir=tmp_path)
    second.fit(EXAMPLES, batch_size=64, max_steps=4)
    assert second.step == 4 and second._engine.recipe.remat == "none"


# --- of devices ---------------------------------------------------------------------------------------------------------


def mesh_of(platform, kind, stats):
    device = SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)
    return SimpleNamespace(local_devices=[device])


def test_the_memory_of_a_device_is_what_it_says_or_what_its_kind_has():
    assert memory_of(mesh_of("gpu", "new", {"bytes_limit": 100, "bytes_in_use": 40})) == Memory(100, 40)
    assert memory_of(mesh_of("tpu", "TPU v4", None)) == Memory(redeqx.machine.TPUS["v4"].memory)
    assert memory_of(mesh_of("tpu", "new", None)) is None
    assert memory_of(redeqx.Deployer(verbose=False).mesh) is None  # a CPU's is its host's


def test_the_order_of_choices():
    found = [(choice.remat, choice.n_parts, choice.offload_opt_state) for choice in choices(Choice("matmuls"), "tpu", 4)]
    levels = [
        ("matmuls", 1), ("matmuls", 2), ("full", 1), ("matmuls", 4), ("full", 2), ("offload", 1), ("full", 4),
        ("offload", 2), ("offload", 4),
    ]  # fmt: skip
    assert found == [(*level, in_host) for in_host in (False, True) for level in levels]
    assert [choice.remat for choice in choices(Choice("none"), "cpu", 1)] == ["none", "matmuls", "full"]
    every = {(choice.remat, choice.n_parts) for choice in choices(Choice("none"), "cpu", 8)}
    assert every == {(remat, n_parts) for remat in ("none", "matmuls", "full") for n_parts in (1, 2, 4, 8)}
    assert choices(Choice("offload", 2), "cpu", 3) == [Choice("offload", 2)]
    written_out = choices(Choice("matmuls", 1, unroll=True), "gpu", 1)
    assert [(choice.remat, choice.unroll) for choice in written_out if not choice.offload_opt_state] == [
        ("matmuls", True), ("matmuls", False), ("full", False), ("offload", False)
    ]  # fmt: skip
    assert written_out[1].code() == 'remat="matmuls", unroll=False'
    tried = {Choice("full"): Need(400, 1200), Choice("matmuls"): Need(0, float("inf"))}
    assert cannot_fit(Choice("full", 1), tried, Memory(1000)) and not cannot_fit(Choice("full", 2), tried, Memory(1000))
    assert not cannot_fit(Choice("matmuls", 2), tried, Memory(1000))


def test_what_a_step_needs_is_beside_what_is_in_use():
    found = SimpleNamespace(
        argument_size_in_bytes=50, temp_size_in_bytes=30, output_size_in_bytes=45, alias_size_in_bytes=40,
        generated_code_size_in_bytes=2,
    )  # fmt: skip
    compiled = lambda: SimpleNamespace(memory_analysis=lambda: found)  # noqa: E731
    assert _memory.memory_need(compiled, Memory(1000)) == Need(50, 30 + 5 + 2)
    assert _memory.memory_need(compiled, Memory(1000, in_use=70)) == Need(70, 30 + 5 + 2)
    assert _memory.memory_need(compiled, Memory(1000, in_use=70), moved=20) == Need(50, 30 + 5 + 2)


class Gathering:
    """Two processes of a run, as threads, which give up on each other after some seconds."""

    def __init__(self):
        self.values, self.barrier = [None, None], threading.Barrier(2, timeout=10)

    def of(self, index):
        def gather(topic, value):
            self.values[index] = (topic, value)
            self.barrier.wait()
            (first, own), (second, other) = self.values
            assert first == second
            self.barrier.wait()
            return [own, other]

        return SimpleNamespace(gather=gather)


def compiled_step(n_bytes):
    found = SimpleNamespace(
        argument_size_in_bytes=0, temp_size_in_bytes=n_bytes, output_size_in_bytes=0, alias_size_in_bytes=0,
        generated_code_size_in_bytes=0,
    )  # fmt: skip
    return SimpleNamespace(memory_analysis=lambda: found)


def test_all_processes_try_the_same_choices():
    """Also if the device of one has less room, or its compiler takes more for the same step."""
    order = [Choice("none"), Choice("none", 2), Choice("matmuls"), Choice("full")]
    steps = [{"none": 900, "matmuls": 500, "full": 100}, {"none": 1300, "matmuls": 700, "full": 100}]
    devices = [Memory(1000, 100), Memory(990, 350)]
    pair = Gathering()

    def process(index):
        peers = pair.of(index)
        memory = least_memory(devices[index], peers)
        tried = first_that_fits(
            order, memory, lambda choice: compiled_step(steps[index][choice.remat] // choice.n_parts), peers
        )
        return memory, tried

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(process, range(2))
    assert (
        one
        == other
        == (
            Memory(990, 350),
            # A second part of 1300 bytes beside 350 cannot fit into 990, though one of 900 could.
            {Choice("none"): Need(350, 1300), Choice("matmuls"): Need(350, 700), Choice("full"): Need(350, 100)},
        )
    )


@pytest.mark.parametrize(("known", "least"), [(Memory(10), Memory(10)), (Memory(30, 5), Memory(20)), (None, None)])
def test_the_least_memory_of_all_processes(known, least):
    pair = Gathering()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda index: least_memory((known, Memory(20))[index], pair.of(index)), range(2)))
    assert found == [least, least]


def test_what_the_compiler_refuses_in_one_process_fits_in_none():
    pair = Gathering()

    def process(index):
        def compiled(choice):
            if index == 0 and choice.remat == "none":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: it exceeds available HBM")
            return compiled_step(10)

        return first_that_fits([Choice("none"), Choice("full")], Memory(100), compiled, pair.of(index))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(process, range(2))
    assert one == other and one == {Choice("none"): Need(0, math.inf), Choice("full"): Need(0, 10)}


def test_a_refusal_of_the_compiler_is_no_error():
    def refused(text):
        raise jax.errors.JaxRuntimeError(text)

    memory = Memory(1000)
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 34.13G of 30.75G hbm. Exceeded hbm capacity by 3G"
    )
    assert _memory.memory_need(lambda: refused(text), memory) == Need(0, float("inf"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        _memory.memory_need(lambda: refused("UNIMPLEMENTED: no such operation"), memory)
    tried = {Choice("matmuls"): Need(0, float("inf")), Choice("full", 2): Need(1, 2)}
    assert "in 2 parts): 0.00 GiB" in (said := _memory.describe_choice(tried, memory)) and "needs more than there is" in said
