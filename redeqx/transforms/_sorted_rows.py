"""What follows a sort of tokens over all rows of the batch: whether the sorted rows may be kept in any order.

`SortedRows.of` follows a sort through the equations that use what is sorted, and says how each is computed if the rows are
in another order. `_sort_by_shard` chooses the order, and computes them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..dims import Related, is_elementwise
from ..tracing import Body, all_inside, insides, run, variables

PRODUCTS = ("ragged_dot_general", "grouped_matmul", "grouped_matmul_gradient")
_ANY_ORDER = {*(f"reduce_{of}" for of in ("sum", "max", "min", "prod", "and", "or", "xor")), "dot_general"}
_SCATTERS = {"scatter-add", "scatter_add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"}
_MAX_INDICES = 2**24
_RESHAPES = ("reshape", "broadcast_in_dim", "squeeze", "convert_element_type")


class _Unknown(Exception):
    """Raised if an equation may compute something else for sorted rows in another order."""


@dataclass
class SortedRows:
    """A sort of keys of rows, `[n]`, and the equations of its jaxpr that use what is sorted.

    **Attributes:**

    - `order`: the index of the output that says which row is at each position.
    - `dims`: the dim of each value that is sorted.
    - `inverses`: values that say at which position each row is.
    - `roles`: how the equations are computed that are not computed as they are: the names of methods of `SortsByShard`.
    - `moved`: for operands of equations that are in the order of the sort, the dim that is sorted.
    """

    eqn: Any
    n: int
    order: int
    body: Body
    n_shards: int
    dims: dict[Any, int] = field(default_factory=dict)
    inverses: set[Any] = field(default_factory=set)
    roles: dict[Any, str] = field(default_factory=dict)
    moved: dict[tuple[Any, Any], int] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, eqn: Any, jaxpr: Any, body: Body, n_shards: int) -> "SortedRows | None":
        """Follows what a sort gives; returns None if something needs its order, or no grouped matmul is reached."""
        n = eqn.outvars[0].aval.shape[0]
        order = next((i for i, atom in enumerate(eqn.invars) if _is_range(body, atom)), None)
        if order is None or n > _MAX_INDICES:
            return None
        sort = cls(eqn, n, order, body, n_shards)
        sort.roles[eqn] = "sort"
        sort.dims.update(dict.fromkeys(eqn.outvars, 0))
        sort.known[eqn.outvars[order]] = np.arange(n, dtype=eqn.outvars[order].aval.dtype)
        try:
            for each in jaxpr.eqns[jaxpr.eqns.index(eqn) + 1 :]:
                if any(var in sort.dims or var in sort.inverses for var in variables(each.invars)):
                    sort._follow(each)
        except _Unknown:
            return None
        if any(var in sort.dims or var in sort.inverses for var in variables(jaxpr.outvars)):
            return None
        return sort if any(each.primitive.name in PRODUCTS for each in sort.roles) else None

    def dim(self, atom: Any) -> int | None:
        return self.dims.get(atom) if variables([atom]) else None

    def _follow(self, eqn: Any) -> None:
        name, dims = eqn.primitive.name, list(map(self.dim, eqn.invars))
        if self.inverses.intersection(variables(eqn.invars)):
            return self._follow_inverse(eqn, dims)
        if name == "sort" and self._inverts(eqn):
            self.roles[eqn] = "inverse"
            self.inverses.add(eqn.outvars[1])
            self.known[eqn.outvars[1]] = np.arange(self.n, dtype=eqn.outvars[1].aval.dtype)
            return None
        try:
            if name == "gather" and dims[0] is None:
                return self._follow_lookup(eqn)
            if name in (*_SCATTERS, "scatter") and dims[0] is None and dims[1] is not None:
                return self._follow_scatter(eqn)
            if name in PRODUCTS:
                return self._follow_product(eqn)
            return self._follow_any(eqn, dims)
        except _Unknown:
            if any(dim is not None and len(var.aval.shape) > 1 for var, dim in zip(eqn.invars, dims, strict=True)):
                raise
            for var in eqn.outvars:
                self.dims.pop(var, None)
            self.roles[eqn] = "whole"  # keys and indices are few bytes
        return None

    def _inverts(self, eqn: Any) -> bool:
        is_argsort = len(eqn.invars) == 2 and eqn.params["num_keys"] == 1 and len(eqn.outvars[0].aval.shape) == 1
        return is_argsort and _is_range(self.body, eqn.invars[1]) and self._is_same(eqn.invars[0])

    def _follow_inverse(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """Positions of rows may be normalized and reshaped, and used to look up what is sorted."""
        if eqn.primitive.name == "gather" and dims == [0, None] and _is_of_rows(eqn) and self._is_same(eqn.invars[1]):
            self.roles[eqn] = "look_up"
            return
        if any(dim is not None for dim in dims) or not (is_elementwise(eqn) or eqn.primitive.name in _RESHAPES):
            raise _Unknown
        self.inverses.update(eqn.outvars)

    def _follow_lookup(self, eqn: Any) -> None:
        """Rows looked up by an index that is sorted."""
        places = _index_dims(eqn.params["dimension_numbers"].offset_dims, len(eqn.outvars[0].aval.shape))
        index_dim = self.dims[eqn.invars[1]]
        if eqn.params["dimension_numbers"].start_indices_batching_dims or index_dim >= len(places):
            raise _Unknown
        self.dims[eqn.outvars[0]] = places[index_dim]
        if _is_of_rows(eqn) and index_dim == 0 and len(places) == 1 and self._stays(eqn.invars[1], eqn.invars[0]):
            self.roles[eqn] = "look_up"
            self._follow_copies(eqn.invars[0])

    def _follow_copies(self, atom: Any) -> None:
        """Rows that are looked up by a constant index before they are sorted, once for each choice."""
        eqn = self.body.producer(atom)
        if eqn is None or eqn.primitive.name != "gather" or not _is_of_rows(eqn):
            return
        if self.body.is_constant(eqn.invars[1]) and self._stays(eqn.invars[1], eqn.invars[0]):
            self.roles[eqn] = "look_up"

    def _follow_scatter(self, eqn: Any) -> None:
        """Rows written to, or added at, indices that are sorted."""
        numbers, (x, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
        places = _index_dims(numbers.update_window_dims, len(updates.aval.shape))
        if numbers.scatter_indices_batching_dims or self.dims[indices] >= len(places):
            raise _Unknown
        if eqn.primitive.name == "scatter" and not (eqn.params["unique_indices"] or self._is_injective(indices)):
            raise _Unknown
        self._move(eqn, {2: places[self.dims[indices]]})
        is_simple = (
            len(places) == 1
            and numbers.update_window_dims == tuple(range(1, len(updates.aval.shape)))
            and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
            and updates.aval.shape[1:] == x.aval.shape[1:]
        )
        self.roles[eqn] = "scatter" if is_simple and self._stays(indices, x) else "other"

    def _follow_product(self, eqn: Any) -> None:
        is_primitive = "setting" in eqn.params
        is_gradient = eqn.primitive.name == "grouped_matmul_gradient"
        rows: tuple[int, ...] = (1,)
        if is_primitive and eqn.invars[0].aval.shape[0] != 1:
            raise _Unknown
        if not is_primitive:
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (contracted, batch), rows = numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions)
            if batch[0] or eqn.params["group_offset"] is not None or len(eqn.invars[2].aval.shape) > 1:
                raise _Unknown
            is_gradient = rows[0] in contracted[0]
            if len(contracted[0]) > 1 and is_gradient:
                raise _Unknown
            if not is_gradient and min(set(range(len(eqn.invars[0].aval.shape))) - set(contracted[0])) != rows[0]:
                raise _Unknown
        second = contracted[1][0] if is_gradient and not is_primitive else 1
        if self.dim(eqn.invars[2]) is not None or (not is_gradient and self.dim(eqn.invars[1]) is not None):
            raise _Unknown
        self._move(eqn, {0: rows[0], **({1: second} if is_gradient else {})})
        self.roles[eqn] = "other"  # computed by the rule of grouped matmuls
        if not is_gradient:
            self.dims[eqn.outvars[0]] = 1 if is_primitive else 0

    def _follow_any(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """An equation that treats all entries of the sorted dim alike."""
        if eqn.effects:
            raise _Unknown
        if insides(eqn) or eqn.primitive.name.startswith("custom_"):
            if not all(map(_is_elementwise_inside, all_inside(eqn))):
                raise _Unknown
            (dim,) = {dim for dim in dims if dim is not None}
            shapes = {atom.aval.shape for atom in (*eqn.invars, *eqn.outvars) if atom.aval.shape}
            if len(shapes) > 1:
                raise _Unknown
            self._move(eqn, {i: dim for i, atom in enumerate(eqn.invars) if atom.aval.shape})
            self.dims.update(dict.fromkeys(eqn.outvars, dim))
            return
        related = Related(eqn)
        sorted_dims = {tuple(related.ins[i][dim]) for i, dim in enumerate(dims) if dim is not None}
        if len(sorted_dims) != 1:
            raise _Unknown
        (factors,) = sorted_dims
        places = dict[int, int]()
        for i, of_operand in enumerate(related.ins):
            found = [dim for dim, each in enumerate(of_operand) if not set(factors).isdisjoint(each)]
            is_mixed = not set(found).isdisjoint(related.combined(i)) and eqn.primitive.name not in _ANY_ORDER
            if is_mixed or len(found) > 1 or any(tuple(of_operand[dim]) != factors for dim in found):
                raise _Unknown
            if found and eqn.invars[i].aval.shape[found[0]] == self.n:
                places[i] = found[0]
        self._move(eqn, places)
        for var, of_output in zip(eqn.outvars, related.outs, strict=True):
            found = [dim for dim, each in enumerate(of_output) if not set(factors).isdisjoint(each)]
            if len(found) > 1 or any(tuple(of_output[dim]) != factors for dim in found):
                raise _Unknown
            if found:
                self.dims[var] = found[0]
            elif eqn.primitive.name not in _ANY_ORDER:
                raise _Unknown

    def _move(self, eqn: Any, places: Mapping[int, int]) -> None:
        """Notes the operands whose dims are to be arranged, and checks those that are."""
        for i, place in places.items():
            atom = eqn.invars[i]
            if (dim := self.dim(atom)) is None and variables([atom]) and not _is_constant_along(self.body, atom, place):
                self.moved[eqn, atom] = place
                self.roles.setdefault(eqn, "other")
            elif dim not in (None, place):
                raise _Unknown

    # --- indices ----------------------------------------------------------------------------------------------------------

    def _indices(self, atom: Any) -> np.ndarray | None:
        """Returns an index for each row, in the order of the rows; None if it depends on more than the order."""
        try:
            return np.asarray(self._value(atom)).reshape(self.n, -1)[:, 0]
        except (_Unknown, ValueError):
            return None

    def _value(self, atom: Any) -> Any:
        if not variables([atom]):
            return atom.val
        if atom not in self.known:
            if self.body.is_constant(atom):
                return self.body.value(atom)
            eqn = self.body.producer(atom)
            if (atom not in self.dims and atom not in self.inverses) or eqn is None or insides(eqn):
                raise _Unknown
            ins = list(map(self._value, eqn.invars))
            with jax.ensure_compile_time_eval():
                self.known.update(zip(eqn.outvars, run(eqn, ins), strict=True))
        return self.known[atom]

    def _is_same(self, atom: Any) -> bool:
        """Whether the indices are those of the rows themselves."""
        found = self._indices(atom)
        return found is not None and np.array_equal(found, np.arange(self.n))

    def _is_injective(self, atom: Any) -> bool:
        found = self._indices(atom)
        return found is not None and len(np.unique(found)) == self.n

    def _stays(self, indices: Any, x: Any) -> bool:
        """Whether each row's index into `x` is among the rows of its own shard."""
        n_of, found = x.aval.shape[0], self._indices(indices)
        if found is None or n_of % self.n_shards or math.prod(indices.aval.shape) != self.n:
            return False
        return np.array_equal(found // (n_of // self.n_shards), np.arange(self.n) // (self.n // self.n_shards))


def _is_range(body: Body, atom: Any) -> bool:
    eqn = body.producer(atom) if variables([atom]) else None
    return eqn is not None and eqn.primitive.name == "iota" and len(eqn.outvars[0].aval.shape) == 1


def _is_constant_along(body: Body, atom: Any, dim: int) -> bool:
    """Whether a value is a broadcast along a dim, or has size 1 there."""
    eqn = body.producer(atom)
    if atom.aval.shape[dim] == 1:
        return True
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    sources = eqn.params["broadcast_dimensions"]
    return dim not in sources or eqn.invars[0].aval.shape[sources.index(dim)] == 1


def _is_elementwise_inside(closed: Any) -> bool:
    return all(
        all(map(_is_elementwise_inside, inner)) if (inner := all_inside(eqn)) else is_elementwise(eqn)
        for eqn in closed.jaxpr.eqns
    )


def _index_dims(others: Sequence[int], n: int) -> list[int]:
    """Returns the dims of a gather's output, or of a scatter's updates, that are those of the indices."""
    return [dim for dim in range(n) if dim not in others]


def _is_of_rows(eqn: Any) -> bool:
    """Whether a gather looks up whole rows of its operand, by one index each."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    n = len(eqn.outvars[0].aval.shape)
    return (
        numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(n - len(shape) + 1, n))
    )
