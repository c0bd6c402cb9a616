"""Loops that keep some products, put some into host memory, and compute the others again, as their bytes and FLOPs say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redeqx.machine import HOST_MEMORY, MODEL, TPUS, make_mesh
from redeqx.memory import share_again
from redeqx.tracing import matmul_flops, transformed
from redeqx.transforms import FuseAttention, GroupMatmuls, Measure, RematLoops, StackBlocks, with_remats

L, B, N, H, D = 3, 4, 16, 2, 8
# Rates at which a product is worth its bytes, and the bus copies all of a layer's values while it is computed.
CHIP = dataclasses.replace(TPUS["v6e"], float32=1e9, bandwidth=1e12, link=1e12, host=1e9)
SLOW_BUS = dataclasses.replace(CHIP, host=3.5e7)
# It copies all values while a layer is computed, but not that of `up` in what comes before or after it.
BUSY_BUS = dataclasses.replace(CHIP, host=1.4e8)
BUSY_BUS_OF_GPU, BUSY_BUS_OF_V5P = (dataclasses.replace(BUSY_BUS, kind=kind) for kind in ("NVIDIA H100 80GB HBM3", "TPU v5"))
SHAPES = {"query": (D, D), "key": (D, D), "value": (D, D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}


def layer(x, w):
    h = jnp.tanh(x)
    q, k, v = ((h @ w[name]).reshape(B, N, H, D // H) for name in ("query", "key", "value"))
    scores = jnp.einsum("bnhd,bmhd->bhnm", q, k)
    y = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), v).reshape(B, N, D)
    x = x + y @ w["out"]
    return x + jax.nn.silu(x @ w["up"]) @ w["down"], None


def loss(weights, state, x):
    del state
    return jnp.square(jax.lax.scan(layer, x, weights)[0]).sum()


def unrolled(layers, state, x):
    del state
    for weights in layers:
        x, _ = layer(x, weights)
    return jnp.square(x).sum()


@functools.cache
def make_args():
    *keys, last = jax.random.split(jax.random.key(0), len(SHAPES) + 1)
    weights = {
        name: 0.3 * jax.random.normal(key, (L, *SHAPES[name])) for name, key in zip(sorted(SHAPES), keys, strict=True)
    }
    return weights, (), jax.random.normal(last, (B, N, D))


@functools.cache
def plain_gradient():
    """The gradient of the loss without the rule, and its FLOPs."""
    plain = jax.grad(transformed(loss, [FuseAttention()]))
    return jax.jit(plain)(*make_args()), matmul_flops(jax.make_jaxpr(plain)(*make_args()).jaxpr)["float32"]


def chosen(budget, chip=CHIP, host=0, mesh=(1, 1), splits=None):
    """Returns what the loop saves, and the gradient of the loss under this choice."""
    mesh = make_mesh(*mesh, jax.devices()[: mesh[0] * mesh[1]])
    specs = [splits[name] if splits else P() for name in sorted(SHAPES)]
    saved = []
    rule = RematLoops(f"{budget}B", Measure(mesh, chip, specs, host), by_value=True)
    grad = jax.grad(with_remats(loss, [rule, FuseAttention()], saved))
    return saved, grad, jax.make_jaxpr(grad)(*make_args())


def sizes(saved, where):
    """Returns the bytes of the values of one iteration for which a choice was made, in order."""
    (loop,) = saved
    return [each.n_bytes for each in loop.candidates if loop.choice(each) == where]


ROWS = 4 * B * N  # bytes of one feature
ATTENTION = ROWS * D + ROWS * H  # its output, and a sum for each query and head


def test_bytes_are_those_of_a_device():
    """Rows are split over fsdp, and what a column split makes over model shards."""
    column, row = P(None, None, MODEL), P(None, MODEL)
    splits = {name: row if name in ("out", "down") else column for name in SHAPES}
    whole = [ROWS * D] * 3 + [ATTENTION] + [ROWS * D, ROWS * 4 * D]
    assert sizes(chosen(0)[0], "again") == whole
    saved, *_ = chosen(0, mesh=(2, 2), splits=splits)
    assert sizes(saved, "again") == [n // (2 if i == 4 else 4) for i, n in enumerate(whole)]
    assert saved[0].carry == ROWS * D // 2


@pytest.mark.parametrize("budget, kept", [(10**9, 6), (L * (ROWS * D + ATTENTION), 1), (L * (ROWS * D + ATTENTION) - 1, 1)])
def test_keeps_what_saves_most_for_its_bytes(budget, kept):
    """All products have the same FLOPs for a byte, but attention, whose are more."""
    saved, grad, jaxpr = chosen(budget)
    found = sizes(saved, "kept")
    assert len(found) == kept and saved[0].carry_in == "kept"
    assert (ATTENTION in found) == (budget >= L * (ROWS * D + ATTENTION))
    assert saved[0].n_bytes("kept") <= max(budget, L * ROWS * D)
    # The FLOPs that are computed again are those that the choice expects.
    plain, flops = plain_gradient()
    extra = matmul_flops(jaxpr.jaxpr)["float32"] - flops
    np.testing.assert_allclose(saved[0].seconds_again, extra / CHIP.float32, rtol=1e-2, atol=2e-7)
    for name, found in jax.jit(grad)(*make_args()).items():
        np.testing.assert_array_equal(found, plain[name])


def test_no_more_than_the_forward_pass_is_computed_again():
    """Also where it takes longer to write the outputs of products than to compute them."""
    saved, *_ = chosen(0, dataclasses.replace(CHIP, bandwidth=1e-6 * CHIP.bandwidth))
    assert not saved[0].saved and 0.5 < share_again(saved) <= 1


@pytest.mark.parametrize(
    "chip, again",
    [
        (CHIP, []),
        (BUSY_BUS, []),
        (BUSY_BUS_OF_GPU, [5]),
        (BUSY_BUS_OF_V5P, [0, 1, 5]),  # the first ones are made again before they are copied
        (SLOW_BUS, [1, 2, 4, 5]),
    ],
)
def test_host_takes_what_the_bus_copies_in_time(chip, again):
    """Candidates are three projections of D features, attention, its projection, and `up` of 4 D."""
    saved, grad, jaxpr = chosen(0, chip, HOST_MEMORY)
    (loop,) = saved
    assert [i for i, each in enumerate(loop.candidates) if loop.choice(each) == "again"] == again
    assert loop.carry_in == "host" and not sizes(saved, "kept")
    assert sum(sizes(saved, "host")) + loop.carry <= chip.host * loop.seconds * 1.5
    assert str(jaxpr).count("Host") > 0
    plain, _ = plain_gradient()
    for name, found in jax.jit(grad)(*make_args()).items():
        np.testing.assert_array_equal(found, plain[name])


@pytest.mark.parametrize("budget, kept", [(4 * 2 * (ROWS * D + ATTENTION), 3), (0, 0)])
def test_equal_blocks_follow_the_same_policy(budget, kept):
    """As one loop, before it is known what loops save."""
    weights, _, x = make_args()
    layers = [{name: w[i % L] for name, w in weights.items()} for i in range(4)]
    mesh, saved = make_mesh(1, 1, jax.devices()[:1]), []
    rule = RematLoops(f"{budget}B", Measure(mesh, CHIP, [P()] * 4 * len(SHAPES), 0), by_value=True)
    stacking, fusing = StackBlocks([name for _ in layers for name in sorted(SHAPES)]), FuseAttention()
    grad = jax.grad(with_remats(unrolled, [stacking, rule, fusing], saved))
    stacked, plain = (jax.grad(transformed(unrolled, rules)) for rules in ([stacking, fusing], [fusing]))
    flops = [matmul_flops(jax.make_jaxpr(fn)(layers, (), x).jaxpr)["float32"] for fn in (grad, stacked)]
    assert len(saved) == 1 and saved[0].n == 4 and saved[0].carry == ROWS * D
    assert len(sizes(saved, "kept")) == kept and flops[0] > flops[1]
    np.testing.assert_allclose(saved[0].seconds_again, (flops[0] - flops[1]) / CHIP.float32, rtol=1e-2)
    ours, theirs = jax.jit(grad)(layers, (), x), jax.jit(plain)(layers, (), x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_grouped_matmuls_that_devices_share_are_saved():
    """Each device reads its own part of the groups' sizes, which no product makes."""
    mesh = make_mesh(n_model_shards=2)
    up, down, x = jnp.ones((2, 4, 8, 16)), jnp.ones((2, 4, 16, 8)), jnp.ones((24, 8))

    def loss(weights, state, x):
        def layer(x, weights):
            hidden = jnp.sin(jax.lax.ragged_dot(x, weights[0], jnp.array([5, 0, 12, 7])))
            return jnp.sin(x + jax.lax.ragged_dot(hidden, weights[1], jnp.array([5, 0, 12, 7]))), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    found = []
    remats = RematLoops("16MiB", Measure(mesh, CHIP, [P(), P()], 0), by_value=True)
    fn = with_remats(loss, [remats, GroupMatmuls(mesh, (3, 2))], found)
    jax.make_jaxpr(jax.grad(fn))((up, down), (), x)
    (loop,) = found
    assert [each.what.partition(" float")[0] for each in loop.candidates] == ["grouped matmul"] * 2
