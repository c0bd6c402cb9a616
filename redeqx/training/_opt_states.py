"""What optax's states tell: hyperparameters, the learning rate, and how many updates were made.

Owns the knowledge of optax's types of states. A state may be inside of others, as those of `optax.chain`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_flatten_with_path
from jaxtyping import PyTree

from .._tree import render

_RATE = "learning_rate"
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def is_injected(node: Any) -> bool:
    return isinstance(node, _INJECTED)


def injected(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yields each state of `optax.inject_hyperparams` in an optimizer state, with the prefix of its names."""
    for path, node in tree_flatten_with_path(tree, is_leaf=is_injected)[0]:
        if is_injected(node):
            prefix = f"{render(path)}." if path else ""
            yield f"{prefix}hyperparams.", node
            for inner, of_inner in injected(node.inner_state):
                yield f"{prefix}inner_state.{inner}", of_inner


def hyperparams(opt_tree: PyTree, *, scheduled: bool) -> dict[str, Any]:
    """Returns the hyperparameters by their names in the state: those that a schedule computes, or the others."""
    return {
        f"{prefix}{name}": value
        for prefix, node in injected(opt_tree)
        for name, value in node.hyperparams.items()
        if (name in getattr(node, "hyperparams_states", ())) == scheduled
    }


def check_schedules(opt_tree: PyTree) -> None:
    """Raises ValueError if `optax.inject_hyperparams` took a mask for a schedule: it calls every function with the number of
    updates, and what a mask returns for a number would hold for all leaves.

    **Arguments:**

    - `opt_tree`: an optimizer state, as shapes.
    """
    for name, value in hyperparams(opt_tree, scheduled=True).items():
        if isinstance(value, jax.ShapeDtypeStruct) and value.dtype == jnp.bool_:
            name = name.rpartition(".")[2]
            raise ValueError(
                f"`optimizer`: expected `optax.inject_hyperparams` to call schedules, got `{name}`, a function that returns "
                f"a boolean for the number of updates. Pass `optax.inject_hyperparams(..., static_args={name!r})`."
            )


def injected_rate(opt_tree: PyTree) -> Any:
    """Returns the learning rate in an optimizer state, also one that a schedule has computed; None without exactly one."""
    rates = [node.hyperparams[_RATE] for _, node in injected(opt_tree) if _RATE in node.hyperparams]
    # Of complex parameters, optax makes complex hyperparameters.
    return jnp.real(rates[0]) if len(rates) == 1 and not jnp.ndim(rates[0]) else None


def n_updates(opt_tree: PyTree) -> Any:
    """Returns how many updates `optax.MultiSteps` has made of the steps so far; None without exactly one of it."""
    nodes = jax.tree.leaves(opt_tree, is_leaf=_is_multi_steps)
    counts = [node.gradient_step for node in nodes if _is_multi_steps(node)]
    return counts[0] if len(counts) == 1 else None


def _is_multi_steps(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def follows_schedule(opt_tree: PyTree) -> bool:
    """Returns whether `lr_schedule_fn` of the step is the learning rate, as far as the optimizer's state shows."""
    is_set = any(name.endswith(f".{_RATE}") for name in hyperparams(opt_tree, scheduled=False))
    return n_updates(opt_tree) is None and not is_set


def check_opt_tree(opt_tree: PyTree) -> None:
    """Raises ValueError for the state of `optax.lookahead`."""
    if any(map(_is_lookahead, jax.tree.leaves(opt_tree, is_leaf=_is_lookahead))):
        raise ValueError(
            "`optimizer`: expected one of the model's parameters, got `optax.lookahead`, which trains pairs of a fast and a "
            "slow copy. Average the weights instead: `redeqx.optimizers.ema(optimizer)`."
        )


def _is_lookahead(node: Any) -> bool:
    return isinstance(node, optax.LookaheadState)
