"""Tokens that are sorted by expert over all rows stay on their devices; what depends on the order is computed as written."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.compiled import Module, collectives
from redeqx.dims import Inputs
from redeqx.kernels import grouped_matmul
from redeqx.machine import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import GroupMatmuls

E, D, F, K, N = 4, 12, 20, 2, 64  # experts, features, hidden features, choices of a token, tokens
LOCAL, SENT = {}, {}


def local(fn):
    LOCAL[fn.__name__] = fn
    return fn


def sent(fn):
    SENT[fn.__name__] = fn
    return fn


def choices(p, x):
    """The weights and the experts of each token's choices. Without `top_k`, for which XLA gathers scores."""
    scores = jax.nn.softmax(x @ p["router"])
    first = jnp.argmax(scores, 1)
    second = jnp.argmax(jnp.where(jnp.arange(E) == first[:, None], -1, scores), 1)
    chosen = jnp.stack([first, second], 1)
    return jnp.take_along_axis(scores, chosen, 1).ravel(), chosen.ravel()


def mlp(p, rows, sizes):
    return jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)


@local
def copies(p, x):
    """Tokens are repeated by an index before they are sorted."""
    weights, experts = choices(p, x)
    token, order = jnp.repeat(jnp.arange(len(x)), K), jnp.argsort(experts)
    y = mlp(p, x[token][order], jnp.bincount(experts, length=E))
    return jnp.zeros_like(x).at[token[order]].add(y * weights[order][:, None])


@local
def unsorted(p, x):
    """With a bias for each expert, a custom derivative, and a write to unique places."""
    weights, experts = choices(p, x)
    order, sizes = jnp.argsort(experts), jax.nn.one_hot(experts, E, dtype=jnp.int32).sum(0)
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order // K], p["up"], sizes) + p["bias"][experts[order]])
    y = jax.lax.ragged_dot(hidden, p["down"], sizes)
    y = jnp.zeros_like(y).at[order].set(y)
    return (y.reshape(len(x), K, -1) * weights.reshape(-1, K, 1)).sum(1)


@local
def inverted(p, x):
    """The order is inverted by a sort, and the product is of the library."""
    weights, experts = choices(p, x)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
    hidden = jnp.sin(grouped_matmul(jnp.repeat(x, K, 0)[order], p["up"], sizes))
    y = grouped_matmul(hidden, p["down"], sizes)[jnp.argsort(order)]
    return (y.reshape(len(x), K, -1) * weights.reshape(-1, K, 1)).sum(1)


@local
def searched(p, x):
    """The sizes of groups are found in the sorted experts, which need their order."""
    weights, experts = choices(p, x)
    order = jnp.argsort(experts)
    sizes = jnp.diff(jnp.searchsorted(experts[order], jnp.arange(E + 1)))
    y = mlp(p, jnp.take(x, order // K, axis=0), sizes)
    return jax.ops.segment_sum(y * weights[order][:, None], order // K, len(x))


@local
def limited(p, x):
    """Rows beyond a capacity of the whole batch are dropped, by their positions."""
    weights, experts = choices(p, x)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
    place = jnp.arange(len(order)) - (jnp.cumsum(sizes) - sizes)[experts[order]]
    y = jnp.where((place < N * K // E)[:, None], mlp(p, x[order // K], sizes), 0)
    return jnp.zeros_like(x).at[order // K].add(y * weights[order][:, None])


@local
def not_all(p, x):
    """The groups end before the rows; a sort of three operands, in a remat."""

    @jax.checkpoint
    def fn(p, x):
        weights, experts = choices(p, x)
        experts, weights, order = jax.lax.sort((experts, weights, jnp.arange(len(experts))), num_keys=1)
        y = mlp(p, x[order // K], jnp.bincount(experts, length=E) // 2) * weights[:, None]
        return jnp.zeros_like(x).at[order // K].add(y)

    return fn(p, x)


@local
def layers(p, x):
    """In a loop."""
    stacks = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)
    return jax.lax.scan(lambda x, p: (x + inverted(p, x), None), x, stacks)[0]


@sent
def summed(p, x):
    """A running sum over sorted rows."""
    _, experts = choices(p, x)
    order = jnp.argsort(experts)
    y = mlp(p, jnp.cumsum(x[order // K], 0), jnp.bincount(experts, length=E))
    return jnp.zeros_like(x).at[order // K].add(y)


@sent
def choices_first(p, x):
    """All first choices, then all second ones: a device's rows are not consecutive."""
    weights, experts = (each.reshape(-1, K).T.ravel() for each in choices(p, x))
    order = jnp.argsort(experts)
    y = mlp(p, x[order % len(x)], jnp.bincount(experts, length=E)) * weights[order][:, None]
    return jnp.zeros_like(x).at[order % len(x)].add(y)


def of_each_sequence(p, x):
    """Rows of `[8, T, D]` are sorted one by one, with a bias as a product, a shared factor of each place, and a limit."""

    def one(x):
        weights, experts = choices(p, x)
        order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
        hidden = grouped_matmul(jnp.repeat(x, K, 0)[order], p["up"], sizes)
        hidden = jnp.sin(hidden + grouped_matmul(jnp.ones((len(order), 1)), p["bias"][:, None], sizes))
        hidden *= jnp.cos(jnp.arange(len(order)))[:, None]
        place = jnp.arange(len(order)) - (jnp.cumsum(sizes) - sizes)[experts[order]]
        y = jnp.where((place < len(order) // 4)[:, None], grouped_matmul(hidden, p["down"], sizes), 0)
        return jnp.zeros_like(x).at[order // K].add(y * weights[order][:, None])

    return jax.vmap(one)(x)


def with_a_shared_mean(p, x):
    """A sum over sorted rows with one factor for each place, which all sequences share: it needs the order."""

    def one(x):
        weights, experts = choices(p, x)
        order = jnp.argsort(experts)
        rows = jnp.repeat(x, K, 0)[order]
        y = grouped_matmul(rows, p["up"], jnp.bincount(experts, length=E)) @ p["down"][0]
        y += jnp.cos(jnp.arange(len(order))) @ rows
        return (y[jnp.argsort(order)] * weights[:, None]).reshape(len(x), K, -1).sum(1)

    return jax.vmap(one)(x)


def with_sequences_behind(p, x):
    """Sorted rows as `[rows, sequences, features]` meet a factor of each place."""

    def one(x):
        weights, experts = choices(p, x)
        order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
        return grouped_matmul(jnp.repeat(x, K, 0)[order], p["up"], sizes), order, sizes, weights[order]

    hidden, order, sizes, weights = jax.vmap(one)(x)
    hidden = jnp.swapaxes(hidden, 0, 1)
    hidden = jnp.swapaxes(hidden * jnp.cos(jnp.arange(len(hidden)))[:, None, None], 0, 1)
    y = jax.vmap(grouped_matmul, (0, None, 0))(hidden, p["down"], sizes) * weights[..., None]
    return jax.vmap(lambda x, order, y: jnp.zeros_like(x).at[order // K].add(y))(x, order, y)


def step(fns):
    """Returns for each function its output and the gradients of the sum of its squares."""

    def each(p, x):
        found = {}
        for name, fn in fns.items():
            y, gradients = jax.vjp(fn, p, x)
            found[name] = y, gradients(2 * y)
        return found

    return each


@pytest.mark.parametrize(
    ("fns", "shards"),
    [
        ({name: LOCAL[name] for name in ("unsorted", "inverted", "limited")}, {}),
        pytest.param(LOCAL, {"n_fsdp_shards": 2, "n_model_shards": 2}, marks=pytest.mark.sweep),
        pytest.param(LOCAL, {"n_sequence_shards": 2}, marks=pytest.mark.sweep),
        pytest.param(SENT, {}, marks=pytest.mark.sweep),
    ],
    ids=["local", "all local, model=2", "all local, sequence=2", "sent"],
)
def test_values_and_what_is_sent(fns, shards):
    mesh = make_mesh(**shards)
    of_rows = check(fns, mesh, (N, D), NamedSharding(mesh, P(("data", "fsdp", "sequence"))))
    assert bool(of_rows) == (fns is SENT), of_rows  # keys are sent, rows are not


@pytest.mark.sweep
@pytest.mark.parametrize("shards", [{"n_sequence_shards": 4}, {"n_sequence_shards": 2, "n_model_shards": 2}], ids=str)
def test_the_positions_of_each_sequence_stay_on_their_devices(shards):
    mesh = make_mesh(**shards)
    split = NamedSharding(mesh, P(("data", "fsdp"), "sequence"))
    fns = {
        "of each sequence": of_each_sequence,
        "with a shared mean": with_a_shared_mean,
        "with sequences behind": with_sequences_behind,
    }
    sent = [check({name: fn}, mesh, (8, N // 8, D), split, Inputs(4, 0, 1)) for name, fn in fns.items()]
    assert not sent[0], sent


def check(fns, mesh, shape, split, inputs=None):
    """Compares values and gradients with those of one device, and returns the shapes of rows that are sent."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"router": (D, E), "up": (E, D, F), "down": (E, F, D), "bias": (E, F)}
    p = {name: 0.3 * jax.random.normal(key, of) for (name, of), key in zip(shapes.items(), keys, strict=False)}
    x = jax.random.normal(keys[4], shape)
    wanted = jax.jit(step(fns))(p, x)
    rule = GroupMatmuls(mesh, (None,) * len(p), inputs)
    args = jax.device_put(p, NamedSharding(mesh, P())), jax.device_put(x, split)
    compiled = jax.jit(step({name: transformed(fn, [rule]) for name, fn in fns.items()})).lower(*args).compile()
    for name, outs in compiled(*args).items():
        for found, want in zip(jax.tree.leaves(outs), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=name)
    sent = [each.shape for each in collectives(Module.of(compiled.as_text() or ""))]
    n = shape[-2]
    return [each for each in sent if {n, n * K}.intersection(each) and math.prod(each) > N * K]
