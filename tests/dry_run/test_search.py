"""The search for settings: those it compiles, skips and proposes. Proposals are compared with compiled steps."""

import dataclasses
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.dims import RowUse
from redeqx.dry_run import DryRunDone, dry_run
from redeqx.dry_run._search import CompiledSetting, SearchSpace, fastest
from redeqx.machine import TPUS, describe, described, dry_for
from redeqx.training import Setting, in_order

GIB = 2**30
V5E = TPUS["v5e"]
OWN = Setting(n_model_shards=1, n_fsdp_shards=1, per_device_batch_size=8, accumulate_grad_batches=1, remat="none")
FLOPS = {"none": {"bfloat16": 3 * 10**15}, "matmuls": {"bfloat16": 3 * 10**15}, "full": {"bfloat16": 4 * 10**15}}


def space(**changes):
    given = {
        "own": OWN, "n_devices": 4, "flops": FLOPS, "weights": 4 * GIB, "state": 12 * GIB, "memory": 16 * GIB, "chip": V5E,
    }  # fmt: skip
    return SearchSpace(**{**given, **changes})


def compiled_settings(of, needs, seconds=None, *, to_fastest=True):
    """The settings that a search compiles, the script's own first. `needs` and `seconds` give a setting's bytes and time."""

    def measure(setting):
        found = needs(setting)
        if found is None:
            return None
        held = of.state // (setting.n_model_shards * setting.n_fsdp_shards)
        each = CompiledSetting(setting, found, found <= of.memory, held=held)
        if seconds is not None:
            each = dataclasses.replace(each, estimate=FakeEstimate(seconds(setting)))
        return each

    own = measure(of.own)
    return [own, *of.search(own, measure, to_fastest=to_fastest)]


class FakeEstimate:
    def __init__(self, serial):
        self.serial = serial


def setting_values(setting):
    shards = (setting.n_model_shards, setting.n_fsdp_shards)
    return (*shards, setting.per_device_batch_size, setting.accumulate_grad_batches, setting.remat)


def bytes_needed(of, activations=4 * GIB):
    """Bytes of a step: its state, and the activations of each row that remat does not recompute."""
    saved = {"none": 1, "matmuls": 1 / 2, "full": 1 / 8}

    def needs(setting):
        shards = setting.n_model_shards * setting.n_fsdp_shards
        return int(of.state / shards + activations * saved[setting.remat] * setting.per_device_batch_size)

    return needs


# --- the settings ------------------------------------------------------------------------------------------------------


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
    settings = space(own=own, rows=use).settings()
    found = {(s.accumulate_grad_batches, s.per_device_batch_size) for s in settings if s.n_model_shards == 1}
    assert found == cuts


def test_every_setting_keeps_the_number_of_examples_per_step():
    for own in (OWN, dataclasses.replace(OWN, n_model_shards=2, per_device_batch_size=6, accumulate_grad_batches=3)):
        settings = list(space(own=own).settings())
        n_rows = {s.per_device_batch_size * (4 // s.n_model_shards) * s.accumulate_grad_batches for s in settings}
        assert n_rows == {own.per_device_batch_size * (4 // own.n_model_shards) * own.accumulate_grad_batches}
        assert own in settings and len(settings) == len(set(settings))
        assert {s.remat for s in settings} == set(FLOPS)
        assert {(s.n_model_shards, s.n_fsdp_shards) for s in settings} == {(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)}


def test_batch_size_is_divided_as_in_a_run():
    own = dataclasses.replace(OWN, batch_size=42, per_device_batch_size=10)
    for setting in space(own=own).settings():
        n_micro_batches = setting.accumulate_grad_batches
        run = redeqx.data.BatchSize.of(
            redeqx.machine.make_mesh(setting.n_model_shards, 1, jax.devices()[:4]), None, 42, n_micro_batches
        )
        assert setting.per_device_batch_size * (4 // setting.n_model_shards) == run.micro_batch
        assert setting.batch_size == 42 and "fit(batch_size=42)" in setting.code()


def test_unrolling_and_offloading_are_varied_only_if_they_matter():
    assert {(s.unroll, s.offload_opt_state) for s in space().settings()} == {(True, False)}
    settings = list(space(opt_state=8 * GIB, unrolls=True).settings())
    assert len(settings) == len(set(settings))
    looped = {(s.n_fsdp_shards, s.remat) for s in settings if not s.unroll}
    assert looped == {(1, "none"), (1, "matmuls")}
    assert {s.offload_opt_state for s in settings} == {True, False}
    own = dataclasses.replace(OWN, offload_opt_state=True)
    assert {s.offload_opt_state for s in space(own=own, opt_state=8 * GIB).settings()} == {True}


def test_search_prefers_loops_to_recomputation_and_offloads_last():
    of = space(memory=19 * GIB, opt_state=8 * GIB, unrolls=True, n_devices=1)

    def needs(setting):
        return (
            bytes_needed(of, 2 * GIB)(setting)
            - (8 * GIB if setting.offload_opt_state else 0)
            - (not setting.unroll) * 2 * GIB
        )

    def seconds(setting):
        return of.min_seconds(setting) + (not setting.unroll)

    compiled = compiled_settings(of, needs, seconds)
    best = fastest(compiled).setting
    every = [s for s in of.settings() if needs(s) <= of.memory]
    assert seconds(best) == min(map(seconds, every)) and not best.offload_opt_state
    assert any(not each.setting.unroll for each in compiled)
    smaller = dataclasses.replace(of, memory=11 * GIB)
    best = fastest(compiled_settings(smaller, needs, seconds)).setting
    assert best.offload_opt_state and "offload_opt_state=True" in best.code()


def test_setting_is_shown_as_script_code():
    setting = Setting(2, 4, 8, 16, "full")
    assert setting.code() == (
        'Deployer(n_model_shards=2, n_fsdp_shards=4); Trainer(accumulate_grad_batches=16, remat="full"); '
        "fit(per_device_batch_size=8)"
    )
    assert "remat" not in dataclasses.replace(setting, remat="auto").code()
    changed = dataclasses.replace(setting, remat="auto", unroll=False, offload_opt_state=True)
    assert "Trainer(accumulate_grad_batches=16, unroll=False, offload_opt_state=True)" in changed.code()


# --- compiled settings --------------------------------------------------------------------------------------------------


def test_few_settings_are_compiled_if_the_own_setting_is_fastest():
    """Settings that only save memory are not compiled. Those that reduce traffic are: they may be faster."""
    compiled = compiled_settings(
        space(memory=64 * GIB), bytes_needed(space()), lambda s: 5.0 + (s.remat == "matmuls") + s.n_fsdp_shards
    )
    found = {setting_values(each.setting) for each in compiled}
    assert found == {(1, n, 8, 1, remat) for n in (1, 4) for remat in ("none", "matmuls")}
    assert fastest(compiled).setting == OWN


def test_fastest_fitting_setting_is_found_without_compiling_all():
    of = space()

    def seconds(setting):
        return of.min_seconds(setting) + {"none": 3, "matmuls": 2, "full": 2}[setting.remat]

    compiled = compiled_settings(of, bytes_needed(of), seconds)
    every = [(seconds(s), s) for s in of.settings() if bytes_needed(of)(s) <= of.memory and s.n_model_shards == 1]
    assert fastest(compiled).seconds == min(every, key=lambda each: each[0])[0]
    assert len(compiled) < len(list(of.settings())) / 3
    # 8 rows need 12 + 32 GiB, so 4 rows cannot fit in 16.
    assert (1, 1, 4, 2, "none") not in [setting_values(each.setting) for each in compiled]


def test_settings_whose_state_does_not_fit_are_not_compiled():
    of = space(state=40 * GIB)
    compiled = compiled_settings(of, bytes_needed(of))
    assert {each.setting.n_model_shards * each.setting.n_fsdp_shards for each in compiled[1:]} == {4}
    of = space(state=80 * GIB)
    assert compiled_settings(of, bytes_needed(of))[1:] == []


def test_model_axis_is_tried_only_if_nothing_fits_without_it():
    of = space(own=dataclasses.replace(OWN, per_device_batch_size=1))
    compiled = compiled_settings(of, lambda s: 20 * GIB // s.n_model_shards)
    fitting = [setting_values(each.setting) for each in compiled if each.fits]
    assert fitting == [(2, 2, 2, 1, "none")] == [setting_values(compiled[-1].setting)]  # which ends the search
    # The script's own model axis is compared with smaller ones.
    own = dataclasses.replace(OWN, n_model_shards=2)
    compiled = compiled_settings(space(own=own), lambda s: GIB, lambda s: 40.0 + s.n_model_shards)
    assert fastest(compiled).setting.n_model_shards == 1 and max(each.setting.n_model_shards for each in compiled) == 2


def test_search_for_any_fitting_setting_ends_with_the_first():
    of = space()
    compiled = compiled_settings(of, bytes_needed(of), to_fastest=False)
    assert [each.fits for each in compiled] == [False] * (len(compiled) - 1) + [True]


def test_first_fitting_setting_is_chosen_without_estimates():
    of = space(chip=None)
    compiled = compiled_settings(of, bytes_needed(of))
    assert [each.fits for each in compiled] == [False] * (len(compiled) - 1) + [True] and fastest(compiled) == compiled[-1]
    assert len(compiled_settings(space(chip=None, memory=64 * GIB), bytes_needed(of))) == 1
    assert fastest([]) is None


def test_settings_that_do_not_compile_are_ignored():
    of = space()
    compiled = compiled_settings(of, lambda s: 20 * GIB if s == OWN else None if s.n_model_shards < 4 else GIB)
    assert setting_values(compiled[-1].setting)[:2] == (4, 1) and compiled[-1].fits


# --- real jobs ----------------------------------------------------------------------------------------------------------


class Scanned(eqx.Module):
    first: eqx.nn.Linear
    blocks: eqx.nn.MLP

    def __init__(self, key):
        self.first = eqx.nn.Linear(16, 16, key=key)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.MLP(16, 16, 256, 1, key=key))(jax.random.split(key, 8))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), self.first(x), arrays)[0]


def make_trainer(model=None, n_fsdp=1, **options):
    deployer = redeqx.Deployer(n_fsdp_shards=n_fsdp, verbose=False)
    model = deployer.init(lambda: Scanned(jax.random.key(0))) if model is None else model
    options = {"loss_fn": lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2), **options}
    return redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, **options)


def example_rows(n=2048):
    return np.zeros((n, 16), np.float32)


@pytest.mark.sweep
def test_proposed_setting_fits_with_the_reported_memory():
    with described("cpu:8"):
        need = make_trainer().dry_run(example_rows(), 256).needs
    with described("cpu:8", memory=need // 3):
        run = make_trainer().dry_run(example_rows(), 256)
        assert not run.fits and DryRunDone(run).code == 3 and run.best is run.tried[-1]
        assert run.best.setting.code() in run.verdict() and "What fits: Deployer(" in run.verdict()
        found = run.best.setting
        options = {"accumulate_grad_batches": found.accumulate_grad_batches, "compute": redeqx.Compute(remat=found.remat)}
        again = make_trainer(n_fsdp=found.n_fsdp_shards, **options).dry_run(example_rows(), found.per_device_batch_size)
    assert again.fits and again.needs == run.best.needs and again.setting == found


@pytest.mark.sweep
def test_search_for_the_fastest_exits_with_0():
    with described("cpu:8"):
        need = make_trainer().dry_run(example_rows(), 256).needs
    with dry_for(describe("cpu:8", memory=need // 3), fit=True) as dry, pytest.raises(DryRunDone) as done:
        make_trainer().fit(example_rows(), 256, 1)
    run = done.value.run
    assert dry.options == {"fit": True} and not run.fits and done.value.code == 0 and run.is_searched
    assert [each.fits for each in run.tried] == [False] * (len(run.tried) - 1) + [True]
    assert "Fastest that fits: Deployer(n_model_shards=1" in run.verdict() and run.best.setting.code() in str(run)
    plain = run.to_json()
    assert plain["best"] == run.best.setting.code() == plain["tried"][-1]["code"]
    with described("cpu:8"):
        own = make_trainer().dry_run(example_rows(), 256, fit=True)
    assert own.fits and own.best.setting == own.setting and "Fastest that fits: Deployer(" in own.verdict()


def test_verdict_says_what_the_nearest_setting_lacks():
    mlp = eqx.nn.MLP(16, 16, 256, 3, key=jax.random.key(0))
    memory = 4 * sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(mlp, eqx.is_array))) // 7
    with described("cpu:8", memory=memory):
        run = make_trainer(mlp).dry_run(example_rows(8), 1, fit=True)
    assert len(run.tried) > 3
    nearest = min((each for each in run.tried if not each.is_bound), key=lambda each: each.needs)
    assert not any(each.fits for each in run.tried) and run.best is None and DryRunDone(run).code == 3
    lacks = f"{(nearest.needs - memory) / 2**10:,.1f} KiB a device: {nearest.setting.code()}. Use more devices"
    assert f"None of the tried settings fits. The nearest lacks {lacks}" in run.verdict()
    with described("cpu:8", memory=1000):
        assert make_trainer(mlp).dry_run(example_rows(8), 1, search=False).tried == ()


@pytest.mark.sweep
def test_only_remat_levels_that_differ_are_tried():
    from redeqx.dry_run._forecast import _levels

    def levels(**options):
        trainer = make_trainer(**options)
        run = trainer.dry_run(example_rows(64), 8, search=False)
        size = trainer._engine.batch_size(8, None)
        own, flops = _levels(trainer._job(in_order(example_rows(64), size), size), run)
        return own, {level: sum(of.values()) for level, of in flops.items()}

    own, flops = levels()
    assert own == "matmuls" and list(flops) == ["none", "matmuls", "full"]  # no level for offloading: a CPU is its own host
    assert flops["none"] == flops["matmuls"] < flops["full"]
    assert levels(remat="full")[0] == "full"
    mlp = eqx.nn.MLP(16, 16, 16, 2, key=jax.random.key(0))
    assert list(levels(model=mlp)[1]) == ["auto"]
    assert list(levels(grad_fn=lambda model, batch, key: (jnp.zeros(()), model))[1]) == ["auto"]


@pytest.mark.sweep
def test_interrupted_search_reports_its_results(monkeypatch):
    from redeqx.dry_run import _forecast

    trainer = make_trainer()
    machine = dataclasses.replace(describe("this"), memory=1_000_000)
    real = _forecast._compiled

    def compiled(job, machine, setting, *args, **options):
        if setting.n_fsdp_shards > 1:
            raise KeyboardInterrupt
        return real(job, machine, setting, *args, **options)

    monkeypatch.setattr(_forecast, "_compiled", compiled)
    size = trainer._engine.batch_size(256, None)
    run = dry_run(trainer._job(in_order(example_rows(), size), size), machine, fit=True)
    assert run.failed["other settings"] == "interrupted" and run.tried[0].setting == run.setting


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is an extra")
@pytest.mark.sweep
def test_loop_inputs_are_offloaded_to_the_host():
    """The batch is split over the data and fsdp axes and into two micro-batches."""
    found = {}
    with described("v5e:2x2"):
        for remat in ("full", "offload"):
            trainer = make_trainer(
                Scanned(jax.random.key(0)), 2, compute=redeqx.Compute(remat=remat), accumulate_grad_batches=2
            )
            found[remat] = trainer.dry_run(example_rows(2**17), 2**14, search=False)
    steps = {remat: run.steps["train"] for remat, run in found.items()}
    input_bytes = 8 * 2**14 * 16 * 4  # the inputs of 8 blocks, in float32
    assert steps["full"].host_bytes == 0 and steps["offload"].host_bytes >= 2 * 2 * input_bytes
    assert found["offload"].estimate.host > 0 and "copied to and from the host a device" in str(found["offload"])
