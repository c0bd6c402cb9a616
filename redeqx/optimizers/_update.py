"""Calls optimizers: optax's extra arguments, and the plan that those of this package read."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ..partition import Plan, using_kinds
from ._states import has_state


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

    **Arguments:**

    - `grads`: the direction of steepest ascent at `params`.
    - `value`: the loss at `params`.
    - `value_fn`, `grad_fn`: map other parameters to the loss and to its direction of ascent.
    """

    def value_of(params: PyTree, grad_fn: Any = None, obj_fn: Any = None, plan: Any = None) -> Array:
        del grad_fn, obj_fn, plan  # a line search hands it what it does not take itself
        return value_fn(params)

    extra: dict[str, Any] = {"value": value, "grad": ascent(grads), "value_fn": value_of}
    extra |= {"grad_fn": lambda params, *_: grad_fn(params), "obj_fn": value_fn, "plan": plan}
    if has_state(state, optax.contrib.SAMState):  # refuses all others, also inside of `optax.chain`
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
