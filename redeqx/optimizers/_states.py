"""What optax's states tell: hyperparameters, the learning rate, and how many updates were made.

A state may be inside of others, as those of `optax.chain`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_flatten_with_path
from jaxtyping import Array, PyTree

from .._tree import listed, named_leaves, nearest, render
from ..errors import brief

_RATE = "learning_rate"
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def states_in(opt_tree: PyTree, kinds: Any) -> list[Any]:
    """Returns the outermost states of these types."""
    return [x for x in jax.tree.leaves(opt_tree, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(x, kinds)]


def kinds_of_states(opt_tree: PyTree) -> str:
    """Names the states in an optimizer state, from the outermost ones on: "ScaleByAdamState, EmptyState"."""
    found: list[str] = []

    def is_leaf(node: Any) -> bool:  # called with each node, the outer ones first
        found.extend([type(node).__name__] if hasattr(node, "_fields") else [])
        return False

    jax.tree.leaves(opt_tree, is_leaf=is_leaf)
    return ", ".join(found)


def injected(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yields each state of `optax.inject_hyperparams` in an optimizer state, with the prefix of its names."""
    for path, node in tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, _INJECTED))[0]:
        if isinstance(node, _INJECTED):
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


def hyperparam_values(opt_tree: PyTree) -> dict[str, Any]:
    """Returns all hyperparameters in an optimizer state as numbers, by their short names."""
    found = {**hyperparams(opt_tree, scheduled=False), **hyperparams(opt_tree, scheduled=True)}
    return dict(zip(short_names(found).values(), map(as_number, found.values()), strict=True))


def short_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Maps names to shorter ones: without what comes before the last dot, unless two would then be the same."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


def as_number(value: Any) -> Any:
    """Returns an array as a number, or lists of numbers. Of complex parameters, optax makes complex hyperparameters."""
    return np.real(np.asarray(value)).tolist()


def find_hyperparam(opt_tree: PyTree, name: str) -> str:
    """Returns the name in an optimizer state of a hyperparameter that can be set.

    Raises ValueError if there is none of that name, or several.
    """
    known, scheduled = hyperparams(opt_tree, scheduled=False), hyperparams(opt_tree, scheduled=True)
    found, is_scheduled = ([full for full in of if name in (full, full.rpartition(".")[2])] for of in (known, scheduled))
    if len(found) == 1:
        return found[0]
    if found:
        expected, got = "one hyperparameter", ", ".join(listed(found))
        advice = f"Set one of these by its whole name: `set_hyperparams(**{{{found[0]!r}: ...}})`."
    elif is_scheduled:
        expected, got = "a hyperparameter that the optimizer was given as a number", "one with a schedule"
        advice = f"Pass a number: `optax.inject_hyperparams(...)({name}=1e-3)`."
    elif known:
        short = short_names(known).values()
        expected, got, advice = f"one of {', '.join(listed([*short]))}", "no such name", nearest(name, short).strip()
    else:
        expected, got = "an optimizer with hyperparameters in its state", "one without"
        advice = "Make it with `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)`."
    raise ValueError(f"`{name}`: expected {expected}, got {got}. {advice}".strip())


def as_hyperparam(name: str, value: Any, leaf: Array) -> np.ndarray:
    """Returns a value for a hyperparameter. Raises TypeError for anything but real numbers, ValueError for NaN."""
    try:
        array = np.asarray(value)
    except Exception:
        array = np.asarray(None)
    if not jnp.issubdtype(array.dtype, jnp.number) or array.shape != leaf.shape or array.dtype.kind == "c":
        rule = "a number" if not leaf.shape else f"numbers of shape {leaf.shape}"
        raise TypeError(f"`{name}`: expected {rule}, got {brief(value)}. Pass `float(...)` of one.")
    cast, is_integer = array.astype(leaf.dtype), jnp.issubdtype(leaf.dtype, jnp.integer)
    if np.isnan(cast).any() or (is_integer and (cast != array).any()):
        rule = "an integer" if is_integer else "a number"
        raise ValueError(f"`{name}`: expected {rule}, got {brief(value)}. Pass another.")
    return cast


def injected_rate(opt_tree: PyTree) -> Any:
    """Returns the learning rate in an optimizer state, which a schedule may have computed; None without exactly one."""
    rates = [node.hyperparams[_RATE] for _, node in injected(opt_tree) if _RATE in node.hyperparams]
    return jnp.real(rates[0]) if len(rates) == 1 and not jnp.ndim(rates[0]) else None


def n_updates(opt_tree: PyTree) -> Any:
    """Returns how many updates `optax.MultiSteps` has made of the steps so far; None without exactly one of it."""
    counts = [node.gradient_step for node in states_in(opt_tree, optax.MultiStepsState)]
    return counts[0] if len(counts) == 1 else None


def follows_schedule(opt_tree: PyTree) -> bool:
    """Returns whether `lr_schedule_fn` of the step is the learning rate, as far as the optimizer's state shows."""
    is_set = any(name.endswith(f".{_RATE}") for name in hyperparams(opt_tree, scheduled=False))
    return n_updates(opt_tree) is None and not is_set


def paired_leaves(new: PyTree, before: PyTree, name: str, like: str, advice: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the leaves of a state after and before, by name. Raises ValueError if it has another structure."""
    leaves, old_leaves = named_leaves(new), named_leaves(before)
    if jax.tree.structure(new) != jax.tree.structure(before):
        names = [f"`{name}`" for name in (*leaves, *old_leaves) if (name in leaves) != (name in old_leaves)]
        differs = f"{', which differs in ' * bool(names)}{', '.join(listed(names, 3))}"
        raise ValueError(f"`{name}` state: expected the structure of `{like}`, got another one{differs}. {advice}")
    yield from zip(leaves, leaves.values(), old_leaves.values(), strict=True)


def check_kept_form(new: PyTree, before: PyTree) -> None:
    """Raises ValueError if an update changes the structure, a shape or a dtype of an optimizer's state: no checkpoint of it
    could be loaded."""
    advice = "Return from `optimizer.update` a state like that of `optimizer.init`."
    for name, leaf, old in paired_leaves(new, before, "optimizer", "optimizer.init", advice):
        found, expected = (x if hasattr(x, "dtype") else jnp.asarray(x) for x in (leaf, old))
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            if found.shape == expected.shape and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (found, expected)):
                advice = (
                    'If the parameters have several dtypes, store all in float32, with `compute="float32"` or '
                    '`compute="bfloat16"`, or return from `optimizer.update` a state like that of `optimizer.init`.'
                )
            raise ValueError(
                f"`optimizer` state `{name}`: expected {expected.dtype}{list(expected.shape)}, as from `optimizer.init`, "
                f"got {found.dtype}{list(found.shape)}. {advice}"
            )


def check_opt_state(opt_tree: PyTree) -> None:
    """Raises ValueError for optimizers that would compute something else than they seem to, by the shapes of their state."""
    if states_in(opt_tree, optax.LookaheadState):
        raise ValueError(
            "`optimizer`: expected one of the model's parameters, got `optax.lookahead`, which trains pairs of a fast and a "
            "slow copy. Average the weights instead: `redeqx.optimizers.ema(optimizer)`."
        )
    # `optax.inject_hyperparams` calls every function with the number of updates, even a mask.
    masks = [name.rpartition(".")[2] for name, x in hyperparams(opt_tree, scheduled=True).items() if x.dtype == jnp.bool_]
    if masks:
        raise ValueError(
            f"`optimizer`: expected `optax.inject_hyperparams` to call schedules, got `{masks[0]}`, a function that returns "
            f"a boolean for the number of updates. Pass `optax.inject_hyperparams(..., static_args={masks[0]!r})`."
        )
