"""Optimizers of parameters that are stored in 16 bits: they compute in float32, with or without copies of the parameters.

Source: mixed precision with master weights (arXiv:1710.03740).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ._update import accepting


class MasterState(NamedTuple):
    """The state of an optimizer, and the float32 copies of the parameters that it updates."""

    inner: PyTree
    master: PyTree[Array]


def widened(tree: PyTree) -> PyTree:
    """Casts floating leaves to at least float32."""

    def wide(x: Any) -> Any:
        dtype = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return x if dtype == x.dtype else x.astype(dtype)

    return jax.tree.map(wide, tree)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that receives parameters and gradients in float32."""
    inner = accepting(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(widened(updates), state, widened(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(widened(params)), update)


def with_masters(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that updates float32 copies, kept in its state. The parameters are the rounded copies."""
    inner = accepting(optimizer)

    def init(params: Any) -> Any:
        master = widened(params)
        return MasterState(inner.init(master), master)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, of_inner = inner.update(widened(updates), state.inner, state.master, **extra)
        master = eqx.apply_updates(state.master, updates)
        return jax.tree.map(jnp.subtract, master, widened(params)), MasterState(of_inner, master)

    return optax.GradientTransformationExtraArgs(init, update)
