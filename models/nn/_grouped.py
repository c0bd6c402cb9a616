"""A linear layer for each group of rows: the layer's leaves are stacked, `[groups, ...]`, and the rows are sorted by group.

How rows come to their groups is in `_experts`; the product is in `redeqx.kernels`.

Dims: rows = tokens sorted by group, in, out = features, groups = the number of stacked layers; dims = any leading dims.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redeqx.errors import wrong
from redeqx.kernels import grouped_matmul


def grouped_linear(
    layer: eqx.nn.Linear,
    x: Float[Array, "*dims rows in"],
    sizes: Int[Array, "*dims groups"],
    factors: Float[Array, "*dims rows 1"] | None = None,
) -> Float[Array, "*dims rows out"]:
    """Applies the first of the stacked layers to the first `sizes[..., 0]` rows, the second to the next, and so on.

    The work is that of the rows, whatever the sizes are. Rows after the last group give zeros. An adapter of `lora.add` on
    the stacked layer is applied group by group too.

    **Arguments:**

    - `factors`: of each row's bias; None for 1.

    Raises TypeError for a layer that is not linear.
    """
    is_adapted = all(hasattr(layer, name) for name in ("lora_a", "lora_b", "scale"))
    if not (type(layer) is eqx.nn.Linear or is_adapted):
        rule = "stacked `eqx.nn.Linear` layers"
        raise wrong("layer", rule, type(layer).__name__, "Adapt it with `lora.add`, or write the mixture out.", TypeError)
    if getattr(layer, "dropout", None) is not None:
        raise wrong("layer", "an adapter of experts without dropout", "one", "Add it without `dropout`.", TypeError)
    if getattr(layer, "magnitude", None) is not None:
        raise wrong("layer", "an adapter of experts without DoRA", "one with it", "Add it without `use_dora`.", TypeError)
    out = grouped_matmul(x, layer.weight, sizes, transposed=True)
    if is_adapted:
        with jax.named_scope("lora"):  # the adapter is float32 with 16-bit weights
            a, b, scale = (getattr(layer, name) for name in ("lora_a", "lora_b", "scale"))
            delta = scale * grouped_matmul(x.astype(a.dtype), a, sizes, transposed=True)
            delta = grouped_matmul(delta, b, sizes, transposed=True)
        out += delta.astype(out.dtype)
    if layer.bias is not None:  # as a product, so that a plan treats it as the weight, and rows of no group get none
        ones = jnp.ones((*x.shape[:-1], 1), out.dtype) if factors is None else factors.astype(out.dtype)
        out += grouped_matmul(ones, layer.bias[..., None], sizes, transposed=True)
    return out
