"""Pools along split positions, whose gradients XLA's partitioners compute wrongly, silently. This rule avoids it.

The gradient of a maximum over windows that overlap is wrong if the dim along which they slide is split over devices. So with
a sequence axis no such dim is split: each device pools all positions of a part of the rows, if these divide.

Source: measured with jax 0.10.2 (the test `test_xla_still_...` fails once it is fixed). Cost: an all-to-all of split
positions, or where the rows do not divide, all of them on each device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh

from ..machine import BATCH_AXES, SEQUENCE, n_batch_shards
from ..tracing import Site, plain, run
from ._by_positions import ByPositions
from ._constrain import split_over

_POOLS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
_DERIVATIVES = ("select_and_gather_add", "select_and_scatter_add")  # as in a user's `grad_fn`


@dataclass(frozen=True)
class FixPools(ByPositions):
    """Computes sums, maxima and minima over windows, and their gradients, correctly with a sequence axis."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        is_pool = eqn.primitive.name in (*_POOLS, *_DERIVATIVES)
        return is_pool and self.mesh.shape[SEQUENCE] > 1 and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        rows = self.positions.rows_in(eqn.invars[0], n_batch_shards(self.mesh) * self.mesh.shape[SEQUENCE])
        axes: Mapping[int, Any] = {dim: None for dim, size in enumerate(eqn.params["window_dimensions"]) if size > 1}
        axes = {**axes, **({} if rows is None else {rows: (*BATCH_AXES, SEQUENCE)})}
        (found,) = run(eqn, [split_over(plain(x), self.mesh, axes) for x in ins])
        return [split_over(found, self.mesh, axes)]
