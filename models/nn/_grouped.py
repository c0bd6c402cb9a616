"""A linear layer for each group of rows: the layer's leaves are stacked, `[groups, ...]`, and the rows are sorted by group.

This module owns the product and its `jax.vmap`. How rows come to their groups is in `_experts`.

Dims: rows = tokens sorted by group, in, out = features, groups = the number of stacked layers; dims = any leading dims.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int


def grouped_linear(
    layer: eqx.nn.Linear, x: Float[Array, "*dims rows in"], sizes: Int[Array, "*dims groups"]
) -> Float[Array, "*dims rows out"]:
    """Applies the first of the stacked layers to the first `sizes[..., 0]` rows, the second to the next, and so on.

    The work is that of the rows, whatever the sizes are. Rows after the last group give zeros. An adapter of `lora.add` on
    the stacked layer is applied group by group too.

    Raises TypeError for a layer that is not linear, and for one with a bias.
    """
    is_adapted = all(hasattr(layer, name) for name in ("lora_a", "lora_b", "scale"))
    if not (type(layer) is eqx.nn.Linear or is_adapted) or layer.bias is not None:
        raise TypeError(
            f"`layer`: expected stacked `eqx.nn.Linear` layers without bias, got {type(layer).__name__}. "
            "Adapt it with `lora.add`, or write the mixture out."
        )
    out = _product(x, layer.weight, sizes)
    if is_adapted:
        with jax.named_scope("lora"):  # the adapter is float32 with 16-bit weights
            a, b, scale = (getattr(layer, name) for name in ("lora_a", "lora_b", "scale"))
            delta = _product(scale * _product(x.astype(a.dtype), a, sizes), b, sizes)
        out += delta.astype(out.dtype)
    return out


def _product(x: Array, weight: Array, sizes: Array) -> Array:
    """Computes `x @ weight[group].T` for the rows of each group. `sizes` has the leading dims of `x`."""
    numbers = RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((x.ndim - 1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[x.ndim - 2],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(x, weight, sizes, numbers)


# --- vmap -------------------------------------------------------------------------------------------------------------
# JAX (0.10.2) has no `jax.vmap` of a product whose weights are not batched, though the product itself takes leading dims.

_shapes = [jax.ShapeDtypeStruct((1,) * n, dtype) for n, dtype in ((2, jnp.float32), (3, jnp.float32), (1, jnp.int32))]
_equation = jax.make_jaxpr(_product)(*_shapes).eqns[0]  # of shapes: importing starts no devices
_all_batched = batching.fancy_primitive_batchers[_equation.primitive]


def _batcher(axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    """Adds a leading dim to the rows and the sizes. Weights that are batched too, as in an ensemble, are JAX's own case."""
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs, rhs), batched = numbers.dot_dimension_numbers
    x, weight, sizes = (a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True))
    if dims[0] is None or dims[1] is not None or not numbers.rhs_group_dimensions or any(batched):
        full = [
            jnp.broadcast_to(a, (axis_data.size, *a.shape)) if d is None else a
            for a, d in zip((x, weight, sizes), dims, strict=True)
        ]
        return _all_batched(axis_data, full, (0, 0, 0), **params)
    (ragged,) = numbers.lhs_ragged_dimensions
    if dims[2] is None:
        sizes = sizes[None]
    leading = tuple(x.shape[i] for i in range(x.ndim) if i <= ragged and i - 1 not in lhs)
    sizes = sizes.reshape(sizes.shape[0], *[1] * (len(leading) + 1 - sizes.ndim), *sizes.shape[1:])
    params["ragged_dot_dimension_numbers"] = RaggedDotDimensionNumbers(
        dot_dimension_numbers=((tuple(i + 1 for i in lhs), rhs), batched),
        lhs_ragged_dimensions=[ragged + 1],
        rhs_group_dimensions=numbers.rhs_group_dimensions,
    )
    return _equation.primitive.bind(x, weight, jnp.broadcast_to(sizes, (*leading, sizes.shape[-1])), **params), 0


batching.fancy_primitive_batchers[_equation.primitive] = _batcher
