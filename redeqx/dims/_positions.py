"""Which dims of a traced function's values are positions of a sequence: those that a sequence axis splits.

Candidates are all dims of the batch but the rows, and what is sliced, padded or joined from them. Such a dim is positions if
an attention compares its entries with one another, or a loop, a convolution, an order or a cumulative operation runs along
it. The dims are hints: a rule constrains values by them, so a missing or a wrong one costs traffic and no correctness.

A reshape to chunks makes two dims of one: the chunks, and the places within them. Work along one of the two is *by chunks*:
it combines some positions, and is no attention over all of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..tracing import once, or_as_written, without_remats
from ._atoms import Atom, Dim, Step, Value, flat, size_of, steps_of
from ._names import Inputs, Names, equations_of

# How a step may combine entries along positions, so that they are more than features.
_ALONG = {"window", "order", "fft"}
ATTENTION, RECURRENCE, CHUNKS, BY_KEYS = "attention", "a recurrence", "a loop over chunks", "a sort by keys"
_PRODUCTS = "products"  # of some positions with others


@dataclass(frozen=True)
class Along:
    """Work that combines the entries along positions.

    **Arguments:**

    - `what`: `ATTENTION`, `RECURRENCE`, `CHUNKS`, `BY_KEYS` for an order in which other values are put, products of some
        positions with others, or the name of a primitive.
    - `line`: `file:line`, or an empty string inside a library.
    - `size`: the number of entries along which it works: of positions, or by chunks of chunks or of places within them.
    - `in_batch`: the number of these positions in the batch.
    - `is_given`: whether the batch has these positions, or they are a slice of its; otherwise the model has added some.
    - `chunked`: if it is by chunks, the sizes of the dims of positions along which it may be split; otherwise None.
    - `has_windows`: whether it combines those in a window that slides along them.
    """

    what: str
    line: str
    size: int
    in_batch: int
    is_given: bool
    chunked: tuple[int, ...] | None = None
    has_windows: bool = False


@dataclass(frozen=True)
class Positions:
    """The positions in a function in normal form.

    **Arguments:**

    - `dims`: for each variable with positions, its dims that are positions, in order.
    - `in_batch`: for each variable with positions, how many of these the batch has.
    - `rows`: for each variable with rows, the dim that begins with them.
    - `lengths`: for each variable that has some, its dims that are dims of the batch after its rows, or parts of these. They
        are positions if the function combines their entries.
    - `parts_of_rows`: for each variable that has some, its dims of some of the rows, or of more, as those of `batch[1:]`.
    - `loops`: for each loop along positions, by its equation, whether it runs over chunks of them. Otherwise it takes one
        after the other, as a recurrence does.
    - `along`: where entries along positions are combined, one for each line, kind and size.
    """

    dims: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    in_batch: Mapping[Any, int] = field(default_factory=dict)
    rows: Mapping[Any, int] = field(default_factory=dict)
    lengths: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    parts_of_rows: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    loops: Mapping[Any, bool] = field(default_factory=dict)
    along: Sequence[Along] = ()

    def are_whole(self, var: Any, n: int) -> bool:
        """Whether `n` devices do not split the positions of a variable: it has none, or neither they nor those of the batch
        divide. A few more or less than those of the batch, as of `logits[:, :-1]`, are split as these are."""
        dims = self.dims.get(var, ())
        return not dims or (var.aval.shape[dims[0]] % n > 0 and self.in_batch[var] % n > 0)

    def rows_in(self, var: Any, n: int) -> int | None:
        """Returns the dim of a variable that begins with rows, if `n` divides it."""
        rows = self.rows.get(var)
        return None if rows is None or var.aval.shape[rows] % n else rows

    @property
    def are_compared(self) -> bool:
        """Whether entries along positions are compared with one another, as by an attention."""
        return any(each.what in (ATTENTION, _PRODUCTS) for each in self.along)


@once  # and warned of once
def positions_of(closed: Any, inputs: Inputs) -> Positions:
    """Returns the positions in a closed jaxpr in normal form; none if the search fails."""
    return or_as_written(partial(_search, closed, inputs), Positions, "the search for positions")


def _search(closed: Any, inputs: Inputs) -> Positions:
    names = Names(without_remats(closed), inputs)
    batch, steps, sets = names.root.ins[inputs.batch], list(steps_of(names.root)), _Sets(names)
    for use in (use for step in steps for use in _uses(step, sets)):
        sets.join(use)
    uses = [use for step in steps for use in _uses(step, sets)]
    seen = {use.root for use in uses}
    for value in batch:
        # Of a grid, as of an image, no side is split: with a side over the sequence axis and channels over the model axis,
        # XLA computed a ViT's loss from half of the patches (jax 0.10.2, CPU, 2 x 2 shards; 2026-11-25).
        sides = [root for dim in value.dims if (root := sets.of_dim(dim)) in seen]
        seen -= set(sides) if len(sides) > 1 else set()

    def positions_in(value: Value) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(value.dims) if sets.of_dim(dim) in seen)

    of_variables, loops = list(zip(closed.jaxpr.invars, names.root.ins, strict=True)), dict[Any, bool]()
    by_place = {names.places[id(step.eqn)]: step for step in steps if id(step.eqn) in names.places}
    for place, eqn in enumerate(equations_of(closed)):
        if (step := by_place.get(place)) is not None:
            of_variables += zip(eqn.outvars, step.outs, strict=True)
            if step.name == "scan" and sets.of_dim(step.scanned) in seen:
                loops[eqn] = _is_chunked(step, seen, sets)
    of_weights = names.of_weights
    of_variables = [(var, value) for var, value in of_variables if id(value) not in of_weights]
    dims = {var: found for var, value in of_variables if (found := positions_in(value))}
    firsts = {var: value.dims[dims[var][0]] for var, value in of_variables if var in dims}
    in_batch = {var: sets.in_batch(root) for var, dim in firsts.items() if (root := sets.of_dim(dim)) is not None}
    rows = {
        var: i
        for var, value in of_variables
        for i, dim in reversed([*enumerate(value.dims)])
        if flat(dim)[:1] == names.rows[:1] != ()
    }
    lengths, parts_of_rows = (
        {var: tuple(i for i, dim in enumerate(value.dims) if is_one(dim)) for var, value in of_variables}
        for is_one in (sets.is_of_batch, sets.is_part_of_rows)
    )
    along = _along([use for use in uses if use.root in seen], sets)
    return Positions(dims, in_batch, rows, lengths, parts_of_rows, loops, along)


class _Use(NamedTuple):
    """What a step does along a dim of a set of positions."""

    root: Atom
    what: str
    step: Step
    dim: Dim


class _Sets:
    """Sets of atoms of which one is a part of another, as after a slice, or that are factors of one dim of positions. One
    atom stands for each set. Rows are left out."""

    def __init__(self, names: Names):
        self._parents: dict[Atom, Atom] = {}
        self._rows = set(names.rows)
        parts = [(how, self._own(before), self._own(after)) for how, before, after in names.parts]
        for _, before, after in parts:
            self._unify((*before, *after))
        self._parts_of_rows = set[Atom]()
        for _, before, after in names.parts:  # in the order of the function
            if not self._parts_of_rows.union(self._rows).isdisjoint(flat(before)[:1]):
                self._parts_of_rows.update(atom for atom in flat(after)[:1] if atom not in self._rows)
        batch = names.root.ins[names.inputs.batch]
        self._batch = [own for value in batch for dim in value.dims[1:] if (own := self._own(dim))]
        # The atoms of each dim that may have all positions: of the batch, and of what is sliced, padded or joined from it.
        self._complete = _with_parts(self._batch, parts)
        self._given = _with_parts(self._batch, [part for part in parts if part[0] == "part"])

    def root(self, atom: Atom) -> Atom:
        """Returns the atom that stands for the set of this one."""
        while (parent := self._parents.get(atom, atom)) is not atom:
            atom = parent
        return atom

    def of_dim(self, dim: Dim) -> Atom | None:
        """Returns the set of a dim by its first factor: one of rows and then positions is split as rows are."""
        atoms = flat(dim)
        return self.root(atoms[0]) if atoms and atoms[0] not in self._rows else None

    def of_batch(self, dim: Dim) -> Dim:
        """Returns the factors of a dim that may be positions, as in a dim of heads and then positions."""
        return tuple(atom for atom in self._own(dim) if self.in_batch(self.root(atom)))

    def is_of_batch(self, dim: Dim) -> bool:
        """Whether a dim begins with entries that may be positions."""
        root = self.of_dim(dim)
        return root is not None and self.in_batch(root) > 0

    def is_part_of_rows(self, dim: Dim) -> bool:
        """Whether a dim begins with some of the rows, or with more."""
        return flat(dim)[:1] != () and flat(dim)[0] in self._parts_of_rows

    def in_batch(self, root: Atom) -> int:
        """Returns how many positions of a set the batch has; 0 if they are none of the batch's."""
        return max((size_of(dim) for dim in self._batch if root in map(self.root, dim)), default=0)

    def is_given(self, dim: Dim) -> bool:
        """Whether a dim is one of the batch, or a slice of it: what is sliced and then padded is not longer than it was."""
        return frozenset(flat(dim)) in self._given and size_of(flat(dim)) <= self.in_batch(self.root(flat(dim)[0]))

    def is_by_chunks(self, dim: Dim) -> bool:
        """Whether a dim has some factors of positions, but not all."""
        own = frozenset(flat(dim))
        return not any(atoms <= own for atoms in self._complete)

    def join(self, use: _Use) -> None:
        """Makes the factors of a dim one set if they are used as one, or if places within a chunk are compared."""
        self._unify(self.of_batch(use.dim))
        if use.what == _PRODUCTS:
            for atoms in self._complete:
                if not atoms.isdisjoint(flat(use.dim)):
                    self._unify(tuple(atoms))

    def _own(self, dim: Dim) -> Dim:
        return tuple(atom for atom in flat(dim) if atom not in self._rows)

    def _unify(self, atoms: Dim) -> None:
        for atom in atoms[1:]:
            self._parents[self.root(atom)] = self.root(atoms[0])


def _with_parts(dims: Iterable[Dim], parts: Iterable[tuple[str, Dim, Dim]]) -> set[frozenset[Atom]]:
    """Returns the atoms of some dims, and of those that are made of them."""
    found = set(map(frozenset[Atom], dims))
    for _, before, after in parts:  # in the order of the function
        if after and frozenset(before) in found:
            found.add(frozenset(after))
    return found


def _uses(step: Step, sets: _Sets) -> Iterator[_Use]:
    """Yields what a step does along the dims of its operands, if that makes them positions."""
    found: list[tuple[str, Dim]] = []
    if step.name == "scan" and (root := sets.of_dim(step.scanned)) is not None:
        found.append((CHUNKS if _is_chunked(step, {root}, sets) else RECURRENCE, step.scanned))
    if step.name == "dot_general":
        found += _compared(step, sets)
    for how, dim in step.mixes:
        is_strided = how == "part" and step.name == "slice" and any(n > 1 for n in step.eqn.params["strides"] or ())
        what = BY_KEYS if step.name == "sort" and len(step.ins) > 1 else step.name
        found += [(what, dim)] if how in _ALONG or is_strided else []
    for what, dim in found:
        if (root := sets.of_dim(dim)) is not None and sets.in_batch(root):
            yield _Use(root, what, step, dim)


def _compared(step: Step, sets: _Sets) -> list[tuple[str, Dim]]:
    """Returns the dim of positions of one operand of a product that are compared with those of the other one, as the scores
    of an attention do. What sums over the same positions, such as scores times values, compares nothing."""
    contracted, batch = step.eqn.params["dimension_numbers"]
    operands = list(zip(step.ins[:2], contracted, batch, strict=True))
    summed = {sets.root(atom) for value, dims, _ in operands for i in dims for atom in sets.of_batch(value.dims[i])}
    sides = list[dict[Atom, Dim]]()
    for value, *others in operands:
        side = dict[Atom, Dim]()
        for i, dim in enumerate(value.dims):
            if all(i not in dims for dims in others) and (own := sets.of_batch(dim)):
                root = sets.root(own[0])
                side[root] = (*side.get(root, ()), *own)
        sides.append(side)
    for root in sides[0]:
        if root in sides[1] and root not in summed:
            complete = [side[root] for side in sides if not sets.is_by_chunks(side[root])]
            return [(ATTENTION, max(complete, key=size_of)) if complete else (_PRODUCTS, sides[0][root])]
    return []


def _is_chunked(step: Step, roots: Collection[Atom | None], sets: _Sets) -> bool:
    """Whether a loop along positions has further positions in what it takes or returns at a time."""
    values = (*step.ins, *step.outs)
    return any(sum(sets.of_dim(dim) in roots for dim in value.dims) > 1 for value in values)


def _along(uses: Sequence[_Use], sets: _Sets) -> tuple[Along, ...]:
    """Returns the uses, each once. Of the primitives of one line only the largest counts: scans halve their positions."""
    found: dict[Any, Along] = {}
    for root, what, step, dim in uses:
        own = Along(
            what,
            step.line,
            size_of(flat(dim)),
            sets.in_batch(root),
            sets.is_given(dim),
            _chunked(root, step, sets) if what == CHUNKS or sets.is_by_chunks(dim) else None,
            ("window", dim) in step.mixes,
        )
        key = (what, own.line, own.size if what in (ATTENTION, RECURRENCE, CHUNKS) else None)
        if key not in found or found[key].size < own.size:
            found[key] = own
    return tuple(found.values())


def _chunked(root: Atom, step: Step, sets: _Sets) -> tuple[int, ...]:
    """Returns the sizes of the dims along which work by chunks is split: the chunks, or the places that a loop slices."""
    if step.name != "scan":
        return tuple(size_of(flat(dim)) for dim in step.outs[0].dims if sets.of_dim(dim) is root)[:1]
    values = (*step.ins, *step.outs)
    return tuple(size_of(flat(dim)) for value in values for dim in value.dims[1:] if sets.of_dim(dim) is root)
