"""Split positions: computes each device's part of the positions of a sequence, in any model.

Source: context parallelism (arXiv:2411.01783) by sharding constraints. `dims.positions_of` says which dims of the values are
positions. This rule constrains the results of products, lookups, slices, sums and loops to be split along them over the
sequence axis. XLA propagates this to the equations between, and finds what else is sent, such as the edges of a convolution.
Attention over split positions is the kernel's task (`kernels`).

A loop over positions, such as a recurrence, cannot be split along them: each device computes all positions of a part of the
rows, if the rows divide, and else of all rows. Of a loop over chunks of positions, each device computes a part of each
chunk.

Cost: attention sends keys and values once a pass; slices, edges and recurrences send their operands.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from ..dims import Inputs, Positions, positions_of
from ..machine import BATCH_AXES, SEQUENCE, n_batch_shards
from ..tracing import Rule, Site, Tagged, scan_counts
from ._constrain import split_over
from ._split_residual import SplitResidual

# Between these, XLA finds the split of values by itself.
_CONSTRAINED = {
    *("dot_general", "ragged_dot_general", "conv_general_dilated", "attention", "gather", "scatter", "scatter-add"),
    *("slice", "dynamic_slice", "split", "pad", "concatenate", "reshape", "scan", "add", "iota"),
    "jit",  # what another rule computes at once, such as an attention
}


@dataclass(frozen=True)
class SplitPositions(Rule):
    """Splits positions over the sequence axis.

    **Arguments:**

    - `inputs`: what the function's inputs are.
    - `of_loops`: whether to arrange the operands and results of loops along positions, or to split all other values. A rule
        that recomputes the body of a loop stands between the two.
    - `residual`: the rule that splits the positions of some values over the model axis too.
    """

    mesh: Mesh
    inputs: Inputs
    of_loops: bool = False
    residual: SplitResidual | None = None

    def of(self, closed: Any) -> Rule | None:
        positions = positions_of(closed, self.inputs)
        if self.of_loops:
            return _ArrangeLoops(positions, self.mesh) if positions.loops else None
        left = frozenset[Any]() if self.residual is None else self.residual.residual(closed).split
        return _SplitValues(positions, self.mesh, left) if positions.dims else None


@dataclass(frozen=True, eq=False)
class _SplitValues(Rule):
    positions: Positions
    mesh: Mesh
    left: Collection[Any] = frozenset()  # variables that another rule splits

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name in _CONSTRAINED and any(self._dim(var) is not None for var in eqn.outvars)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        outs = site.rest(eqn, ins)
        return [
            out if var in self.left else self._constrained(out, {self._dim(var): SEQUENCE})
            for out, var in zip(outs, eqn.outvars, strict=True)
        ]

    def _dim(self, var: Any, *, begin: int = 0) -> int | None:
        """Returns the dim of a variable to split over the sequence axis: the first that is positions and divides."""
        shape, n = var.aval.shape, self.mesh.shape[SEQUENCE]
        dims = self.positions.dims.get(var, ())
        return next((dim for dim in dims if dim >= begin and shape[dim] and shape[dim] % n == 0), None)

    def _constrained(self, value: Any, entries: Mapping[Any, Any]) -> Any:
        """Constrains some dims of a value, by their mesh axes. A tagged value, such as a weight, is left to its rule."""
        if isinstance(value, Tagged) or not entries.keys() - {None}:
            return value
        return split_over(value, self.mesh, entries)


class _ArrangeLoops(_SplitValues):
    def claims(self, eqn: Any) -> bool:
        return eqn in self.positions.loops

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        arranged = self._part_of_each if self.positions.loops[eqn] else self._all
        first = sum(scan_counts(eqn))
        slices = [arranged(x, var) for x, var in zip(ins[first:], eqn.invars[first:], strict=True)]
        return super().__call__(eqn, [*ins[:first], *slices], site)

    def _part_of_each(self, value: Any, var: Any) -> Any:
        """Arranges chunks for a loop over them: each device has a part of each chunk."""
        dim = self._dim(var, begin=1)
        return value if dim is None else self._constrained(value, {0: None, dim: SEQUENCE})

    def _all(self, value: Any, var: Any) -> Any:
        """Arranges positions for a loop over them: each device has all of them, for its part of the rows if these divide."""
        rows, n = self.positions.rows.get(var), n_batch_shards(self.mesh) * self.mesh.shape[SEQUENCE]
        divides = rows is not None and var.aval.shape[rows] % n == 0
        return self._constrained(value, {0: None, **({rows: (*BATCH_AXES, SEQUENCE)} if divides else {})})
