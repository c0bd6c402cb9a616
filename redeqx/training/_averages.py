"""Averages of the weights: an optimizer that also keeps an average, and how averages are matched with those of a checkpoint.

The average is part of the optimizer state: sharded as the parameters are, saved and resumed with it, updated inside the
compiled step, and unchanged by a skipped step.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .._origins import CHANGED, set_origin
from .._tree import PyTree
from ..machine import is_in_host
from ._precision import widened


class AverageState(eqx.Module):
    """The state of an averaging optimizer: the inner optimizer's state, and the average of the trained parameters."""

    inner: PyTree
    average: PyTree
    name: str = eqx.field(static=True)


class Averaging(optax.GradientTransformationExtraArgs):
    """An optimizer that also averages the updated parameters."""

    inner: optax.GradientTransformationExtraArgs
    name: str
    decay: float

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, name: str, decay: float) -> "Averaging":
        """Wraps an optimizer."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: Any) -> Any:
            # In bfloat16 the small changes of an average would be rounded away.
            return AverageState(inner.init(params), widened(params), name)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, of_inner = inner.update(updates, state.inner, params, **extra)
            new = eqx.apply_updates(params, updates)
            average = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x.astype(a.dtype), state.average, new)
            return updates, AverageState(of_inner, average, name)

        averaging = cls(init, update)
        averaging.inner, averaging.name, averaging.decay = inner, name, decay
        return averaging


def average_names(optimizer: optax.GradientTransformation) -> list[str]:
    """Returns the names of an optimizer's averages, the outermost first."""
    return [optimizer.name, *average_names(optimizer.inner)] if isinstance(optimizer, Averaging) else []


def with_saved_averages(
    optimizer: optax.GradientTransformation, saved: Sequence[str], log: Callable[[str], None]
) -> optax.GradientTransformation:
    """Returns the optimizer with the averages of a checkpoint, in their order, so that its state can be loaded.

    **Arguments:**

    - `saved`: the names of the checkpoint's averages, from `average_names`.
    - `log`: called with a message for each average that is new to the run, or that this run does not use.
    """
    own = average_names(optimizer)
    if own == list(saved):
        return optimizer
    for name in (name for name in saved if name not in own):
        log(f"the checkpoint's average `{name}` is dropped, unless a fit before the next step keeps one (callback `EMA`)")
    for name in (name for name in own if name not in saved):
        log(f"the average `{name}` begins with the weights of the checkpoint, which has none")
    while isinstance(optimizer, Averaging):
        optimizer = optimizer.inner
    for name in reversed(saved):
        optimizer = Averaging.of(optimizer, name, 0.0)  # takes no step
    return optimizer


def with_averages(
    names: Sequence[str], state: PyTree, aside: dict[str, PyTree], init: Callable[[], PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the optimizer state with other averages, and the unused averages by name.

    **Arguments:**

    - `names`: the averages to keep, the outermost first.
    - `aside`: further averages of the same weights, which an earlier state did not use.
    - `init`: makes such a state from the current weights, where new averages begin.
    """
    averages, state = _unwrap(state)
    averages = {**aside, **averages}
    if set(names) - set(averages):
        averages = {**_unwrap(init())[0], **averages}
    for name in reversed(names):
        state = AverageState(state, averages.pop(name), name)
    return state, averages


def with_new_averages(state: PyTree, params: PyTree) -> PyTree:
    """Returns the state with its averages restarted from these parameters."""
    if not isinstance(state, AverageState):
        return state
    copied = lambda x, a: jax.device_put(jnp.array(x, a.dtype, copy=True), a.sharding)  # noqa: E731 (a step donates both)
    average = jax.tree.map(copied, params, state.average)
    return AverageState(with_new_averages(state.inner, params), average, state.name)


def averages_in(state: PyTree) -> dict[str, PyTree]:
    """Returns the averages in an optimizer state, by name."""
    return _unwrap(state)[0]


def without_averages(state: PyTree) -> PyTree:
    """Returns the optimizer state inside its averages."""
    return _unwrap(state)[1]


def as_model(average: PyTree, model: PyTree) -> PyTree:
    """Returns an averaged model, with the dtypes and memory kinds of the trained one."""
    return jax.tree.map(_like, eqx.combine(cast(PyTree, average), model), model)


def _unwrap(state: PyTree) -> tuple[dict[str, PyTree], PyTree]:
    """Splits a state into its averages, by name, and the inner state."""
    averages = {}
    while isinstance(state, AverageState):
        averages[state.name], state = state.average, state.inner
    return averages, state


def _like(average: Any, x: Any) -> Any:
    """Converts an average to the dtype and memory kind of its leaf."""
    if not isinstance(x, jax.Array) or average is x:
        return average
    average = jax.device_put(average, x.sharding) if is_in_host(average.sharding) else average
    average = average.astype(x.dtype) if average.dtype != x.dtype else average
    set_origin(average, CHANGED)
    return average
