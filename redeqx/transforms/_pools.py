"""Pools along split positions, whose gradients XLA's partitioners compute wrongly, silently. This rule avoids it.

The gradient of a maximum over windows that overlap is wrong if the dim along which they slide is split over devices. So
where a sequence axis splits positions, each device's part with its edges becomes an entry of a dim of its own, which is
split instead. Where the positions of the result do not divide, and of images, no dim along which windows slide is split.

Source: measured with jax 0.10.2 (the test `test_xla_still_...` fails once it is fixed). Cost: a copy of split positions with
their edges, which are sent.
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
from ._windows import in_windows

_FILL = {"reduce_window_sum": 0.0, "reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}
_DERIVATIVES = ("select_and_gather_add", "select_and_scatter_add")  # as in a user's `grad_fn`


@dataclass(frozen=True)
class FixPools(ByPositions):
    """Computes sums, maxima and minima over windows, and their gradients, correctly with a sequence axis."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        is_pool = eqn.primitive.name in (*_FILL, *_DERIVATIVES)
        return is_pool and self.mesh.shape[SEQUENCE] > 1 and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        (x, *others), (out,), params = map(plain, ins), eqn.outvars, eqn.params
        positions, n = self.positions, self.mesh.shape[SEQUENCE]
        along = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1]
        split = [dim for dim in positions.dims.get(out, ()) if dim in along]
        if others or len(split) != 1 or out.aval.shape[split[0]] % n or not out.aval.size:
            rows = positions.rows_in(eqn.invars[0], n_batch_shards(self.mesh) * n)
            axes: Mapping[int, Any] = dict.fromkeys(along) | ({} if rows is None else {rows: (*BATCH_AXES, SEQUENCE)})
            (found,) = run(eqn, [split_over(each, self.mesh, axes) for each in (x, *others)])
            return [split_over(found, self.mesh, axes)]
        (dim,) = split
        size, stride, padding, *dilations = (params[name][dim] for name in _WINDOW)
        x = in_windows(
            x, dim, n, _FILL[eqn.primitive.name], n_results=out.aval.shape[dim], size=size, stride=stride, padding=padding,
            dilations=(dilations[0], dilations[1]),
        )  # fmt: skip
        of_part = {"window_dimensions": size, "window_strides": stride, "window_dilation": dilations[1]}
        changed = {
            name: (*params[name][:dim], none, of_part.get(name, none), *params[name][dim + 1 :])
            for name, none in _WINDOW.items()
        }
        axes = {dim: SEQUENCE, **{each + (each >= dim): None for each in along}}
        (found,) = run(eqn.replace(params={**params, **changed}), [split_over(x, self.mesh, axes)])
        return [split_over(found, self.mesh, axes).reshape(out.aval.shape)]


# The parameters of a window, and their values along a dim along which it does not slide.
_WINDOW = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
