"""Records of a run: `metrics.jsonl`, `speed.jsonl`, images and texts in `media/`, and trackers.

`metrics.jsonl` holds computed values, and a rerun reproduces it to the byte; `speed.jsonl` holds measured times.
"""

import json
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsFloat

from ..errors import Once, brief, warn
from ._delivery import Delivery
from ._goodput import Goodput
from ._jsonl import JsonLines, prefix_of, to_json
from ._live import ProgressLine
from ._media import MediaFile, check_image, check_name, png, rewind_media
from ._trackers import TRACKERS, Row, Tracker, check_loggers

_METRICS, _SPEED = "metrics.jsonl", "speed.jsonl"
# The files of a workdir that a resumed run continues.
RECORDS = (_METRICS, _SPEED, *(f"trackers/{name}.json" for name in TRACKERS))


class Records:
    """Records for the run in process 0; other processes only check the arguments.

    Without a workdir there are no files. Threads hold `log`, which prints a line, so it must not hold this object.

    Attributes: `goodput`, where the time of the run goes; `has_trackers`, whether there are trackers by name, also in other
    processes than the main one; `is_kept`, whether this process writes or sends what it records.

    Raises the errors of `check_loggers`.
    """

    def __init__(self, workdir: Path | None, loggers: Iterable[Tracker | str], is_main: bool, log: Callable[[str], None]):
        named, objects = check_loggers(loggers, workdir)
        self.has_trackers: bool = bool(named)
        self.goodput: Goodput = Goodput()
        self._workdir, self._is_main = workdir, is_main
        self._objects = objects if is_main else []
        self._files = {name: JsonLines(workdir / name) for name in (_METRICS, _SPEED)} if workdir and is_main else {}
        self._deliveries = [Delivery(name, workdir, log) for name in named] if is_main else []
        self.is_kept: bool = bool(self._objects or self._files or self._deliveries)
        weakref.finalize(self, _request_close, self._deliveries).atexit = False
        self._step = 0  # the step of the newest metrics
        self._rewound: set[str | None] = set()  # the names of the trainers whose earlier records were rewound
        self._has_timed = False  # whether this process has recorded times
        self._media: dict[str, str] = {}  # the name of each file of an image or a text
        self._warn_of_medium = Once(warn)

    def step(
        self,
        line: ProgressLine,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        name: str | None = None,
        **counts: Any,
    ) -> None:
        """Shows a finished step in a line, and records its metrics with the line's speed. `name` is that of the trainer, as
        for `metrics`; the others are those of `ProgressLine.update`."""
        line.update(step, metrics=metrics, epoch=epoch, **counts)
        values = metrics if epoch is None else {"epoch": epoch, **metrics}
        if speed := line.speed():
            self._has_timed = True
            speed |= self.goodput.numbers()
        self.metrics(values, step, speed=speed, name=name)

    def end(self, step: int, name: str | None = None) -> None:
        """Records that a fit has ended after this step: time that passes until a later process is not the run's."""
        if _SPEED in self._files:
            prefix = "" if name is None else f"{name}/"
            self._files[_SPEED].write(step, {prefix + key: x for key, x in {**self.goodput.numbers(), "ended": 1}.items()})

    def metrics(
        self,
        values: Mapping[str, SupportsFloat],
        step: int,
        *,
        speed: Mapping[str, SupportsFloat] | None = None,
        name: str | None = None,
    ) -> None:
        """Records metrics of one step in the files and every tracker.

        `speed` has more numbers, which a rerun does not reproduce; they are written to `speed.jsonl`. For a name in both,
        trackers get the value of `values`. The numbers of a trainer with a `name` are called `name/...`.

        Raises ValueError for a metric called `step`, TypeError for anything but a dict of names, and for a value that is not
        one number.
        """
        self._step = step = _as_step(step)
        if not self._is_main:
            return
        if not (isinstance(values, Mapping) and all(isinstance(key, str) for key in values)):
            raise TypeError(f"`metrics`: expected numbers by name, got {brief(values)}. Pass a dict: `{{'loss': 0.5}}`.")
        prefix = "" if name is None else f"{name}/"
        values, speed = ({prefix + key: x for key, x in of.items()} for of in (values, speed or {}))
        if "step" in values:
            raise ValueError("`step`: expected another name for a metric, got the name of the step. Rename it.")
        numbers, rates = ({key: _as_number(key, x) for key, x in of.items()} for of in (values, speed))
        if self._files:
            self._files[_METRICS].write(step, numbers)
            if rates:
                self._files[_SPEED].write(step, rates)
        together = {**rates, **numbers}
        for delivery in self._deliveries:
            delivery.record(Row(step, together))
        for logger in self._objects:
            logger.log(dict(together), step)

    def image(self, name: str, image: Any, step: int | None) -> None:
        """Records an image; arguments and errors as for `Deployer.log_image`."""
        check_name(name)
        image = check_image(image)
        content = png(image) if self._files or self._deliveries else b""
        self._medium(MediaFile(name, self._step if step is None else _as_step(step), content), "log_image", image)

    def text(self, name: str, text: str, step: int | None) -> None:
        """Records a text."""
        check_name(name)
        if not isinstance(text, str):
            raise TypeError(f"`text`: expected a string, got {type(text).__name__}. Pass `str(text)`.")
        text = text.encode(errors="backslashreplace").decode()  # a sample of bytes may hold lone surrogates
        self._medium(MediaFile(name, self._step if step is None else _as_step(step), text), "log_text", text)

    def _medium(self, medium: MediaFile, method: str, value: Any) -> None:
        """Records an image or a text, also by this method of the trackers that are objects and have it."""
        if self._workdir is not None and (other := self._media.setdefault(medium.filename, medium.name)) != medium.name:
            raise ValueError(
                f"`name`: expected a name with a file of its own, got {medium.name!r}, whose file {medium.filename} at this "
                f"step is that of {other!r}. Rename one of them."
            )
        if self._files and self._workdir is not None:
            try:
                medium.write(self._workdir / "media")
            except OSError as error:
                self._warn_of_medium(
                    f"`{self._workdir / 'media'}`: expected to record, got {error.strerror or error}. Training goes on."
                )
        for delivery in self._deliveries:
            delivery.record(medium)
        for logger in self._objects:
            if callable(log := getattr(logger, method, None)):
                log(medium.name, value, medium.step)

    def config(self, values: Mapping[str, Any]) -> None:
        """Records the configuration of the run in the built-in trackers. Raises TypeError for anything but a mapping."""
        if not isinstance(values, Mapping):
            raise TypeError(f"`config`: expected values by name, got {brief(values)}. Pass a dict: `{{'rate': 0.1}}`.")
        for delivery in self._deliveries:
            delivery.config({name: _plain(value) for name, value in values.items()})

    def begin(self, rows: Mapping[str, str], explain_plan: Callable[[], str]) -> None:
        """Records the rows of the header, and at the begin of a tracker's run the full plan, in the built-in trackers."""
        self.config(rows)
        for delivery in self._deliveries:
            if delivery.is_new:
                delivery.record(MediaFile("plan", self._step, explain_plan()))

    def rewind_once(self, step: int, name: str | None) -> None:
        """Calls `rewind`, unless this process has called it for a trainer of this name."""
        if name not in self._rewound:
            self.rewind(step, name)

    def rewind(self, step: int, name: str | None = None) -> None:
        """Deletes what was recorded after `step`, for a run that resumes from there. Of one of several trainers, by `name`,
        all images and texts are kept.

        Rows of other trainers are kept, unless -1 deletes all. The user's own rows belong to the trainer without a name, if
        there is one.
        """
        self._rewound.add(name)
        if not self._is_main:
            return
        self._step = max(step, 0)
        if self._workdir is None:  # nothing is recorded, and so nothing repeated
            return
        if not self._has_timed:  # those of an earlier process
            self._has_timed, prefix = True, "" if name is None else f"{name}/"
            rows = ((at, {k.removeprefix(prefix): x for k, x in row.items()}) for at, row in self._files[_SPEED].read())
            self.goodput.continue_from(rows, self._step)
        trainers = self._trainers()
        others = set() if name is None and step < 0 else trainers - {name}

        def is_of_another(numbers: Mapping[str, Any]) -> bool:
            prefix = prefix_of(numbers)
            return (prefix if prefix in trainers else None) in others

        def is_kept(record: Any) -> bool:
            return is_of_another(record.numbers) if isinstance(record, Row) else name is not None

        for file in self._files.values():
            file.rewind(step, is_of_another)
        if name is None:
            rewind_media(self._workdir / "media", step)
        for delivery in self._deliveries:
            every = (Row(at, numbers) for at, numbers in self._files[_METRICS].read())
            delivery.rewind(step, every, is_kept, begins=step <= 0 and not others)

    def _trainers(self) -> set[str | None]:
        """Returns the names of the trainers whose steps are recorded, None for one without a name. The user's own metrics
        may have prefixes too."""
        rows = ((prefix_of(row), row) for _, row in self._files[_METRICS].read())
        steps = ((of, "" if of is None else f"{of}/", row) for of, row in rows)
        return {of for of, prefix, row in steps if {f"{prefix}loss", f"{prefix}grad_norm"} <= row.keys()}

    def close(self) -> None:
        """Closes files and trackers. Later records open them again."""
        for each in (*self._files.values(), *self._deliveries):
            each.close()


def _as_step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"`step`: expected an integer, got {step!r}. Pass `trainer.step`.") from None


def _plain(value: Any) -> Any:
    """Returns a value of a configuration as trackers sort and compare them: numbers stay numbers, dicts and lists stay what
    they are, and anything else is text."""

    def number_or_text(x: Any) -> Any:
        if getattr(x, "ndim", None) == 0:
            with suppress(AttributeError, NotImplementedError):  # a dtype, a shape or a key
                return x.item()
        return str(x)

    try:
        return json.loads(to_json(value, default=number_or_text))
    except (TypeError, ValueError):  # keys that are no strings, or a dict within itself
        return str(value)


def _as_number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        shape = getattr(value, "shape", None)
        got = repr(value)[:80] if shape is None else f"an array of shape {shape}"
        raise TypeError(f"`{name}`: expected one number as a metric, got {got}. Reduce it to one.") from None


def _request_close(deliveries: Iterable[Delivery]) -> None:
    for delivery in deliveries:
        delivery.request_close()
