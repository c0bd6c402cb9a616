"""Views: equations that only rearrange, slice, cast or repeat their first operand. One table maps their dims."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Dims = Sequence[int | None]


def view(eqn: Any) -> Dims | None:
    """Returns, for each dim of a view's output, the dim of the first operand that it equals, or None if it is new or sliced.

    Returns None for an equation that is no view: it computes something, or mixes dims, as most reshapes do.
    """
    dims = _TABLE.get(eqn.primitive.name)
    return None if dims is None else dims(eqn)


def repeats(eqn: Any) -> bool:
    """Whether the output has more elements than the first operand, as after a broadcast to larger dims."""
    return math.prod(eqn.outvars[0].aval.shape) > math.prod(eqn.invars[0].aval.shape)


def _same(eqn: Any) -> Dims:
    return range(len(eqn.outvars[0].aval.shape))


def _broadcast(eqn: Any) -> Dims | None:
    if len(eqn.invars) > 1:  # a dynamic shape
        return None
    to = [int(dim) for dim in eqn.params["broadcast_dimensions"]]
    return [to.index(dim) if dim in to else None for dim in range(len(eqn.params["shape"]))]


def _squeezed(eqn: Any) -> Dims:
    n = len(eqn.invars[0].aval.shape)
    removed = {dim % n for dim in eqn.params["dimensions"]}
    return [dim for dim in range(n) if dim not in removed]


def _reshaped(eqn: Any) -> Dims | None:
    """Handles only reshapes that add or drop dims of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if len(eqn.invars) > 1 or [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    kept = iter([dim for dim, size in enumerate(before) if size != 1])
    return [None if size == 1 else next(kept) for size in after]


def _sliced(eqn: Any) -> Dims:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [dim if size == before[dim] else None for dim, size in enumerate(after)]


_TABLE: dict[str, Callable[[Any], Dims | None]] = {
    "convert_element_type": _same,
    "copy": _same,
    "reduce_precision": _same,
    "sharding_constraint": _same,
    "stop_gradient": _same,
    "transpose": lambda eqn: [int(dim) for dim in eqn.params["permutation"]],
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "slice": _sliced,
    "dynamic_slice": _sliced,
}
