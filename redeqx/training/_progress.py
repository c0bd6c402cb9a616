"""The progress of a trainer in its fits, as `trainer.json` records it with the step.

These few numbers suffice for a killed and resumed run to end with the same bits as an uninterrupted one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import MANIFEST
from ..errors import brief, damaged, is_plain, warn
from ..monitor import to_json
from ..storage import Location


@dataclass(frozen=True)
class Position:
    """A point in training: after `examples` examples of an epoch of one of the trainer's fits, all counted from 0.
    `data_state` is the state that an iterable of examples reports at this point."""

    fit: int = 0
    epoch: int = 0
    examples: int = 0
    data_state: Any = None


def position_of_record(record: Mapping[str, Any]) -> Position:
    """Returns the position in a `trainer.json` that `check_record` has found valid."""
    return Position(**{name: record[name] for name in ("fit", "epoch", "examples", "data_state")})


def others_of_record(record: Mapping[str, Any]) -> dict[str, int]:
    """Returns the steps that the run's other trainers had at the time of a record, by their folders' names."""
    others = record.get("others")
    pairs = others.items() if isinstance(others, dict) else ()
    return {name: step for name, step in pairs if isinstance(step, int) and (not name or is_plain(name))}


def is_whole(others: Mapping[str, tuple[int, list[int]]]) -> bool | None:
    """Returns whether the run's other trainers, each its step at the time of a record and the steps of its checkpoints, have
    checkpoints of those steps; None if they have gone on since."""
    pairs = [(step, saved) for step, saved in others.values() if saved]
    if any(step > saved[-1] for step, saved in pairs):
        return False
    return all(step in saved[-2:] for step, saved in pairs) or None


def warn_of_unsaved(path: Location, others: Mapping[str, tuple[int, list[int]]]) -> None:
    """Warns of those that had taken steps at the time of a record, and have no checkpoint."""
    for name, (step, saved) in others.items():
        if step and not saved:
            who = f"the trainer {name!r}" if name else "the trainer without a name"
            warn(
                f"`{path}`: expected a checkpoint of each trainer of the run, got none of {who}, which was at step {step} "
                "then: it begins anew. Save every trainer; to begin all of them anew, choose another workdir."
            )


@dataclass
class Progress:
    """What the fits of a trainer have come to."""

    setting: dict[str, Any] = field(default_factory=dict)  # the sizes with which the current fit began; empty if unknown
    best: dict[str, dict[str, float]] = field(default_factory=dict)  # `{"value": ..., "step": ...}` by a checkpoint's tag
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest evaluation
    learning_rate: float | None = None  # of the newest update, if a checkpoint records it
    saved: tuple[int, Position] | None = None  # step and position of the newest checkpoint
    first_step: int = 0  # the number of updates before the current fit
    evaluated: int = 0  # the step of the newest evaluation
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # that the newest fits returned, by their number

    def to_record(self) -> dict[str, Any]:
        """Returns the entries for `trainer.json`."""
        setting = {name: self.setting.get(name) for name in _SETTING}
        evaluation = {"step": self.evaluated, "metrics": self.metrics}
        numbers = plain_numbers({"best": self.best, "evaluation": evaluation, "results": self.results})
        return {**setting, **numbers, "first_step": self.first_step}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Progress":
        """Returns the progress in a `trainer.json` that `check_record` has found valid."""
        evaluation = record.get("evaluation", record)  # older records have the newest evaluation's metrics alone
        return cls(
            {name: record[name] for name in _SETTING if record.get(name) is not None},
            numbers_of_record(record["best"]),
            numbers_of_record(evaluation["metrics"]),
            numbers_of_record(record["learning_rate"]),
            (record["step"], position_of_record(record)),
            record["first_step"],
            evaluation["step"],
            numbers_of_record(record.get("results", {})),
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


# What determines the examples of a step and their computation. Older records have only the first ones.
_FIRST = ("batch_size", "train_size", "drop_remainder", "accumulate_grad_batches", "sample", "precision")
_SETTING = (*_FIRST, "optimizer", "trainable", "eval_sample")
_CHECKSUMS = {  # which a record has in place of these settings
    "sample": "other examples",
    "trainable": "other trained leaves",
    "eval_sample": "other examples to evaluate",
}
# The entries that a Trainer reads back, with their types. Their checksum says that they are as they were written.
_RECORDED: dict[str, type] = {
    **dict.fromkeys(("step", "seed", "n_keys", "fit", "epoch", "examples", "n_skipped", "n_examples", "first_step"), int),
    **dict.fromkeys(("best", "metrics", "train_metrics", "callbacks", "hyperparams"), dict),
    **dict.fromkeys((*_FIRST, "stream", "learning_rate", "data_state"), object),
}


def check_record(folder: Location, record: Mapping[str, Any]) -> None:
    """Raises DamagedError if a checkpoint's `trainer.json` was not written by a Trainer."""
    for name, kind in _RECORDED.items():
        if name not in record or not isinstance(record[name], kind):
            raise damaged(folder / MANIFEST, f"`{name}` as a Trainer writes it", brief(record.get(name)))


def changed_setting(before: Mapping[str, Any], now: Mapping[str, Any], otherwise: str) -> list[str]:
    """Describes harmless differences between the sizes of a resumed run and those of the fit that continues it, None if
    unknown. Raises ValueError if the steps would have other examples, with what to do `otherwise`."""
    differs = {name: (was, now[name]) for name, was in before.items() if now.get(name) is not None and now[name] != was}
    if "batch_size" in differs:
        was, found = differs["batch_size"]
        raise ValueError(
            f"`batch_size`: expected {was} examples per update, as in the resumed run, got {found}. "
            f"Pass `batch_size={was}`, which sets the rows per device on any mesh, or {otherwise}."
        )
    if "train_size" in differs:
        was, found = differs["train_size"]
        raise ValueError(
            f"`train_examples`: expected {was}, as in the resumed run, got {found}. "
            f"The order of the examples would differ. For new examples {otherwise}."
        )
    return [_CHECKSUMS.get(name, f"`{name}` {found}, before {was}") for name, (was, found) in differs.items()]


# --- where a fit starts -----------------------------------------------------------------------------------------------


def start(known: Position | None, fit_index: int, *, may_resume: bool) -> Position | None:
    """Returns where a fit starts, after `fit_index` fits of this script, if the run has come as far as `known`; None if an
    earlier run has finished it. `may_resume` says whether a fit that was interrupted goes on."""
    if known is None or fit_index > known.fit:
        return Position(fit_index)
    if fit_index < known.fit:
        return None
    return known if may_resume else Position(fit_index + 1)  # the interrupted fit is abandoned
