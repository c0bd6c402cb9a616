"""Split positions: computes each device's part of the positions of a sequence, in any model.

Source: context parallelism (arXiv:2411.01783) by sharding constraints. `dims.positions_of` says which dims of the values are
positions. This rule constrains the results of products, lookups, slices, sums and loops to be split along them over the
sequence axis. XLA propagates this to the equations between, and finds what else is sent, such as the edges of a convolution.
Attention over split positions is the kernel's task (`kernels`).

Where a reshape makes chunks of positions, each device computes some of the chunks if their number divides, and else all
chunks of a part of the rows, if these divide.

A loop over positions, such as a recurrence, cannot be split along them: each device computes all positions of a part of the
rows, if the rows divide. Else it computes all rows, or of a loop over chunks of positions a part of each chunk. Sorts, for
which XLA would gather all positions of all rows, are computed by rows likewise. So are products of values without positions,
as of an image, or of a batch whose positions do not divide, and those with the buffers of experts by the places in these, if
the rows do not divide. Running sums and other cumulative operations are computed by parts (`_cumulative.py`).

Cost: attention sends keys and values once a pass; recurrences and sorts send their operands, slices edges, and cumulative
operations one entry of each device.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from ..dims import CUMULATIVE, Inputs, Positions, positions_of
from ..machine import BATCH_AXES, SEQUENCE, n_batch_shards
from ..tracing import Rule, Site, plain, scan_counts, variables
from ._constrain import split_over
from ._cumulative import cumulative_by_parts
from ._split_residual import SplitResidual

# Of these, each device computes all positions of a part of the rows, unless it computes a part of the positions.
_OF_ALL = {"sort": "dimension", **dict.fromkeys(CUMULATIVE, "axis")}
# Between these, XLA finds the split of values by itself.
_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated", "attention"}
_CONSTRAINED = _PRODUCTS | {
    *("gather", "scatter", "scatter-add", "slice", "dynamic_slice", "split", "pad", "concatenate", "reshape", "scan", "add"),
    *("iota", "jit"),  # another rule may compute a `jit` at once, such as an attention
}


@dataclass(frozen=True)
class SplitPositions(Rule):
    """Splits positions over the sequence axis, except of what `residual` splits over the model axis too.

    It is applied twice: with `of_loops` it arranges the operands and results of loops along positions, and without it splits
    all other values. A rule that recomputes the body of a loop stands between the two.
    """

    mesh: Mesh
    inputs: Inputs
    of_loops: bool = False
    residual: SplitResidual | None = None
    # For one function: its positions, and the variables that `residual` splits.
    positions: Positions = field(default_factory=Positions, compare=False, repr=False)
    left: Collection[Any] = field(default=(), compare=False, repr=False)

    def of(self, closed: Any) -> Rule | None:
        positions = positions_of(closed, self.inputs)
        if self.of_loops:
            return replace(self, positions=positions) if positions.loops else None
        left = () if self.residual is None else self.residual.residual(closed).split
        return replace(self, positions=positions, left=left) if positions.dims or positions.rows else None

    def claims(self, eqn: Any) -> bool:
        if self.of_loops:
            return eqn in self.positions.loops
        return self._is_by_parts(eqn) or bool(self._of_all(eqn)) or any(self._splits(eqn))

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if self.of_loops:
            return self._arranged(eqn, ins, site)
        if self._is_by_parts(eqn):
            return [cumulative_by_parts(eqn, plain(ins[0]), self.mesh.shape[SEQUENCE], self._split)]
        if axes := self._of_all(eqn):
            outs = site.rest(eqn, [split_over(x, self.mesh, axes) for x in ins])
            by_rows = [split_over(out, self.mesh, axes) for out in outs]
            return [split_over(out, self.mesh, self._entries(var)) for out, var in zip(by_rows, eqn.outvars, strict=True)]
        return [
            out if var in self.left else split_over(out, self.mesh, entries)
            for out, var, entries in zip(site.rest(eqn, ins), eqn.outvars, self._splits(eqn), strict=True)
        ]

    def _splits(self, eqn: Any) -> list[Mapping[int, Any]]:
        """Returns the mesh axes of the dims of each output to split. What is computed of chunks, or of scores, is split as
        these are: XLA would move the halves of a matrix of scores to split each of them again."""
        if eqn.primitive.name not in _CONSTRAINED:
            return [{} for _ in eqn.outvars]
        n_before = max((len(self.positions.dims.get(var, ())) for var in variables(eqn.invars)), default=0)
        n = self.mesh.shape[SEQUENCE]
        if all(self.positions.are_whole(var, n) for var in (*variables(eqn.invars), *eqn.outvars)):  # as of an image
            is_product = eqn.primitive.name in _PRODUCTS
            return [self._by_rows(var) or self._by_places(eqn) if is_product else {} for var in eqn.outvars]
        is_new = [n_before < 2 or len(self.positions.dims.get(var, ())) < 2 for var in eqn.outvars]
        return [self._entries(var) if new else {} for var, new in zip(eqn.outvars, is_new, strict=True)]

    def _is_by_parts(self, eqn: Any) -> bool:
        """Whether an equation is a cumulative operation along positions, or chunks of them, that devices split."""
        if eqn.primitive.name not in CUMULATIVE:
            return False
        (var,) = eqn.invars
        dims = self.positions.dims.get(var, ())
        if dims[:1] != (eqn.params["axis"],):
            return False
        is_padded = len(dims) == 1 and not self.positions.are_whole(var, self.mesh.shape[SEQUENCE])
        return self._divides(var, dims[0]) or is_padded

    def _split(self, x: Any, dim: int | None, whole: int) -> Any:
        """Constrains a dim of a value, if any, to be split over the sequence axis, and another one not to be."""
        return split_over(x, self.mesh, {whole: None} if dim is None else {dim: SEQUENCE, whole: None})

    def _of_all(self, eqn: Any) -> Mapping[int, Any]:
        """Returns the mesh axes of the operand of an operation that needs all positions, if its rows divide.

        A sort of several operands may be one of tokens by their experts, which another rule computes.
        """
        if eqn.primitive.name not in _OF_ALL or len(eqn.invars) > 1:
            return {}
        (var,), dim = eqn.invars, eqn.params[_OF_ALL[eqn.primitive.name]]
        rows = self._by_rows(var) if self.positions.dims.get(var, ())[:1] == (dim,) else {}
        return {dim: None, **rows} if rows else {}

    def _entries(self, var: Any) -> Mapping[int, Any]:
        """Returns the mesh axes of the dims of a variable to split: of chunks and the places within them, or of scores, the
        first, and if it does not divide the rows."""
        dims = self.positions.dims.get(var, ())
        if dims and self._divides(var, dims[0]):
            return {dims[0]: SEQUENCE}
        return {} if len(dims) < 2 else self._by_rows(var)

    def _by_rows(self, var: Any) -> Mapping[int, Any]:
        """Returns the mesh axes of the rows of a variable over which the sequence axis splits them too, if they divide."""
        rows = self.positions.rows_in(var, n_batch_shards(self.mesh) * self.mesh.shape[SEQUENCE])
        return {} if rows is None else {rows: (*BATCH_AXES, SEQUENCE)}

    def _by_places(self, eqn: Any) -> Mapping[int, Any]:
        """Returns the mesh axes of the output of a product of rows with a stack of matrices, whose rows do not divide: as of
        experts, whose buffers have places for the tokens of each row. The places are split."""
        if eqn.primitive.name != "dot_general":
            return {}
        contracted, batch = eqn.params["dimension_numbers"]
        sides = [i for i, var in enumerate(eqn.invars) if var in self.positions.rows]
        if not batch[0] or len(sides) != 1:
            return {}
        (side,) = sides
        x, n_before = eqn.invars[side], len(batch[0]) if side == 0 else eqn.outvars[0].aval.ndim
        free = [dim for dim in range(x.aval.ndim) if dim not in (*contracted[side], *batch[side])]
        n_before -= len(free) if side else 0
        places = [i for i, dim in enumerate(free) if dim != self.positions.rows[x] and self._divides(x, dim)]
        return {n_before + places[0]: SEQUENCE} if places else {}

    def _divides(self, var: Any, dim: int) -> bool:
        size = var.aval.shape[dim]
        return size > 0 and size % self.mesh.shape[SEQUENCE] == 0

    # --- loops along positions ---------------------------------------------------------------------------------------------

    def _arranged(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any]:
        """Returns the outputs of a loop along positions, with its slices and its outputs arranged."""
        first = sum(scan_counts(eqn))
        by_rows = any(self._by_rows(var) for var in eqn.invars[first:])
        slices = [
            split_over(x, self.mesh, {0: None, **self._in_loop(var, eqn, by_rows=by_rows)})
            for x, var in zip(ins[first:], eqn.invars[first:], strict=True)
        ]
        outs = site.rest(eqn, [*ins[:first], *slices])
        return [split_over(out, self.mesh, self._entries(var)) for out, var in zip(outs, eqn.outvars, strict=True)]

    def _in_loop(self, var: Any, eqn: Any, *, by_rows: bool) -> Mapping[int, Any]:
        """Returns the mesh axes of what a loop slices: of the rows if they divide, and else of the places in each chunk."""
        if by_rows:
            return self._by_rows(var)
        places = [dim for dim in self.positions.dims.get(var, ()) if dim > 0 and self._divides(var, dim)]
        return {places[0]: SEQUENCE} if places and self.positions.loops[eqn] else {}
