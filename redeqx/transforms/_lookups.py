"""Lookups and scatters along dims that do not divide over the devices, which XLA computes wrongly, silently.

XLA pads a split dim that does not divide. A scatter, such as the gradient of a lookup, then adds what is in the padding too,
if another axis of the mesh replicates it. So this rule leaves some dims of lookups and scatters whole: positions, or other
lengths of the batch, and rows or parts of them, as in `table[ids[1:]]`. At the gradient of a sort, which looks up by
unsigned numbers, padding would end the process.

If the rows of a scatter's operand are split over the sequence axis too, and that axis splits what is scattered, XLA drops
the operand on all devices but one, before JAX 0.12. So this rule splits them as the rows of a batch.

Source: measured with jax 0.10.2 (the tests `test_xla_still_...` fail once it is fixed). Cost: each device looks up all
positions that do not divide, and in the backward pass of parts of rows too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax.sharding import Mesh

from ..dims import SCATTERS
from ..machine import BATCH_AXES, MODEL, SEQUENCE, n_batch_shards
from ..tracing import Site, equations, is_variable
from ._by_positions import ByPositions
from ._constrain import split_over, with_gradient

_PRIMITIVES = {"gather", "sort", *SCATTERS}


@dataclass(frozen=True)
class FixLookups(ByPositions):
    """Computes lookups, scatters and sorts without padding what it must not. Without `inputs`, as inside a custom
    derivative, each dim may be one of the batch. `splits_residual`: whether the model axis splits positions too."""

    mesh: Mesh
    splits_residual: bool = False
    corrects: ClassVar = True

    def of(self, closed: Any) -> Self:
        sizes = {
            size
            for eqn in equations(closed)
            if eqn.primitive.name in _PRIMITIVES
            for atom in (*eqn.invars[eqn.primitive.name != "sort" :], *eqn.outvars)  # a table has no dims of the batch
            for size in atom.aval.shape
        }
        divide = self.mesh.shape[SEQUENCE] == 1 and all(size == 1 or size % self.mesh.size == 0 for size in sizes)
        return self if divide else super().of(closed)

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name in _PRIMITIVES and any(self._axes(eqn).values())

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        axes = self._axes(eqn)
        outs = site.rest(eqn, [self._split(x, atom, axes) for x, atom in zip(ins, eqn.invars, strict=True)])
        if eqn.primitive.name != "gather" or not jnp.issubdtype(outs[0].dtype, jnp.inexact):
            return [self._split(x, var, axes) for x, var in zip(outs, eqn.outvars, strict=True)]
        ((out,), (var,)) = outs, eqn.outvars
        rows = [dim for dim in self.positions.parts_of_rows.get(var, ()) if dim in axes[var]]
        out = with_gradient(lambda x: x, lambda gradient: self._split(gradient, var, axes))(out)  # which is scattered
        return [split_over(out, self.mesh, {**axes[var], **dict.fromkeys(rows, BATCH_AXES)})]

    def _split(self, value: Any, atom: Any, axes: Mapping[Any, Mapping[int, Any]]) -> Any:
        return split_over(value, self.mesh, axes.get(atom, {}))

    def _axes(self, eqn: Any) -> Mapping[Any, Mapping[int, Any]]:
        """Returns for operands and outputs the mesh axes of some dims, most of which must be whole: of an order all that do
        not divide, and of lookups and scatters those of the indices, and of what is looked up or scattered. XLA pads tables,
        and dims that tables have for these indices too (`operand_batching_dims`), as it should."""
        if eqn.primitive.name == "sort":
            return {atom: dict.fromkeys(self._uneven(atom)) for atom in (*eqn.invars, *eqn.outvars) if is_variable(atom)}
        numbers, (table, indices) = eqn.params["dimension_numbers"], eqn.invars[:2]
        is_lookup = eqn.primitive.name == "gather"
        if is_lookup:
            entries, windows, batching = eqn.outvars[0], numbers.offset_dims, numbers.start_indices_batching_dims
        else:
            entries, windows, batching = eqn.invars[2], numbers.update_window_dims, numbers.scatter_indices_batching_dims
        own = [dim for dim in range(entries.aval.ndim) if dim not in windows]  # as many as the indices have
        pairs = [(i, dim) for i, dim in enumerate(own) if i not in batching]
        uneven = [(i, dim) for i, dim in pairs if i in self._uneven(indices) or dim in self._uneven(entries)]
        found: dict[Any, Mapping[int, Any]] = {
            indices: {i: None for i, _ in uneven},
            entries: {dim: None for _, dim in uneven},
        }
        n, lengths = self.mesh.shape[SEQUENCE], self.positions.lengths.get(entries, ())
        if n > 1 and not is_lookup and any(dim in lengths for _, dim in pairs):
            rows = self.positions.rows_in(table, n_batch_shards(self.mesh) * n) if is_variable(table) else None
            found[table] = {} if rows is None else {rows: BATCH_AXES}
        return {atom: axes for atom, axes in found.items() if is_variable(atom)}

    def _uneven(self, atom: Any) -> set[int]:
        """Returns the dims of the batch, and of parts of it, that devices do not divide."""
        if not is_variable(atom):
            return set()
        n_rows, n = n_batch_shards(self.mesh), self.mesh.shape[SEQUENCE]
        if self.inputs is None:
            return {dim for dim, size in enumerate(atom.aval.shape) if size > 1 and (size % n_rows or size % n)}
        n_lengths = n * self.mesh.shape[MODEL] if self.splits_residual else n
        rows = [(dim, n_rows) for dim in [self.positions.rows.get(atom)] if dim is not None]
        parts = [(dim, n_rows * n) for dim in self.positions.parts_of_rows.get(atom, ())]
        lengths = [(dim, n_lengths) for dim in self.positions.lengths.get(atom, ())]
        return {dim for dim, n in (*rows, *parts, *lengths) if atom.aval.shape[dim] % n}
