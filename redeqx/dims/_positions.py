"""Which dims of a traced function's values are positions of a sequence: those that a sequence axis splits.

Candidates are all dims of the batch but the rows, and what is sliced, padded or joined from them. Such a dim is positions if
an attention compares its entries with one another, or a loop, a convolution, an order or a cumulative operation runs along
it. The dims are hints: a rule constrains values by them, so a missing or a wrong one costs traffic and no correctness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tracing import without_remats
from ._atoms import Atom, Dim, Step, Value, flat, steps_of
from ._names import Inputs, Names, equations_of

# How a step may combine entries along positions, so that they are more than features.
_ALONG = {"window", "order", "fft"}


@dataclass(frozen=True)
class Loop:
    """A loop along positions.

    **Arguments:**

    - `is_chunked`: whether it runs over chunks of positions, with all rows of each; otherwise over the positions themselves,
        as a recurrence does.
    """

    is_chunked: bool


@dataclass(frozen=True)
class Attended:
    """An attention over positions, or other work along them.

    **Arguments:**

    - `size`: the number of positions; of the queries in an attention.
    - `is_given`: whether the batch has this many positions, or a slice of them; otherwise the model has added some.
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
    - `loops`: the loops along positions, by the equation.
    - `found`: where entries along positions are combined, one for each line.
    """

    dims: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[Any, int] = field(default_factory=dict)
    loops: Mapping[Any, Loop] = field(default_factory=dict)
    found: Sequence[Attended] = ()


def positions_of(closed: Any, n_weights: int, n_state: int, n_batch: int) -> Positions:
    """Returns the positions in a closed jaxpr in normal form.

    **Arguments:**

    - `n_weights`, `n_state`, `n_batch`: how many of its first inputs are weights, a state of the model, and leaves of the
        batch, whose dim 0 is rows.
    """
    inputs = Inputs(n_weights, n_state, n_batch)
    names = Names(without_remats(closed), inputs)
    steps = list(steps_of(names.root))
    sets = _Sets(names)
    candidates = {sets.root(atom) for value in names.root.ins[inputs.batch] for dim in value.dims[1:] for atom in flat(dim)}
    candidates -= {sets.root(atom) for atom in names.rows}
    # Of a grid, as of an image, no side is split: where both sides and channels may be, jax 0.10.2 on CPUs computed a ViT's
    # loss from half of the patches (mesh sequence=2 x model=2; 2026-11-25).
    found = [each for step in steps if (each := _along(step, sets, candidates)) is not None]
    seen = {root for root, _, _ in found}
    for value in names.root.ins[inputs.batch]:
        sides = {i: root for i, dim in enumerate(value.dims) if (root := _root(dim, sets)) in seen}
        seen -= set(sides.values()) if len(sides) > 1 else set()
    if not seen:
        return Positions()

    def dims_of(value: Value) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(value.dims) if _root(dim, sets) in seen)

    by_place = {names.places[id(step.eqn)]: step for step in steps if id(step.eqn) in names.places}
    dims, rows, loops = dict[Any, tuple[int, ...]](), dict[Any, int](), dict[Any, Loop]()
    variables = list(zip(closed.jaxpr.invars, names.root.ins, strict=True))
    for place, eqn in enumerate(equations_of(closed)):
        if (step := by_place.get(place)) is None:
            continue
        variables += zip(eqn.outvars, step.outs, strict=True)
        if step.name == "scan" and _root(step.scanned, sets) in seen:
            loops[eqn] = Loop(is_chunked=any(len(dims_of(value)) > 1 for value in (*step.ins, *step.outs)))
    for var, value in variables:
        if of := dims_of(value):
            dims[var] = of
        of_rows = [i for i, dim in enumerate(value.dims) if flat(dim)[:1] == names.rows[:1] != ()]
        if of_rows:
            rows[var] = of_rows[0]
    given = sets.sliced(atom for value in names.root.ins[inputs.batch] for dim in value.dims[1:] for atom in flat(dim))
    by_line: dict[tuple[str, str, int], Attended] = {}
    for _, what, (step, dim) in found:
        size, is_given = _size(dim), all(atom in given for atom in flat(dim))
        by_line.setdefault((what, step.line, size), Attended(what, step.line, size, is_given))
    return Positions(dims, rows, loops, tuple(by_line.values()))


class _Sets:
    """Sets of atoms of which one is a part of another, as after a slice. Rows are in none."""

    def __init__(self, names: Names):
        self._parents: dict[Atom, Atom] = {}
        self._sliced: list[tuple[Dim, Dim]] = []
        rows = set(names.rows)
        for how, before, after in names.parts:
            atoms = [atom for atom in (*flat(before), *flat(after)) if atom not in rows]
            for atom in atoms[1:]:
                self._parents[self.root(atom)] = self.root(atoms[0])
            if how == "part":
                self._sliced.append((flat(before), flat(after)))

    def root(self, atom: Atom) -> Atom:
        """Returns the atom that stands for the set of this one."""
        while (parent := self._parents.get(atom, atom)) is not atom:
            atom = parent
        return atom

    def sliced(self, atoms: Any) -> set[Atom]:
        """Returns some atoms with all that are slices of them."""
        found = set(atoms)
        for before, after in self._sliced:  # in the order of the function
            if found.issuperset(before):
                found.update(after)
        return found


def _root(dim: Dim, sets: _Sets) -> Atom | None:
    """Returns the set of a dim, by its first atom: a dim of rows and then positions is split as rows are."""
    atoms = flat(dim)
    return sets.root(atoms[0]) if atoms else None


def _size(dim: Dim) -> int:
    size = 1
    for atom in flat(dim):
        size *= atom.size
    return size


def _along(step: Step, sets: _Sets, candidates: set[Atom]) -> tuple[Atom, str, tuple[Step, Dim]] | None:
    """Returns the set along whose positions a step works, what it does, and the step with the dim; None for other steps."""
    if step.name == "scan" and (root := _root(step.scanned, sets)) in candidates and root is not None:
        return root, "recurrence", (step, step.scanned)
    if step.name == "dot_general":
        dims = step.outs[0].dims
        roots = [_root(dim, sets) for dim in dims]
        for i, root in enumerate(roots):
            if root in candidates and root is not None and root in roots[i + 1 :]:
                return root, "attention", (step, dims[i])
    for how, dim in step.mixes:
        root = _root(dim, sets)
        is_strided = how == "part" and step.name == "slice" and any(n > 1 for n in step.eqn.params["strides"] or ())
        if root in candidates and root is not None and (how in _ALONG or is_strided):
            return root, step.name, (step, dim)
    return None
