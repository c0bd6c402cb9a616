"""How a step calls an optimizer: with optax's extra arguments, the plan, and parameters of 16 bits in float32.

Source: mixed precision with master weights (arXiv:1710.03740).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from .._rounding import at_least_float32
from .._tree import PyTree, as_bare_shapes
from ..partition import Plan, using_kinds
from ._states import states_in


def ascent(grads: PyTree) -> PyTree:
    """Returns the direction of steepest ascent, as optimizers expect it, for gradients of `jax.grad`, which returns its
    conjugate: with complex parameters, an optimizer would climb along the imaginary parts. Inverts itself."""
    return jax.tree.map(jnp.conj, grads)


@dataclass(frozen=True, eq=False)
class Update:
    """An optimizer's update of one model, with the kinds of a plan's loss for its masks, from the shapes of the trained
    leaves and of its state. If it `is_wide`, gradients are cast to at least float32; otherwise to the dtype of their
    parameters.

    A step calls it as one jitted function, whose trace others read. One that calls the loss, as a line search does, becomes
    a part of each step instead.
    """

    optimizer: optax.GradientTransformation
    plan: Plan
    params: PyTree
    state: PyTree
    is_wide: bool = False
    _calls: list[str] = field(default_factory=list)  # of the loss at other parameters, for which the trace has stand-ins
    _traces: list[Any] = field(default_factory=list)

    def __call__(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        value: Array,
        value_fn: Callable[..., Array],
        grad_fn: Callable[..., PyTree],
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates and the new state. `grads` is the direction of steepest ascent and `value` the loss, both at
        `params`; `value_fn` and `grad_fn` map other parameters to these."""
        args = jax.tree.map(lambda grad, like: grad.astype(like.dtype), grads, self._grads), state, params, value
        if self._trace(*args) is None or self._calls:
            return self._run(*args, value_fn, grad_fn)
        return self._jitted(*args)

    @property
    def closed(self) -> Any:
        """It as a closed jaxpr, from the leaves of `(grads, state, params, value)` to those of the updates and of the new
        state; None if it cannot be traced alone."""
        if self._traces:
            return self._traces[-1]
        value = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return self._trace(*as_bare_shapes((self._grads, self.state, self.params, value)))

    def _trace(self, *args: Any) -> Any:
        try:
            self._traces[:] = [self._jitted.trace(*args).jaxpr]
        except Exception:  # the step calls it with its own arguments, and reports the error
            self._traces[:] = [None]
        return self._traces[0]

    @cached_property
    def _jitted(self) -> Any:
        def stand_in(x: Any, name: str) -> Callable[..., Any]:
            return lambda *_: self._calls.append(name) or x

        def update(grads: PyTree, state: PyTree, params: PyTree, value: Array) -> Any:
            return self._run(grads, state, params, value, stand_in(value, "value_fn"), stand_in(grads, "grad_fn"))

        return jax.jit(update)

    @property
    def _grads(self) -> PyTree:
        return jax.eval_shape(widened, self.params) if self.is_wide else self.params

    def _run(self, grads: PyTree, state: PyTree, params: PyTree, value: Array, value_fn: Any, grad_fn: Any) -> Any:
        def value_of(params: PyTree, grad_fn: Any = None, obj_fn: Any = None, plan: Any = None) -> Array:
            del grad_fn, obj_fn, plan  # a line search hands it what it does not take itself
            return value_fn(params)

        extra: dict[str, Any] = {"value": value, "grad": ascent(grads), "value_fn": value_of}
        extra |= {"grad_fn": lambda params, *_: grad_fn(params), "obj_fn": value_fn, "plan": self.plan}
        if states_in(state, optax.contrib.SAMState):  # refuses all others, even inside of `optax.chain`
            extra = {"grad_fn": extra["grad_fn"]}
        with using_kinds(self.plan.kinds_of_loss):
            return accepting(self.optimizer).update(grads, state, params, **extra)


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
        dtype = at_least_float32(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return x if dtype == x.dtype else x.astype(dtype)

    return jax.tree.map(wide, tree)


def with_kept_dtypes(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer whose first state has the dtypes of later ones. With parameters of several dtypes, some of optax
    widen it in the first update, such as bfloat16 moments by the float32 arrays of `optax.inject_hyperparams`."""
    inner = accepting(optimizer)

    def after_update(params: PyTree, state: PyTree) -> PyTree:
        value = jnp.zeros(())
        of_loss = {"value": value, "grad": params, "value_fn": lambda *_, **__: value, "grad_fn": lambda *_: params}
        return inner.update(params, state, params, **of_loss, obj_fn=lambda *_: value, plan=None)[1]

    def init(params: PyTree) -> PyTree:
        state, before = inner.init(params), None
        try:
            while len({x.dtype for x in jax.tree.leaves(params)}) > 1 and (dtypes := _dtypes(state)) != before:
                state, before = jax.tree.map(_widened_as, state, jax.eval_shape(after_update, params, state)), dtypes
        except Exception:  # the step calls it with its own arguments, and reports the error
            return state
        return state

    return optax.GradientTransformationExtraArgs(init, inner.update)


def _dtypes(tree: PyTree) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)]


def _widened_as(leaf: Any, like: Any) -> Any:
    """Casts a floating leaf to the dtype of another one of its shape, if that holds more."""
    is_floating = eqx.is_array(leaf) and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (leaf, like))
    is_wider = is_floating and leaf.shape == like.shape and jnp.promote_types(leaf.dtype, like.dtype) == like.dtype
    return leaf.astype(like.dtype) if is_wider else leaf


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
