"""Equal parts of a split dim are resharded by permutes alone, with the same values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.compiled import Module, collectives
from redeqx.machine import make_mesh
from redeqx.tracing import transformed
from redeqx.transforms import Reshard
from tests._programs import assert_all_close, computed

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
    """As in transposed code: the dim of the parts is not the last."""
    parts = y.T.reshape(k, PART, -1)
    return [parts[i].T for i in range(k)]


def sum_of_parts_loss(take, k, around=lambda fn: fn):
    """Uses each part of a linear layer's output differently, so that swapped parts would change the result."""

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


def mesh_weights_and_batch(k, n_model_shards):
    mesh = make_mesh(n_model_shards)
    keys = jax.random.split(jax.random.key(k), 3)
    placements = [NamedSharding(mesh, spec) for spec in (P("model", None), P("model"), P(("data", "fsdp"), None))]
    shapes = [(k * PART, IN), (k * PART,), (ROWS, IN)]
    weight, bias, x = (
        jax.device_put(jax.random.normal(key, shape), place)
        for key, shape, place in zip(keys, shapes, placements, strict=True)
    )
    return mesh, (weight, bias), x


CASES = [
    *((k, n, by_split, "plain") for k, n in [(2, 2), (2, 4), (3, 2), (3, 4), (4, 8), (6, 4)]),
    *((3, 4, take, around) for take in (by_slices, by_reshape) for around in AROUND),
    *((3, 4, by_reshape_before_rows, around) for around in ("plain", "remat")),
]


@pytest.mark.sweep
@pytest.mark.parametrize("n_shards", [2, 4, 8])
def test_values_and_gradients_are_unchanged(n_shards):
    plain, changed = {}, {}
    for k, n, take, around in CASES:
        if n == n_shards:
            mesh, weights, x = mesh_weights_and_batch(k, n_shards)
            fn = sum_of_parts_loss(take, k, AROUND[around])
            name = f"{k} parts {take.__name__} in {around}"
            plain[name] = jax.value_and_grad(fn), jax.tree.map(np.asarray, (weights, x))
            changed[name] = jax.value_and_grad(resharded(fn, [0, 0], mesh)), (weights, x)
    assert_all_close(computed(changed), computed(plain), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("k", "n_shards", "take"),
    [*((k, n, by_split) for k, n in [(2, 4), (3, 8), (6, 4)]), (3, 4, by_slices), (3, 4, by_reshape)],
)
def test_each_part_moves_once_per_pass(k, n_shards, take):
    """Each pass has `k` permutes, each of which sends one shard of a part."""
    mesh, weights, x = mesh_weights_and_batch(k, n_shards)
    step = jax.jit(jax.grad(resharded(sum_of_parts_loss(take, k), [0, 0], mesh)))
    moves = [c for c in collectives(Module.of(step.lower(weights, x).compile().as_text())) if "model" in c.axes(mesh)]
    unit = ROWS * n_shards // 8 * PART // n_shards * 4
    assert [(c.kind, c.bytes) for c in moves] == [("collective-permute", unit)] * (2 * k)


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (lambda y, k: [y[..., :12], y[..., 12:]], "parts of different sizes"),
        (lambda y, k: [y[..., ::2], y[..., 1::2]], "parts that alternate"),
        (lambda y, k: [y[..., :0], y], "an empty part, as in a head that is rotated completely"),
        (lambda y, k: [y.reshape(*y.shape[:-1], -1, 2)[..., 0]] * 2, "the dim that is split over shards is not divided"),
    ],
)
def test_other_slices_are_unchanged(take, why):
    mesh, weights, x = mesh_weights_and_batch(2, 4)
    fn = lambda weights, x: sum(jnp.square(part).sum() for part in take(x @ weights[0].T + weights[1], 2))  # noqa: E731
    changed = resharded(fn, [0, 0], mesh)
    assert "shard_map" not in str(jax.make_jaxpr(changed)(weights, x)), why
    np.testing.assert_allclose(jax.jit(fn)(weights, x), jax.jit(changed)(weights, x), rtol=1e-6)


def test_no_change_without_a_model_axis():
    mesh, weights, x = mesh_weights_and_batch(2, 1)
    traced = jax.make_jaxpr(sum_of_parts_loss(by_split, 2))(weights, x)
    assert Reshard([0, 0], mesh).of(traced) is None
