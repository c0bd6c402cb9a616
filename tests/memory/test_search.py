"""The search for strategies: those it compiles, skips and proposes."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

import redeqx
from redeqx.dims import RowUse
from redeqx.machine import HOST_MEMORY, TPUS, make_mesh
from redeqx.memory import Candidate, Loop, SearchSpace, Strategy, Tried, describe_saved, fastest, saved_at

GIB = 2**30
V5E = TPUS["v5e"]
OWN = Strategy(n_model_shards=1, n_fsdp_shards=1, per_device_batch_size=8, accumulate_grad_batches=1, remat="none")
FLOPS = {"none": {"bfloat16": 3 * 10**15}, "matmuls": {"bfloat16": 3 * 10**15}, "full": {"bfloat16": 4 * 10**15}}


def space(**changes):
    given = {
        "own": OWN, "n_devices": 4, "rows": RowUse("separable"),
        "flops": FLOPS, "weights": 4 * GIB, "state": 12 * GIB, "memory": 16 * GIB, "chip": V5E,
    }  # fmt: skip
    return SearchSpace(**{**given, **changes})


def tried_strategies(of, needs, seconds=None, *, to_fastest=True):
    """The strategies that a search compiles, the script's own first. `needs` and `seconds` give bytes and time."""

    def measure(strategy):
        found = needs(strategy)
        if found is None:
            return None
        held = of.state // (strategy.n_model_shards * strategy.n_fsdp_shards)
        each = Tried(strategy, found, held, found <= of.memory)
        return each if seconds is None else dataclasses.replace(each, seconds=(0.0, seconds(strategy)))

    own = measure(of.own)
    return [own, *of.search(own, measure, to_fastest=to_fastest)]


def values_of(strategy):
    shards = (strategy.n_model_shards, strategy.n_fsdp_shards)
    return (*shards, strategy.per_device_batch_size, strategy.accumulate_grad_batches, strategy.remat)


def bytes_needed(of, activations=4 * GIB):
    """Bytes of a step: its state, and the activations of each row that remat does not recompute."""
    saved = {"none": 1, "matmuls": 1 / 2, "full": 1 / 8}

    def needs(strategy):
        shards = strategy.n_model_shards * strategy.n_fsdp_shards
        return int(of.state / shards + activations * saved[strategy.remat] * strategy.per_device_batch_size)

    return needs


# --- the strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize(
    "use, cuts",
    [
        (RowUse("separable"), {(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)}),
        (RowUse("separable", group=4), {(1, 16), (2, 8), (4, 4)}),
        (RowUse("mixed"), {(2, 8)}),
    ],
)
def test_rows_are_cut_only_as_the_loss_allows(use, cuts, batch_size):
    own = dataclasses.replace(OWN, per_device_batch_size=8, accumulate_grad_batches=2, batch_size=batch_size)
    strategies = space(own=own, rows=use).strategies()
    found = {(s.accumulate_grad_batches, s.per_device_batch_size) for s in strategies if s.n_model_shards == 1}
    assert found == cuts


def test_what_is_held_does_not_shrink_with_the_rows():
    """Of 24 GiB, 12 stay: with half of the rows 18 are needed at least, which is not tried, with a quarter 15."""
    of = space(n_devices=1, flops={"none": FLOPS["none"]})
    tried = tried_strategies(of, bytes_needed(of, activations=3 * GIB // 2))
    assert [strategy.strategy.per_device_batch_size for strategy in tried] == [8, 2]


def test_every_strategy_keeps_the_number_of_examples_per_step():
    for own in (OWN, dataclasses.replace(OWN, n_model_shards=2, per_device_batch_size=6, accumulate_grad_batches=3)):
        strategies = list(space(own=own).strategies())
        n_rows = {s.per_device_batch_size * (4 // s.n_model_shards) * s.accumulate_grad_batches for s in strategies}
        assert n_rows == {own.per_device_batch_size * (4 // own.n_model_shards) * own.accumulate_grad_batches}
        assert own in strategies and len(strategies) == len(set(strategies))
        assert {s.remat for s in strategies} == set(FLOPS)
        assert {(s.n_model_shards, s.n_fsdp_shards) for s in strategies} == {(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)}


def test_batch_size_is_divided_as_in_a_run():
    own = dataclasses.replace(OWN, batch_size=42, per_device_batch_size=10)
    for strategy in space(own=own).strategies():
        n_micro_batches = strategy.accumulate_grad_batches
        run = redeqx.data.BatchSize.of(make_mesh(strategy.n_model_shards, 1, jax.devices()[:4]), None, 42, n_micro_batches)
        assert strategy.per_device_batch_size * (4 // strategy.n_model_shards) == run.micro_batch
        assert strategy.batch_size == 42 and "fit(batch_size=42)" in strategy.code()


def test_unrolling_and_offloading_are_varied_only_if_they_matter():
    assert {(s.unroll, s.offload_opt_state) for s in space().strategies()} == {(True, False)}
    strategies = list(space(opt_state=8 * GIB, unrolls=True).strategies())
    assert len(strategies) == len(set(strategies))
    looped = {(s.n_fsdp_shards, s.remat) for s in strategies if not s.unroll}
    assert looped == {(1, "none"), (1, "matmuls")}
    assert {s.offload_opt_state for s in strategies} == {True, False}
    own = dataclasses.replace(OWN, offload_opt_state=True)
    assert {s.offload_opt_state for s in space(own=own, opt_state=8 * GIB).strategies()} == {True}


class Program:
    """A jaxpr that counts how often its equations are read."""

    def __init__(self, n):
        self._eqns, self.n_reads = jax.make_jaxpr(lambda x: sum([x @ x] * n))(np.ones((2, 2))).eqns, 0

    @property
    def eqns(self):
        self.n_reads += 1
        return self._eqns


def test_a_program_is_read_once_for_its_flops_and_once_for_its_primitives():
    programs = {}

    def trace(strategy):
        return programs.setdefault(strategy, Program({"none": 1, "full": 2}.get(strategy.remat, 3)))

    sizes = types.SimpleNamespace(weights=1, frozen=0, state=1, opt_state=0)
    found = SearchSpace.of(OWN, trace, sizes, "cuda", n_devices=1, memory=1, chip=None)
    assert {"none", "full"} <= found.flops.keys() and len(programs) > 2
    assert max(program.n_reads for program in programs.values()) <= 2


@pytest.mark.parametrize("has_loops, found", [(True, ["2GiB", "full"]), (False, ["2GiB"])])
def test_a_script_may_set_bytes_for_what_its_loops_save(has_loops, found):
    """Levels that save more than these bytes are not compiled if they do not fit. Without loops there are no levels."""
    own = dataclasses.replace(OWN, remat="2GiB")
    sizes = types.SimpleNamespace(weights=4 * GIB, frozen=0, state=12 * GIB, opt_state=0)
    n_products = {"none": 1, "matmuls": 2, "full": 3, "offload": 3}
    of = SearchSpace.of(
        own, lambda strategy: Program(n_products.get(strategy.remat, 4) if has_loops else 1), sizes, "cuda",
        n_devices=1, memory=16 * GIB, chip=None, is_running=True, rows=RowUse("mixed"), loops=lambda strategy: (),
    )  # fmt: skip
    compiled = tried_strategies(of, lambda strategy: (15 if strategy.remat == "full" else 17) * GIB, to_fastest=False)
    assert [each.strategy.remat for each in compiled] == found


def test_search_prefers_loops_to_recomputation_and_offloads_last():
    of = space(memory=19 * GIB, opt_state=8 * GIB, unrolls=True, n_devices=1)

    def needs(strategy):
        return (
            bytes_needed(of, 2 * GIB)(strategy)
            - (8 * GIB if strategy.offload_opt_state else 0)
            - (not strategy.unroll) * 2 * GIB
        )

    def seconds(strategy):
        return of.min_seconds(strategy) + (not strategy.unroll)

    compiled = tried_strategies(of, needs, seconds)
    best = fastest(compiled).strategy
    every = [s for s in of.strategies() if needs(s) <= of.memory]
    assert seconds(best) == min(map(seconds, every)) and not best.offload_opt_state
    assert any(not each.strategy.unroll for each in compiled)
    smaller = dataclasses.replace(of, memory=11 * GIB)
    best = fastest(tried_strategies(smaller, needs, seconds)).strategy
    assert best.offload_opt_state and "offload_opt_state=True" in best.code()


def test_search_splits_the_residual_stream_before_it_recomputes_products():
    """It saves memory and sends more, so the level that does not do it by default tries it if it does not fit without."""
    own = dataclasses.replace(OWN, n_model_shards=4, n_fsdp_shards=1, remat="matmuls")
    of = space(own=own, splits_residual=True, is_running=True, rows=RowUse("mixed"), memory=20 * GIB)
    assert {(s.remat, s.split_residual) for s in of.strategies()} == {
        ("none", None), ("matmuls", None), ("matmuls", True), ("full", None),
    }  # fmt: skip

    def chosen(whole, split):  # GiB that `matmuls` needs
        def needs(strategy):
            at_matmuls = split if strategy.split_residual else whole
            return {"none": 40, "matmuls": at_matmuls, "full": 15}[strategy.remat] * GIB

        return fastest(tried_strategies(of, needs, of.min_seconds)).strategy

    assert chosen(whole=18, split=16) == own
    best = chosen(whole=30, split=16)
    assert (best.remat, best.split_residual) == (
        "matmuls",
        True,
    ) and 'Compute(remat="matmuls", split_residual=True)' in best.code()
    assert chosen(whole=30, split=25).remat == "full"


def test_strategy_is_shown_as_script_code():
    strategy = Strategy(2, 4, 8, 16, "full")
    assert strategy.code() == (
        'Deployer(n_model_shards=2, n_fsdp_shards=4); Trainer(accumulate_grad_batches=16, compute=Compute(remat="full")); '
        "fit(per_device_batch_size=8)"
    )
    assert "Compute" not in dataclasses.replace(strategy, remat="auto").code()
    changed = dataclasses.replace(strategy, remat="auto", unroll=False, offload_opt_state=True)
    assert "accumulate_grad_batches=16, compute=Compute(unroll=False, offload_opt_state=True))" in changed.code()


# --- compiled strategies --------------------------------------------------------------------------------------------------


def test_few_strategies_are_compiled_if_the_own_strategy_is_fastest():
    """Settings that only save memory are not compiled. Those that reduce traffic are: they may be faster."""
    compiled = tried_strategies(
        space(memory=64 * GIB), bytes_needed(space()), lambda s: 5.0 + (s.remat == "matmuls") + s.n_fsdp_shards
    )
    found = {values_of(each.strategy) for each in compiled}
    assert found == {(1, n, 8, 1, remat) for n in (1, 4) for remat in ("none", "matmuls")}
    assert fastest(compiled).strategy == OWN


def test_frozen_weights_have_no_gradients_to_send():
    """A frozen model on each device computes without collectives, which is faster than to gather it."""
    flops = {"none": {"bfloat16": 10**14}}
    own = dataclasses.replace(OWN, n_fsdp_shards=4)
    of = space(own=own, flops=flops, weights=8 * GIB, frozen=8 * GIB, state=8 * GIB, is_running=False)
    matmuls, reads, gathers = 10**14 / 4 / V5E.bfloat16, 8 * GIB / V5E.bandwidth, 8 * GIB * 3 / 4 / V5E.link

    def seconds(strategy):
        return matmuls + reads + gathers * (strategy.n_fsdp_shards > 1)

    best = fastest(tried_strategies(of, lambda strategy: 9 * GIB, seconds)).strategy
    assert best.shards == (1, 1) and seconds(best) == pytest.approx(of.min_seconds(best))


def test_fastest_fitting_strategy_is_found_without_compiling_all():
    of = space()

    def seconds(strategy):
        return of.min_seconds(strategy) + {"none": 3, "matmuls": 2, "full": 2}[strategy.remat]

    compiled = tried_strategies(of, bytes_needed(of), seconds)
    every = [(seconds(s), s) for s in of.strategies() if bytes_needed(of)(s) <= of.memory and s.n_model_shards == 1]
    assert fastest(compiled).cost == min(every, key=lambda each: each[0])[0]
    assert len(compiled) < len(list(of.strategies())) / 3
    # 8 rows need 12 + 32 GiB, so 4 rows cannot fit in 16.
    assert (1, 1, 4, 2, "none") not in [values_of(each.strategy) for each in compiled]


def test_strategies_whose_state_does_not_fit_are_not_compiled():
    of = space(state=40 * GIB)
    compiled = tried_strategies(of, bytes_needed(of))
    assert {each.strategy.n_model_shards * each.strategy.n_fsdp_shards for each in compiled[1:]} == {4}
    of = space(state=80 * GIB)
    assert tried_strategies(of, bytes_needed(of))[1:] == []


def test_model_axis_is_tried_only_if_nothing_fits_without_it():
    of = space(own=dataclasses.replace(OWN, per_device_batch_size=1))
    compiled = tried_strategies(of, lambda s: 20 * GIB // s.n_model_shards)
    fitting = [values_of(each.strategy) for each in compiled if each.fits]
    assert fitting == [(2, 2, 2, 1, "none")] == [values_of(compiled[-1].strategy)]  # which ends the search
    # The script's own model axis is compared with smaller ones.
    own = dataclasses.replace(OWN, n_model_shards=2)
    compiled = tried_strategies(space(own=own), lambda s: GIB, lambda s: 40.0 + s.n_model_shards)
    assert fastest(compiled).strategy.n_model_shards == 1 and max(each.strategy.n_model_shards for each in compiled) == 2


def test_search_for_any_fitting_strategy_ends_with_the_first():
    of = space()
    compiled = tried_strategies(of, bytes_needed(of), to_fastest=False)
    assert [each.fits for each in compiled] == [False] * (len(compiled) - 1) + [True]


def test_first_fitting_strategy_is_chosen_without_estimates():
    of = space(chip=None)
    compiled = tried_strategies(of, bytes_needed(of))
    assert [each.fits for each in compiled] == [False] * (len(compiled) - 1) + [True] and fastest(compiled) == compiled[-1]
    assert len(tried_strategies(space(chip=None, memory=64 * GIB), bytes_needed(of))) == 1
    assert fastest([]) is None


def test_strategies_that_do_not_compile_are_ignored():
    of = space()
    compiled = tried_strategies(of, lambda s: 20 * GIB if s == OWN else None if s.n_model_shards < 4 else GIB)
    assert values_of(compiled[-1].strategy)[:2] == (4, 1) and compiled[-1].fits


# --- bytes for what loops save ---------------------------------------------------------------------------------------------

PRODUCTS = [2 * GIB, 1 * GIB, 1 * GIB]  # bytes of each product of a loop, with a second to compute each of them again


def one_loop(strategy):
    """A loop of 4 iterations whose carry has a quarter of a GiB."""
    del strategy
    candidates = [Candidate(str(i), "product", "", "", size // 4, window=2.0 - i) for i, size in enumerate(PRODUCTS)]
    return [Loop("", 4, GIB // 4, 3.0, 3.0, candidates, lambda saved: 3.0 - len(saved))]


@pytest.mark.parametrize("level", ["matmuls", "full", "offload", "20GiB"])
def test_what_a_loop_saves_does_not_depend_on_what_it_saved_before(level):
    """A search asks for several levels of the same loops."""
    loops = one_loop(OWN)
    before = saved_at(loops, "0KiB", V5E, HOST_MEMORY)
    assert before[0].carry_in == "host"
    assert saved_at(before, level, V5E, HOST_MEMORY) == saved_at(loops, level, V5E, HOST_MEMORY)


@pytest.mark.parametrize("n, carry_in, in_host", [(60, "host", 3), (120, "host", 2), (250, "host", 1), (600, "kept", 0)])
def test_loops_put_no_more_into_host_memory_than_a_program_may_use(n, carry_in, in_host):
    """128 GiB for a device: the compiler of TPUs refuses more. A carry of more than that stays."""
    (loop,) = one_loop(OWN)
    candidates = [dataclasses.replace(each, window=1e9) for each in loop.candidates]
    loop = dataclasses.replace(loop, n=n, seconds=1e9, candidates=candidates)
    (saved,) = saved_at([loop], "0KiB", V5E, HOST_MEMORY)
    assert saved.carry_in == carry_in and len(saved.keys("host")) == in_host
    assert saved.n_bytes("host") <= 128 * GIB


@pytest.mark.parametrize(
    "level, host, reason",
    [
        ("0KiB", math.inf, "; there is no room for it, and no time to copy it to the host"),
        ("0KiB", 0, "; there is no room for it"),
        ("full", math.inf, ""),
    ],
)
def test_a_report_says_why_a_value_is_computed_again(level, host, reason):
    (loop,) = one_loop(OWN)
    loop = dataclasses.replace(loop, candidates=[dataclasses.replace(each, window=0.0) for each in loop.candidates])
    _, *rows = describe_saved(saved_at([loop], level, V5E, host), level, V5E, host, ())
    assert [(row.choice, row.why) for row in rows] == 3 * [("computed again", f"1e+03 ms to compute it again{reason}")]


@pytest.mark.parametrize(
    "memory, hidden, found",
    [
        (20, 0, ["none", "matmuls"]),
        (18.5, 0, ["none", "matmuls", "3.1GiB"]),  # the two smaller products and the carry
        (18.5, 1.5, ["none", "matmuls", "3.1GiB", "1802.2MiB"]),  # the compiler needs more than expected: only the carry
        (16.5, 0, ["none", "matmuls", "1198MiB"]),
        (15.9, 0, ["none", "matmuls", "595.9MiB"]),  # the carry goes to the host
    ],
)
def test_bytes_for_what_loops_save_are_those_that_are_left(memory, hidden, found):
    """Known from the compiled level before, and corrected if the compiler needs more."""
    flops = {**FLOPS, "fit": FLOPS["matmuls"], "offload": FLOPS["full"]}
    levels = ("none", "matmuls", "fit", "full", "offload")
    of = space(
        n_devices=1, flops={level: flops[level] for level in levels}, loops=one_loop, is_running=True, rows=RowUse("mixed"),
        memory=int(memory * GIB),
    )  # fmt: skip

    def needs(strategy):
        if strategy.remat == "none":
            return 30 * GIB
        saved = saved_at(one_loop(strategy), strategy.remat, V5E, HOST_MEMORY)
        kept = sum(each.n_bytes("kept") for each in saved)
        return 15 * GIB + kept + int(hidden * GIB) * (strategy.remat != "matmuls" and kept > GIB)

    compiled = tried_strategies(of, needs, to_fastest=False)
    assert [each.strategy.remat for each in compiled] == found and compiled[-1].fits


@pytest.mark.parametrize("in_host, found", [(0, ["none", "matmuls", "595.9MiB"]), (127.5, ["none", "matmuls", "full"])])
def test_a_search_knows_that_the_optimizers_state_is_in_host_memory_too(in_host, found):
    """The carry, of one GiB, goes there only if there is room for it."""
    flops = {level: FLOPS["full" if level == "full" else "matmuls"] for level in ("none", "matmuls", "fit", "full")}
    of = space(
        own=dataclasses.replace(OWN, offload_opt_state=True), opt_state=int(in_host * GIB), n_devices=1, flops=flops,
        loops=one_loop, is_running=True, rows=RowUse("mixed"), memory=int(15.9 * GIB),
    )  # fmt: skip
    needs = {"none": 30 * GIB, "matmuls": 20 * GIB, "full": 16 * GIB}
    compiled = tried_strategies(of, lambda strategy: needs.get(strategy.remat, 15 * GIB), to_fastest=False)
    assert [each.strategy.remat for each in compiled] == found


def test_bytes_that_save_nothing_else_are_not_compiled():
    """If nothing is worth saving, bytes make the program of `"full"`."""
    flops = {"none": FLOPS["none"], "matmuls": FLOPS["matmuls"], "fit": FLOPS["matmuls"], "full": FLOPS["full"]}

    def loops(strategy):
        return [dataclasses.replace(loop, again=lambda saved: 0.0) for loop in one_loop(strategy)]

    of = space(n_devices=1, flops=flops, loops=loops, is_running=True, rows=RowUse("mixed"), memory=19 * GIB)
    compiled = tried_strategies(of, lambda strategy: {"none": 30, "matmuls": 20}.get(strategy.remat, 19.5) * GIB)
    assert [each.strategy.remat for each in compiled] == ["none", "matmuls", "full"]
