"""Lookups in a stored table send what is looked up instead of the table, and give the same update."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

VOCAB, D, T, ROWS, RATE = 1032, 16, 12, 16, 0.5
MESHES = {"fsdp": {"n_fsdp_shards": 8}, "all": {"n_model_shards": 2, "n_fsdp_shards": 2}}


class Tied(eqx.Module):
    """A table that is both looked up and multiplied with."""

    table: eqx.nn.Embedding
    mix: eqx.nn.Linear

    def __init__(self, n_rows=VOCAB):
        one, two = jax.random.split(jax.random.key(0))
        self.table, self.mix = eqx.nn.Embedding(n_rows, D, key=one), eqx.nn.Linear(D, D, key=two)

    def __call__(self, ids):
        return jax.vmap(self.mix)(jax.vmap(self.table)(ids)) @ self.table.weight.T


class ByTake(Tied):
    """A lookup by `jnp.take`, all of whose rows are of one array."""

    def __call__(self, ids):
        return jax.vmap(self.mix)(jnp.take(self.table.weight, ids, axis=0))


def loss_fn(model, ids, key):
    return jnp.mean(jnp.square(jax.vmap(model)(ids)))


def together_fn(model, ids, key):
    """The rows are no longer a dim of the tokens."""
    return jnp.mean(jnp.square(model(ids.reshape(-1))))


def step(model, loss_fn, mesh, n_rows=VOCAB):
    """Trains for one step. Returns the weights of the table, those after a step by hand, and the program."""
    rows = list(np.random.default_rng(0).integers(0, n_rows, (ROWS, T)).astype(np.int32))
    rows[1][:4] = rows[0][0]  # in several rows, on several devices
    deployer = redeqx.Deployer(verbose=False, **mesh)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(RATE), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.train(rows, batch_size=ROWS)
    grads = eqx.filter_grad(loss_fn)(model, jnp.stack(rows), None)
    expected = model.table.weight - RATE * grads.table.weight
    assert trainer.compiled_step is not None
    return trainer.model.table.weight, expected, trainer.compiled_step.as_text()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("model", "loss"), [(ByTake, loss_fn), (ByTake, together_fn)], ids=["rows", "joined_rows"])
def test_tokens_are_exchanged_and_the_table_is_not_gathered(model, loss, mesh):
    weights, expected, program = step(model(), loss, MESHES[mesh])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    of_device = VOCAB // MESHES[mesh].get("n_model_shards", 1)
    assert " all-to-all(" in program
    assert f"[{of_device},{D // MESHES[mesh]['n_fsdp_shards']}]" in program  # the table as stored, and its gradient
    assert f"[{of_device},{D}]" not in program


@pytest.mark.parametrize("mesh", MESHES)
def test_a_table_that_is_also_the_head(mesh):
    weights, expected, program = step(Tied(), loss_fn, MESHES[mesh])
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert " all-to-all(" in program


def test_a_table_of_fewer_rows_than_tokens_is_gathered():
    n_rows = 16  # each device looks 24 tokens up
    weights, expected, program = step(ByTake(n_rows), loss_fn, MESHES["fsdp"], n_rows)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert f"[{n_rows},{D}]" in program and " all-to-all(" not in program


def test_a_table_is_gathered_with_a_sequence_axis():
    """XLA would put the tokens of all devices on each."""
    weights, expected, program = step(ByTake(), loss_fn, {"n_fsdp_shards": 2, "n_sequence_shards": 4})
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert f"[{VOCAB},{D}]" in program
