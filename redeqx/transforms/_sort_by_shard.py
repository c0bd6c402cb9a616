"""Sorting by shard: tokens that are sorted over rows or positions which devices share stay on their devices.

`x[jnp.argsort(experts)]` sends every row of `x` to another device. A sort is a permutation, and what follows it in a mixture
of experts treats all sorted rows alike: lookups by the sorted indices, elementwise equations, grouped matmuls, and a scatter
or lookup back. So the sorted rows may be kept in any order. This module keeps them in the one in which each device has those
that come from its own tokens, in the order of the sort. The lookups and the scatter are then a device's own, and its part of
a group is the part of the rows that have the places of the group.

This concerns a sort of all tokens of the batch, and, if the sequence axis splits positions, one of each sequence by itself.

The function stays the same, whatever the groups are, even where rows in the end are dropped: places are those in the sort of
all tokens. For them each device sorts all keys, 4 bytes each. What depends on the order otherwise, such as a running sum,
keeps a sort as it is written.

`_sorted_rows` finds what follows a sort, and `_group_matmuls` is the rule that applies this.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..dims import Positions, spread
from ..machine import BATCH_AXES, SEQUENCE, n_batch_shards
from ..tracing import GROUPED, Body, Site, plain, variables
from ._constrain import split_over
from ._exchanged_rows import Exchange
from ._sorted_rows import SortedRows, jaxprs_in, scatter_rows


class SortsByShard:
    """The sorts of a function whose rows stay on their devices, and the equations that this concerns."""

    def __init__(self, mesh: Mesh, sorts: Sequence[SortedRows] = ()):
        self.mesh = mesh
        self._sorts = {eqn: sort for sort in sorts for eqn in sort.roles}
        self._positions: dict[Any, jax.Array] = {}  # of each sort, `[*batch, shards, rows of a shard]`, ascending

    @classmethod
    def of(
        cls, body: Body, n_weights: int, mesh: Mesh, positions: Positions, exchanges: Sequence[Exchange]
    ) -> "SortsByShard":
        """Finds the sorts of a function whose rows reach grouped matmuls. Its first `n_weights` inputs are weights. The rows
        of the sorts in `exchanges` are exchanged over the model axis, which splits them too."""
        n_rows = n_batch_shards(mesh)
        found = [each.sort for each in exchanges]
        sorts = [(eqn, jaxpr) for jaxpr in jaxprs_in(body.closed) for eqn in jaxpr.eqns if eqn.primitive.name == "sort"]
        if n_rows * mesh.shape[SEQUENCE] == 1 or not sorts:
            return cls(mesh, found)
        known, taken = spread(body.closed, n_weights), {eqn for each in exchanges for eqn in each.all}

        def is_split(eqn: Any) -> bool:
            """Whether the devices split what is sorted: all rows, or the positions of each."""
            n_dims, rows = len(eqn.outvars[0].aval.shape), known[eqn][0].rows if eqn in known else ()
            if n_rows > 1 and not any(dim == 0 and parts % n_rows == 0 for dim, parts in rows):
                return False
            return n_dims == 1 or any(positions.dims.get(var, ())[:1] == (1,) for var in variables(eqn.invars))

        for eqn, jaxpr in sorts:
            sort = SortedRows.of(eqn, jaxpr, body, mesh, SEQUENCE) if is_split(eqn) else None
            if sort is not None and taken.isdisjoint(sort.roles):
                found.append(sort)
                taken.update(sort.roles)
        return cls(mesh, found)

    @property
    def is_any(self) -> bool:
        return bool(self._sorts)

    def __contains__(self, eqn: Any) -> bool:
        return eqn in self._sorts

    def is_product(self, eqn: Any) -> bool:
        """Whether an equation is a grouped matmul of sorted rows."""
        return eqn in self._sorts and eqn.primitive.name in GROUPED

    def compute(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any]:
        """Returns the outputs of an equation that is not a grouped matmul."""
        sort = self._sorts[eqn]
        role = sort.roles[eqn]
        if role == "sort":
            return self._sort(sort, eqn, ins, site)
        if role == "inverse":
            return self._inverse(sort, eqn, ins)
        if role == "own lookup":
            return self._look_up(sort, eqn, ins)
        if role == "own scatter":
            return self._scatter(sort, eqn, ins)
        pairs = list(zip(ins, eqn.invars, strict=True))
        if role == "as written":
            return site.rest(eqn, [self._arranged(sort, x, var, eqn) for x, var in pairs])
        return site.rest(eqn, [x if sort.dim(var) is None else self._in_sort_order(sort, x) for x, var in pairs])

    def operands(self, eqn: Any, a: Any, b: Any, sizes: Any) -> tuple[Any, Any, Any]:
        """Returns the operands of a grouped matmul, with the sizes of each shard's part of the groups,
        `[*batch, shards, E]`."""
        sort = self._sorts[eqn]
        a, b = (self._arranged(sort, x, var, eqn) for x, var in zip((a, b), eqn.invars[:2], strict=True))
        positions, ends = self._positions[sort.eqn], jnp.cumsum(sizes.reshape(*sort.lead, 1, 1, -1), axis=-1)
        until = jnp.sum(positions[..., None] < ends, axis=-2, dtype=sizes.dtype)
        return a, b, self._split(sort, jnp.diff(until, axis=-1, prepend=0))

    def axes(self, eqn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the mesh axes that split the batch, and those that split the rows, of a grouped matmul."""
        return (BATCH_AXES, (SEQUENCE,)) if self._sorts[eqn].lead else ((), (*BATCH_AXES, SEQUENCE))

    def positions(self, sort: SortedRows) -> jax.Array:
        """Returns the position of each row in the sort, `[*batch, rows]`, in the order of the shards."""
        return self._positions[sort.eqn].reshape(*sort.lead, -1)

    # --- equations, by their roles -----------------------------------------------------------

    def _sort(self, sort: SortedRows, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any]:
        whole = partial(split_over, mesh=self.mesh, axes={0: BATCH_AXES if sort.lead else None}, others=None)
        outs = list(map(whole, site.rest(eqn, list(map(whole, ins)))))
        place = each_of(_inverse, sort.lead)(outs[sort.order])
        self._positions[eqn] = positions = jnp.sort(self._by_shard(sort, place), axis=-1)
        return [self._split(sort, each_of(_rows_at, sort.lead)(out, positions.reshape(out.shape))) for out in outs]

    def _inverse(self, sort: SortedRows, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        order, shape = self._by_shard(sort, plain(ins[0])), eqn.outvars[0].aval.shape
        found = (jnp.argsort(order, axis=-1).astype(order.dtype) + _starts(sort, order)).reshape(shape)
        return [jnp.broadcast_to(jnp.arange(sort.n, dtype=order.dtype), shape), found][: len(eqn.outvars)]

    def _look_up(self, sort: SortedRows, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Looks up rows that are all on a device's own shard."""
        x, indices = map(plain, ins)
        x, indices = self._by_shard(sort, x), self._by_shard(sort, indices.reshape(*sort.lead, -1))
        found = each_of(_rows_at, (*sort.lead, sort.n_shards))(x, indices - _starts(sort, x))
        return [self._split(sort, found).reshape(eqn.outvars[0].aval.shape)]

    def _scatter(self, sort: SortedRows, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Writes rows that are all on a device's own shard."""
        x, indices, updates = map(plain, ins)
        updates = self._arranged(sort, updates, eqn.invars[2], eqn)
        x, indices, updates = (self._by_shard(sort, x) for x in (x, indices.reshape(*sort.lead, -1), updates))
        scatter = each_of(partial(scatter_rows, eqn), (*sort.lead, sort.n_shards))
        found = scatter(x, indices - _starts(sort, x), updates)
        return [self._split(sort, found).reshape(eqn.outvars[0].aval.shape)]

    # --- orders ------------------------------------------------------------------------------

    def _in_sort_order(self, sort: SortedRows, x: Any) -> jax.Array:
        """Returns keys or indices, which are in the order of the shards, in that of the sort."""

        def placed(x: jax.Array, positions: jax.Array) -> jax.Array:
            return jnp.zeros_like(x).at[positions].set(x, mode="promise_in_bounds", unique_indices=True)

        return each_of(placed, sort.lead)(plain(x), self.positions(sort))

    def _arranged(self, sort: SortedRows, x: Any, var: Any, eqn: Any) -> Any:
        """Returns an operand with its sorted dim in the order of the shards, if it is in that of the sort."""
        dim = sort.moved.get((eqn, var))
        if dim is None:
            return x
        dim -= len(sort.lead)

        def arranged(x: jax.Array, positions: jax.Array) -> jax.Array:
            return jnp.moveaxis(_rows_at(jnp.moveaxis(x, dim, 0), positions), 0, dim)

        return each_of(arranged, sort.lead)(plain(x), self.positions(sort))

    def _by_shard(self, sort: SortedRows, x: jax.Array) -> jax.Array:
        """Returns rows `[*batch, shards, rows of a shard, ...]`."""
        lead = len(sort.lead)
        return self._split(sort, x.reshape(*sort.lead, sort.n_shards, -1, *x.shape[lead + 1 :]))

    def _split(self, sort: SortedRows, x: jax.Array) -> jax.Array:
        """Constrains sorted rows, or shards of them, to be split over devices: after the batch, if each is sorted by
        itself, and together with it otherwise."""
        return split_over(x, self.mesh, {0: BATCH_AXES, 1: sort.axis} if sort.lead else {0: (*BATCH_AXES, sort.axis)})


def each_of(fn: Callable[..., Any], lead: Sequence[int]) -> Callable[..., Any]:
    """Returns a function, mapped over leading dims."""
    for _ in lead:
        fn = jax.vmap(fn)
    return fn


def _inverse(order: jax.Array) -> jax.Array:
    places = jnp.arange(len(order), dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(places, mode="promise_in_bounds", unique_indices=True)


def _starts(sort: SortedRows, by_shard: jax.Array) -> jax.Array:
    """Returns the first row of each shard, `[shards, 1]`."""
    return jnp.arange(sort.n_shards, dtype=jnp.int32)[:, None] * by_shard.shape[len(sort.lead) + 1]


def _rows_at(x: jax.Array, indices: jax.Array) -> jax.Array:
    return x.at[indices].get(mode="promise_in_bounds")
