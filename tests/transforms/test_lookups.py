"""Lookups along dims that do not divide over the devices: the gradients are those of one device."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.machine import make_mesh

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 64, (8, 65)).astype(np.int32)
MODEL = {
    "table": RNG.normal(size=(64, 32)).astype(np.float32),
    "latents": RNG.normal(size=(8, 32)).astype(np.float32),
    "weight": RNG.normal(size=(32, 32)).astype(np.float32) / 6,
}


def of_some_rows(model, batch, key):
    """As of rows that are compared with those before them."""
    return jnp.square(jnp.tanh(model["table"][batch[1:]]) @ model["weight"]).mean()


def of_rows_that_are_added(model, batch, key):
    """By a scatter, as of the sums of segments."""
    rows = jnp.tanh(model["table"][batch[:, 0]] @ model["weight"])
    return jnp.square(jnp.exp(jnp.zeros((5, 32)).at[batch[:5, 1] % 5].add(rows[:5]))).mean()


def of_latents(model, batch, key):
    """Tokens attend to weights: these are no positions, and attention pads its queries over the sequence shards."""
    x = model["table"][batch]
    found = jax.nn.softmax(x @ model["weight"] @ model["latents"].T) @ jnp.tanh(model["latents"])
    return jnp.square(x + found).mean()


def of_attended_labels(model, batch, key):
    """The probabilities of all next tokens but the last, by pairs of a position and a label."""
    x = model["table"][batch]
    x = jax.nn.softmax(x @ model["weight"] @ x.swapaxes(1, 2)) @ x
    logits = jax.nn.log_softmax(x[:, :-1] @ model["table"].T)
    return -jax.vmap(lambda logits, labels: logits[jnp.arange(len(labels)), labels])(logits, batch[:, 1:]).mean()


@jax.custom_vjp
def loss_of_labels(x, head, labels):
    return -jax.nn.log_softmax(x @ head)[jnp.arange(len(labels)), labels].sum()


def of_labels_backward(operands, g):
    x, head, labels = operands
    d_logits = g * jax.nn.softmax(x @ head).at[jnp.arange(len(labels)), labels].add(-1)
    return d_logits @ head.T, x.T @ d_logits, None


loss_of_labels.defvjp(lambda *operands: (loss_of_labels(*operands), operands), of_labels_backward)


def of_labels_with_their_own_derivative(model, batch, key):
    """As a fused cross-entropy: a scatter inside a custom derivative."""
    x = model["table"][batch]
    x = jax.nn.softmax(x @ model["weight"] @ x.swapaxes(1, 2)) @ x
    losses = jax.vmap(lambda x, labels: loss_of_labels(x, model["table"].T, labels))(x[:, :-1], batch[:, 1:])
    return losses.mean() / 63


def of_the_highest(model, batch, key):
    """Adds to the 16 tokens of the highest scores."""
    x = jnp.tanh(model["table"][batch] @ model["weight"])
    best = jax.lax.top_k(x.sum(-1), 16)[1]
    x = jax.vmap(lambda x, best: x.at[best].add(x[:16]))(x, best)
    return jnp.square(jnp.tanh(x @ model["weight"])).mean()


def of_ordered_positions(model, batch, key):
    """All positions but the first, of each feature in the order of its values."""
    x = jnp.tanh(model["table"][batch] @ model["weight"])
    return (jnp.sort(x[:, 1:], axis=1) * jnp.arange(63.0)[:, None]).mean() / 60


def of_ordered_rows(model, batch, key):
    """The same of all rows but the first."""
    x = jnp.tanh(model["table"][batch[1:]] @ model["weight"])
    return (jnp.sort(x, axis=0) * jnp.arange(float(len(x)))[:, None, None]).mean()


@pytest.mark.filterwarnings("ignore:.*to compute 1/8 of a step")
@pytest.mark.parametrize(
    ("loss_fn", "n_rows", "options"),
    [
        (of_some_rows, 8, {"n_model_shards": 2}),
        pytest.param(of_some_rows, 8, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_some_rows, 8, {"n_fsdp_shards": 2, "n_model_shards": 2}, marks=pytest.mark.sweep),
        pytest.param(of_rows_that_are_added, 8, {"n_model_shards": 2}, marks=pytest.mark.sweep),
        pytest.param(of_latents, 3, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_attended_labels, 3, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_labels_with_their_own_derivative, 3, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_the_highest, 8, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_ordered_positions, 3, {"n_sequence_shards": 4}, marks=pytest.mark.sweep),
        pytest.param(of_ordered_rows, 8, {"n_model_shards": 2}, marks=pytest.mark.sweep),
    ],
)
def test_a_gradient_is_that_of_one_device(loss_fn, n_rows, options):
    texts = IDS[:n_rows, : 65 if loss_fn is of_latents else 64]  # attention needs lengths that divide
    expected = jax.jit(jax.grad(loss_fn))(MODEL, texts, None)
    deployer = redeqx.Deployer(**options, verbose=False)
    trainer = redeqx.Trainer(deployer, model=MODEL, optimizer=optax.sgd(1024.0), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.update(list(texts))
    for name, gradient in expected.items():
        found = (MODEL[name] - np.asarray(trainer.model[name])) / 1024
        np.testing.assert_allclose(found, gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("axis", ["data", "sequence"])
def test_xla_still_scatters_padded_values(axis):
    """The error that `FixLookups` avoids (jax 0.10.2, 2026-11-27). Once this fails, delete the rule."""
    mesh = make_mesh(n_sequence_shards=4)

    def added(values, ids, spec):
        values = jax.lax.with_sharding_constraint(jnp.exp(values), NamedSharding(mesh, spec))
        return jnp.zeros((64, 4)).at[ids].add(values)

    scatter = jax.jit(added, static_argnums=2)
    values = jnp.zeros((5, 65, 4))
    split = scatter(values, IDS[:5], P("data") if axis == "data" else P(None, "sequence"))
    assert not np.allclose(split, scatter(values, IDS[:5], P()), atol=0.5)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12 adds the operand")
def test_xla_still_drops_the_operand_of_a_scatter():
    """The other error that `FixLookups` avoids, up to JAX 0.11 (2026-11-27)."""
    mesh = make_mesh(n_sequence_shards=4)

    def split(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def added(x, best, new, *spec):
        best, new = split(best, "data", "sequence"), split(new, "data", "sequence")
        return split(jax.vmap(lambda x, i, y: x.at[i].add(y))(split(x, *spec), best, new), "data")

    operands = jnp.ones((8, 64, 4)), IDS[:, :16] % 64, jnp.ones((8, 16, 4))
    scatter = jax.jit(added, static_argnums=3)
    assert not np.allclose(scatter(*operands, ("data", "sequence")), scatter(*operands, "data"), atol=0.5)


ABORTS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from redeqx.machine import make_mesh
jax.config.update("jax_num_cpu_devices", 4)
sharding = NamedSharding(make_mesh(n_sequence_shards=4), P(None, "sequence"))
def loss(w, x):
    return jax.numpy.sort(jax.lax.with_sharding_constraint(w * x, sharding), axis=1)[:, 0].sum()
x = jax.random.normal(jax.random.key(0), (8, 30, 4))
jax.jit(jax.grad(loss))(x, x)
"""


@pytest.mark.sweep
def test_xla_still_ends_the_process_at_the_gradient_of_a_sort():
    """The reason why `FixLookups` leaves an order whole (jax 0.10.2, 2026-11-30). Once this fails, leave sorts to XLA."""
    assert subprocess.run([sys.executable, "-c", ABORTS], capture_output=True, timeout=120).returncode < 0
