"""Devices of the model axis add up a token's outputs, and gradients, once: not once for each of its experts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.compiled import Module, collectives
from redeqx.machine import make_mesh, split_rows
from redeqx.models.nn import MixtureOfExperts
from redeqx.tracing import transformed
from redeqx.transforms import GroupMatmuls

E, D, F, K, ROWS, T = 4, 12, 24, 3, 8, 20  # experts, features, hidden features, choices, rows, tokens of a row
N = ROWS * T
SPLITS = {"router": None, "gate": 2, "up": 2, "down": 1}


def choices(p, x):
    """The weights and the experts of each token's choices, in three rounds."""
    scores, chosen = jax.nn.softmax(x @ p["router"]), []
    for _ in range(K):
        left = scores - sum((jax.nn.one_hot(each, E) for each in chosen), jnp.zeros(()))
        chosen.append(jnp.argmax(jax.lax.stop_gradient(left), 1))
    chosen = jnp.stack(chosen, 1)
    return jnp.take_along_axis(scores, chosen, 1).ravel(), chosen.ravel()


def mlp(p, rows, sizes):
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)


def added(p, x):
    """All tokens are sorted, and outputs are added to their tokens by a scatter."""
    x = x.reshape(-1, D)
    weights, experts = choices(p, x)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
    y = mlp(p, x[order // K], sizes) * weights[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(y)


def in_layers(p, x):
    """In a loop, whose body is recomputed; outputs are put back in order and summed."""

    @jax.checkpoint
    def layer(x, p):
        weights, experts = choices(p, x)
        order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
        y = mlp(p, jnp.repeat(x, K, 0)[order], sizes)[jnp.argsort(order)]
        return x + (y.reshape(len(x), K, -1) * weights.reshape(-1, K, 1)).sum(1), None

    return jax.lax.scan(layer, x.reshape(-1, D), jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p))[0]


def check(fn, splits, weights, x, shards):
    """Compares values and gradients with those of one device, and what is added up with tokens. Returns its shapes."""
    mesh = make_mesh(**shards)

    def step(fn):
        def run(weights, x):
            y, gradients = jax.vjp(fn, weights, x)
            return y, gradients(2 * y)

        return jax.jit(run)

    wanted = step(fn)(weights, x)
    ruled = transformed(fn, [GroupMatmuls(mesh, splits)])
    args = [
        jax.device_put(w, NamedSharding(mesh, P(*["model" if i == dim else None for i in range(w.ndim)])))
        for w, dim in zip(jax.tree.leaves(weights), splits, strict=True)
    ]
    args = jax.tree.unflatten(jax.tree.structure(weights), args), jax.device_put(x, split_rows(mesh))
    compiled = step(ruled).lower(*args).compile()
    for found, want in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6 * np.abs(want).max())
    n_batch = mesh.shape["data"] * mesh.shape["fsdp"]
    sums = [each for each in collectives(Module.of(compiled.as_text() or "")) if each.kind == "all-reduce"]
    assert sums and max(each.bytes for each in sums) <= 4 * max(N // n_batch * D, E * D * F)
    assert not [each for each in sums if each.shape[-1] == D and math.prod(each.shape) == N * K // n_batch * D]
    return [each.shape for each in sums]


MESHES = [{"n_model_shards": 4}, pytest.param({"n_fsdp_shards": 2, "n_model_shards": 2}, marks=pytest.mark.sweep)]


@pytest.mark.sweep
@pytest.mark.parametrize("shards", MESHES, ids=str)
@pytest.mark.parametrize("fn", [added, in_layers])
def test_sorted_tokens(fn, shards):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"down": (E, F, D), "gate": (E, D, F), "router": (D, E), "up": (E, D, F)}
    p = {name: 0.3 * jax.random.normal(key, of) for (name, of), key in zip(shapes.items(), keys, strict=False)}
    check(fn, [SPLITS[name] for name in p], p, jax.random.normal(keys[4], (ROWS, T, D)), shards)


@pytest.mark.sweep
@pytest.mark.parametrize("shards", MESHES, ids=str)
def test_the_layer(shards):
    layer = MixtureOfExperts(D, F, E, K, init_std=0.3, key=jax.random.key(0))
    leaves, treedef = jax.tree.flatten(layer)
    splits = [{(E, D, F): 2, (E, F, D): 1, (E, D): 0}[leaf.shape] for leaf in leaves]  # down, gate and up, router

    def fn(leaves, x):
        return jax.vmap(jax.tree.unflatten(treedef, leaves))(x)[0]

    def normed(leaves, x):
        return fn(leaves, x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True)))

    sums = check(normed, splits, leaves, jax.random.normal(jax.random.key(1), (ROWS, T, D)), shards)
    n_tokens = N // shards.get("n_fsdp_shards", 1) // (8 // math.prod(shards.values()))
    # Outputs, and the gradients of all that is computed of a token, also of the router's product.
    assert len([shape for shape in sums if shape[-1] == D and math.prod(shape) == n_tokens * D]) == 2
