"""Hyperparameters in the state of `optax.inject_hyperparams`: read and set between updates, and matched with a checkpoint's.

The state has precedence over the optimizer that made it, so a restored state would bring back the values of an earlier
script. A checkpoint records which values its script gave, and which were set during the run: those set during the run are
kept, as a part of it; of the others, one that the script has changed since is taken from the script.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._tree import listed, nearest
from ..distributed import Peers
from ..errors import brief
from ._opt_states import hyperparams, injected, is_injected
from ._state import TrainState


def _short(names: Mapping[str, Any]) -> dict[str, str]:
    """Maps names to shorter ones: without what comes before the last dot, unless two would then be the same."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


def _plain(value: Any) -> Any:
    """Returns an array as a number, or lists of numbers. Of complex parameters, optax makes complex hyperparameters."""
    return np.real(np.asarray(value)).tolist()


def _text(value: Any) -> str:
    return str(_plain(value))  # in JSON as a text, since it may be infinite


def hyperparam_values(opt_tree: PyTree) -> dict[str, Any]:
    """Returns all hyperparameters in an optimizer state, by name."""
    found = {**hyperparams(opt_tree, scheduled=False), **hyperparams(opt_tree, scheduled=True)}
    return dict(zip(_short(found).values(), map(_plain, found.values()), strict=True))


class Hyperparams:
    """The hyperparameters of one engine: where their values come from.

    **Attributes:**

    - `is_running`: whether the run has begun. Values that are set before belong to the script, like its optimizer.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._given: dict[str, str] = {}  # the values of the script, as texts
        self._of_run: set[str] = set()  # the names of those set during the run
        self._by_script: dict[str, np.ndarray] = {}  # set before the run
        # The dicts in the states that the user received, and what they held: a changed one is a value to set.
        self._shown: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    @property
    def record(self) -> dict[str, Any]:
        """The entry in `trainer.json`."""
        return {"given": self._given, "set": sorted(self._of_run)}

    def begin(self, state: TrainState) -> None:
        """Notes the values of a new optimizer state."""
        self._given = {name: _text(value) for name, value in hyperparams(state.opt_tree, scheduled=False).items()}

    # --- setting -------------------------------------------------------------------------------------------------------

    def set(self, state: TrainState, values: Mapping[str, Any], peers: Peers) -> None:
        """Sets values by name, those of process 0.

        Raises ValueError for an unknown name and a value of a schedule, TypeError for anything but a number.
        """
        known = hyperparams(state.opt_tree, scheduled=False)
        checked = {}
        for name, value in values.items():
            full = find(state.opt_tree, name)
            checked[full] = _checked(name, value, known[full])
        decided = peers.decide("set_hyperparams", {name: _plain(value) for name, value in checked.items()})
        for name, value in decided.items():
            value = np.asarray(value, known[name].dtype)
            _put(state, name, value)
            if self.is_running:
                self._of_run.add(name)
            else:
                self._by_script[name], self._given[name] = value, _text(value)

    def show(self, opt_tree: PyTree) -> PyTree:
        """Returns an optimizer state for the user, who may write into its dicts as with optax."""
        i = 0
        prefixes = [prefix for prefix, _ in injected(opt_tree)]

        def with_shown(node: Any) -> Any:
            nonlocal i
            if not is_injected(node):
                return node
            if i == len(self._shown):
                self._shown.append((prefixes[i], {}, {}))
            _, shown, before = self._shown[i]
            i += 1
            for values in (shown, before):
                values.clear()
                values.update(node.hyperparams)
            inner = jax.tree.map(with_shown, node.inner_state, is_leaf=is_injected)
            return node._replace(hyperparams=shown, inner_state=inner)

        return jax.tree.map(with_shown, opt_tree, is_leaf=is_injected)

    def take_written(self, state: TrainState, peers: Peers) -> None:
        """Sets the values that the user wrote into a state that `show` returned."""
        written = {}
        for prefix, shown, before in self._shown:
            changed = {name: value for name, value in shown.items() if value is not before.get(name)}
            written.update({f"{prefix}{name}": value for name, value in changed.items()})
            before.update(changed)
        if written and peers.n > 1:
            raise ValueError(
                f"`trainer.opt_state`: expected no change with several processes, got one of "
                f"{', '.join(listed([*written]))}. Call `trainer.set_hyperparams` in every process."
            )
        if written:
            self.set(state, written, peers)

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def match(self, state: TrainState, saved: Mapping[str, Any] | None, log: Callable[[str], None]) -> None:
        """Decides between the values of a loaded state and those of the script.

        **Arguments:**

        - `saved`: the `record` of the checkpoint; None for those of earlier releases.
        - `log`: called with a message for each value that differs from the script's, or from before.
        """
        loaded = hyperparams(state.opt_tree, scheduled=False)
        if not loaded:
            return
        given, of_run = ({}, []) if saved is None else (saved["given"], saved["set"])
        now, short = {**_made(state, loaded), **self._by_script}, _short(loaded)
        for name, value in loaded.items():
            before, script = np.asarray(value), np.asarray(now[name], value.dtype)
            if given.get(name) == _text(script) or np.array_equal(before, script, equal_nan=True):
                continue  # the script is unchanged: what it computed since is a part of the run
            if name in of_run:
                log(
                    f"hyperparameter `{short[name]}`: {_rounded(before)}, as set during the run, and not {_rounded(script)} "
                    "as in this script. `trainer.set_hyperparams` changes it"
                )
            else:
                log(f"hyperparameter `{short[name]}`: {_rounded(script)}, as in this script, before {_rounded(before)}")
                _put(state, name, script)
        self._given = {name: _text(np.asarray(now[name], loaded[name].dtype)) for name in loaded}
        self._of_run = {name for name in of_run if name in loaded}


def find(opt_tree: PyTree, name: str) -> str:
    """Returns the name in an optimizer state of a hyperparameter that can be set.

    Raises ValueError if there is none of that name, or several.
    """
    known, scheduled = hyperparams(opt_tree, scheduled=False), hyperparams(opt_tree, scheduled=True)
    found = [full for full in known if name in (full, full.rpartition(".")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"`{name}`: expected one hyperparameter, got {', '.join(listed(found))}. Set one of these by its whole name: "
            f"`set_hyperparams(**{{{found[0]!r}: ...}})`."
        )
    if any(name in (full, full.rpartition(".")[2]) for full in scheduled):
        raise ValueError(
            f"`{name}`: expected a hyperparameter that the optimizer was given as a number, got one with a schedule, which "
            f"computes it at each step. Pass a number: `optax.inject_hyperparams(...)({name}=1e-3)`."
        )
    if not known:
        raise ValueError(
            f"`{name}`: expected an optimizer with hyperparameters in its state, got one without. Make it with "
            "`optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)`."
        )
    short = _short(known).values()
    raise ValueError(f"`{name}`: expected one of {', '.join(listed([*short]))}, got no such name.{nearest(name, short)}")


def _checked(name: str, value: Any, leaf: Array) -> np.ndarray:
    """Returns a value for a leaf of the state."""
    try:
        array = np.asarray(value)
    except Exception:
        array = np.asarray(None)
    if not jnp.issubdtype(array.dtype, jnp.number) or array.shape != leaf.shape or array.dtype.kind == "c":
        rule = "a number" if not leaf.shape else f"numbers of shape {leaf.shape}"
        raise TypeError(f"`{name}`: expected {rule}, got {brief(value)}. Pass `float(...)` of one.")
    cast = array.astype(leaf.dtype)
    if np.isnan(cast).any() or (jnp.issubdtype(leaf.dtype, jnp.integer) and (cast != array).any()):
        rule = "an integer" if jnp.issubdtype(leaf.dtype, jnp.integer) else "a number"
        raise ValueError(f"`{name}`: expected {rule}, got {brief(value)}. Pass another.")
    return cast


def _put(state: TrainState, name: str, value: np.ndarray) -> None:
    """Replaces a leaf of the state's optimizer state. The program stays: only the value changes."""
    indices = jax.tree.unflatten(state.program.opt_treedef, range(len(state.opt_state)))
    i = hyperparams(indices, scheduled=False)[name]
    state.opt_state[i] = jax.device_put(value, state.opt_state[i].sharding)


def _made(state: TrainState, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the values that the optimizer of this script gives, without making the rest of its state."""
    indices = hyperparams(jax.tree.unflatten(state.program.opt_treedef, range(len(state.opt_state))), scheduled=False)
    init = state.program.init_opt_state

    def values(trained: list[Array]) -> list[Array]:
        leaves = init(trained)
        return [leaves[indices[name]] for name in names]

    return dict(zip(names, map(np.asarray, jax.jit(values)(state.trained)), strict=True))


def _rounded(value: np.ndarray) -> str:
    return f"{_plain(value):.6g}" if not value.ndim else brief(_plain(value))
