"""Convolutions and lookups in custom derivatives are computed under the rules that correct them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx


def convolved(x, weight):
    out = jax.lax.conv_general_dilated(
        x[None], weight, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
    )
    return jnp.tanh(out[0])


class Net(eqx.Module):
    table: jax.Array
    weight: jax.Array

    def __init__(self):
        self.table = jax.random.normal(jax.random.key(0), (16, 8))
        self.weight = jax.random.normal(jax.random.key(1), (3, 1, 8))

    def __call__(self, ids):
        @jax.custom_vjp
        def fn(x, weight, is_used):
            return jnp.where(is_used[:, None], convolved(x, weight), 0)

        def forward(x, weight, is_used):
            return fn(x, weight, is_used), (x, weight, is_used)

        def backward(saved, gradient):
            x, weight, is_used = saved
            gradient = jnp.where(is_used[:, None], gradient, 0)
            return *jax.vjp(lambda x, weight: convolved(x, weight), x, weight)[1](gradient), None

        fn.defvjp(forward, backward)
        return fn(self.table[ids], self.weight, ids > 3)


def loss_fn(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def test_gradient_of_a_grouped_convolution():
    model = Net()
    batch = np.random.default_rng(0).integers(0, 16, (8, 32)).astype(np.int32)
    expected = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    deployer = redeqx.Deployer(n_model_shards=2, n_sequence_shards=2, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(list(batch))
    for name in ("table", "weight"):
        before, after, gradient = (np.asarray(getattr(of, name)) for of in (model, trainer.model, expected))
        np.testing.assert_allclose(before - after, gradient, rtol=1e-4, atol=1e-6)


@jax.custom_vjp
def scattered_backward(table, ids):
    """A lookup as a matmul, as for TPUs: only its gradient has a scatter."""
    return jax.nn.one_hot(ids, len(table)) @ table


def of_scattered(saved, gradient):
    table, ids = saved
    return jnp.zeros_like(table).at[ids].add(gradient), None


scattered_backward.defvjp(lambda table, ids: (scattered_backward(table, ids), (table, ids)), of_scattered)


@jax.custom_jvp
def with_a_tangent(table, ids):
    return table[ids] * 1.0


with_a_tangent.defjvp(lambda primals, tangents: (with_a_tangent(*primals), tangents[0][primals[1]]))


@pytest.mark.filterwarnings("ignore:.*to compute 1/8 of a step")
@pytest.mark.parametrize("fn", [scattered_backward, with_a_tangent], ids=["custom_vjp", "custom_jvp"])
def test_gradient_of_a_lookup_of_rows_that_do_not_divide(fn):
    rng = np.random.default_rng(0)
    model = {name: rng.normal(size=(n, 32)).astype(np.float32) for name, n in (("table", 64), ("weight", 32))}
    batch = rng.integers(0, 64, (8, 65)).astype(np.int32)

    def loss_fn(model, batch, key):
        return jnp.square(jnp.tanh(fn(model["table"], batch[1:]) @ model["weight"] / 6)).mean()

    expected = jax.jit(jax.grad(loss_fn))(model, batch, None)
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(1e3), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(list(batch))
    for name, before in model.items():
        np.testing.assert_allclose(
            (before - np.asarray(trainer.model[name])) / 1e3, expected[name], rtol=1e-3, atol=1e-6, err_msg=name
        )
