"""Hyperparameters in the state of `optax.inject_hyperparams`: set between updates, and matched with a checkpoint's.

The state has precedence over the optimizer that made it, so a restored state would bring back the values of an earlier
script. A checkpoint records which values its script gave, and which were set during the run: those set during the run are
kept, as a part of it; of the others, one that the script has changed since is taken from the script.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._tree import listed
from ..distributed import Peers
from ..errors import brief
from ..optimizers import as_hyperparam, as_number, find_hyperparam, hyperparams, injected, short_names
from ..steps import Program, TrainState


def _text(value: Any) -> str:
    return str(as_number(value))  # in JSON as a text, since it may be infinite


class Hyperparams:
    """The hyperparameters of one engine: where their values come from. `shown` has the dicts in the state that the user
    received, and what they held: a changed one is a value to set."""

    def __init__(self) -> None:
        self._is_running = False
        self._given: dict[str, str] = {}  # the values of the script, as texts
        self._of_run: set[str] = set()  # the names of those set during the run
        self._by_script: dict[str, np.ndarray] = {}  # set before the run
        self.shown: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    @property
    def record(self) -> dict[str, Any]:
        """The entry in `trainer.json`."""
        return {"given": self._given, "set": sorted(self._of_run)}

    def begin(self, program: Program, state: TrainState) -> None:
        """Sets in a new optimizer state what was set in an earlier one, and notes its values."""
        for name, value in self._by_script.items():
            _put(program, state, name, value)
        self._given = {name: _text(value) for name, value in hyperparams(program.opt_tree(state), scheduled=False).items()}

    def begin_run(self) -> None:
        """Notes that the run has begun. Values that are set before belong to the script, like its optimizer."""
        self._is_running = True

    # --- setting -------------------------------------------------------------------------------------------------------

    def set(self, program: Program, state: TrainState, values: Mapping[str, Any], peers: Peers) -> None:
        """Sets values by name, those of process 0.

        Raises ValueError for an unknown name and a value of a schedule, TypeError for anything but a number.
        """
        known = hyperparams(program.opt_tree(state), scheduled=False)
        checked = {}
        for name, value in values.items():
            full = find_hyperparam(program.opt_tree(state), name)
            checked[full] = as_hyperparam(name, value, known[full])
        decided = peers.decide("set_hyperparams", {name: as_number(value) for name, value in checked.items()})
        for name, value in decided.items():
            value = np.asarray(value, known[name].dtype)
            _put(program, state, name, value)
            if self._is_running:
                self._of_run.add(name)
            else:
                self._by_script[name], self._given[name] = value, _text(value)

    def show(self, opt_tree: PyTree) -> PyTree:
        """Returns an optimizer state for the user, who may write into its dicts as with optax."""
        opt_tree = jax.tree.map(lambda x: x, opt_tree)  # with dicts of its own
        self.shown = [(prefix, node.hyperparams, dict(node.hyperparams)) for prefix, node in injected(opt_tree)]
        return opt_tree

    def take_written(self, program: Program, state: TrainState, peers: Peers) -> None:
        """Sets the values that the user wrote into the state that `show` returned last."""
        written = {}
        for prefix, shown, before in self.shown:
            changed = {name: value for name, value in shown.items() if value is not before.get(name)}
            written.update({f"{prefix}{name}": value for name, value in changed.items()})
            before.update(changed)
        if written and peers.n > 1:
            raise ValueError(
                f"`trainer.opt_state`: expected no change with several processes, got one of "
                f"{', '.join(listed([*written]))}. Call `trainer.set_hyperparams` in every process."
            )
        if written:
            self.set(program, state, written, peers)

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def match(self, program: Program, state: TrainState, saved: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Decides between the values of a loaded state and those of the script, given the `record` of the checkpoint; logs
        each value that differs from the script's, or from before."""
        loaded = hyperparams(program.opt_tree(state), scheduled=False)
        if not loaded:
            return
        now, short = {**_made(program, state, loaded), **self._by_script}, short_names(loaded)
        for name, value in loaded.items():
            before, script = np.asarray(value), np.asarray(now[name], value.dtype)
            if saved["given"].get(name) == _text(script) or np.array_equal(before, script, equal_nan=True):
                continue  # the script is unchanged: what it computed since is a part of the run
            if name in saved["set"]:
                log(
                    f"hyperparameter `{short[name]}`: {_rounded(before)}, as set during the run, and not {_rounded(script)} "
                    "as in this script. `trainer.set_hyperparams` changes it"
                )
            else:
                log(f"hyperparameter `{short[name]}`: {_rounded(script)}, as in this script, before {_rounded(before)}")
                _put(program, state, name, script)
        self._given = {name: _text(np.asarray(now[name], loaded[name].dtype)) for name in loaded}
        self._of_run = set(saved["set"]) & loaded.keys()


def _indices(program: Program, state: TrainState) -> dict[str, int]:
    """Returns the position of each hyperparameter among the leaves of the optimizer state."""
    tree = jax.tree.unflatten(program.opt_treedef, range(len(state.opt_state)))
    return hyperparams(tree, scheduled=False)


def _put(program: Program, state: TrainState, name: str, value: np.ndarray) -> None:
    """Replaces a leaf of the state's optimizer state. The program stays: only the value changes."""
    i = _indices(program, state)[name]
    state.opt_state[i] = jax.device_put(value, state.opt_state[i].sharding)


def _made(program: Program, state: TrainState, names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the values that the optimizer of this script gives, without making the rest of its state."""
    indices, init = _indices(program, state), program.init_opt_state

    def values(trained: list[Array]) -> list[Array]:
        leaves = init(trained)
        return [leaves[indices[name]] for name in names]

    return dict(zip(names, map(np.asarray, jax.jit(values)(state.trained)), strict=True))


def _rounded(value: np.ndarray) -> str:
    return f"{as_number(value):.6g}" if not value.ndim else brief(as_number(value))
