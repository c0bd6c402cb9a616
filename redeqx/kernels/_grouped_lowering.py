"""How a grouped matmul is computed: by tiles or a platform's kernel on one device, and by each on its own rows on several.

Dims as in `_grouped`: `B` batch, `M` rows, `E` groups, `K` contracted, `N` outputs, `W` stacks of matrices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._rounding import at_least_float32
from ..machine import axes_of
from . import _megablox, _tiles
from ._shared import log_fallback, on_each_device, pad


@dataclass(frozen=True)
class GroupedSetting:
    """The static configuration of a grouped matmul, or of the gradient of its matrices.

    **Arguments:**

    - `dtype`: that of the output.
    - `transposed`: whether the matrices are `[N, K]`; not for the gradient.
    - `is_summed`: for the gradient, whether entries of `B` share their matrices, and the output is the sum over them.
    - `n_stacks`: for a gradient that is summed, `W`: each run of `B / W` entries has a sum.
    - `precision`: as for `jax.lax.dot_general`.
    - `split`: the sharding of the dims `[rows, K, N]`, or `[rows, K, N, W]`; None if it is unknown or there is one device.
    """

    dtype: Any
    transposed: bool = False
    is_summed: bool = False
    n_stacks: int = 1
    precision: Any = None
    split: NamedSharding | None = None


# --- on one device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Local:
    """The rows of one device: of `M` consecutive rows of each of `B`, those from `offset` on.

    **Arguments:**

    - `mean`: the mean number of rows of a group, over all devices.
    """

    sizes: Any  # [B, E], over all devices
    n_rows: int
    offset: Any
    mean: float

    @property
    def bounds(self) -> tuple[Any, Any]:
        """Returns the first row of each group, and the row after its last one: `[B, E]`, among the device's rows."""
        sizes = self.sizes.astype(jnp.int32)
        after = jnp.cumsum(sizes, axis=1)
        first, last = (jnp.clip(x - self.offset, 0, self.n_rows) for x in (after - sizes, after))
        return first, last

    def groups(self, n_stacks: int) -> _tiles.Groups:
        """Returns the groups of all of `B`, for rows `[B * M]` and matrices `[W * E]`."""
        (n, n_groups), (first, last) = self.sizes.shape, self.bounds
        rows = jnp.arange(n, dtype=jnp.int32)[:, None]
        matrices = jnp.arange(n_groups, dtype=jnp.int32) + rows // (n // n_stacks) * n_groups
        # By group and then by batch: groups that share a matrix follow each other.
        found = first + rows * self.n_rows, last + rows * self.n_rows, matrices
        return _tiles.Groups(*(jnp.transpose(each).reshape(-1) for each in found))


class Tiled:
    """Computes by `_tiles`.

    **Arguments:**

    - `min_rows`: as for `_tiles.n_tile_rows`.
    - `widened`: whether bfloat16 operands are cast to float32 where products are summed in float32.
    """

    def __init__(self, min_rows: int, widened: bool):
        self.min_rows, self.widened = min_rows, widened

    def options(self, local: _Local, setting: GroupedSetting) -> dict[str, Any]:
        size = _tiles.n_tile_rows(local.mean, self.min_rows)
        return {"size": size, "precision": setting.precision, "dtype": setting.dtype, "widened": self.widened}

    def matmul(self, setting: GroupedSetting, x: Any, weights: Any, local: _Local) -> Any:
        groups, options = local.groups(weights.shape[0]), self.options(local, setting)
        rows, matrices = x.reshape(-1, x.shape[2]), weights.reshape(-1, *weights.shape[2:])
        out = _tiles.matmul(rows, matrices, groups, transposed=setting.transposed, **options)
        return out.reshape(*x.shape[:2], -1)

    def gradient(self, setting: GroupedSetting, x: Any, g: Any, local: _Local) -> Any:
        n, n_groups = setting.n_stacks if setting.is_summed else x.shape[0], local.sizes.shape[1]
        rows = x.reshape(-1, x.shape[2]), g.reshape(-1, g.shape[2])
        out = _tiles.gradient(*rows, local.groups(n), n * n_groups, **self.options(local, setting))
        return out.reshape(n, n_groups, *out.shape[1:])


class _OnTpu(Tiled):
    """Computes by `_megablox`, one of `B` after the other, or by `_tiles` where it supports no such operands."""

    def _is_supported(self, lhs: Any, rhs: Any, setting: GroupedSetting) -> bool:
        reason = _megablox.unsupported_reason(lhs, rhs, setting.precision, setting.dtype)
        if reason is not None:
            log_fallback("grouped matmuls are computed in tiles, not by Megablox", reason)
        return reason is None

    def matmul(self, setting: GroupedSetting, x: Any, weights: Any, local: _Local) -> Any:
        if not self._is_supported(x, weights, setting):
            return super().matmul(setting, x, weights, local)
        first, last = local.bounds
        tile = _megablox.n_tile_rows(local.mean)
        run = partial(_megablox.matmul, tile=tile, transposed=setting.transposed, dtype=setting.dtype)

        def of_stack(x: Any, weights: Any, sizes: Any) -> Any:
            return _each(lambda x, sizes: run(x, weights, sizes), x, sizes)

        n, by_stack = weights.shape[0], lambda x: x.reshape(n, -1, *x.shape[1:])
        return _each(of_stack, by_stack(x), weights, by_stack(last - first)).reshape(*x.shape[:2], -1)

    def gradient(self, setting: GroupedSetting, x: Any, g: Any, local: _Local) -> Any:
        if not self._is_supported(x, g, setting):
            return super().gradient(setting, x, g, local)
        first, last = local.bounds
        sizes, n, tile = last - first, setting.n_stacks, _megablox.n_tile_rows(local.mean)
        if x.shape[0] == n or not setting.is_summed:
            return _each(partial(_megablox.gradient, tile=tile, dtype=setting.dtype), x, g, sizes)
        wide = at_least_float32(setting.dtype)

        def add(total: Any, operands: Any) -> Any:
            return total + _megablox.gradient(*operands, tile=tile, dtype=wide), None

        def of_stack(*operands: Any) -> Any:
            total = jnp.zeros((sizes.shape[1], x.shape[2], g.shape[2]), wide)
            return jax.lax.scan(add, total, operands)[0].astype(setting.dtype)

        return _each(of_stack, *(each.reshape(n, -1, *each.shape[1:]) for each in (x, g, sizes)))


def _each(fn: Callable[..., Any], *operands: Any) -> Any:
    if operands[0].shape[0] == 1:
        return fn(*(x[0] for x in operands))[None]
    return jax.lax.map(lambda each: fn(*each), operands)


# --- on several devices -----------------------------------------------------------------------------------------------


def matmul(backend: Tiled, x: Any, weights: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    shape = *x.shape[:2], weights.shape[2 if setting.transposed else 3]
    if not math.prod((*x.shape, *weights.shape, *shape)):
        return jnp.zeros(shape, setting.dtype)
    mean = x.shape[1] / sizes.shape[1]
    if setting.split is None or setting.split.mesh.size == 1:
        return backend.matmul(setting, x, weights, _Local(sizes, x.shape[1], 0, mean))
    over = _Split(setting.split, x, (x.shape[2], shape[2]), weights.shape[0])
    lead = over.stacks
    sides = (over.outputs, over.inputs) if setting.transposed else (over.inputs, over.outputs)

    def on_device(x: Any, weights: Any, sizes: Any) -> Any:
        out = backend.matmul(setting, x, weights, over.local(x, sizes, mean))
        return jax.lax.psum(out, over.inputs) if over.inputs else out

    specs = P(over.lead, over.rows, over.inputs), P(lead, None, *sides), P(over.lead, None)
    out = over.run(on_device, specs, P(over.lead, over.rows, over.outputs), over.pad(x), weights, sizes)
    return out[:, : x.shape[1]]


def gradient(backend: Tiled, x: Any, g: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    shape = setting.n_stacks if setting.is_summed else x.shape[0], sizes.shape[1], x.shape[2], g.shape[2]
    if not math.prod((*shape, *x.shape)):
        return jnp.zeros(shape, setting.dtype)
    mean = x.shape[1] / sizes.shape[1]
    if setting.split is None or setting.split.mesh.size == 1:
        return backend.gradient(setting, x, g, _Local(sizes, x.shape[1], 0, mean))
    over = _Split(setting.split, x, shape[2:], shape[0])
    lead = over.stacks
    summed = (*axes_of(over.rows), *(axis for axis in axes_of(over.lead) if axis not in axes_of(lead)))

    of_device = replace(setting, n_stacks=shape[0] // over.n_devices(lead) if setting.is_summed else 1)

    def on_device(x: Any, g: Any, sizes: Any) -> Any:
        out = backend.gradient(of_device, x, g, over.local(x, sizes, mean))
        return jax.lax.psum(out, summed) if summed else out

    specs = P(over.lead, over.rows, over.inputs), P(over.lead, over.rows, over.outputs), P(over.lead, None)
    return over.run(on_device, specs, P(lead, None, over.inputs, over.outputs), over.pad(x), over.pad(g), sizes)


class _Split:
    """How the devices share a product: its batch as far as it divides, its rows, and the dims of its matrices.

    **Attributes:**

    - `lead`, `rows`, `inputs`, `outputs`, `stacks`: the mesh axes over which `B`, `M`, `K`, `N` and `W` are split, or None.
    """

    def __init__(self, split: NamedSharding, x: Any, sides: Sequence[int], n_stacks: int):
        self.mesh, (rows, *of_sides) = split.mesh, split.spec[:3]
        of_stacks = [axis for axis in axes_of(split.spec[3]) if self.mesh.shape[axis] > 1] if len(split.spec) > 3 else []
        of_stacks = of_stacks if n_stacks == self.n_devices(of_stacks) else []
        n, of_batch, of_rows = x.shape[0], list[str](), list[str]()
        is_one = n_stacks == 1 or bool(of_stacks)  # all entries that the batch axes split have the same matrices
        n = n // n_stacks if is_one else math.gcd(n, n_stacks)
        for axis in (axis for axis in axes_of(rows) if self.mesh.shape[axis] > 1):
            (of_rows if n % self.n_devices([*of_batch, axis]) else of_batch).append(axis)
        self.lead, self.rows = tuple(of_stacks + of_batch) or None, tuple(of_rows) or None
        self.stacks = tuple(of_stacks if is_one else of_batch) or None
        self.inputs, self.outputs = (
            axes if axes and n % self.n_devices(axes) == 0 else None
            for axes, n in zip(map(axes_of, of_sides), sides, strict=True)
        )

    def n_devices(self, axes: Sequence[str] | None) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes or ())

    def pad(self, x: Any) -> Any:
        """Appends rows, which are in no group, so that the devices have equally many."""
        return pad(x, 1, self.n_devices(self.rows))

    def local(self, x: Any, sizes: Any, mean: float) -> _Local:
        """Returns the rows of the device that runs this."""
        offset = jax.lax.axis_index(self.rows) * x.shape[1] if self.rows else 0
        return _Local(sizes, x.shape[1], offset, mean)

    def run(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, *operands: Any) -> Any:
        return on_each_device(self.mesh, fn, in_specs, out_specs)(*operands)


# --- the platforms ---------------------------------------------------------------------------------------------------

# CPUs have no product of bfloat16 that is summed in float32. A tile of an NVIDIA GPU's matmul has 128 rows.
ON_CPU, ON_GPU, ON_TPU = Tiled(8, widened=True), Tiled(128, widened=False), _OnTpu(128, widened=False)
TILED_ON_TPU = Tiled(ON_TPU.min_rows, widened=False)
