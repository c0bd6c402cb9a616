"""How one equation relates the dims of its operands and outputs, whatever else the function computes.

Reads the table of `_relations` with new dims for each operand. This is what plans and rules read: they follow a split or a
label from value to value themselves.
"""

import math
from collections.abc import Sequence
from typing import Any

from ._atoms import Atom, Dim, Step, flat
from ._inference import Inference
from ._relations import relation_of


class Related(Inference):
    """The dims of an equation without inner jaxprs, by their factors."""

    def __init__(self, eqn: Any):
        super().__init__()
        self._step = step = Step(eqn, [self.fresh(atom.aval) for atom in eqn.invars])
        outs = relation_of(eqn)(self, eqn, step.ins)
        # For each operand and output the factors of each dim, most significant first. Equal dims have equal factors.
        self.ins: Sequence[Sequence[Dim]] = [list(map(_factors, value.dims)) for value in step.ins]
        self.outs: Sequence[Sequence[Dim]] = [list(map(_factors, dims)) for dims in outs]

    def dim(self, size: int) -> Dim:
        return (Atom(size),)  # also of size 1, so that its place in the output is known

    def source(self, operand: int = 0, output: int = 0) -> list[int | None]:
        """Returns for each dim of an output the dim of an operand that it is, or None if it is none of them."""
        places = {dim: i for i, dim in reversed([*enumerate(self.ins[operand])])}
        return [places.get(dim) for dim in self.outs[output]]

    def places(self, operand: int = 0) -> dict[int, int]:
        """Maps dims of an operand to the first output's dims that have the same first factor."""
        return _by_first_factor(self.ins[operand], self.outs[0])

    def partners(self, side: int) -> dict[int, int]:
        """Maps dims of one of two operands to the dims of the other one that have the same first factor."""
        return _by_first_factor(self.ins[side], self.ins[1 - side])

    @property
    def group(self) -> int | None:
        """The dim of a grouped matmul's second operand that counts matrices, as the sizes of groups do; None without it."""
        return _by_first_factor(self.ins[2], self.ins[1]).get(len(self.ins[2]) - 1)

    def combined(self, operand: int = 0, how: str | None = None) -> list[int]:
        """Returns the dims of an operand along which entries are combined, selected, reordered or dropped; or only those
        where this is how (see `Step.mixes`)."""
        assert self._step is not None
        mixes = [set(flat(dim)) for own, dim in self._step.mixes if how in (None, own)]
        return [i for atoms in mixes for i, dim in enumerate(self.ins[operand]) if not atoms.isdisjoint(dim)]


def _by_first_factor(dims: Sequence[Dim], others: Sequence[Dim]) -> dict[int, int]:
    places = {dim[:1]: i for i, dim in reversed([*enumerate(others)])}
    return {i: places[dim[:1]] for i, dim in enumerate(dims) if dim[:1] in places}


def _factors(dim: Dim) -> Dim:
    """Returns a dim without its factors of size 1, if it has others."""
    atoms = flat(dim)
    return tuple(atom for atom in atoms if atom.size != 1) or atoms[:1]


# Equations that only rearrange, slice, cast or repeat their first operand.
VIEWS = {
    *("convert_element_type", "copy", "reduce_precision", "sharding_constraint", "stop_gradient", "transpose", "squeeze"),
    *("broadcast_in_dim", "reshape", "slice", "dynamic_slice"),
}


def view(eqn: Any) -> list[int | None] | None:
    """Returns, for each dim of a view's output, the dim of the first operand that it equals, or None if it is new or sliced.
    Returns None for an equation that is no view: it computes something, or mixes dims, as most reshapes do."""
    name = eqn.primitive.name
    if name not in VIEWS:
        return None
    source = Related(eqn).source()
    if name == "reshape" and any(dim is None and n != 1 for dim, n in zip(source, eqn.outvars[0].aval.shape, strict=True)):
        return None
    return source


def repeats(eqn: Any) -> bool:
    """Whether the output has more elements than the first operand, as after a broadcast to larger dims."""
    return math.prod(eqn.outvars[0].aval.shape) > math.prod(eqn.invars[0].aval.shape)
