"""A warning about optimizers that climb along the imaginary part of complex weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import PyTree, listed
from ..errors import warn
from ..partition import Plan, using_kinds
from ._recipe import Recipe
from ._state import TrainState
from ._step import update_with

_MOST_STEPS = 8  # in which an optimizer must have moved a weight: a warm-up may begin with a rate of 0


def warn_of_optimizer(recipe: Recipe, plan: Plan, state: TrainState) -> None:
    """Warns if complex weights climb."""
    pairs = zip(recipe.parts.names[0], state.trained, strict=True)
    complexes = [f"`{name}`" for name, leaf in pairs if jnp.iscomplexobj(leaf)]
    if complexes and recipe.grad_fn is None and _climbs(recipe, plan, state):
        warn(
            f"`optimizer`: expected updates that descend, got ones that climb along the imaginary part of "
            f"{', '.join(listed(complexes, 3))}: `jax.grad` returns the conjugate of the direction of ascent. Conjugate it: "
            "`optax.chain(optax.stateless(lambda grads, params: jax.tree.map(jnp.conj, grads)), optimizer)`."
        )


def _climbs(recipe: Recipe, plan: Plan, state: TrainState) -> bool:
    """Returns whether the optimizer's first updates for an imaginary gradient of complex leaves increase the loss, or cannot
    be computed. Each leaf has one element here."""

    def small(leaf: Any, value: complex) -> jax.Array:
        return jnp.full((1,) * leaf.ndim, value if jnp.iscomplexobj(leaf) else 0, leaf.dtype)

    optimizer, parts = recipe.optimizer, recipe.parts
    params = parts.trained_tree([small(leaf, 0) for leaf in state.trained])
    grads = parts.trained_tree([small(leaf, 1j) for leaf in state.trained])

    def loss(params: PyTree, *_: Any, **__: Any) -> Any:
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
        return sum(jnp.sum(jnp.real(g * x)) for g, x in pairs)

    extra: dict[str, Any] = {"value_fn": loss, "grad_fn": lambda *_, **__: grads}
    try:
        with using_kinds(plan.kinds_of_loss):
            opt_state = optimizer.init(params)
        for _ in range(_MOST_STEPS):
            updates, opt_state = update_with(optimizer, plan, grads, opt_state, params, value=loss(params), **extra)
            if change := np.asarray(loss(updates)).item():
                return change > 0
    except Exception:  # the step calls it with its own arguments, and reports errors
        return True
    return True
