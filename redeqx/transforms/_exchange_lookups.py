"""Exchanging lookups: looks tokens up in a table whose features are split over the devices, and exchanges what was found.

`GatherAtUse` would gather the whole table on every device to look up a few of its rows, and add the gradient of each of its
rows on every device before it is split. But a table is stored split along its features. So each device looks its features up
for the tokens of all devices, and an all-to-all gives each device all features of its own tokens. The derivative exchanges
the gradients of the tokens, and adds them into the device's part of the table. Three sharding constraints do this.

It is used where a device has fewer tokens than the table has rows there, so that less is sent, and not with a sequence axis:
there XLA would first put the tokens of all devices on each, to split their features and positions anew. Values and gradients
stay the same; the gradient of a token that is in several rows of the batch is added in another order.

Cost: an all-to-all of the tokens' features forward and one backward, and the indices of all devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh, PartitionSpec as P

from ..dims import spread
from ..machine import BATCH_AXES, SEQUENCE, STORAGE_AXES, axes_of, n_batch_shards, n_shards
from ..tracing import Rule, Site, plain, run
from ._constrain import split_over
from ._gather import Shardings, stored


@dataclass(frozen=True)
class ExchangeLookups(Rule):
    """Looks rows of stored tables up, for the tokens of all devices at once. It stands before `GatherAtUse`. The function's
    first `n_weights` inputs are weights. Dim 0 of the others is rows."""

    mesh: Mesh
    n_weights: int
    rows: Mapping[Any, int] = field(default_factory=dict)  # for one function: the dim of an equation's indices that is rows

    def of(self, closed: Any) -> Rule | None:
        n = n_batch_shards(self.mesh)
        if all(self.mesh.shape[axis] == 1 for axis in STORAGE_AXES) or self.mesh.shape[SEQUENCE] > 1:
            return None
        rows: dict[Any, int] = {}

        for eqn, ins in spread(closed, self.n_weights).items():
            if eqn.primitive.name == "gather" and _takes_rows(eqn) and not ins[0].is_data:
                shape = eqn.invars[1].aval.shape
                dims = [dim for dim, n_parts in ins[1].rows if n_parts >= n and shape[dim] % n == 0]
                rows.update({eqn: min(dims)} if dims else {})
        return replace(self, rows=rows) if rows else None

    def claims(self, eqn: Any) -> bool:
        return eqn in self.rows

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if (table := stored(ins[0])) is None:
            return None
        (value, shardings), row_dim = table, self.rows[eqn]
        axes, shape = _axes_of_features(shardings), eqn.outvars[0].aval.shape
        n_tokens = math.prod(shape[:-1]) // n_batch_shards(self.mesh)
        if not axes or n_tokens > value.shape[0] // n_shards(P(shardings.compute.spec[0]), self.mesh):
            return None
        others = tuple(axis for axis in BATCH_AXES if axis not in axes)
        indices = split_over(plain(ins[1]), self.mesh, {row_dim: others}, None)
        (found,) = run(eqn, [value, indices, *map(plain, ins[2:])])
        found = split_over(found, self.mesh, {row_dim: others, found.ndim - 1: axes}, None)
        return [split_over(found, self.mesh, {row_dim: BATCH_AXES, found.ndim - 1: None})]


def _takes_rows(eqn: Any) -> bool:
    """Whether a gather takes whole rows of a matrix, and their features are its last dim. Equinox's embeddings slice each
    row, so that there may be a dim of size 1 before the features."""
    numbers, table, out = eqn.params["dimension_numbers"], eqn.invars[0].aval, eqn.outvars[0].aval
    is_matrix = len(table.shape) == 2 and eqn.params["slice_sizes"] == (1, *table.shape[1:])
    n_of_row = 2 - len(numbers.collapsed_slice_dims)
    are_last = tuple(numbers.offset_dims) == tuple(range(len(out.shape))[-n_of_row:])
    return is_matrix and are_last and not numbers.operand_batching_dims and 0 in numbers.start_index_map


def _axes_of_features(shardings: Shardings) -> tuple[str, ...]:
    """Returns the axes over which the features of a table are split in storage only; none if its rows are too."""
    (rows, features), (rows_in_use, features_in_use) = shardings.storage.spec, shardings.compute.spec
    return axes_of(features) if rows == rows_in_use and features_in_use is None else ()
