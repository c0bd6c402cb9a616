"""What changes between two traces of a function for different numbers of rows, and whether it is explained.

A dim that grows must be named as rows. A number that changes must be a power of the number of rows, such as the `1 / n` of a
mean. What is not explained is not known to be the same function of each row.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tracing import Env, insides
from ._atoms import Dim, Step, Value, flat, steps_of
from ._names import Names

_SIZES = {  # parameters that are sizes of dims, which the names explain
    *("shape", "new_sizes", "slice_sizes", "limit_indices", "length", "sizes", "window_dimensions", "reps"),
    *("feature_group_count", "batch_group_count", "axis_size", "__axis_size", "split"),
}


class Growth:
    """What changes with the number of rows, between the names of a function for one number and for another.

    **Attributes:**

    - `is_comparable`: whether the two traces have the same equations.
    - `is_grouped`: whether reshapes divide the rows into groups of constant size, which may be mixed inside.
    - `rows`: the atoms of the rows; of their groups, if they are grouped.
    - `group`: parts of the rows are a multiple of this: the number of consecutive rows of a group.
    """

    def __init__(self, names: Names, other: Names):
        # By the id of a constant that changes, d if it is proportional to the d-th power of the number of rows, or None.
        self.degrees: dict[int, int | None] = {}
        self.unexplained: set[int] = set()  # the ids of values that are not known to be the same function of rows
        ours, others = list(steps_of(names.root)), list(steps_of(other.root))
        has_same_steps = [s.name for s in ours] == [s.name for s in others]
        self.rows, self.group, self.is_grouped = frozenset(names.rows), 1, False
        self.is_comparable = has_same_steps and len(names.rows) == len(other.rows)
        if not self.is_comparable:
            return
        varies = [one.size != two.size for one, two in zip(names.rows, other.rows, strict=True)]
        if varies == sorted(varies, reverse=True):  # the outer factors
            self.rows = frozenset(names.rows[: sum(varies)])
        self.is_grouped = len(self.rows) < len(names.rows)
        if len(names.rows) == 1:
            _name_what_grows(names, other, ours, others)
        self.group = math.prod(atom.size for atom, grows in zip(names.rows, varies, strict=True) if not grows)
        self._sizes = {one: two.size for one, two in zip(names.rows, other.rows, strict=True)}
        self._weights = names.of_weights
        for one, two in zip(ours, others, strict=True):
            for value, its in zip(one.ins, two.ins, strict=True):
                self._compare(value, its)
            values = [(v, its) for v, its in zip(one.ins, two.ins, strict=True) if id(v) in self._weights]
            is_same = self._is_same(one, two) and all(self._is_named(value, its.aval.shape) for value, its in values)
            for value, its in zip(one.outs, two.outs, strict=True):
                if not is_same or not self._is_named(value, its.aval.shape):
                    self.unexplained.add(id(value))
        for value, its in zip(names.root.outs, other.root.outs, strict=True):
            self._compare(value, its)

    def has_rows(self, dims: Iterable[Dim]) -> bool:
        """Whether one of these dims has an atom of the rows."""
        return any(atom in self.rows for dim in dims for atom in flat(dim))

    def grows(self, dims: Iterable[Dim]) -> bool:
        """Whether one of these dims grows with the rows, as a constant factor of them does not."""
        return any(self._sizes.get(atom, atom.size) != atom.size for dim in dims for atom in flat(dim))

    def _compare(self, value: Value, its: Value) -> None:
        """Notes a constant that changes."""
        if value.literal is None and its.literal is None:
            return
        if not self._is_named(value, its.aval.shape):
            self.degrees[id(value)] = None
        elif id(value) not in self.degrees and value.literal is not its.literal:
            degree = degree_of(value.literal, its.literal)
            if degree != 0:
                self.degrees[id(value)] = degree

    def _is_named(self, value: Value, its_shape: Sequence[int]) -> bool:
        """Whether the dims that grow are rows, and no others are. Weights and constants have no rows."""
        for dim, size, its_size in zip(value.dims, value.aval.shape, its_shape, strict=True):
            if not self._is_rows(dim, size, its_size):
                return False
            is_fixed = value.literal is not None or id(value) in self._weights
            if is_fixed and size == its_size and dim and self.has_rows([dim]):
                return False
        return True

    def _is_same(self, one: Step, two: Step) -> bool:
        """Whether two equations differ in nothing but sizes."""
        if one.name == "scan" and (length := one.eqn.params["length"]) != two.eqn.params["length"]:
            return self._is_rows(one.scanned, length, two.eqn.params["length"])
        return list(numbers_of(one.eqn)) == list(numbers_of(two.eqn))

    def _is_rows(self, dim: Dim, size: int, its_size: int) -> bool:
        """Whether a dim grows as the rows among its atoms do."""
        of = [atom for atom in flat(dim) if atom in self._sizes]
        return size * math.prod(self._sizes[atom] for atom in of) == its_size * math.prod(atom.size for atom in of)


def _name_what_grows(names: Names, other: Names, ours: Sequence[Step], others: Sequence[Step]) -> None:
    """Names as rows the dims that have an entry for each row, but meet no row of the batch, such as those of the noise from
    which a GAN makes its examples. Which entry belongs to which row is then free."""
    sizes = names.rows[0].size, other.rows[0].size
    for one, two in zip(ours, others, strict=True):
        for value, its in zip((*one.ins, *one.outs), (*two.ins, *two.outs), strict=True):
            for dim, its_dim in zip(value.dims, its.dims, strict=True):
                for atom, its_atom in zip(flat(dim), flat(its_dim), strict=False):
                    if (atom.size, its_atom.size) == sizes:
                        names.unify(names.rows, (atom,))
                        other.unify(other.rows, (its_atom,))


def numbers_of(eqn: Any) -> Iterator[Any]:
    """Yields the numbers and words among an equation's parameters that are not sizes."""
    values = [value for name, value in sorted(eqn.params.items()) if name not in _SIZES]
    for value in jax.tree.leaves(values, is_leaf=lambda x: not isinstance(x, tuple | list)):
        if isinstance(value, np.ndarray):
            yield from value.ravel().tolist()
        elif isinstance(value, bool | int | float | str | np.number):  # not None, which a mesh replaces by a sharding
            yield value


def degree_of(one: Any, two: Any) -> int | None:
    """Returns d if a constant is proportional to the d-th power of the number of rows, from its values for one number and
    for twice as many; None if there is no such d."""
    return {1: 0, 2: 1, 0.5: -1, 4: 2, 0.25: -2}.get(_factor(one, two))


def _factor(one: Any, two: Any) -> Any:
    """Returns the number by which a constant is multiplied to give another, or None if there is none. An array that grows
    has the same number in all of its entries."""
    if one is two:
        return 1
    if one is None or two is None:
        return None
    if jnp.issubdtype(jax.dtypes.result_type(one), jax.dtypes.extended):  # keys
        return 1
    x, y = np.asarray(one), np.asarray(two)
    if x.dtype != y.dtype or x.ndim != y.ndim:
        return None
    if x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return 1
    if not x.size or not y.size or (x != x.flat[0]).any() or (y != y.flat[0]).any():
        return None
    a, b = x.flat[0].item(), y.flat[0].item()
    return 1 if a == b else b / a if a else None


def have_same_constants(found: Sequence[tuple[Any, Any]], closed: Any, ratio: float) -> bool:
    """Whether the constants of a function for some rows are those for other rows, as far as these are known. `found` has
    pairs of constants, for one number of rows and for twice as many; `closed` is the function's closed jaxpr in normal form
    for `ratio` times the first number."""

    def is_same(pair: tuple[Any, Any], y: Any) -> bool:
        x, other = pair
        if isinstance(x, str | tuple):
            return x == y or x != other
        if isinstance(x, list):  # sizes that grow are those of rows, which the names explain
            return len(x) == len(y) and all(a == c or a != b for a, b, c in zip(x, other, y, strict=False))
        if (degree := degree_of(x, other)) is None:
            return True
        factor, tolerance = _factor(x, y), _rounding(x) if degree else 0
        return factor is not None and abs(factor - ratio**degree) <= tolerance * abs(factor)

    its = list(constants_of(closed))
    return len(its) == len(found) and all(map(is_same, found, its))


def _rounding(x: Any) -> float:
    dtype = jax.dtypes.result_type(x)
    return max(1e-6, 2 * float(jnp.finfo(dtype).eps)) if jnp.issubdtype(dtype, jnp.inexact) else 1e-12


def constants_of(closed: Any) -> Iterator[Any]:
    """Yields, for each equation of a closed jaxpr and of those inside, its name, the numbers among its parameters, the sizes
    of its outputs as a list, and its constants."""
    constants, none = Env(zip(closed.jaxpr.constvars, closed.consts, strict=True)), object()
    for eqn in closed.jaxpr.eqns:
        yield eqn.primitive.name
        yield tuple(numbers_of(eqn))
        yield [size for var in eqn.outvars for size in getattr(var.aval, "shape", ())]
        found = (constants.get(atom, none) for atom in eqn.invars)
        yield from (value for value in found if value is not none)
        for inner in insides(eqn):
            yield from constants_of(inner.closed)
