"""Which dims of a traced function's values are positions of a sequence: those that a sequence axis splits.

Candidates are all dims of the batch but the rows, and what is sliced, padded or joined from them. Such a dim is positions if
an attention compares its entries with one another, or a loop, a convolution, an order or a cumulative operation runs along
it. The dims are hints: a rule constrains values by them, so a missing or a wrong one costs traffic and no correctness.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tracing import once, without_remats
from ._atoms import Atom, Dim, Step, Value, flat, size_of, steps_of
from ._names import Inputs, Names, equations_of

# How a step may combine entries along positions, so that they are more than features.
_ALONG = {"window", "order", "fft"}
ATTENTION, RECURRENCE, CHUNKS = "attention", "a recurrence", "a loop over chunks"


@dataclass(frozen=True)
class Along:
    """Work that combines the entries along positions.

    **Arguments:**

    - `what`: `ATTENTION`, `RECURRENCE`, `CHUNKS`, or the name of a primitive.
    - `line`: `file:line`, or an empty string inside a library.
    - `size`: the number of positions; of the queries in an attention.
    - `is_given`: whether the batch has these positions, or they are a slice of its; otherwise the model has added some.
    """

    what: str
    line: str
    size: int
    is_given: bool


@dataclass(frozen=True)
class Positions:
    """The positions in a function in normal form.

    **Arguments:**

    - `dims`: for each variable with positions, its dims that are positions, in order.
    - `rows`: for each variable with rows, the dim that begins with them.
    - `loops`: for each loop along positions, by its equation, whether it runs over chunks of them. Otherwise it takes one
        after the other, as a recurrence does.
    - `along`: where entries along positions are combined, one for each line, kind and size.
    """

    dims: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[Any, int] = field(default_factory=dict)
    loops: Mapping[Any, bool] = field(default_factory=dict)
    along: Sequence[Along] = ()


@once
def positions_of(closed: Any, inputs: Inputs) -> Positions:
    """Returns the positions in a closed jaxpr in normal form."""
    names = Names(without_remats(closed), inputs)
    batch, steps, sets = names.root.ins[inputs.batch], list(steps_of(names.root)), _Sets(names)
    others = [atom for value in batch for dim in value.dims[1:] for atom in flat(dim)]
    candidates = set(map(sets.root, others)) - set(map(sets.root, names.rows))
    uses = [use for step in steps for use in _uses(step, sets) if use[0] in candidates]
    seen = {root for root, _, _, _ in uses}
    for value in batch:
        # Of a grid, as of an image, no side is split: with a side over the sequence axis and channels over the model axis,
        # XLA computed a ViT's loss from half of the patches (jax 0.10.2, CPU, 2 x 2 shards; 2026-11-25).
        sides = [root for dim in value.dims if (root := sets.of_dim(dim)) in seen]
        seen -= set(sides) if len(sides) > 1 else set()
    if not seen:
        return Positions()

    def positions_in(value: Value) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(value.dims) if sets.of_dim(dim) in seen)

    of_variables, loops = list(zip(closed.jaxpr.invars, names.root.ins, strict=True)), dict[Any, bool]()
    by_place = {names.places[id(step.eqn)]: step for step in steps if id(step.eqn) in names.places}
    for place, eqn in enumerate(equations_of(closed)):
        if (step := by_place.get(place)) is not None:
            of_variables += zip(eqn.outvars, step.outs, strict=True)
            if step.name == "scan" and sets.of_dim(step.scanned) in seen:
                loops[eqn] = _is_chunked(step, seen, sets)
    dims = {var: found for var, value in of_variables if (found := positions_in(value))}
    rows = {
        var: i
        for var, value in of_variables
        for i, dim in reversed([*enumerate(value.dims)])
        if flat(dim)[:1] == names.rows[:1] != ()
    }
    given = sets.sliced(others)
    return Positions(dims, rows, loops, _along([use for use in uses if use[0] in seen], given))


_Use = tuple[Atom, str, Step, Dim]  # of a set of positions: what a step does along a dim


class _Sets:
    """Sets of atoms of which one is a part of another, as after a slice; one atom stands for each set. Rows are left out."""

    def __init__(self, names: Names):
        self._parents: dict[Atom, Atom] = {}
        self._slices: list[tuple[Dim, Dim]] = []
        rows = set(names.rows)
        for how, before, after in names.parts:
            atoms = [atom for atom in (*flat(before), *flat(after)) if atom not in rows]
            for atom in atoms[1:]:
                self._parents[self.root(atom)] = self.root(atoms[0])
            if how == "part":
                self._slices.append((flat(before), flat(after)))

    def root(self, atom: Atom) -> Atom:
        """Returns the atom that stands for the set of this one."""
        while (parent := self._parents.get(atom, atom)) is not atom:
            atom = parent
        return atom

    def of_dim(self, dim: Dim) -> Atom | None:
        """Returns the set of a dim by its first factor: one of rows and then positions is split as rows are."""
        atoms = flat(dim)
        return self.root(atoms[0]) if atoms else None

    def sliced(self, atoms: Iterable[Atom]) -> set[Atom]:
        """Returns some atoms with all that are slices of them."""
        found = set(atoms)
        for before, after in self._slices:  # in the order of the function
            if found.issuperset(before):
                found.update(after)
        return found


def _uses(step: Step, sets: _Sets) -> Iterator[_Use]:
    """Yields what a step does along the dims of its operands, if that makes them positions."""
    if step.name == "scan" and (root := sets.of_dim(step.scanned)) is not None:
        yield root, CHUNKS if _is_chunked(step, {root}, sets) else RECURRENCE, step, step.scanned
    if step.name == "dot_general":  # the scores of an attention have the positions twice
        dims = step.outs[0].dims
        roots = list(map(sets.of_dim, dims))
        for i, root in enumerate(roots):
            if root is not None and root in roots[i + 1 :]:
                yield root, ATTENTION, step, dims[i]
                break
    for how, dim in step.mixes:
        is_strided = how == "part" and step.name == "slice" and any(n > 1 for n in step.eqn.params["strides"] or ())
        if (how in _ALONG or is_strided) and (root := sets.of_dim(dim)) is not None:
            yield root, step.name, step, dim


def _is_chunked(step: Step, roots: Collection[Atom | None], sets: _Sets) -> bool:
    """Whether a loop along positions has further positions in what it takes or returns at a time."""
    values = (*step.ins, *step.outs)
    return any(sum(sets.of_dim(dim) in roots for dim in value.dims) > 1 for value in values)


def _along(uses: Sequence[_Use], given: set[Atom]) -> tuple[Along, ...]:
    """Returns the uses, each once. Of the primitives of one line only the largest counts: scans halve their positions."""
    found: dict[Any, Along] = {}
    for _, what, step, dim in uses:
        own = Along(what, step.line, size_of(flat(dim)), given.issuperset(flat(dim)))
        key = (what, own.line, own.size if what in (ATTENTION, RECURRENCE, CHUNKS) else None)
        if key not in found or found[key].size < own.size:
            found[key] = own
    return tuple(found.values())
