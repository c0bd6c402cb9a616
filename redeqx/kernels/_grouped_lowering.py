"""How a grouped matmul is computed on one device: by tiles or a platform's kernel.

Dims as in `_grouped`: `B` batch, `M` rows, `E` groups, `K` contracted, `N` outputs, `W` stacks of matrices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._rounding import at_least_float32
from . import _megablox, _tiles
from ._shared import log_fallback


@dataclass(frozen=True)
class GroupedSetting:
    """The static configuration of a grouped matmul, or of the gradient of its matrices.

    **Arguments:**

    - `dtype`: that of the output.
    - `transposed`: whether the matrices are `[N, K]`; not for the gradient.
    - `is_summed`: for the gradient, whether entries of `B` share their matrices, and the output is the sum over them.
    - `precision`: as for `jax.lax.dot_general`.
    - `mean`: the mean number of rows of a group, if the rows are consecutive ones of more; None if they are all.
    """

    dtype: Any
    transposed: bool = False
    is_summed: bool = False
    precision: Any = None
    mean: float | None = None


def mean_of(setting: GroupedSetting, x: Any, sizes: Any) -> float:
    return x.shape[1] / sizes.shape[1] if setting.mean is None else setting.mean


def groups_of(sizes: Any, n_rows: int, *, shares_matrices: bool) -> _tiles.Groups:
    """Returns the groups of all of `B`, for rows `[B * M]` and matrices `[W * E]`."""
    (n, n_groups), sizes = sizes.shape, sizes.astype(jnp.int32)
    after = jnp.cumsum(sizes, axis=1)
    first, last = (jnp.clip(x, 0, n_rows) for x in (after - sizes, after))
    rows = jnp.arange(n, dtype=jnp.int32)[:, None]
    matrices = jnp.arange(n_groups, dtype=jnp.int32) + (jnp.zeros_like(rows) if shares_matrices else rows) * n_groups
    # By group and then by batch: groups that share a matrix follow each other.
    found = first + rows * n_rows, last + rows * n_rows, matrices
    return _tiles.Groups(*(jnp.transpose(each).reshape(-1) for each in found))


class Tiled:
    """Computes by `_tiles`, with its `min_rows`. `widened`: whether bfloat16 operands are cast to float32 where products are
    summed in float32."""

    def __init__(self, min_rows: int, widened: bool):
        self.min_rows, self.widened = min_rows, widened

    def options(self, setting: GroupedSetting, x: Any, sizes: Any) -> dict[str, Any]:
        size = _tiles.n_tile_rows(mean_of(setting, x, sizes), self.min_rows)
        return {"size": size, "precision": setting.precision, "dtype": setting.dtype, "widened": self.widened}

    def matmul(self, setting: GroupedSetting, x: Any, weights: Any, sizes: Any) -> Any:
        groups, options = groups_of(sizes, x.shape[1], shares_matrices=len(weights) == 1), self.options(setting, x, sizes)
        rows, matrices = x.reshape(-1, x.shape[2]), weights.reshape(-1, *weights.shape[2:])
        out = _tiles.matmul(rows, matrices, groups, transposed=setting.transposed, **options)
        return out.reshape(*x.shape[:2], -1)

    def gradient(self, setting: GroupedSetting, x: Any, g: Any, sizes: Any) -> Any:
        n = 1 if setting.is_summed else len(x)
        groups, options = groups_of(sizes, x.shape[1], shares_matrices=n == 1), self.options(setting, x, sizes)
        rows = x.reshape(-1, x.shape[2]), g.reshape(-1, g.shape[2])
        out = _tiles.gradient(*rows, groups, n * sizes.shape[1], **options)
        return out.reshape(n, -1, *out.shape[1:])


class _OnTpu(Tiled):
    """Computes by `_megablox`, one of `B` after the other, or by `_tiles` where it supports no such operands."""

    def _is_supported(self, lhs: Any, rhs: Any, setting: GroupedSetting) -> bool:
        reason = _megablox.unsupported_reason(lhs, rhs, setting.precision, setting.dtype)
        if reason is not None:
            log_fallback("grouped matmuls are computed in tiles, not by Megablox", reason)
        return reason is None

    def matmul(self, setting: GroupedSetting, x: Any, weights: Any, sizes: Any) -> Any:
        if not self._is_supported(x, weights, setting):
            return super().matmul(setting, x, weights, sizes)
        tile = _megablox.n_tile_rows(mean_of(setting, x, sizes))
        run = partial(_megablox.matmul, tile=tile, transposed=setting.transposed, dtype=setting.dtype)
        if len(weights) == 1:
            return _each(lambda x, sizes: run(x, weights[0], sizes), x, sizes)
        return _each(run, x, weights, sizes)

    def gradient(self, setting: GroupedSetting, x: Any, g: Any, sizes: Any) -> Any:
        if not self._is_supported(x, g, setting):
            return super().gradient(setting, x, g, sizes)
        run = partial(_megablox.gradient, tile=_megablox.n_tile_rows(mean_of(setting, x, sizes)))
        if len(x) == 1 or not setting.is_summed:
            return _each(partial(run, dtype=setting.dtype), x, g, sizes)
        wide = at_least_float32(setting.dtype)

        def add(total: Any, operands: Any) -> Any:
            x, g, sizes = operands
            return run(x, g, sizes, total, dtype=wide), None

        total = jnp.zeros((sizes.shape[1], x.shape[2], g.shape[2]), wide)
        return jax.lax.scan(add, total, (x, g, sizes))[0].astype(setting.dtype)[None]


def _each(fn: Callable[..., Any], *operands: Any) -> Any:
    if len(operands[0]) == 1:
        return fn(*(x[0] for x in operands))[None]
    return jax.lax.map(lambda each: fn(*each), operands)


def matmul(backend: Tiled, x: Any, weights: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    shape = *x.shape[:2], weights.shape[2 if setting.transposed else 3]
    if not math.prod((*x.shape, *weights.shape, *shape)):
        return jnp.zeros(shape, setting.dtype)
    return backend.matmul(setting, x, weights, sizes)


def gradient(backend: Tiled, x: Any, g: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    shape = 1 if setting.is_summed else len(x), sizes.shape[1], x.shape[2], g.shape[2]
    if not math.prod((*shape, *x.shape)):
        return jnp.zeros(shape, setting.dtype)
    return backend.gradient(setting, x, g, sizes)


# --- the platforms ---------------------------------------------------------------------------------------------------

# CPUs have no product of bfloat16 that is summed in float32. A tile of an NVIDIA GPU's matmul has 128 rows.
ON_CPU, ON_GPU, ON_TPU = Tiled(8, widened=True), Tiled(128, widened=False), _OnTpu(128, widened=False)
TILED_ON_TPU = Tiled(ON_TPU.min_rows, widened=False)
