"""Optimizer state in host memory: training and checkpoints are bitwise the same."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.memory import Memory, SearchSpace

EXAMPLES = list(np.random.default_rng(0).normal(size=(96, 16)).astype(np.float32))


def make_trainer(offload, shards=(2, 2), **options):
    deployer = redeqx.Deployer(0, *shards, workdir=options.pop("workdir", None))
    return redeqx.Trainer(
        deployer,
        model=eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0)),
        optimizer=options.pop("optimizer", optax.adamw(1e-2)),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
        **{"compute": redeqx.Compute(offload_opt_state=offload), **options},
    )


def bits(trainer):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(eqx.filter((trainer.model, trainer.opt_state), eqx.is_array))]


def memory_kinds(trainer):
    return {x.ndim > 0: x.sharding.memory_kind for x in jax.tree.leaves(trainer.opt_state)}


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "skip", "accumulate_grad_batches": 2}])
def test_offloading_trains_to_the_same_bits(options, capsys):
    on_device, offloaded = (make_trainer(offload, **options) for offload in (False, True))
    capsys.readouterr()
    for trainer in (on_device, offloaded):
        trainer.fit(EXAMPLES, batch_size=32, n_epochs=2)
    assert bits(on_device) == bits(offloaded)
    assert memory_kinds(offloaded) == {True: "pinned_host", False: "device"} and memory_kinds(on_device) == {
        True: "device",
        False: "device",
    }
    assert " ".join(capsys.readouterr().out.split()).count(" optimizer state in the host's memory") == 1


@pytest.mark.sweep
def test_run_resumes_with_and_without_offloading(tmp_path):
    """An average of the weights, which is part of that state, can be evaluated."""

    def make(offload, workdir=None):
        return make_trainer(offload, workdir=workdir, optimizer=redeqx.optimizers.ema(optax.adamw(1e-2), 0.9))

    uninterrupted = make(False)
    uninterrupted.fit(EXAMPLES, batch_size=32, n_epochs=2, eval_examples=EXAMPLES)
    make(True, tmp_path).fit(EXAMPLES, batch_size=32, max_steps=2)
    make(False, tmp_path).fit(EXAMPLES, batch_size=32, max_steps=4)
    last = make(True, tmp_path)
    metrics = last.fit(EXAMPLES, batch_size=32, n_epochs=2, eval_examples=EXAMPLES)
    assert last.step == 6 and bits(last) == bits(uninterrupted)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(eqx.filter(last.eval_model, eqx.is_array))} == {"device"}
    assert metrics["loss"] == last.eval_loss(EXAMPLES, batch_size=32, model=last.eval_model)


def test_memory_auto_offloads_if_nothing_else_fits(monkeypatch, capsys):
    expected = make_trainer(False)
    expected.fit(EXAMPLES, batch_size=32, n_epochs=1)
    needed = expected.compiled_step.memory_analysis()
    memory = Memory(needed.argument_size_in_bytes, 2**20)
    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: memory)
    monkeypatch.setattr(SearchSpace, "strategies", lambda of: [dataclasses.replace(of.own, offload_opt_state=True)])
    trainer = make_trainer(False, compute=redeqx.Compute(memory="auto"))
    trainer.fit(EXAMPLES, batch_size=32, n_epochs=1)
    assert bits(trainer) == bits(expected) and memory_kinds(trainer)[True] == "pinned_host"
    assert "offload_opt_state=True)" in " ".join(capsys.readouterr().out.split()).partition(" needs ")[0]
