"""A linear layer for each group of rows: the layer's leaves are stacked, `[groups, ...]`, and the rows are sorted by group.

How rows come to their groups is in `_experts`; the product is in `redeqx.kernels`.

Dims: rows = tokens sorted by group, in, out = features, groups = the number of stacked layers; dims = any leading dims.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from redeqx.kernels import grouped_matmul


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
    out = grouped_matmul(x, layer.weight, sizes, transposed=True)
    if is_adapted:
        with jax.named_scope("lora"):  # the adapter is float32 with 16-bit weights
            a, b, scale = (getattr(layer, name) for name in ("lora_a", "lora_b", "scale"))
            delta = scale * grouped_matmul(x.astype(a.dtype), a, sizes, transposed=True)
            delta = grouped_matmul(delta, b, sizes, transposed=True)
        out += delta.astype(out.dtype)
    return out
