"""The progress of a trainer in its fits, as `trainer.json` records it with the step.

These few numbers suffice for a killed and resumed run to end with the same bits as an uninterrupted one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..checkpoint import MANIFEST
from ..errors import brief, damaged, is_size
from ..monitor import to_json
from ..storage import Location
from ._callbacks import is_states


@dataclass(frozen=True)
class Position:
    """A point in training: after `examples` examples of an epoch of one of the trainer's fits, all counted from 0.

    `data_state` is the state that an iterable of examples reports at this point.
    """

    fit: int = 0
    epoch: int = 0
    examples: int = 0
    data_state: Any = None


@dataclass
class Progress:
    """The progress of a trainer in its fits.

    **Arguments:**

    - `position`: the current position.
    - `setting`: the sizes with which the current fit began; empty if unknown.
    - `best`: for each tag of a best checkpoint, `{"value": ..., "step": ...}`.
    - `n_skipped`: updates that were skipped because they were not finite.
    - `n_examples`: examples of all updates so far.
    - `first_step`: the number of updates before the current fit.
    - `metrics`: the metrics of the newest evaluation.
    - `learning_rate`: the learning rate of the newest update, if a checkpoint records it.
    - `saved`: step and position of the newest checkpoint.
    """

    position: Position = Position()
    setting: dict[str, Any] = field(default_factory=dict)
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    n_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    saved: tuple[int, Position] | None = None
    n_examples: int = 0
    first_step: int = 0

    def to_record(self) -> dict[str, Any]:
        """Returns the entries for `trainer.json`."""
        setting = {name: self.setting.get(name) for name in _SETTING}
        counts = {name: getattr(self, name) for name in ("n_skipped", "n_examples", "first_step")}
        return {**asdict(self.position), **setting, "best": plain_numbers(self.best), **counts}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Progress":
        """Returns the progress in a `trainer.json` that `check_record` has found valid."""
        position = Position(**{name: record[name] for name in ("fit", "epoch", "examples", "data_state")})
        return cls(
            position,
            {name: record[name] for name in _SETTING if record.get(name) is not None},
            numbers_of_record(record["best"]),
            record.get("n_skipped", 0),
            numbers_of_record(record.get("metrics", {})),
            numbers_of_record(record.get("learning_rate")),
            (record["step"], position),
            record.get("n_examples", 0),
            record.get("first_step", 0),
        )


# Numbers for which JSON has no literal, as `to_json` writes them.
_NONFINITE = ("NaN", "Infinity", "-Infinity")


def plain_numbers(value: Any) -> Any:
    """Returns numbers, alone or in dicts, for `trainer.json`: NaN and the infinities as strings that `float` accepts, as
    other programs refuse JSON with anything else in their place."""
    try:
        return json.loads(to_json(value, default=float))
    except (TypeError, ValueError):
        raise TypeError(f"`metrics`: expected numbers by name, got {brief(value)}. Convert them by `float`.") from None


def numbers_of_record(value: Any) -> Any:
    """Returns what `plain_numbers` was given."""
    if isinstance(value, dict):
        return {name: numbers_of_record(item) for name, item in value.items()}
    return float(value) if value in _NONFINITE else value


# What determines the examples of a step and their computation.
_SETTING = ("batch_size", "train_size", "drop_remainder", "accumulate_grad_batches", "sample", "precision")
_MAX_STEP = 2**31  # the step counter is an int32, as are the numbers of keys


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in _NONFINITE  # bool is a subclass of int


def _is_best(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(best, dict) and _is_number(best.get("value")) and is_size(best.get("step")) for best in value.values()
    )


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(name, str) and name.isidentifier() for name in value)
    return is_list and len(set(value)) == len(value)


def _are_hyperparams(value: Any) -> bool:
    """Returns whether a value has the format of `Hyperparams.record`."""
    return (
        isinstance(value, dict)
        and isinstance(given := value.get("given"), dict)
        and all(isinstance(text, str) for text in given.values())
        and isinstance(names := value.get("set"), list)
        and all(isinstance(name, str) for name in names)
    )


def _is_count(value: Any, least: int) -> bool:
    return is_size(value) and least <= value < _MAX_STEP


_SIZE = ("an integer from 0 on", is_size)
_SIZE_OR_NONE = ("an integer from 1 on, or null", lambda value: value is None or (is_size(value) and value > 0))
# The entries that a Trainer writes, with their valid values; `data_state` is defined by the user.
_RECORDED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": (f"an integer from 0 to {_MAX_STEP - 1}", lambda value: _is_count(value, 0)),
    "seed": ("an integer", lambda value: type(value) is int),
    "stream": (f"an integer from 1 to {_MAX_STEP - 1}, or null", lambda value: value is None or _is_count(value, 1)),
    "n_keys": (f"an integer from 0 to {_MAX_STEP - 1}", lambda value: _is_count(value, 0)),
    **dict.fromkeys(("fit", "epoch", "examples"), _SIZE),
    "data_state": ("any JSON", lambda value: True),
    **dict.fromkeys(("train_size", "batch_size", "accumulate_grad_batches"), _SIZE_OR_NONE),
    "drop_remainder": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "sample": ("a crc32, or null", lambda value: value is None or (is_size(value) and value < 2**32)),
    "precision": ("a string, or null", lambda value: value is None or isinstance(value, str)),
    "best": ("a value and a step for each tag", _is_best),
    **dict.fromkeys(("n_skipped", "n_examples", "first_step"), _SIZE),
    "learning_rate": ("a number, or null", lambda value: value is None or _is_number(value)),
    **dict.fromkeys(("metrics", "train_metrics"), ("an object", lambda value: isinstance(value, dict))),
    "callbacks": ("values and arrays for each", is_states),
    "averages": ("a list of names", _are_names),
    "hyperparams": ("values and names", lambda value: value is None or _are_hyperparams(value)),
}
# Entries that earlier releases did not write, with their default values.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("batch_size", "accumulate_grad_batches", "drop_remainder", "sample")),
    **dict.fromkeys(("precision", "learning_rate", "stream", "hyperparams")),
    **dict.fromkeys(("n_skipped", "n_examples", "first_step", "n_keys"), 0),
    **{name: {} for name in ("metrics", "train_metrics", "callbacks")},
    "averages": [],
}


def check_record(folder: Location, record: Mapping[str, Any]) -> None:
    """Raises DamagedError if a checkpoint's `trainer.json` was not written by a Trainer."""
    for name, (rule, is_right) in _RECORDED.items():
        if name not in record and name not in _DEFAULTS:
            raise damaged(folder / MANIFEST, f"`{name}`, {rule}", "none")
        if not is_right(value := record.get(name, _DEFAULTS.get(name))):
            raise damaged(folder / MANIFEST, f"`{name}` to be {rule}", brief(value))
