"""Grouped matmuls in plain XLA: a loop over tiles, each of which has rows of one group.

A tile is a slice of at most `n_tile_rows` consecutive rows of a group. It is multiplied with the matrix of its group alone,
so the work is that of the rows, and of a part of a tile at the end of each group, whatever the sizes of the groups. The
compiler sees a loop of unknown length, and one small matmul.

Dims: `R` rows, `K` contracted, `N` outputs, `G` groups, `W` matrices. Groups that share a matrix are consecutive.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._rounding import at_least_float32
from ..tracing import about

_MAX_TILE = 2048  # rows; larger tiles would not use a matmul unit better, and would waste more work at the ends of groups


class Groups(NamedTuple):
    """Where the groups are: the first row of each, the row after its last one, and its matrix. All are `[G]` integers."""

    starts: Any
    ends: Any
    matrices: Any


def n_tile_rows(mean: float, min_rows: int) -> int:
    """Returns the number of rows of a tile: a group of up to 1.1 times the mean size has two tiles. Below `min_rows` a
    platform's matmul is not fast."""
    multiple = min(min_rows, 64)
    return min(max(multiple * math.ceil(0.55 * mean / multiple), min_rows), _MAX_TILE)


class _Tile(NamedTuple):
    start: Any  # the first row of the slice
    mask: Any  # which rows of the slice are the tile's, [C, 1]
    matrix: Any


class _Tiles:
    """The tiles of all groups, of `size` rows."""

    def __init__(self, groups: Groups, n_rows: int, size: int):
        self.groups, self.n_rows, self.size = groups, n_rows, min(size, n_rows)
        self.counts = (groups.ends - groups.starts + self.size - 1) // self.size
        self.after = jnp.cumsum(self.counts)  # the number of tiles up to and including those of each group

    def __getitem__(self, i: Any) -> _Tile:
        group = jnp.sum(self.after <= i)
        first = self.groups.starts[group] + (i - self.after[group] + self.counts[group]) * self.size
        start = jnp.minimum(first, self.n_rows - self.size)  # a slice does not extend beyond the last row
        rows = start + jnp.arange(self.size)[:, None]
        return _Tile(start, (rows >= first) & (rows < self.groups.ends[group]), self.groups.matrices[group])

    def slice(self, x: Any, tile: _Tile) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, tile.start, self.size)

    def loop(self, body: Any, init: Any) -> Any:
        """Calls `body(tile, *carry)` for each tile, in the order of the groups; returns the last carry."""

        def step(state: Any) -> Any:
            return state[0] + 1, *body(self[state[0]], *state[1:])

        with about(math.ceil(self.n_rows / self.size)):
            return jax.lax.while_loop(lambda state: state[0] < self.after[-1], step, (jnp.zeros((), jnp.int32), *init))[1:]


def _dot(a: Any, b: Any, contracted: tuple[int, int], precision: Any, dtype: Any, widened: bool) -> Any:
    """Multiplies two matrices. `widened` casts the operands to the output's dtype first, with the same result."""
    common = jnp.dtype(dtype) if widened else jnp.result_type(a, b)
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    return jax.lax.dot_general(a.astype(common), b.astype(common), dims, precision, dtype)


def matmul(
    x: Any, weights: Any, groups: Groups, *, size: int, transposed: bool, precision: Any, dtype: Any, widened: bool
) -> Any:
    """Multiplies the rows `[R, K]` of each group with its matrix, of `[W, K, N]`, or `[W, N, K]` if `transposed`, in tiles
    of `size` rows. Returns `[R, N]`, with zeros in rows outside all groups."""
    tiles = _Tiles(groups, x.shape[0], size)
    contracted = (1, 1) if transposed else (1, 0)

    def body(tile: _Tile, out: Any) -> Any:
        matrix = jax.lax.dynamic_index_in_dim(weights, tile.matrix, keepdims=False)
        product = _dot(tiles.slice(x, tile), matrix, contracted, precision, dtype, widened)
        merged = jnp.where(tile.mask, product, tiles.slice(out, tile))
        return (jax.lax.dynamic_update_slice_in_dim(out, merged, tile.start, 0),)

    return tiles.loop(body, (jnp.zeros((x.shape[0], weights.shape[1 if transposed else 2]), dtype),))[0]


def gradient(
    x: Any, g: Any, groups: Groups, n_matrices: int, *, size: int, precision: Any, dtype: Any, widened: bool
) -> Any:
    """Returns `[W, K, N]`: for each matrix the sum, over the rows of its groups, of the products of `x` `[R, K]` and `g`
    `[R, N]`. Products are summed in float32, one matrix at a time. Each is written after each of its tiles."""
    tiles = _Tiles(groups, x.shape[0], size)
    wide = at_least_float32(dtype)

    def body(tile: _Tile, previous: Any, total: Any, out: Any) -> Any:
        # Rows of other groups are replaced on both sides: they may be infinite.
        a, b = (jnp.where(tile.mask, tiles.slice(each, tile), 0) for each in (x, g))
        total = jnp.where(tile.matrix == previous, total, 0) + _dot(a, b, (0, 0), precision, wide, widened)
        out = jax.lax.dynamic_update_index_in_dim(out, total.astype(dtype), tile.matrix, 0)
        return tile.matrix, total, out

    shape = x.shape[1], g.shape[1]
    init = jnp.full((), -1, groups.matrices.dtype), jnp.zeros(shape, wide), jnp.zeros((n_matrices, *shape), dtype)
    return tiles.loop(body, init)[-1]
