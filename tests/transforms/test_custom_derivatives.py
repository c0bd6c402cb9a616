"""Convolutions in a `jax.custom_vjp`, and in its derivative, are computed under the rules that correct them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

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
