"""Where the rows of the batch are in each value: the dims along which XLA keeps a value split over the devices.

That is a dim that begins with the rows, as those of `[rows, T, d]` and `[rows * T, d]`. After a sort of all rows, or a
scatter or a lookup of rows by index, there is none, and every device computes what follows. Other than the names of dims
(`_names`), this follows what the compiler does, in one direction. It is a hint for shardings, and changes no number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._tree import is_key
from ..tracing import flow, insides, once
from ._atoms import Atom
from ._equation import Related
from ._lookups import SCATTERS
from ._relations import REDUCTIONS, is_elementwise

# For some dims, how many leading parts of each the devices may hold: of `[rows * T, d]` the dim 0 has `rows`.
Parts = frozenset[tuple[int, int]]
_NONE: Parts = frozenset()


class Spread(NamedTuple):
    """What is known of a value's dims: whether it depends on the batch, and which dims begin with rows. Values are joined
    where paths meet, so each is what *may* be."""

    is_data: bool = False
    rows: Parts = _NONE


def _joined(values: Sequence[Spread]) -> Spread:
    rows = _largest(part for value in values for part in value.rows)
    return Spread(any(value.is_data for value in values), rows)


def _largest(parts: Any) -> Parts:
    found: dict[int, int] = {}
    for dim, n in parts:
        found[dim] = max(n, found.get(dim, 1))
    return frozenset((dim, n) for dim, n in found.items() if n > 1)


@once
def spread(closed: Any, n_weights: int) -> Mapping[Any, Sequence[Spread]]:
    """Returns what is known of the operands of each equation of a closed jaxpr in normal form, and of those inside. Its
    first `n_weights` inputs are weights. Dim 0 of all others is rows, except of keys."""
    found: dict[Any, Sequence[Spread]] = {}

    def note(eqn: Any, ins: Sequence[Spread], outs: Sequence[Spread]) -> None:
        del outs
        found[eqn] = ins

    def of_input(i: int, aval: Any) -> Spread:
        if i < n_weights or is_key(aval):
            return Spread()
        return Spread(True, _largest([(0, aval.shape[0])] if aval.shape else []))

    def rule(eqn: Any, ins: Sequence[Spread]) -> list[Spread] | None:
        if insides(eqn) or eqn.primitive.name == "optimization_barrier":
            return None
        is_data = any(value.is_data for value in ins)
        return [Spread(is_data, rows) for rows in _through(eqn, [value.rows for value in ins])]

    flow(
        closed,
        [of_input(i, var.aval) for i, var in enumerate(closed.jaxpr.invars)],
        rule,
        _joined,
        visit=note,
        entry=lambda value: _moved(value, -1),
        stack=lambda value: _moved(value, 1),
    )
    return found


def _moved(value: Spread, by: int) -> Spread:
    return Spread(value.is_data, frozenset((dim + by, n) for dim, n in value.rows if dim + by >= 0))


def _through(eqn: Any, ins: Sequence[Parts]) -> list[Parts]:
    """Returns the parts of an equation's outputs."""
    if not any(ins):
        return [_NONE] * len(eqn.outvars)
    shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
    if is_elementwise(eqn):
        full = (parts for atom, parts in zip(eqn.invars, ins, strict=True) if len(atom.aval.shape) == len(shapes[0]))
        return [_largest(part for parts in full for part in parts)] * len(shapes)
    if eqn.primitive.name not in _FOLLOWED:
        return [_anywhere(eqn, ins, shape) for shape in shapes]
    related = Related(eqn)
    dropped = set(related.combined()) if eqn.primitive.name == "sort" else ()
    amounts: dict[Atom, int] = {}  # how many parts of each factor
    for parts, dims in zip(ins, related.ins, strict=True):
        for dim, n in parts:
            for factor in () if dim in dropped else dims[dim]:
                amounts[factor] = max(amounts.get(factor, 1), min(n, factor.size))
                n = -(-n // factor.size)
    found = []
    for dims in related.outs:
        parts = []
        for i, dim in enumerate(dims):
            n = 1
            for factor in dim:
                n *= amounts.get(factor, 1)
                if amounts.get(factor, 1) < factor.size:
                    break
            parts.append((i, n))
        found.append(_largest(parts))
    return found


def _anywhere(eqn: Any, ins: Sequence[Parts], shape: Sequence[int]) -> Parts:
    """Returns the parts of an output that may be split wherever an operand is, as a slice of rows is."""
    found = []
    for atom, parts in zip(eqn.invars, ins, strict=True):
        is_alike = len(atom.aval.shape) == len(shape)
        found += [(dim, min(n, shape[dim])) for dim, n in parts] if is_alike else list(enumerate(shape)) if parts else []
    return _largest(found)


# Where XLA splits nothing but what the dims say. All others, as slices of rows and what is not known, may be split anywhere.
_FOLLOWED = {
    *("sort", "reshape", "transpose", "squeeze", "broadcast_in_dim", "dot_general", "ragged_dot_general", "top_k", "gather"),
    *("argmax", "argmin", *REDUCTIONS, *SCATTERS),
}
