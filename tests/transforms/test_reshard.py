"""Equal parts of a split dim reach all shards by permutes alone, and nothing about them changes but where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.compiled import _hlo
from redeqx.machine._mesh import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import Reshard

ROWS, IN, PART = 8, 8, 16


def resharded(fn, splits, mesh):
    return transformed(fn, [Reshard(splits, mesh)])


def by_split(y, k):
    return jnp.split(y, k, axis=-1)


def by_slices(y, k):
    return [y[..., i * PART : (i + 1) * PART] for i in range(k)]


def by_reshape(y, k):
    y = y.reshape(*y.shape[:-1], k, PART // 2, 2)
    return [y[..., i, :, :].reshape(*y.shape[:-3], PART) for i in range(k)]


def by_reshape_before_rows(y, k):
    """As transposed code has it: the parts' dim is not the last."""
    parts = y.T.reshape(k, PART, -1)
    return [parts[i].T for i in range(k)]


def function(take, k, around=lambda fn: fn):
    """Parts of a biased product, each used otherwise, so that none can be taken for another."""

    def fn(weights, x):
        weight, bias = weights

        @around
        def one(x):
            parts = take(x @ weight.T + bias, k)
            return sum(jnp.sin(i + part) for i, part in enumerate(parts))

        return jnp.square(one(x)).sum()

    return fn


def in_scan(fn):
    return lambda x: jax.lax.scan(lambda total, row: (total + fn(row[None])[0], None), jnp.zeros(PART), x)[0]


def in_map(fn):
    return jax.vmap(lambda row: fn(row[None])[0])


AROUND = {"plain": lambda fn: fn, "remat": jax.checkpoint, "scan": in_scan, "jit": jax.jit, "map": in_map}


def sharded(k, n_model_shards):
    mesh = make_mesh(n_model_shards)
    keys = jax.random.split(jax.random.key(k), 3)
    places = [NamedSharding(mesh, spec) for spec in (P("model", None), P("model"), P(("data", "fsdp"), None))]
    shapes = [(k * PART, IN), (k * PART,), (ROWS, IN)]
    weight, bias, x = (
        jax.device_put(jax.random.normal(key, shape), place) for key, shape, place in zip(keys, shapes, places, strict=True)
    )
    return mesh, (weight, bias), x


@pytest.mark.parametrize(
    ("k", "n_shards", "take", "around"),
    [
        *((k, n, by_split, "plain") for k, n in [(2, 2), (2, 4), (3, 2), (3, 4), (4, 8), (6, 4)]),
        *((3, 4, take, around) for take in (by_slices, by_reshape) for around in AROUND),
        *((3, 4, by_reshape_before_rows, around) for around in ("plain", "remat")),
    ],
)
def test_values_and_gradients_stay(k, n_shards, take, around):
    mesh, weights, x = sharded(k, n_shards)
    fn = function(take, k, AROUND[around])
    expected = jax.jit(jax.value_and_grad(fn))(jax.tree.map(np.asarray, weights), np.asarray(x))
    found = jax.jit(jax.value_and_grad(resharded(fn, [0, 0], mesh)))(weights, x)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("k", "n_shards", "take"),
    [*((k, n, by_split) for k, n in [(2, 4), (3, 8), (6, 4)]), (3, 4, by_slices), (3, 4, by_reshape)],
)
def test_parts_move_once_each_way(k, n_shards, take):
    """Each of `k` permutes, forward and backward, sends one unit: a part's share of a shard."""
    mesh, weights, x = sharded(k, n_shards)
    step = jax.jit(jax.grad(resharded(function(take, k), [0, 0], mesh)))
    moves = [c for c in _hlo.collectives(step.lower(weights, x).compile().as_text()) if "model" in c.axes(mesh)]
    unit = ROWS * n_shards // 8 * PART // n_shards * 4
    assert [(c.kind, c.bytes) for c in moves] == [("collective-permute", unit)] * (2 * k)


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (lambda y, k: [y[..., :12], y[..., 12:]], "parts of different sizes"),
        (lambda y, k: [y[..., ::2], y[..., 1::2]], "parts that alternate"),
        (lambda y, k: [y[..., :0], y], "nothing at all, as what is left of a head that is rotated whole"),
        (lambda y, k: [y.reshape(*y.shape[:-1], -1, 2)[..., 0]] * 2, "the shards' own dim is left whole"),
    ],
)
def test_what_are_no_equal_parts_is_left_alone(take, why):
    mesh, weights, x = sharded(2, 4)
    fn = lambda weights, x: sum(jnp.square(part).sum() for part in take(x @ weights[0].T + weights[1], 2))  # noqa: E731
    changed = resharded(fn, [0, 0], mesh)
    assert "shard_map" not in str(jax.make_jaxpr(changed)(weights, x)), why
    np.testing.assert_allclose(jax.jit(fn)(weights, x), jax.jit(changed)(weights, x), rtol=1e-6)


def test_nothing_is_changed_without_a_model_axis():
    mesh, weights, x = sharded(2, 1)
    traced = jax.make_jaxpr(function(by_split, 2))(weights, x)
    assert Reshard([0, 0], mesh).of(traced) is None
