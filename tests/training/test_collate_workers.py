"""Collate workers: the run is the same as without them, and no worker outlives the trainer."""

import gc
import multiprocessing
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

EXAMPLES = list(np.random.default_rng(0).normal(size=(44, 4)).astype(np.float32))


def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def make_trainer(**options):
    deployer = redeqx.Deployer(verbose=False)
    model = eqx.nn.MLP(4, 4, 8, 1, key=deployer.next_key())
    return redeqx.Trainer(deployer, model=model, optimizer=optax.adam(1e-2), collate_fn=np.stack, loss_fn=loss_fn, **options)


def train(**options):
    trainer = make_trainer(**options)
    metrics = trainer.fit(EXAMPLES, batch_size=8, n_epochs=2, eval_examples=EXAMPLES)
    return trainer, metrics, [np.asarray(x) for x in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))]


@pytest.mark.parametrize("where", ["threads", "processes"])
@pytest.mark.sweep
def test_workers_do_not_change_the_fit_and_end_with_the_trainer(where):
    _, metrics, expected = train()
    trainer, found, leaves = train(workers=redeqx.Workers(2, where))
    assert found == metrics
    assert all(np.array_equal(a, b) for a, b in zip(leaves, expected, strict=True))
    names = {process.name for process in multiprocessing.active_children()}
    assert ("redeqx-collate" in names) == (where == "processes")
    del trainer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "redeqx-end":  # a thread ends the workers, as the garbage collector may run while a lock is held
            thread.join(60)
    assert "redeqx-collate" not in {process.name for process in multiprocessing.active_children()}


def test_invalid_worker_arguments_raise():
    with pytest.raises(ValueError, match="`workers`: expected at least 0, got -1"):
        make_trainer(workers=redeqx.Workers(-1))
    with pytest.raises(ValueError, match=r"`workers\.where`: expected 'threads' or 'processes', got 'fork'"):
        make_trainer(workers=redeqx.Workers(1, "fork"))
