"""Grouped matmuls on TPUs: the kernels of Megablox, which skip the tiles that a group does not have.

The compiler cannot partition them. `_grouped` runs them on each device's own rows.

Source: `jax.experimental.pallas.ops.tpu.megablox`, after MegaBlocks (arXiv:2211.15841). Dims as in `_tiles`.
"""

from functools import cache
from typing import Any

import jax.numpy as jnp

from ._shared import LANES, is_default, pad

_MAX_SIDE = 512  # three tiles with this side, twice, fit into the memory of a core


@cache
def _library() -> Any:
    """Imports the kernels, lazily because it is slow; None for a version of JAX without them."""
    try:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
    except ImportError:  # pragma: no cover
        return None
    return gmm, tgmm


def unsupported_reason(lhs: Any, rhs: Any, precision: Any, dtype: Any) -> str | None:
    """Returns why Megablox does not multiply operands like these; None if it does."""
    if _library() is None:
        return "this version of JAX has it not"
    if {jnp.dtype(x) for x in (lhs.dtype, rhs.dtype, dtype)} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        return f"it supports bfloat16 and float32, not {lhs.dtype}"
    if jnp.float32 in (lhs.dtype, rhs.dtype) and not is_default(precision):
        return f"it does not support precision {precision}"
    return None


def matmul(x: Any, weights: Any, sizes: Any, *, tile: int, transposed: bool, dtype: Any, interpret: bool = False) -> Any:
    """Same as `_tiles.matmul`, for the sizes `[W]` of groups that follow each other from the first row, and tiles of
    `n_tile_rows`. `interpret` interprets the kernel, which works on any platform."""
    n_rows, n_inputs = x.shape
    sides = tile, _tile_side(n_inputs), _tile_side(weights.shape[1 if transposed else 2])
    out = _library()[0](pad(x, 0, tile), weights, sizes, dtype, sides, transpose_rhs=transposed, interpret=interpret)
    # The kernel does not write rows outside all groups.
    return jnp.where(jnp.arange(n_rows)[:, None] < jnp.sum(sizes), out[:n_rows], 0)


def gradient(x: Any, g: Any, sizes: Any, total: Any = None, *, tile: int, dtype: Any, interpret: bool = False) -> Any:
    """Same as `_tiles.gradient`, for the sizes of groups that follow each other from the first row. The kernel adds it to
    the sum of earlier ones, `total`, in the same memory."""
    sides = tile, _tile_side(x.shape[1]), _tile_side(g.shape[1])
    x, g = pad(x, 0, tile), pad(g, 0, tile)
    return _library()[1](x.swapaxes(0, 1), g, sizes, dtype, sides, existing_out=total, interpret=interpret)


def n_tile_rows(mean: float) -> int:
    """Returns the number of rows of a tile, at most a quarter of the mean size of a group. A tile with rows of several
    groups is multiplied with the matrix of each of them."""
    return next((size for size in (512, 256) if size <= mean / 4), LANES)


def _tile_side(size: int) -> int:
    """Returns the side of a tile along another dim: all of it, or a multiple of 128."""
    return min(_MAX_SIDE, size)
