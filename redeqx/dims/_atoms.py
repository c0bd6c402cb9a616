"""The dims of values: each is a tuple of atoms, and equations relate them.

An *atom* is a dim, or a factor of one. A merged dim has several, in order, most significant first; a dim of size 1 has none.
Two atoms that turn out to be the same are unified: one then stands for the other. An atom that turns out to be merged from
others stands for those.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from ..tracing import line_of


@dataclass(eq=False)
class Atom:
    """A dim, or a factor of one."""

    size: int  # the number of its entries
    to: "tuple[Atom, ...] | None" = None  # what it was found to be, most significant first; None while it is one of its own


Dim = tuple[Atom, ...]


def flat(dim: Dim) -> Dim:
    """Returns a dim by its present atoms."""
    for atom in dim:
        if atom.to is not None:
            break
    else:
        return dim
    out: list[Atom] = []
    for atom in dim:
        same: list[Atom] = []
        while atom.to is not None and len(atom.to) == 1:  # no recursion: such a chain may be as long as the function
            same.append(atom)
            (atom,) = atom.to
        if atom.to is not None:
            atom.to = flat(atom.to)
        found = atom.to or (atom,)
        for each in same:
            each.to = found
        out.extend(found)
    return tuple(out)


def size_of(dim: Dim) -> int:
    """Returns the number of entries of a dim."""
    return math.prod(atom.size for atom in dim)


def have_common_factors(one: Dim, two: Dim) -> bool:
    """Whether two dims of equal size can be divided into the same atoms, each at the place that it has in both."""
    a, b = (set(zip(dim, accumulate((atom.size for atom in dim), mul), strict=True)) for dim in (one, two))  # and their ends
    moved = {atom for atom, _ in a - b} & {atom for atom, _ in b - a}
    ends = sorted({end for _, end in a | b})
    return len(ends) == 1 or (0 not in ends and not moved and all(later % end == 0 for end, later in pairwise(ends)))


@dataclass(eq=False)
class Value:
    """A value at one place of a traced function."""

    aval: Any
    dims: tuple[Dim, ...]  # one for each dim of its shape
    index_of: Dim | None = None  # the dim whose index each entry equals, as of an `iota`
    columns: tuple[Dim | None, ...] | None = None  # the same for each entry of the last dim, as of the indices of a gather
    is_negative: bool = False  # whether it is `index < 0`
    literal: Any = None  # its value, if the traced function contains it
    reads: "list[Value]" = field(default_factory=list)  # what it is computed from, even in loops, branches and calls
    readers: "list[Value]" = field(default_factory=list)  # what is computed from it

    def depends(self, *values: "Value") -> "Value":
        """Records that this value is computed from others. Returns it."""
        for each in values:
            self.reads.append(each)
            each.readers.append(self)
        return self

    @property
    def atoms(self) -> list[Atom]:
        return [atom for dim in self.dims for atom in flat(dim)]


@dataclass(eq=False)
class Step:
    """An equation with its operands and outputs."""

    eqn: Any
    ins: list[Value]
    outs: list[Value] = field(default_factory=list)
    mixes: list[tuple[str, Dim]] = field(default_factory=list)  # how it combines the entries of a dim, and the dim
    blocks: "list[Block]" = field(default_factory=list)  # the jaxprs inside
    derivative: "Block | None" = None  # that of a function with a derivative of the user's own, see `_derivatives`
    scanned: Dim = ()  # the dim that a scan loops over
    own_columns: tuple[int, ...] = ()  # of a lookup, the columns of its indices that are the index of each entry itself
    is_known: bool = True  # whether a table has its primitive

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def copied(self) -> "list[Value] | None":
        """The operands that the outputs are; None for an equation that computes something."""
        if self.name in ("device_put", "optimization_barrier"):
            return self.ins
        if self.name == "select_n" and self.ins[0].is_negative:  # an index counted from the end, which it is not
            return [self.ins[1]]
        return None

    @property
    def line(self) -> str:
        """The line of code, `file.py:12`; for an operation of a package that users do not change, where they call it."""
        return line_of(self.eqn, "optax", "lineax", "optimistix", "diffrax") or line_of(self.eqn)


@dataclass(eq=False)
class Block:
    """A jaxpr at one place: its inputs, equations and outputs."""

    ins: list[Value]
    steps: list[Step] = field(default_factory=list)
    outs: list[Value] = field(default_factory=list)


def steps_of(block: Block) -> Iterator[Step]:
    """Yields the steps of a block, and those inside loops, branches and calls."""
    for step in block.steps:
        yield step
        for inner in (*step.blocks, *([step.derivative] if step.derivative else [])):
            yield from steps_of(inner)


def reached(starts: Iterable[Value], edges: Callable[[Value], Iterable[Value]]) -> set[int]:
    """Returns the ids of the values that can be reached from some."""
    found, todo = set[int](), list(starts)
    while todo:
        value = todo.pop()
        if id(value) not in found:
            found.add(id(value))
            todo += edges(value)
    return found
