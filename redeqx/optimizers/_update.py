"""How a step calls an optimizer: with optax's extra arguments, the plan, and parameters of 16 bits in float32.

Source: mixed precision with master weights (arXiv:1710.03740).
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ..partition import Plan, using_kinds
from ._states import states_in


def ascent(grads: PyTree) -> PyTree:
    """Returns the direction of steepest ascent, as optimizers expect it, for gradients of `jax.grad`, which returns its
    conjugate: with complex parameters, an optimizer would climb along the imaginary parts. Inverts itself."""
    return jax.tree.map(jnp.conj, grads)


def update_with(
    optimizer: optax.GradientTransformation,
    plan: Plan,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    value: Array,
    value_fn: Callable[..., Array],
    grad_fn: Callable[..., PyTree],
) -> tuple[PyTree, PyTree]:
    """Returns the optimizer's updates and new state, with the kinds of the plan's loss for its masks.

    `grads` is the direction of steepest ascent and `value` the loss, both at `params`; `grad_fn` and `value_fn` map other
    parameters to these.
    """

    def value_of(params: PyTree, grad_fn: Any = None, obj_fn: Any = None, plan: Any = None) -> Array:
        del grad_fn, obj_fn, plan  # a line search hands it what it does not take itself
        return value_fn(params)

    extra: dict[str, Any] = {"value": value, "grad": ascent(grads), "value_fn": value_of}
    extra |= {"grad_fn": lambda params, *_: grad_fn(params), "obj_fn": value_fn, "plan": plan}
    if states_in(state, optax.contrib.SAMState):  # refuses all others, even inside of `optax.chain`
        extra = {"grad_fn": extra["grad_fn"]}
    with using_kinds(plan.kinds_of_loss):
        return accepting(optimizer).update(grads, state, params, **extra)


def accepting(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with an `update` that takes any extra argument, and drops those that the optimizer does not."""
    extra = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(extra.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        return extra.update(updates, state, params, **{name: x for name, x in given.items() if name in parameters})

    return optax.GradientTransformationExtraArgs(extra.init, update)


# --- parameters of 16 bits -----------------------------------------------------------------------------------------------


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
