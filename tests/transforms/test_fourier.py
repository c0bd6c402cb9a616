"""Fourier transforms on a mesh: values and gradients are those of one device, and each device transforms its own rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.machine import make_mesh


class Spectral(eqx.Module):
    """Fourier layers between two products: the lowest frequencies are multiplied by complex weights."""

    first: jax.Array
    weights: jax.Array  # of each layer, the real and the imaginary part
    last: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        shapes = (8, 2), (3, 2, 8, 8, 5), (2, 8)
        self.first, self.weights, self.last = (jax.random.normal(*each) for each in zip(keys, shapes, strict=True))

    def __call__(self, x):
        x = jnp.tanh(self.first @ x)
        for weight in self.weights:
            kept = jnp.einsum("iM,ioM->oM", jnp.fft.rfft(x)[:, :5], weight[0] + 1j * weight[1])
            x = jnp.tanh(x + jnp.fft.irfft(jnp.pad(kept, ((0, 0), (0, 4))), n=16))
        return self.last @ jnp.fft.fft2(x).real


def loss_fn(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


MODEL = Spectral(jax.random.key(0))
BATCH = np.random.default_rng(0).normal(size=(8, 2, 16)).astype(np.float32)


def trained(batch, accumulate, shards, model=MODEL):
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False, **shards), model=model, optimizer=optax.sgd(1e-2), collate_fn=np.stack,
        loss_fn=loss_fn, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.update(list(batch))
    return trainer


@pytest.mark.parametrize(
    ("n_rows", "accumulate", "shards"),
    [
        (8, 2, {"n_fsdp_shards": 2, "n_model_shards": 2}),
        *(
            pytest.param(*of, marks=pytest.mark.sweep)
            for of in (
                (8, 1, {"n_model_shards": 4}),
                (7, 1, {"n_model_shards": 2}),
                (8, 1, {"n_sequence_shards": 2, "n_model_shards": 2}),
            )
        ),
    ],
)
def test_gradient(n_rows, accumulate, shards):
    check_gradient(MODEL, BATCH[:n_rows], accumulate, shards)


class Convolved(eqx.Module):
    """Convolutions, each of a transformed signal."""

    layers: list[eqx.nn.Conv1d]

    def __init__(self, key):
        self.layers = [eqx.nn.Conv1d(8, 8, 3, padding=1, key=each) for each in jax.random.split(key)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(jnp.fft.irfft(jnp.fft.rfft(x), n=16)))
        return x


@pytest.mark.sweep
def test_next_to_convolutions():
    """XLA's transforms on CPUs refuse the layout in memory that its convolutions prefer."""
    batch = np.random.default_rng(0).normal(size=(7, 8, 16)).astype(np.float32)
    check_gradient(Convolved(jax.random.key(0)), batch, 1, {"n_model_shards": 2})


def check_gradient(model, batch, accumulate, shards):
    grads = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, batch, None)
    trainer = trained(batch, accumulate, shards, model)
    for before, after, grad in zip(*map(jax.tree.leaves, (model, trainer.model, grads)), strict=True):
        found = (np.asarray(before) - np.asarray(after)) / 1e-2
        assert np.linalg.norm(found - grad) < 1e-4 * np.linalg.norm(grad)


def test_each_device_transforms_its_own_rows():
    text = str(trained(BATCH, 1, {}).compiled_step.as_text())
    transforms = [line.split("=")[1].split("[")[1] for line in text.splitlines() if " fft(" in line]
    assert transforms
    assert all(shape.startswith("1,") for shape in transforms), "8 rows, 8 devices"
    assert " all-gather(" not in text


class Looped(eqx.Module):
    """Layers in a loop that begin with a transform."""

    weights: jax.Array

    def __call__(self, x):
        def layer(x, weight):
            return jnp.tanh(x + jnp.fft.irfft(jnp.fft.rfft(x) * weight, n=16)), None

        return jax.lax.scan(layer, x, self.weights)[0]


def test_rows_and_their_gradients_stay_where_they_are():
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False, n_model_shards=2), model=Looped(jax.random.normal(jax.random.key(0), (3, 9))),
        optimizer=optax.sgd(1e-2), collate_fn=np.stack, loss_fn=loss_fn,
    )  # fmt: skip
    trainer.update(list(BATCH))
    text = str(trainer.compiled_step.as_text())
    assert " fft(" in text
    assert " all-gather(" not in text
    assert not [line for line in text.splitlines() if " all-reduce(" in line and (",2,16]" in line or ",2,9]" in line)]


def test_forward_mode():
    def update(grads, state, params=None, *, value_fn=None, **_):
        slope = jax.jvp(value_fn, (params,), (params,))[1]
        return jax.tree.map(lambda x: -slope * jnp.ones_like(x), grads), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    model = Looped(jax.random.normal(jax.random.key(0), (3, 9)))
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=model, optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.update(list(BATCH))
    slope = jax.jvp(lambda model: loss_fn(model, BATCH, None), (model,), (model,))[1]
    np.testing.assert_allclose(np.asarray(model.weights - trainer.model.weights), np.full((3, 9), slope), rtol=1e-4)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12 splits the rows")
def test_xla_still_gathers_the_rows():
    """What `SplitFourier` avoids (jax 0.10.2, 2026-11-30). Delete the rule with the last version that needs it."""
    rows = NamedSharding(make_mesh(), P("data"))
    shape = jax.ShapeDtypeStruct((8, 2, 16), jnp.float32, sharding=rows)
    text = jax.jit(jnp.fft.rfft, out_shardings=rows).lower(shape).compile().as_text()
    assert " all-gather(" in str(text)
