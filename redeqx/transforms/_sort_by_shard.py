"""Sorting by shard: tokens that are sorted over all rows of the batch stay on the devices of their rows.

`x[jnp.argsort(experts)]` sends every row of `x` to another device. A sort is a permutation, and what follows it in a mixture
of experts treats all sorted rows alike: lookups by the sorted indices, elementwise equations, grouped matmuls, and a scatter
or lookup back. So the sorted rows may be kept in any order. This module keeps them in the one in which each device has those
that come from its own rows of the batch, in the order of the sort. The lookups and the scatter are then a device's own, and
its part of a group is the part of the rows that have the positions of the group.

The function stays the same, whatever the groups are, even where rows in the end are dropped: positions are those in the sort
of all rows. For them each device sorts the keys of all rows, 4 bytes each. What depends on the order otherwise, such as a
running sum, keeps a sort as it is written.

`_sorted_rows` finds what follows a sort, and `_group_matmuls` is the rule that applies this.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..dims import spread
from ..machine import BATCH_AXES, SEQUENCE, n_batch_shards, replicated
from ..tracing import GROUPED, Body, Site, plain
from ._constrain import split_over
from ._sorted_rows import SortedRows, jaxprs_in, scatter_rows


class SortsByShard:
    """The sorts of a function whose rows stay on their devices, and the equations that this concerns."""

    def __init__(self, mesh: Mesh, sorts: Sequence[SortedRows] = ()):
        self.mesh, self.n_shards = mesh, n_batch_shards(mesh)
        self._sorts = {eqn: sort for sort in sorts for eqn in sort.roles}
        self._positions: dict[Any, jax.Array] = {}  # of each sort, `[shards, rows of a shard]`, ascending

    @classmethod
    def of(cls, body: Body, n_weights: int, mesh: Mesh, others: Iterable[Any] = ()) -> "SortsByShard":
        """Finds the sorts of a function whose rows reach grouped matmuls, without `others`, equations that are computed
        otherwise. Its first `n_weights` inputs are weights."""
        n = n_batch_shards(mesh)
        if n == 1 or mesh.shape[SEQUENCE] > 1:
            return cls(mesh)
        sorts = {eqn: jaxpr for jaxpr in jaxprs_in(body.closed) for eqn in jaxpr.eqns if _may_stay(eqn, n)}
        if not sorts:
            return cls(mesh)

        known = spread(body.closed, n_weights)
        found, taken = list[SortedRows](), set(others)
        for eqn, jaxpr in sorts.items():
            has_rows = eqn in known and any(parts % n == 0 for _, parts in known[eqn][0].rows)
            if has_rows and (sort := SortedRows.of(eqn, jaxpr, body, n)) and taken.isdisjoint(sort.roles):
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
            return self._inverse(eqn, ins)
        if role == "own lookup":
            return self._look_up(eqn, ins)
        if role == "own scatter":
            return self._scatter(sort, eqn, ins)
        pairs = list(zip(ins, eqn.invars, strict=True))
        if role == "as written":
            return site.rest(eqn, [self._arranged(sort, x, var, eqn) for x, var in pairs])
        return site.rest(eqn, [x if sort.dim(var) is None else self._in_sort_order(sort, x) for x, var in pairs])

    def operands(self, eqn: Any, a: Any, b: Any, sizes: Any) -> tuple[Any, Any, Any]:
        """Returns the operands of a grouped matmul, with the sizes of each shard's part of the groups, `[shards, E]`."""
        sort = self._sorts[eqn]
        a, b = (self._arranged(sort, x, var, eqn) for x, var in zip((a, b), eqn.invars[:2], strict=True))
        positions, ends = self._positions[sort.eqn], jnp.cumsum(sizes.reshape(-1))
        until = jnp.sum(positions[:, :, None] < ends, axis=1, dtype=sizes.dtype)
        return a, b, self.split(jnp.diff(until, axis=1, prepend=0))

    def split(self, x: jax.Array) -> jax.Array:
        """Constrains dim 0 to be split over the devices that split a batch."""
        return split_over(x, self.mesh, {0: BATCH_AXES})

    # --- equations, by their roles -----------------------------------------------------------

    def _sort(self, sort: SortedRows, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any]:
        outs = [jax.lax.with_sharding_constraint(out, replicated(self.mesh)) for out in site.rest(eqn, ins)]
        order = outs[sort.order]
        place = (
            jnp.zeros_like(order)
            .at[order]
            .set(jnp.arange(sort.n, dtype=order.dtype), mode="promise_in_bounds", unique_indices=True)
        )
        self._positions[eqn] = positions = jnp.sort(self._by_shard(place), axis=1)
        return [self.split(_rows_at(out, positions.reshape(-1))) for out in outs]

    def _inverse(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        order = self._by_shard(plain(ins[0]))
        found = (jnp.argsort(order, axis=1).astype(order.dtype) + self._starts(order)).reshape(-1)
        return [jnp.arange(len(found), dtype=order.dtype), found][: len(eqn.outvars)]

    def _look_up(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Looks up rows that are all on a device's own shard."""
        x, indices = map(plain, ins)
        x, indices = self._by_shard(x), self._by_shard(indices.reshape(-1))
        return [jax.vmap(_rows_at)(x, indices - self._starts(x)).reshape(eqn.outvars[0].aval.shape)]

    def _scatter(self, sort: SortedRows, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Writes rows that are all on a device's own shard."""
        x, indices, updates = map(plain, ins)
        updates = self._arranged(sort, updates, eqn.invars[2], eqn)
        x, indices, updates = map(self._by_shard, (x, indices.reshape(-1), updates))
        found = jax.vmap(partial(scatter_rows, eqn))(x, indices - self._starts(x), updates)
        return [found.reshape(eqn.outvars[0].aval.shape)]

    # --- orders ------------------------------------------------------------------------------

    def _in_sort_order(self, sort: SortedRows, x: Any) -> jax.Array:
        """Returns keys or indices, which are in the order of the shards, in that of the sort."""
        positions = self._positions[sort.eqn].reshape(-1)
        return jnp.zeros_like(plain(x)).at[positions].set(plain(x), mode="promise_in_bounds", unique_indices=True)

    def _arranged(self, sort: SortedRows, x: Any, var: Any, eqn: Any) -> Any:
        """Returns an operand with its sorted dim in the order of the shards, if it is in that of the sort."""
        dim = sort.moved.get((eqn, var))
        if dim is None:
            return x
        positions = self._positions[sort.eqn].reshape(-1)
        return jnp.moveaxis(_rows_at(jnp.moveaxis(plain(x), dim, 0), positions), 0, dim)

    def _by_shard(self, x: jax.Array) -> jax.Array:
        return self.split(x.reshape(self.n_shards, -1, *x.shape[1:]))

    def _starts(self, by_shard: jax.Array) -> jax.Array:
        """Returns the first row of each shard, `[shards, 1]`."""
        return jnp.arange(self.n_shards, dtype=jnp.int32)[:, None] * by_shard.shape[1]


def _rows_at(x: jax.Array, indices: jax.Array) -> jax.Array:
    return x.at[indices].get(mode="promise_in_bounds")


def _may_stay(eqn: Any, n_shards: int) -> bool:
    """Whether an equation sorts a single dim that the shards divide."""
    shape = eqn.outvars[0].aval.shape if eqn.primitive.name == "sort" else ()
    return len(shape) == 1 and shape[0] % n_shards == 0
