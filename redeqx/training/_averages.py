"""An optimizer that also keeps an average of the weights, and what becomes of it where a checkpoint has more or fewer.

The average is part of the optimizer's state: split over the mesh as the parameters are, saved and resumed with it, updated
inside the compiled step, and left alone by a step that is skipped.
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import equinox as eqx
import jax
import optax

from .._tree import PyTree
from ._precision import widened


class AverageState(eqx.Module):
    """The state of an averaging optimizer: that of the optimizer it wraps, and the average of the trained parameters."""

    inner: PyTree
    average: PyTree
    name: str = eqx.field(static=True)


class Averaging(optax.GradientTransformationExtraArgs):
    """An optimizer that also averages the parameters that it makes."""

    inner: optax.GradientTransformationExtraArgs
    name: str
    decay: float

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, name: str, decay: float) -> "Averaging":
        """Wraps an optimizer."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: Any) -> Any:
            # In bfloat16 the small steps of an average would be lost.
            return AverageState(inner.init(params), widened(params), name)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, of_inner = inner.update(updates, state.inner, params, **extra)
            new = eqx.apply_updates(params, updates)
            average = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x.astype(a.dtype), state.average, new)
            return updates, AverageState(of_inner, average, name)

        averaging = cls(init, update)
        averaging.inner, averaging.name, averaging.decay = inner, name, decay
        return averaging


def with_saved_averages(
    optimizer: optax.GradientTransformation, tensors: Iterable[str], say: Callable[[str], None]
) -> optax.GradientTransformation:
    """An optimizer with as many averages as a checkpoint has, so that its state can be loaded.

    **Arguments:**

    - `tensors`: the names of the tensors of the checkpoint's optimizer.
    - `say`: is told of each average that is new to the run, or that this run has no use for.
    """
    n_saved = _n_saved(tuple(tensors))
    if n_saved and not isinstance(optimizer, Averaging):
        say("the checkpoint's average is dropped: this trainer keeps none (callback `EMA`)")
        for _ in range(n_saved):
            optimizer = Averaging.of(optimizer, "dropped", 0.0)
    while isinstance(optimizer, Averaging) and _n_averages(optimizer) > n_saved:
        say(f"the average `{optimizer.name}` begins with the weights of the checkpoint, which has none")
        optimizer = optimizer.inner
    return optimizer


def as_state_of(treedef: Any, state: PyTree, init: Callable[[], PyTree]) -> PyTree:
    """The state of one optimizer as that of another, which keeps more averages, or fewer, of the same one.

    **Arguments:**

    - `treedef`: the structure of the other's state.
    - `init`: makes the other's state from the weights as they are: averages that are new begin there.
    """
    found = state
    while jax.tree.structure(found) != treedef and isinstance(found, AverageState):
        found = found.inner
    return found if jax.tree.structure(found) == treedef else _around(init(), state)


def _around(averages: AverageState, state: PyTree) -> AverageState:
    """Averages around another state of the optimizer that they wrap."""
    is_wrapped = jax.tree.structure(averages.inner) == jax.tree.structure(state)
    inner = state if is_wrapped else _around(averages.inner, state)
    return AverageState(inner, averages.average, averages.name)


def _n_averages(optimizer: optax.GradientTransformation) -> int:
    return 1 + _n_averages(optimizer.inner) if isinstance(optimizer, Averaging) else 0


def _n_saved(names: tuple[str, ...]) -> int:
    return next(n for n in count() if not any(name.startswith("inner." * n + "average.") for name in names))
