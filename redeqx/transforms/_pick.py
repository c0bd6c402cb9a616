"""Picking by comparison: takes one entry of each row, such as a label's logit in a cross-entropy, without a scatter.

The gradient of `jnp.take_along_axis(logits, labels[..., None], -1)`, and of `logits[label]` under `jax.vmap`, is a scatter
into zeros of the size of all logits. XLA fuses nothing with a scatter: the zeros, the softmax and their sum are float32
arrays in memory, and are cast at the end. Comparing the label with the index of each entry gives the same value, and its
gradient is elementwise, in one pass over the logits. If the dim is split, no device needs the entries of the others.
With jax 0.10.2, the CPU compiler needs 32 MiB instead of 48 for 64 x 64 logits of 8192 labels
(`test_a_scatter_still_needs_more_memory` fails once that is over).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..tracing import Rule, Site, plain


@dataclass(frozen=True)
class PickByComparison(Rule):
    """Computes a gather of one entry along one dim, for all positions of the other dims, as a masked sum over that dim."""

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name == "gather" and _picks(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        operand, index = map(plain, ins)
        (dim,) = eqn.params["dimension_numbers"].start_index_map
        out, size = eqn.outvars[0].aval, operand.shape[dim]
        others = [n for i, n in enumerate(operand.shape) if i != dim]
        # The iota has the index's dtype. In 8 bits it would wrap around: entry 300 would equal index 44.
        index = index.reshape(others).astype(jnp.int32 if index.dtype.itemsize < 4 else index.dtype)
        is_inside = (index >= 0) & (index < size)
        is_filled = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        if not is_filled:
            index = jnp.clip(index, 0, size - 1)
        is_picked = jax.lax.broadcasted_iota(index.dtype, operand.shape, dim) == jnp.expand_dims(index, dim)
        picked = jnp.sum(jnp.where(is_picked, operand, 0), dim, dtype=operand.dtype)
        if is_filled:
            fill = eqn.params["fill_value"]
            picked = jnp.where(is_inside, picked, jnp.nan if fill is None else fill)
        return [picked.reshape(out.shape)]


def _picks(eqn: Any) -> bool:
    """Whether a gather takes one entry along one dim, for each position of the other dims, in their order."""
    operand, index = (var.aval for var in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    along, others = tuple(numbers.start_index_map), tuple(numbers.operand_batching_dims)
    rows = tuple(numbers.start_indices_batching_dims)
    rest = [size for i, size in enumerate(index.shape) if i not in rows]
    return (
        jnp.issubdtype(operand.dtype, jnp.floating)
        and len(along) == 1
        and sorted((*along, *others)) == list(range(operand.ndim))
        and list(others) == sorted(others)
        and list(rows) == sorted(rows)
        and all(size == 1 for size in (*rest, *eqn.params["slice_sizes"]))
    )
