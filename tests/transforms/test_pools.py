"""Values and gradients of pools along positions that sequence shards split are those of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.dims import Inputs
from redeqx.machine import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import FixPools


class Pooled(eqx.Module):
    embedding: eqx.nn.Embedding
    pool: eqx.nn.MaxPool1d

    def __call__(self, ids):
        return jnp.tanh(self.pool(jax.vmap(self.embedding)(ids).T))


def loss_fn(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def grad_fn(model, batch, key):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, key)
    return redeqx.Loss(loss * len(batch), len(batch)), grads


@pytest.mark.parametrize(
    ("n_positions", "options"),
    [(32, {}), *(pytest.param(*of, marks=pytest.mark.sweep) for of in ((30, {}), (32, {"grad_fn": grad_fn})))],
)
def test_gradient_with_sequence_shards(n_positions, options):
    model = Pooled(eqx.nn.Embedding(16, 8, key=jax.random.key(0)), eqx.nn.MaxPool1d(3, padding=1))
    batch = np.random.default_rng(0).integers(0, 16, (3, n_positions)).astype(np.int32)
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None).embedding.weight
    deployer = redeqx.Deployer(n_sequence_shards=4, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn, **options
    )
    trainer.update(list(batch))
    found = np.asarray(model.embedding.weight) - np.asarray(trainer.model.embedding.weight)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("reduction", "identity", "size", "stride", "padding", "dilations"),
    [
        (jax.lax.max, -jnp.inf, 3, 1, (1, 1), (1, 1)),
        (jax.lax.min, jnp.inf, 5, 3, (3, 3), (1, 1)),
        (jax.lax.add, 0.0, 3, 2, (2, 2), (2, 2)),
        (jax.lax.max, -jnp.inf, 2, 4, (0, 0), (1, 1)),  # shorter than its stride
    ],
)
def test_pools_along_split_positions(x64, reduction, identity, size, stride, padding, dilations):
    def pool(batch):
        before, within = ((1, each, 1) for each in dilations)
        paddings = ((0, 0), padding, (0, 0))
        return jax.lax.reduce_window(batch, identity, reduction, (1, size, 1), (1, stride, 1), paddings, before, within)

    def step(fn):
        return jax.value_and_grad(lambda x: jnp.square(fn(x)).sum())

    batch = np.random.default_rng(0).normal(size=(2, 32, 5))
    rule = FixPools(make_mesh(n_sequence_shards=4), inputs=Inputs(n_weights=0, n_state=0, n_batch=1))
    placed = jax.device_put(batch, NamedSharding(rule.mesh, P(None, "sequence")))
    found, expected = (jax.jit(step(fn))(x) for fn, x in ((transformed(pool, [rule]), placed), (pool, batch)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_xla_still_computes_the_gradient_wrongly():
    """The error that `FixPools` avoids (jax 0.10.2, 2026-11-27). Once this fails, delete the rule."""
    batch = jax.random.normal(jax.random.key(0), (8, 32, 4))

    def loss(batch):
        pooled = jax.lax.reduce_window(jnp.tanh(batch), -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
        return jnp.square(pooled).sum()

    expected = jax.jit(jax.grad(loss))(batch)
    placed = jax.device_put(batch, NamedSharding(make_mesh(n_sequence_shards=4), P(None, "sequence")))
    assert not np.allclose(jax.jit(jax.grad(loss))(placed), expected, rtol=0.01, atol=0.01)
