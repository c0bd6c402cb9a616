"""Which equations of a traced function make an entry of a row from the row's number: draws, splits of keys, and numbers of
rows. And which draws cannot follow the numbers of their rows."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax

from .._tree import is_key
from ._atoms import Dim, Step, flat, steps_of
from ._growth import Growth
from ._names import Names

_DRAWS = ("random_bits", "random_split")
_AT_ONCE = ("random_gamma", "rng_bit_generator", "rng_uniform")  # their lowering splits keys by the shape of the output

# The factors of a dim, most significant first: their sizes; None for the rows; -n for the groups of n consecutive rows.
Factors = tuple[int | None, ...]


class ByNumber(NamedTuple):
    """An equation that makes the entry of a row from the row's number."""

    place: int  # among the equations of the function, in the order of `equations_of`
    factors: tuple[Factors, ...] = ()  # of each dim of a draw that is not one of the keys; of an `iota`, those of its dim
    is_draw: bool = False  # whether it draws or splits keys
    columns: tuple["OwnColumn", ...] = ()


class OwnColumn(NamedTuple):
    """A column of indices that are the number of each entry's own row, in a table of the rows."""

    column: int
    rows: int  # the dim of the table
    along: int  # the dim of the indices along which the rows are
    repeats: int  # how many entries of that dim each row has, one after the other


def factors_of(growth: Growth, dims: Sequence[Dim]) -> tuple[Factors, ...]:
    """Returns the factors of dims."""
    rows = -growth.group if growth.is_grouped else None
    return tuple(tuple(rows if atom in growth.rows else atom.size for atom in flat(dim)) for dim in dims)


def place_of_rows(dims: Sequence[Factors]) -> tuple[int, int, int] | None:
    """Returns the dim that has the rows, and the sizes of its factors before and after them; None if no dim has."""
    for dim, factors in enumerate(dims):
        for i, factor in enumerate(factors):
            if factor is None or factor < 0:
                outer, inner = (math.prod(factor or 0 for factor in some) for some in (factors[:i], factors[i + 1 :]))
                return dim, outer, inner
    return None


class Draws:
    """What a function draws for the outputs with the indices `judged`."""

    def __init__(self, names: Names, growth: Growth, judged: Collection[int]):
        self._growth = growth
        self.by_number: list[ByNumber] = []
        self.refused: list[tuple[Step, str]] = []  # what draws for rows but cannot follow their numbers, and why
        self.wrong: tuple[Step, str] | None = None  # the first that needs the numbers of rows but cannot have them, and why
        self.is_random = False  # whether anything may be drawn
        needed = names.needed(judged)
        self._numbers = names.needed(judged, with_own_indices=False)
        for step in steps_of(names.root):
            self.is_random |= step.name in ("random_bits", "random_unwrap", *_AT_ONCE)
            self.is_random |= not step.is_known and any(is_key(value.aval) for value in step.ins)
            if needed.isdisjoint(map(id, step.outs)):
                continue
            made = self._by_number(names.places.get(id(step.eqn), -1), step)
            if why := self._why_refused(step, made):
                if step.name in (*_DRAWS, *_AT_ONCE):
                    self.refused.append((step, why))
                else:
                    self.wrong = self.wrong or (step, why)
            elif made is not None:
                self.by_number.append(made)

    def _by_number(self, place: int, step: Step) -> ByNumber | None:
        growth = self._growth
        if step.name == "iota":
            dim = step.outs[0].dims[step.eqn.params["dimension"]]
            if growth.has_rows([dim]) and id(step.outs[0]) in self._numbers:
                return ByNumber(place, factors_of(growth, [dim]))
        elif step.name in _DRAWS and growth.has_rows(_own(step)):
            return ByNumber(place, factors_of(growth, _own(step)), is_draw=True)
        elif step.own_columns:
            numbers = step.eqn.params["dimension_numbers"]
            of = numbers.start_index_map if step.name == "gather" else numbers.scatter_dims_to_operand_dims
            table, indices = step.ins[:2]
            dims = {column: flat(table.dims[of[column]]) for column in step.own_columns}
            rows = [
                OwnColumn(column, of[column], *_place(indices.dims, dim))
                for column, dim in dims.items()
                if growth.has_rows([dim])
            ]
            return ByNumber(place, columns=tuple(rows)) if rows else None
        return None

    def _why_refused(self, step: Step, made: ByNumber | None) -> str:
        if step.name in _AT_ONCE and self._growth.has_rows(_own(step)):
            return f"`{step.name}` draws for all rows at once"
        if made is None:
            return ""
        if made.place < 0:
            return "it is inside a custom derivative"
        is_usual = not step.ins or step.ins[0].aval.dtype.name == "key<fry>"
        if step.name in _DRAWS and not (is_usual and getattr(jax.config, "jax_threefry_partitionable", False)):
            return "its key is not one of JAX's default kind"
        if len(self._growth.rows) > 1 and not step.own_columns:
            return "a reshape divides the rows"
        return ""


def _place(dims: Sequence[Dim], of: Dim) -> tuple[int, int]:
    """Returns which of some dims has another one as its factor, and how many entries that factor's entries have each."""
    return next(
        (i, math.prod(atom.size for atom in dim[start + len(of) :]))
        for i, dim in enumerate(map(flat, dims))
        for start in range(len(dim))
        if dim[start : start + len(of)] == of
    )


def _own(step: Step) -> Sequence[Dim]:
    """Returns the dims of a draw that are not those of its keys."""
    return step.outs[0].dims[len(step.ins[0].dims) if step.ins else 0 :]
