"""Megablox without a TPU: its results, interpreted on CPU; what it does not support; where it is lowered."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _grouped_tiles import n_grouped_tiles

from redeqx.kernels import _megablox as megablox, grouped_matmul
from redeqx.machine import make_mesh, split_rows
from redeqx.tracing import transformed
from redeqx.transforms import GroupMatmuls

ROWS, K, N, GROUPS = 200, 8, 12, 4


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [[3, 130, 0, 67], [0, 9, 0, 1]], ids=["skewed", "rows outside"])
def test_values_are_those_of_each_group(sizes):
    x, weights, g = draw((ROWS, K), (GROUPS, K, N), (ROWS, N))
    ends = np.cumsum(sizes)
    rows = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    out = np.zeros((ROWS, N), np.float32)
    for each, weight in zip(rows, np.asarray(weights), strict=True):
        out[each] = np.asarray(x)[each] @ weight
    of_weights = np.stack([np.asarray(x)[each].T @ np.asarray(g)[each] for each in rows])
    options = {"tile": 128, "dtype": jnp.float32, "interpret": True}
    sizes = jnp.array(sizes, jnp.int32)
    for matrices, transposed in ((weights, False), (weights.swapaxes(1, 2), True)):
        found = megablox.matmul(x, matrices, sizes, transposed=transposed, **options)
        np.testing.assert_allclose(found, out, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(megablox.gradient(x, g, sizes, **options), of_weights, rtol=1e-6, atol=1e-5)
    added = megablox.gradient(x, g, sizes, weights, **options)
    np.testing.assert_allclose(added, weights + of_weights, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("n_devices", [1, 8])
def test_tiles_are_those_that_the_kernel_visits(n_devices):
    """As counted one by one: a tile is multiplied for each group that has rows in it."""
    sizes = np.random.default_rng(0).multinomial(4096, np.ones(4) / 4)
    found, size = n_grouped_tiles(jnp.array(sizes), 4096, "tpu", n_devices)
    group = np.repeat(np.arange(4), sizes).reshape(n_devices, -1, size)
    assert found.tolist() == [sum(len(set(tile)) for tile in tiles.tolist()) for tiles in group]


def lowered(fn, *args):
    """Returns the program lowered for TPUs, which needs no TPU."""
    step = jax.jit(jax.grad(lambda x, w, sizes: fn(x, w, sizes).sum(), (0, 1)))
    return step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "a batch"])
def test_tpu_programs_call_the_kernels(lead):
    x, weights = draw((*lead, ROWS, K), (GROUPS, K, N))
    text = lowered(grouped_matmul, x, weights, jnp.zeros((*lead, GROUPS), jnp.int32))
    assert text.count("tpu_custom_call") == 2  # for the rows and for the matrices: the sum needs no output
    assert "stablehlo.dot_general" not in text
    # The gradients of a batch's entries are added in the memory of one, by the kernel.
    assert ("output_operand_alias" in text) == bool(lead)


def test_falls_back_to_tiles_and_logs_the_reason(caplog):
    x, weights = (each.astype(jnp.float16) for each in draw((ROWS, K), (GROUPS, K, N)))
    with caplog.at_level(logging.INFO, "redeqx"):
        text = lowered(grouped_matmul, x, weights, jnp.zeros(GROUPS, jnp.int32))
    assert "tpu_custom_call" not in text and "stablehlo.dot_general" in text
    assert "in tiles, not by Megablox: it supports bfloat16 and float32, not float16" in caplog.text
    with jax.default_matmul_precision("highest"):
        text = lowered(grouped_matmul, *draw((ROWS, K), (GROUPS, K, N)), jnp.zeros(GROUPS, jnp.int32))
    assert "tpu_custom_call" not in text and "HIGHEST" in text


def test_an_unknown_split_over_devices_falls_back_to_tiles():
    """The compiler cannot partition the kernels. If the split is known, each device runs them on its rows."""
    mesh = make_mesh(2, 2)
    x, weights = draw((ROWS, K), (GROUPS, K, N))
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split_rows(mesh))
    sizes = jnp.zeros(GROUPS, jnp.int32)
    assert "tpu_custom_call" not in lowered(grouped_matmul, x, weights, sizes)
    known = transformed(lambda weights, x, sizes: grouped_matmul(x, weights, sizes), [GroupMatmuls(mesh, (2,))])
    text = lowered(lambda x, weights, sizes: known(weights, x, sizes), x, weights, sizes)
    assert text.count("tpu_custom_call") == 2 and "manual_computation" in text
