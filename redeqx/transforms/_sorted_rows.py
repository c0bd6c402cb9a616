"""What follows a sort of tokens, of all rows of the batch or of each: whether the sorted rows may be kept in any order.

`SortedRows.of` follows a sort through the equations that use what is sorted, and says how each is computed if the rows are
in another order. `_sort_by_shard` chooses the order, and computes them.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from ..dims import REDUCTIONS, SCATTERS, Related, is_elementwise
from ..machine import n_batch_shards
from ..tracing import GROUPED, Body, Env, all_inside, insides, is_variable, run, variables

_ANY_ORDER = {*REDUCTIONS, "dot_general"}
_MAX_INDICES = 2**24
# How `SortsByShard` computes an equation: the sort; its inverse; a lookup or a scatter of rows that are all on a device's
# own shard; as it is written, with all operands in the order of the shards; or in the order of the sort.
Role = Literal["sort", "inverse", "own lookup", "own scatter", "as written", "in sort order"]
RESHAPES = ("reshape", "broadcast_in_dim", "squeeze")
WITH_CASTS = (*RESHAPES, "convert_element_type")


class _Unknown(Exception):
    """Raised if an equation may compute something else for sorted rows in another order."""


@dataclass
class SortedRows:
    """A sort of keys of rows, `[n]`, or of each sequence's, `[batch, n]`, and the equations of its jaxpr that use what is
    sorted."""

    eqn: Any
    n: int
    order: int  # the index of the output that says which row is at each position
    body: Body
    axis: str  # the mesh axis that splits what is sorted, together with the batch's or after them
    n_shards: int
    after: Collection[Any]  # the equations of its jaxpr after it
    dims: Env = field(default_factory=lambda: Env(literal=lambda _: None))  # the dim of each value that is sorted
    inverses: set[Any] = field(default_factory=set)  # values that say at which position each row is
    roles: dict[Any, Role] = field(default_factory=dict)  # how the equations are computed that the other order changes
    moved: dict[tuple[Any, Any], int] = field(default_factory=dict)  # the dim that is sorted, of operands in its order
    known: dict[Any, Any] = field(default_factory=dict)  # values that depend on the order alone, in the order of the rows

    @classmethod
    def of(cls, eqn: Any, jaxpr: Any, body: Body, mesh: Mesh, axis: str) -> "SortedRows | None":
        """Follows what a sort gives. Returns None if something needs its order, no grouped matmul is reached, or the devices
        do not divide it."""
        shape = eqn.outvars[0].aval.shape
        n, along = shape[-1], len(shape) - 1
        order = next((i for i, atom in enumerate(eqn.invars) if _is_range(body, atom, along)), None)
        if order is None or math.prod(shape) > _MAX_INDICES or along > 1 or eqn.params["dimension"] != along:
            return None
        n_shards = mesh.shape[axis] * (1 if along else n_batch_shards(mesh))
        if n_shards == 1 or n % n_shards:
            return None
        after = jaxpr.eqns[jaxpr.eqns.index(eqn) + 1 :]
        sort = cls(eqn, n, order, body, axis, n_shards, frozenset(after))
        sort.roles[eqn] = "sort"
        sort.dims.update(dict.fromkeys(eqn.outvars, along))
        sort.known[eqn.outvars[order]] = sort._range(eqn.outvars[order])
        try:
            for each in after:
                if any(var in sort.dims or var in sort.inverses for var in variables(each.invars)):
                    sort._follow(each)
        except _Unknown:
            return None
        if any(var in sort.dims or var in sort.inverses for var in variables(jaxpr.outvars)):
            return None
        return sort if any(each.primitive.name in GROUPED for each in sort.roles) else None

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the dims before the one that is sorted: the batch, or none."""
        return self.eqn.outvars[0].aval.shape[:-1]

    def _range(self, var: Any) -> np.ndarray:
        return np.broadcast_to(np.arange(self.n, dtype=var.aval.dtype), (*self.lead, self.n))

    def dim(self, atom: Any) -> int | None:
        return self.dims.get(atom)

    def _follow(self, eqn: Any) -> None:
        name, dims = eqn.primitive.name, list(map(self.dim, eqn.invars))
        if self.inverses.intersection(variables(eqn.invars)):
            return self._follow_inverse(eqn, dims)
        if name == "sort" and self._inverts(eqn):
            self.roles[eqn] = "inverse"
            self.inverses.add(eqn.outvars[1])
            self.known[eqn.outvars[1]] = self._range(eqn.outvars[1])
            return None
        try:
            if name == "gather" and dims[0] is None:
                return self._follow_lookup(eqn, dims)
            if name in SCATTERS and dims[0] is None and dims[1] is not None:
                return self._follow_scatter(eqn, dims)
            if name in GROUPED:
                return self._follow_product(eqn, dims)
            return self._follow_any(eqn, dims)
        except _Unknown:
            sorted_vars = [var for var, dim in zip(eqn.invars, dims, strict=True) if dim is not None]
            if any(len(var.aval.shape) > len(self.lead) + 1 for var in sorted_vars):
                raise
            for var in eqn.outvars:
                self.dims.pop(var, None)
            self.roles[eqn] = "in sort order"  # keys and indices are few bytes
        return None

    def _inverts(self, eqn: Any) -> bool:
        along = len(self.lead)
        is_argsort = len(eqn.invars) == 2 and eqn.params["num_keys"] == 1 and eqn.params["dimension"] == along
        is_argsort = is_argsort and eqn.outvars[0].aval.shape == (*self.lead, self.n)
        return is_argsort and _is_range(self.body, eqn.invars[1], along) and self._is_same(eqn.invars[0])

    def _follow_inverse(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """Positions of rows may be normalized and reshaped, and used to look up what is sorted."""
        is_lookup = eqn.primitive.name == "gather" and dims == [len(self.lead), None] and self._is_of_rows(eqn)
        if is_lookup and self._is_same(eqn.invars[1]):
            self.roles[eqn] = "own lookup"
            return
        if any(dim is not None for dim in dims) or not (is_elementwise(eqn) or eqn.primitive.name in WITH_CASTS):
            raise _Unknown
        self.inverses.update(eqn.outvars)

    def _follow_lookup(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """Rows looked up by an index that is sorted."""
        self._follow_any(eqn, dims)
        (x, indices), (out,) = eqn.invars, eqn.outvars
        is_of_rows = self._is_of_rows(eqn) and self.dims[indices] == len(self.lead) and x.aval.ndim == out.aval.ndim
        if is_of_rows and self._stays(indices, x):
            self.roles[eqn] = "own lookup"
            self._follow_copies(x)

    def _follow_copies(self, atom: Any) -> None:
        """Rows that are looked up by a constant index before they are sorted, once for each choice."""
        eqn = self.body.producer(atom)
        if eqn is None or eqn.primitive.name != "gather" or not self._is_of_rows(eqn):
            return
        if self.body.is_constant(eqn.invars[1]) and self._stays(eqn.invars[1], eqn.invars[0]):
            self.roles[eqn] = "own lookup"

    def _follow_scatter(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """Rows written to, or added at, indices that are sorted."""
        numbers, (x, indices, updates), along = eqn.params["dimension_numbers"], eqn.invars, len(self.lead)
        is_unique = eqn.primitive.name != "scatter" or eqn.params["unique_indices"] or self._is_injective(indices)
        if not is_unique or tuple(numbers.scatter_indices_batching_dims) != tuple(range(along)):
            raise _Unknown
        self._follow_any(eqn, dims, in_any_order=True)
        is_simple = (
            tuple(numbers.operand_batching_dims) == tuple(range(along))
            and tuple(numbers.update_window_dims) == tuple(range(along + 1, updates.aval.ndim))
            and tuple(numbers.inserted_window_dims) == tuple(numbers.scatter_dims_to_operand_dims) == (along,)
            and updates.aval.shape[along + 1 :] == x.aval.shape[along + 1 :]
        )
        self.roles[eqn] = "own scatter" if is_simple and self._stays(indices, x) else "as written"

    def _follow_product(self, eqn: Any, dims: Sequence[int | None]) -> None:
        """A grouped matmul of sorted rows, or the gradient of its matrices, with the groups of this sort alone."""
        (x, _, sizes), along, numbers = eqn.invars, len(self.lead), eqn.params.get("ragged_dot_dimension_numbers")
        (rows,), is_gradient, is_primitive = Related(eqn).combined(0, "order"), Related(eqn).group is None, numbers is None
        is_known = dims[0] in (None, rows) and dims[2] is None and (is_gradient or dims[1] is None)
        if is_primitive:
            is_known = is_known and x.aval.shape[0] == math.prod(self.lead)
        else:
            is_known = is_known and not numbers.dot_dimension_numbers[1][0] and eqn.params["group_offset"] is None
            is_known = is_known and len(sizes.aval.shape) <= along + 1
        if not is_known or (self.lead and (is_gradient or sizes.aval.shape[:-1] != self.lead)):
            raise _Unknown
        self._follow_any(eqn, [rows, *dims[1:]], in_any_order=True)
        self.roles[eqn] = "as written"  # computed by the rule of grouped matmuls
        if not is_gradient and self.dim(eqn.outvars[0]) != (1 if is_primitive else along):
            raise _Unknown

    def _follow_any(self, eqn: Any, dims: Sequence[int | None], *, in_any_order: bool = False) -> None:
        """An equation that treats all entries of the sorted dim alike, also if it sums or drops them `in_any_order`."""
        in_any_order = in_any_order or eqn.primitive.name in _ANY_ORDER
        if eqn.effects:
            raise _Unknown
        if insides(eqn) or eqn.primitive.name.startswith("custom_"):
            if not is_elementwise_inside(eqn):
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
        lead = {tuple(related.ins[i][: len(self.lead)]) for i, dim in enumerate(dims) if dim is not None}
        for i, of_operand in enumerate(related.ins):
            found = [dim for dim, each in enumerate(of_operand) if not set(factors).isdisjoint(each)]
            is_mixed = not set(found).isdisjoint(related.combined(i)) and not in_any_order
            if is_mixed or len(found) > 1 or any(tuple(of_operand[dim]) != factors for dim in found):
                raise _Unknown
            if found and tuple(of_operand[: len(self.lead)]) not in lead:
                raise _Unknown  # all entries of the batch share it
            if found and eqn.invars[i].aval.shape[found[0]] == self.n:
                places[i] = found[0]
        self._move(eqn, places)
        for var, of_output in zip(eqn.outvars, related.outs, strict=True):
            found = [dim for dim, each in enumerate(of_output) if not set(factors).isdisjoint(each)]
            if len(found) > 1 or any(tuple(of_output[dim]) != factors for dim in found):
                raise _Unknown
            if found and tuple(of_output[: len(self.lead)]) not in lead:
                raise _Unknown  # what is arranged later is taken to have the batch in front
            if found:
                self.dims[var] = found[0]
            elif not in_any_order:
                raise _Unknown

    def _move(self, eqn: Any, places: Mapping[int, int]) -> None:
        """Notes the operands whose dims are to be arranged, and checks those that are."""
        for i, place in places.items():
            atom = eqn.invars[i]
            if self.dim(atom) is None:
                self._follow_back(atom)
            if (dim := self.dim(atom)) is None and is_variable(atom) and not is_constant_along(self.body, atom, [place]):
                self.moved[eqn, atom] = place
                self.roles.setdefault(eqn, "as written")
            elif dim not in (None, place):
                raise _Unknown

    def _follow_back(self, atom: Any) -> None:
        """A product of equal rows with the matrices of their groups, such as a bias, that nothing else reads."""
        chain = list[Any]()
        while (eqn := self.body.producer(atom)) is not None and eqn in self.after and len(self.body.readers(atom)) == 1:
            chain.append(eqn)
            if eqn.primitive.name not in WITH_CASTS:
                break
            atom = eqn.invars[0]
        if chain and chain[-1].primitive.name in GROUPED and self.body.number(chain[-1].invars[0]) is not None:
            for each in reversed(chain):
                self._follow(each)

    # --- indices ----------------------------------------------------------------------------------------------------------

    def indices(self, atom: Any) -> np.ndarray | None:
        """Returns an index for each row, in the order of the rows; None if it depends on more than the order."""
        try:
            found = np.asarray(self._value(atom)).reshape(math.prod(self.lead), self.n, -1)[:, :, 0]
        except (_Unknown, ValueError):
            return None
        return found[0] if (found == found[0]).all() else None

    def _value(self, atom: Any) -> Any:
        if not is_variable(atom):
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
        found = self.indices(atom)
        return found is not None and np.array_equal(found, np.arange(self.n))

    def _is_injective(self, atom: Any) -> bool:
        found = self.indices(atom)
        return found is not None and len(np.unique(found)) == self.n

    def _is_of_rows(self, eqn: Any) -> bool:
        """Whether a gather looks up whole rows of its operand, by one index each."""
        numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
        n, along = len(eqn.outvars[0].aval.shape), len(self.lead)
        return (
            tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (along,)
            and tuple(numbers.operand_batching_dims) == tuple(range(along))
            and tuple(eqn.params["slice_sizes"]) == (*[1] * (along + 1), *shape[along + 1 :])
            and tuple(numbers.offset_dims) == tuple(range(n - len(shape) + along + 1, n))
        )

    def _stays(self, indices: Any, x: Any) -> bool:
        """Whether each row's index into `x` is among the rows of its own shard."""
        n_of, found = x.aval.shape[len(self.lead)], self.indices(indices)
        if found is None or n_of % self.n_shards or math.prod(indices.aval.shape) != math.prod((*self.lead, self.n)):
            return False
        return np.array_equal(found // (n_of // self.n_shards), np.arange(self.n) // (self.n // self.n_shards))


def scatter_rows(eqn: Any, x: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """Computes a scatter of rows of one shard, the "own scatter" of all rows, given the index of each of them there."""
    numbers = jax.lax.ScatterDimensionNumbers(tuple(range(1, updates.ndim)), (0,), (0,))
    params = {**eqn.params, "dimension_numbers": numbers, "mode": jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS}
    return run(eqn.replace(params=params), [x, indices[:, None], updates])[0]


def _is_range(body: Body, atom: Any, along: int) -> bool:
    """Whether a value of `along + 1` dims is the numbers of its last dim."""
    eqn, shape = body.producer(atom), getattr(atom.aval, "shape", ())
    if eqn is None or len(shape) != along + 1:
        return False
    if eqn.primitive.name == "broadcast_in_dim" and eqn.params["broadcast_dimensions"] == (along,):
        return eqn.invars[0].aval.shape == shape[along:] and _is_range(body, eqn.invars[0], 0)
    return eqn.primitive.name == "iota" and eqn.params["dimension"] == along


def is_constant_along(body: Body, atom: Any, dims: Iterable[int]) -> bool:
    """Whether a value is a broadcast along these dims, or has size 1 there. Dims that it lacks do not count."""
    eqn, shape = body.producer(atom), atom.aval.shape
    dims = [dim for dim in dims if dim < len(shape) and shape[dim] != 1]
    if not dims or eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return not dims
    sizes = dict(zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True))
    return all(sizes.get(dim, 1) == 1 for dim in dims)


def is_elementwise_inside(eqn: Any, others: Collection[str] = ()) -> bool:
    """Whether an equation is elementwise or of one of the other primitives; of a call, whether all equations in it are."""
    if inside := all_inside(eqn):
        return all(is_elementwise_inside(each, others) for closed in inside for each in closed.jaxpr.eqns)
    return is_elementwise(eqn) or eqn.primitive.name in others


def jaxprs_in(closed: Any) -> list[Any]:
    """Returns a jaxpr and those inside it, without those that compute on shards."""
    inner = [each.closed for eqn in closed.jaxpr.eqns for each in insides(eqn) if each.role != "manual"]
    return [closed.jaxpr, *(jaxpr for each in inner for jaxpr in jaxprs_in(each))]
