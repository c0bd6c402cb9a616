"""Places a model on the plan's mesh, and finds the shardings of an optimizer state."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._tree import PyTree, is_array_like, render
from ..machine import copied, n_shards, put as put_on_mesh, replicated, sharding_of
from ._plan import Plan


def is_on(mesh: Mesh, leaf: Any) -> bool:
    """Whether a leaf is an array on this mesh already, as those of `deployer.init` are."""
    return isinstance(leaf, jax.Array) and getattr(leaf.sharding, "mesh", None) == mesh


def place(model: PyTree, plan: Plan, taken: Collection[str] = ()) -> PyTree:
    """Puts every array of a model on the plan's mesh, sharded by the plan's specs.

    Arrays that already have their sharding are not copied. All others are, so that a step that donates its arguments never
    deletes an array of the caller; and so is the second leaf of one array, because a step may donate the first. But leaves
    that a step will delete, by their names in `taken`, are moved one after the other if their arrays are on the mesh, as
    `deployer.init` places them before a loss is known: no device holds two models.
    """
    kept: set[int] = set()
    moved: dict[int, jax.Array] = {}

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        name = render(path)
        sharding, leaf = plan.sharding(name), moved.get(id(leaf), leaf)
        may_move = name in taken and id(leaf) not in kept and is_on(plan.mesh, leaf)
        if may_move and leaf.sharding != sharding:
            new = jax.device_put(copied(leaf), sharding)  # copied, since a device's own part may be kept as it is
            moved[id(leaf)] = new
            leaf.delete()
            leaf = new
        is_placed = isinstance(leaf, jax.Array) and leaf.sharding == sharding and not leaf.weak_type
        if is_placed:
            is_second = id(leaf) in kept
            kept.add(id(leaf))
            return leaf.copy() if is_second else leaf
        if not sharding.is_fully_addressable:
            return put_on_mesh(leaf, sharding)
        # Copied first: `device_put` may keep the caller's own memory in spite of `may_alias=False`.
        return jax.device_put(_copied(leaf), sharding, may_alias=False)

    return jtu.tree_map_with_path(put, model)


def _copied(leaf: Any) -> Any:
    """Returns a copy of an array, as NumPy's unless it is on a GPU or TPU, or on several devices: JAX would compile a
    program to copy, and another to cut, the arrays of each shape."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    is_in_host = [device.platform for device in leaf.devices()] == ["cpu"]
    return np.array(leaf) if is_in_host and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else copied(leaf)


def shardings_like(state: PyTree, plan: Plan) -> PyTree:
    """Returns the shardings of the leaves of an optimizer state (or of gradients, or of averages), arrays or shapes.

    A leaf gets the sharding of the parameter that has the same shape and whose name is a suffix of the leaf's name:
    `0.mu.head.weight` gets that of `head.weight`. A leaf with one number for each block of the parameter does too, along the
    dims whose blocks divide over the shards. All others are replicated.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = render(path).split(".")
        for i in range(len(parts)):
            planned = plan.leaves.get(".".join(parts[i:]))
            if planned is not None and planned.shape == tuple(leaf.shape):
                return sharding_of(planned.spec, plan.mesh)
            if planned is not None and _are_blocks(leaf.shape, planned.shape):
                of_dims = zip(leaf.shape, planned.spec, strict=True)
                kept = [None if n % n_shards(P(entry), plan.mesh) else entry for n, entry in of_dims]
                return sharding_of(P(*kept), plan.mesh) if any(kept) else replicated(plan.mesh)
        return replicated(plan.mesh)

    return jtu.tree_map_with_path(of, state)


def _are_blocks(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether an array has one entry for each equal block of another array."""
    return len(shape) == len(full) and all(n and size % n == 0 for n, size in zip(shape, full, strict=True))
