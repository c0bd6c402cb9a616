"""Grouped matmul: rows in groups, each multiplied with the matrix of its group, such as tokens sorted by their experts.

There are two JAX primitives: the matmul, and the gradient of its matrices. Each is linear in its two operands, and their
derivatives of any order are these two again, so all of them cost what the rows cost. `_grouped_lowering` computes them.

They know of one device: the rule `GroupMatmuls` of `transforms` shares the rows among several, which no compiler does.

Dims: `B` batch, `M` rows, `E` groups, `K` contracted, `N` outputs, `W` stacks of matrices: `B`, or 1 that all entries share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from .._promotion import promoting
from . import _grouped_lowering as lowering
from ._grouped_lowering import GroupedSetting
from ._shared import default_precision, make_aval

grouped_matmul_p = jex.Primitive("grouped_matmul")
grouped_gradient_p = jex.Primitive("grouped_matmul_gradient")


def grouped_matmul(
    x: Float[Array, "*batch rows k"],
    weights: Float[Array, "groups k n"] | Float[Array, "groups n k"],
    group_sizes: Int[Array, "*batch groups"],
    *,
    transposed: bool = False,
) -> Float[Array, "*batch rows n"]:
    """Multiplies the rows of each group with the matrix of that group, as `jax.lax.ragged_dot`, at the cost of the rows.

    The first `group_sizes[0]` rows are multiplied with `weights[0]`, the next `group_sizes[1]` rows with `weights[1]`, and
    so on. Rows after the last group give 0. In a step, redeqx computes every `jax.lax.ragged_dot` in this way. This function
    can also be mapped by `jax.vmap`, and it takes leading dims: each of their entries has groups of its own, and all share
    the weights. If they are `transposed`, each matrix is `[n, k]`, as the weight of a linear layer.

    TPUs compute it by the kernels of Megablox, other platforms by a loop over tiles of rows. Products have the precision of
    `jax.default_matmul_precision`, and the output has the common dtype of `x` and `weights`.

    Raises ValueError if shapes or dtypes do not agree.
    """
    batch = x.shape[:-2]
    _check(x, weights, group_sizes, transposed)
    dtype = jnp.result_type(x, weights)
    x, weights = x.astype(dtype), weights.astype(dtype)
    setting = GroupedSetting(dtype, transposed=transposed, precision=default_precision())
    flat = x.reshape(math.prod(batch), *x.shape[-2:]), weights[None], group_sizes.reshape(math.prod(batch), -1)
    out = grouped_matmul_p.bind(*flat, setting=setting)
    return out.reshape(*batch, *out.shape[1:])


def _check(x: Any, weights: Any, group_sizes: Any, transposed: bool) -> None:
    shapes = f"got shapes {tuple(x.shape)}, {tuple(weights.shape)} and {tuple(group_sizes.shape)}"
    for name, value in (("x", x), ("weights", weights)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"`{name}`: expected floating numbers, got {value.dtype}. Cast them to a floating dtype.")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"`group_sizes`: expected integers, got {group_sizes.dtype}. Pass the rows of each group.")
    if x.ndim < 2 or weights.ndim != 3 or weights.shape[2 if transposed else 1] != x.shape[-1]:
        matrix = "n, k" if transposed else "k, n"
        raise ValueError(f"`x`, `weights`: expected [*batch, rows, k] and [groups, {matrix}], {shapes}. Reshape them.")
    if tuple(group_sizes.shape) != (*x.shape[:-2], weights.shape[0]):
        raise ValueError(f"`group_sizes`: expected [*batch, groups], {shapes}. Pass one size for each matrix.")


# --- shapes -----------------------------------------------------------------------------------------------------------


@grouped_matmul_p.def_abstract_eval
def _matmul_shape(x: Any, weights: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    return make_aval((*x.shape[:2], weights.shape[2 if setting.transposed else 3]), setting.dtype, x)


@grouped_gradient_p.def_abstract_eval
def _gradient_shape(x: Any, g: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    n = 1 if setting.is_summed else x.shape[0]
    return make_aval((n, sizes.shape[1], x.shape[2], g.shape[2]), setting.dtype, x)


# --- derivatives ------------------------------------------------------------------------------------------------------


def _define_jvp(primitive: Any) -> None:
    """A product is linear in each of its first two operands; sizes have no tangents."""

    def of_first(tangent: Any, a: Any, b: Any, sizes: Any, **params: Any) -> Any:
        return primitive.bind(tangent, b, sizes, **params)

    def of_second(tangent: Any, a: Any, b: Any, sizes: Any, **params: Any) -> Any:
        return primitive.bind(a, tangent, sizes, **params)

    ad.defjvp(primitive, of_first, of_second, None)
    of_all = ad.primitive_jvps[primitive]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        if not any(type(tangent) is ad.Zero for tangent in tangents[:2]):
            # So that XLA computes both gradients before it uses one of them. Else it may leave those of the matrices for
            # later, with all rows in memory: on TPUs to the end of a layer.
            tangents = (*jax.lax.optimization_barrier(tuple(tangents[:2])), tangents[2])
        return of_all(primals, tangents, **params)

    ad.primitive_jvps[primitive] = jvp


def _transpose_matmul(g: Any, x: Any, weights: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    if type(g) is ad.Zero:
        return None, None, None
    if ad.is_undefined_primal(x):
        back = replace(setting, dtype=x.aval.dtype, transposed=not setting.transposed)
        return grouped_matmul_p.bind(g, weights, sizes, setting=back), None, None
    back = replace(setting, dtype=weights.aval.dtype, transposed=False, is_summed=weights.aval.shape[0] == 1)
    operands = (g, x) if setting.transposed else (x, g)
    return None, grouped_gradient_p.bind(*operands, sizes, setting=back), None


def _transpose_gradient(ct: Any, x: Any, g: Any, sizes: Any, *, setting: GroupedSetting) -> Any:
    if type(ct) is ad.Zero:
        return None, None, None
    if ad.is_undefined_primal(x):
        back = replace(setting, dtype=x.aval.dtype, transposed=True, is_summed=False)
        return grouped_matmul_p.bind(g, ct, sizes, setting=back), None, None
    back = replace(setting, dtype=g.aval.dtype, is_summed=False)
    return None, grouped_matmul_p.bind(x, ct, sizes, setting=back), None


# --- vmap -------------------------------------------------------------------------------------------------------------


def _merged(x: Any, dim: int | None, size: int) -> Any:
    """Merges the dim of a `vmap` into the leading dim."""
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _matmul_batcher(operands: Sequence[Any], dims: Sequence[int | None], *, setting: GroupedSetting) -> Any:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    x, weights, sizes = operands
    x, sizes = _merged(x, dims[0], size), _merged(sizes, dims[2], size)
    if dims[1] is not None or weights.shape[0] > 1:
        weights = _merged(weights, dims[1], size)
        weights = jnp.repeat(weights, x.shape[0] // weights.shape[0], 0)
    out = grouped_matmul_p.bind(x, weights, sizes, setting=setting)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _gradient_batcher(operands: Sequence[Any], dims: Sequence[int | None], *, setting: GroupedSetting) -> Any:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    merged = [_merged(x, dim, size) for x, dim in zip(operands, dims, strict=True)]
    out = grouped_gradient_p.bind(*merged, setting=replace(setting, is_summed=False))
    out = out.reshape(size, -1, *out.shape[1:])
    return jnp.sum(out, 1, keepdims=True, dtype=out.dtype) if setting.is_summed else out, 0


for _primitive, _transpose, _batcher in (
    (grouped_matmul_p, _transpose_matmul, _matmul_batcher),
    (grouped_gradient_p, _transpose_gradient, _gradient_batcher),
):
    _primitive.def_impl(jax.jit(_primitive.bind, static_argnames="setting"))
    _define_jvp(_primitive)
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batcher


# --- lowering for each platform ---------------------------------------------------------------------------------------


def _register(primitive: Any, fn: Callable[..., Any]) -> None:
    """Registers the lowering for each platform. The compiler cannot partition Megablox: if several devices share arrays,
    TPUs compute by tiles."""
    on_cpu, on_gpu, on_tpu, tiled_on_tpu = (
        mlir.lower_fun(promoting(partial(fn, backend)), multiple_results=False)
        for backend in (lowering.ON_CPU, lowering.ON_GPU, lowering.ON_TPU, lowering.TILED_ON_TPU)
    )

    def lower_on_tpu(ctx: Any, *operands: Any, setting: GroupedSetting) -> Any:
        context = ctx.module_context.axis_context
        axes = getattr(context, "manual_axes", None)  # inside of a `jax.shard_map`
        is_local = getattr(context, "num_devices", 1) == 1 if axes is None else axes == {*context.mesh.axis_names}
        return (on_tpu if is_local else tiled_on_tpu)(ctx, *operands, setting=setting)

    mlir.register_lowering(primitive, on_cpu)
    mlir.register_lowering(primitive, on_gpu, platform="cuda")
    mlir.register_lowering(primitive, lower_on_tpu, platform="tpu")


_register(grouped_matmul_p, lowering.matmul)
_register(grouped_gradient_p, lowering.gradient)
