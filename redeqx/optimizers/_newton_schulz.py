"""Where Newton-Schulz iterations are computed: batches of matrices, distributed over a mesh.

Parameters are sharded along dims of their matrices, so each matmul of the iteration would need a collective. Instead, the
matrices of equal shape, from all leaves and from all layers that a leaf stacks, are distributed: one exchange gives each
device some complete matrices, on which it iterates alone, and another one returns the shards. The result stays the same.

Source: K. Jordan et al. 2024, *Muon: An optimizer for hidden layers in neural networks*; the distribution of the work, as in
the same authors' modded-nanogpt and in *Muon is Scalable for LLM Training* (arXiv:2502.16982).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float

from ..machine import axes_of, n_shards
from ..partition import Kind, Plan

Axes = tuple[str, ...]
Iterate = Callable[[Float[Array, "batch rows cols"]], Float[Array, "batch rows cols"]]


@dataclass(frozen=True)
class _View:
    """A leaf as a batch of matrices with no more rows than columns."""

    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # those that form the batch, the rows and the columns
    axes: tuple[Axes, ...]  # for each dim of the leaf, the mesh axes that split it while the batch is made

    @classmethod
    def of(cls, shape: Sequence[int], kind: Kind, axes: Sequence[Axes]) -> "_View":
        sizes = [math.prod(shape[dim] for dim in dims) for dims in (kind.outputs, kind.inputs)]
        rows, cols = kind.outputs, kind.inputs
        # Square matrices may be transposed, so that leaves split along either side share a batch.
        if (sizes[0], axes[rows[0]]) > (sizes[1], axes[cols[0]]):
            rows, cols = cols, rows
        stack = tuple(dim for dim in range(len(shape)) if dim not in (*rows, *cols))
        leading = {dims[0] for dims in (stack, rows, cols) if dims}  # only the first of merged dims may be split
        kept = tuple(axes[dim] if dim in leading else () for dim in range(len(shape)))
        return cls(tuple(shape), (stack, rows, cols), kept)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of matrices, of rows and of columns."""
        return tuple(math.prod(self.shape[dim] for dim in dims) for dims in self.dims)

    @property
    def split(self) -> tuple[Axes, ...]:
        """The mesh axes that split the batch, the rows and the columns."""
        return tuple(self.axes[dims[0]] if dims else () for dims in self.dims)

    def _patterns(self) -> tuple[str, str]:
        names = [" ".join(f"d{dim}" for dim in dims) for dims in (range(len(self.shape)), *self.dims)]
        return names[0], " ".join(f"({name})" for name in names[1:])

    def to_batch(self, x: Array) -> Float[Array, "batch rows cols"]:
        """Returns the leaf, or a device's shard of it, as a batch."""
        whole, batch = self._patterns()
        return rearrange(x, f"{whole} -> {batch}")

    def from_batch(self, x: Float[Array, "batch rows cols"], shape: Sequence[int]) -> Array:
        """Inverts `to_batch`; `shape` is that of the leaf or of the device's shard."""
        whole, batch = self._patterns()
        return rearrange(x, f"{batch} -> {whole}", **{f"d{dim}": size for dim, size in enumerate(shape)})


def orthogonalize(
    matrices: Mapping[str, Array], kinds: Mapping[str, Kind], plan: Plan | None, iterate: Iterate
) -> dict[str, Array]:
    """Returns the leaves with orthogonalized matrices, in their shardings: those of the plan, or of one device, or as XLA
    chooses. `kinds` determine the dims of a matrix; all other dims stack them.
    """
    views = {name: _View.of(x.shape, kinds[name], _axes_of(name, x, plan)) for name, x in matrices.items()}
    if plan is None or plan.mesh.size == 1:
        return {name: view.from_batch(iterate(view.to_batch(matrices[name])), view.shape) for name, view in views.items()}
    batches: dict[Any, list[str]] = {}
    for name, view in views.items():
        batches.setdefault((view.sizes[1:], view.split, matrices[name].dtype), []).append(name)
    results: dict[str, Array] = {}
    for names in batches.values():
        leaves, of = [matrices[name] for name in names], [views[name] for name in names]
        results.update(zip(names, _orthogonalize_sharded(leaves, of, plan.mesh, iterate), strict=True))
    return {name: results[name] for name in matrices}


def _axes_of(name: str, x: Array, plan: Plan | None) -> tuple[Axes, ...]:
    """Returns for each dim the mesh axes that split it, without axes of size 1."""
    leaf = None if plan is None else plan.leaves.get(name)
    if plan is None or leaf is None or leaf.shape != x.shape:
        return ((),) * x.ndim
    return tuple(tuple(axis for axis in axes_of(entry) if plan.mesh.shape[axis] > 1) for entry in leaf.spec)


# --- distribution ------------------------------------------------------------------------------------------------------


def _orthogonalize_sharded(leaves: Sequence[Array], views: Sequence[_View], mesh: Mesh, iterate: Iterate) -> list[Array]:
    """Orthogonalizes leaves whose matrices have the same shape and sharding: each device computes some of all matrices."""
    stack, rows, cols = views[0].split
    n_here = sum(view.sizes[0] for view in views) // n_shards(stack, mesh)
    used = _choose_axes(n_here, stack, {*rows, *cols}, mesh)

    def here(*parts: Array) -> list[Array]:
        flat = [view.to_batch(part) for view, part in zip(views, parts, strict=True)]
        batch = jnp.concatenate(flat)
        whole, invert = _redistribute(batch, used, rows, cols, mesh)
        batch = invert(iterate(whole))[: len(batch)]
        starts = [sum(map(len, flat[:i])) for i in range(1, len(flat))]
        pieces = jnp.split(batch, starts)
        return [view.from_batch(piece, part.shape) for view, piece, part in zip(views, pieces, parts, strict=True)]

    specs = [P(*(axes or None for axes in view.axes)) for view in views]
    return jax.shard_map(here, mesh=mesh, in_specs=tuple(specs), out_specs=specs, check_vma=False)(*leaves)


def _choose_axes(n: int, stack: Axes, sides: set[str], mesh: Mesh) -> frozenset[str]:
    """Returns the mesh axes over which `n` matrices are distributed. They minimize the matrices of the busiest device, then
    the number of devices, then the axes that do not split the `sides` of matrices, whose results must be gathered."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in stack]
    choices = [frozenset(of) for k in range(len(axes) + 1) for of in combinations(axes, k)]

    def cost(used: frozenset[str]) -> tuple[int, int, int]:
        n_devices = n_shards(used, mesh)
        return -(-n // n_devices), n_devices, len(used - sides)

    return min(choices, key=cost)


def _redistribute(
    x: Float[Array, "batch rows cols"], used: frozenset[str], rows: Axes, cols: Axes, mesh: Mesh
) -> tuple[Array, Callable[[Array], Array]]:
    """Returns this device's share of complete matrices, of which `x` is its shard, and the function that inverts this.

    Each axis that splits the matrices takes one all-to-all if it is used, inverted by another one, else one all-gather,
    inverted by a slice. Each used axis over which they are replicated takes a slice, inverted by an all-gather. The batch is
    padded until it divides, and remains padded after inverting.
    """
    inverses: list[Callable[[Array], Array]] = []

    def split(x: Array, axis: str, dim: int) -> Array:
        size = x.shape[dim] // mesh.shape[axis]
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dim)

    def gather(x: Array, axis: str, dim: int) -> Array:
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True)

    def swap(x: Array, axis: str, cut: int, joined: int) -> Array:
        # XLA for CPUs sends slices of `x`. Without the barrier it may replace these by values of several layouts, which its
        # own verifier refuses.
        return jax.lax.all_to_all(jax.lax.optimization_barrier(x), axis, cut, joined, tiled=True)

    n_devices = n_shards(used, mesh)
    x = jnp.pad(x, [(0, -len(x) % n_devices), (0, 0), (0, 0)])
    for axis in sorted(used - {*rows, *cols}):
        x = split(x, axis, 0)
        inverses.append(lambda x, axis=axis: gather(x, axis, 0))
    for dim, axes in ((1, rows), (2, cols)):
        for axis in reversed(axes):  # the last axis splits what the others have split
            if axis in used:
                x = swap(x, axis, 0, dim)
                inverses.append(lambda x, axis=axis, dim=dim: swap(x, axis, dim, 0))
            else:
                x = gather(x, axis, dim)
                inverses.append(lambda x, axis=axis, dim=dim: split(x, axis, dim))

    def invert(x: Array) -> Array:
        for inverse in reversed(inverses):
            x = inverse(x)
        return x

    return x, invert
