"""Places a model on the plan's mesh, and finds the shardings of an optimizer state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from .._tree import PyTree, is_array_like, render
from ..machine import copied, n_shards, put as put_on_mesh, replicated
from ._plan import Plan


def place(model: PyTree, plan: Plan) -> PyTree:
    """Puts every array of a model on the plan's mesh, sharded by the plan's specs.

    Arrays that already have their sharding (from `deployer.init`) are not copied. All others are, so that a step that
    donates its arguments never deletes an array of the caller; and so is the second leaf of one array, because a step may
    donate the first.
    """
    kept: set[int] = set()

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        sharding = plan.sharding(render(path))
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
    """Returns the shardings of the leaves of an optimizer state (or of gradients, or of averages).

    A leaf gets the sharding of the parameter that has the same shape and whose name is a suffix of the leaf's name:
    `0.mu.head.weight` gets that of `head.weight`. A leaf with one number for each block of the parameter does too, along the
    dims whose blocks divide over the shards. All others are replicated.

    **Arguments:**

    - `state`: a PyTree of arrays or shapes.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = render(path).split(".")
        for i in range(len(parts)):
            planned = plan.leaves.get(".".join(parts[i:]))
            if planned is not None and planned.shape == tuple(leaf.shape):
                return NamedSharding(plan.mesh, planned.spec)
            if planned is not None and _are_blocks(leaf.shape, planned.shape):
                of_dims = zip(leaf.shape, planned.spec, strict=True)
                kept = [None if n % n_shards(P(entry), plan.mesh) else entry for n, entry in of_dims]
                return NamedSharding(plan.mesh, P(*kept)) if any(kept) else replicated(plan.mesh)
        return replicated(plan.mesh)

    return jtu.tree_map_with_path(of, state)


def _are_blocks(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether an array has one entry for each equal block of another array."""
    return len(shape) == len(full) and all(n and size % n == 0 for n, size in zip(shape, full, strict=True))
