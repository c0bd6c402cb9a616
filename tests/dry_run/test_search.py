"""Searches in dry runs: proposals are compared with compiled steps."""

import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.dry_run import DryRunDone
from redeqx.machine import describe, described, dry_for


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
        assert run.best.strategy.code() in run.verdict() and "What fits: Deployer(" in run.verdict()
        found = run.best.strategy
        options = {"accumulate_grad_batches": found.accumulate_grad_batches, "compute": redeqx.Compute(remat=found.remat)}
        again = make_trainer(n_fsdp=found.n_fsdp_shards, **options).dry_run(example_rows(), found.per_device_batch_size)
    assert again.fits and again.needs == run.best.needs and again.strategy == found


@pytest.mark.sweep
def test_search_for_the_fastest_exits_with_0():
    with described("cpu:8"):
        need = make_trainer().dry_run(example_rows(), 256).needs
    with dry_for(describe("cpu:8", memory=need // 3), search="fastest") as dry, pytest.raises(DryRunDone) as done:
        make_trainer().fit(example_rows(), 256, 1)
    run = done.value.run
    assert dry.options == {"search": "fastest"} and not run.fits and done.value.code == 0 and run.is_searched
    assert [each.fits for each in run.tried] == [False] * (len(run.tried) - 1) + [True]
    assert "Fastest that fits: Deployer(n_model_shards=1" in run.verdict() and run.best.strategy.code() in str(run)
    plain = run.to_json()
    assert plain["best"] == run.best.strategy.code() == plain["tried"][-1]["code"]
    with described("cpu:8"):
        own = make_trainer().dry_run(example_rows(), 256, search="fastest")
    assert own.fits and own.best.strategy == own.strategy and "Fastest that fits: Deployer(" in own.verdict()


@pytest.mark.sweep
def test_what_fits_includes_the_evaluation():
    """A strategy whose train step fits does not fit if its evaluation does not."""

    def found(memory, n_fsdp=1, **compute):
        with dry_for(describe("cpu:8", memory=memory), search="fastest"), pytest.raises(DryRunDone) as done:
            trainer = make_trainer(
                n_fsdp=n_fsdp, compute=redeqx.Compute(**compute),
                loss_fn=lambda model, batch, key: jnp.mean(jnp.tanh(jax.vmap(model)(batch) @ batch.T)),
            )  # fmt: skip
            trainer.fit(example_rows(), 8, 1, eval_examples=example_rows(), eval_loss=True, eval_per_device_batch_size=256)
        return done.value.run, done.value.code

    run, _ = found(2**40)
    needs = {name: step.needs for name, step in run.steps.items()}
    assert needs["train"] < needs["eval"] == run.needs == run.tried[0].needs
    run, code = found(needs["eval"] - 1)
    assert run.too_large == ["eval"] and "for the eval step, whose rows `eval_per_device_batch_size` sets" in run.verdict()
    assert code == 0 and run.best.strategy.n_fsdp_shards == 8
    again, _ = found(2**40, 8, remat=run.best.strategy.remat)
    assert run.best.needs == again.steps["eval"].needs == again.needs
    run, code = found(again.needs - 1)
    assert code == 3 and not any(each.fits for each in run.tried)
    assert len({each.strategy.shards for each in run.tried}) == len(run.tried) > 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"search": True}, "`search`: expected 'fits', 'fastest' or 'none', got True. Pass one of them."),
        ({"optimization": "O4"}, "`optimization`: expected 'none', 'O0', 'O1', 'O2', 'O3', 'UNKNOWN' or None, got 'O4'."),
    ],
)
def test_invalid_options(options, message):
    with described("cpu:8"), pytest.raises(ValueError) as raised:
        make_trainer(eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))).dry_run(example_rows(8), 1, **options)
    assert str(raised.value).startswith(message)


@pytest.mark.sweep
def test_verdict_says_what_the_nearest_setting_lacks():
    mlp = eqx.nn.MLP(16, 16, 256, 3, key=jax.random.key(0))
    memory = 4 * sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(mlp, eqx.is_array))) // 7
    with described("cpu:8", memory=memory):
        run = make_trainer(mlp).dry_run(example_rows(8), 1, search="fastest")
    assert len(run.tried) > 3
    nearest = min((each for each in run.tried if not each.is_refused), key=lambda each: each.needs)
    assert not any(each.fits for each in run.tried) and run.best is None and DryRunDone(run).code == 3
    lacks = f"{(nearest.needs - memory) / 2**10:,.1f} KiB a device: {nearest.strategy.code()}. Use more devices"
    assert f"None of the tried strategies fits. The nearest lacks {lacks}" in run.verdict()
    with described("cpu:8", memory=1000):
        assert make_trainer(mlp).dry_run(example_rows(8), 1, search="none").tried == ()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options, levels",
    [
        ({}, {"none", "matmuls", "full"}),  # no level for offloading: a CPU is its own host
        ({"compute": redeqx.Compute(remat="full")}, {"none", "matmuls", "full"}),
        ({"compute": redeqx.Compute(remat="6KiB")}, {"none", "matmuls", "full", "6KiB"}),
        ({"model": eqx.nn.MLP(16, 16, 16, 2, key=jax.random.key(0))}, {"auto"}),
        ({"grad_fn": lambda model, batch, key: (jnp.zeros(()), model)}, {"auto"}),
    ],
)
def test_only_levels_that_differ_are_tried(options, levels):
    with described("cpu:8", memory=200_000):
        run = make_trainer(**options).dry_run(example_rows(64), 8, search="fastest")
    tried = {each.strategy.remat for each in run.tried}
    assert {remat for remat in tried if not remat.endswith("iB")} <= levels and run.strategy.remat in levels
    assert levels != {"auto"} or tried <= levels


@pytest.mark.sweep
def test_interrupted_search_reports_its_results(monkeypatch):
    from redeqx.memory import SearchSpace

    def interrupted(self, own, measure, *, to_fastest):
        yield measure(own.strategy)
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchSpace, "search", interrupted)
    with described("cpu:8", memory=1_000_000):
        run = make_trainer().dry_run(example_rows(), 256, search="fastest")
    assert run.failed["other strategies"] == "interrupted" and run.tried[0].strategy == run.strategy


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
            found[remat] = trainer.dry_run(example_rows(2**17), 2**14, search="none")
    steps = {remat: run.steps["train"] for remat, run in found.items()}
    input_bytes = 8 * 2**14 * 16 * 4  # the inputs of 8 blocks, in float32
    assert steps["full"].host_bytes == 0 and steps["offload"].host_bytes >= 2 * 2 * input_bytes
    assert found["offload"].estimate.host > 0 and "copied to and from the host a device" in str(found["offload"])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is an extra")
def test_loops_leave_room_for_the_optimizers_state_in_host_memory():
    """It takes 126 of 128 GiB for each device, so the inputs of 8 blocks, 4 GiB, stay on the device."""
    n, hidden = 2**14, 63 * 2**10

    def loss_fn(weights, batch, key):
        del key
        layer = lambda x, w: (jnp.tanh(x + jax.nn.relu(x @ w[0]) @ w[1]), None)  # noqa: E731
        return jax.lax.scan(layer, jnp.repeat(batch, n, axis=1), weights)[0].mean()

    found = {}
    with described("v5e:2x2"):
        deployer = redeqx.Deployer(verbose=False)
        model = deployer.init(lambda: (jnp.zeros((8, n, hidden)), jnp.zeros((8, hidden, n))))
        for offload in (False, True):
            compute = redeqx.Compute(remat="offload", offload_opt_state=offload)
            options = {"optimizer": optax.adam(0.1), "collate_fn": np.stack, "loss_fn": loss_fn, "compute": compute}
            trainer = redeqx.Trainer(deployer, model=model, **options)
            run = trainer.dry_run(np.zeros((2**15, 1), np.float32), 2**13, search="none", optimization="none")
            assert run.in_host // 2**30 == 126 * offload
            found[offload] = (run.saved[0].carry_in, "the host has no room for it" in " ".join(str(run).split()))
    assert found == {False: ("host", False), True: ("kept", True)}
