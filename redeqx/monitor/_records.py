"""What a run records: `metrics.jsonl`, `speed.jsonl`, images and texts in `media/`, and trackers.

`metrics.jsonl` holds what a run computed, and a rerun repeats it to the byte; `speed.jsonl` holds what a clock said of it.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from ._delivery import Delivery
from ._jsonl import JsonLines
from ._media import Medium, check_image, check_name, png, rewind_media
from ._trackers import TRACKERS, Row, Tracker, as_number, check_loggers

_APPENDED = {"metrics": "metrics.jsonl", "speed": "speed.jsonl"}
# The files of a workdir with which a resumed run goes on.
RECORDS = (*_APPENDED.values(), *(f"trackers/{name}.json" for name in TRACKERS))


class Records:
    """Records for one process, which is process 0; the others check what they are given.

    **Arguments:**

    - `workdir`: the folder of the run; None writes no files.
    - `loggers`: trackers, by name or objects; `run_tensorboard` adds `"tensorboard"`.
    - `is_main`: whether this process records.
    - `say`: prints a line; a bound method, which is not kept alive.

    Raises what `check_loggers` raises.
    """

    def __init__(
        self,
        workdir: Path | None,
        loggers: Iterable[Tracker | str],
        run_tensorboard: bool,
        is_main: bool,
        say: Callable[[str], None],
    ):
        named, self._objects = check_loggers(loggers, workdir, run_tensorboard)
        self._workdir, self._is_main = workdir, is_main
        self._files = {} if workdir is None else {kind: JsonLines(workdir / name) for kind, name in _APPENDED.items()}
        self._deliveries = [Delivery(name, workdir, _weakly(say)) for name in named] if is_main else []
        weakref.finalize(self, _leave, self._deliveries).atexit = False
        self._step = 0  # of the newest metrics

    def metrics(self, values: Mapping[str, SupportsFloat], step: int, speed: Mapping[str, SupportsFloat]) -> None:
        """Records metrics of one step; arguments and errors as for `Console.metrics`."""
        self._step = step = _as_step(step)
        if not self._is_main:
            return
        if "step" in values:
            raise ValueError("`step`: expected another name for a metric, got the name of the step. Rename it.")
        numbers, rates = ({name: as_number(name, x) for name, x in of.items()} for of in (values, speed))
        together = {**rates, **numbers}
        if self._files:
            self._files["metrics"].write(step, numbers)
            if rates:
                self._files["speed"].write(step, rates)
        for delivery in self._deliveries:
            delivery.row(Row(step, together))
        for logger in self._objects:
            logger.log(dict(together), step)

    def image(self, name: str, image: Any, step: int | None) -> None:
        """Records an image; arguments and errors as for `Deployer.log_image`."""
        check_name(name)
        image = check_image(image)
        step = self._step if step is None else _as_step(step)
        if self._is_main and (self._files or self._deliveries):
            self._medium(Medium(name, step, png(image)))
        self._call("log_image", name, image, step)

    def text(self, name: str, text: str, step: int | None) -> None:
        """Records a text."""
        check_name(name)
        if not isinstance(text, str):
            raise TypeError(f"`text`: expected a string, got {type(text).__name__}. Pass `str(text)`.")
        step = self._step if step is None else _as_step(step)
        if self._is_main:
            self._medium(Medium(name, step, text))
        self._call("log_text", name, text, step)

    def config(self, values: Mapping[str, Any]) -> None:
        """Records what the run is made of, in the trackers by name."""
        for delivery in self._deliveries:
            delivery.config({name: str(value) for name, value in values.items()})

    def begin(self, rows: Mapping[str, str], explain_plan: Callable[[], str]) -> None:
        """Records in the trackers by name the rows of the header, and the plan in full."""
        if self._deliveries:
            self.config(rows)
            plan = Medium("plan", self._step, explain_plan())
            for delivery in self._deliveries:
                delivery.first(plan)

    def rewind(self, step: int) -> None:
        """Deletes what was recorded after `step`, for a run that resumes from there."""
        if not self._is_main:
            return
        self._step = max(step, 0)
        for file in self._files.values():
            file.rewind(step)
        if self._workdir is not None:
            rewind_media(self._workdir / "media", step)
        for delivery in self._deliveries:
            rows = self._files["metrics"].read() if self._files else ()
            delivery.rewind(step, (Row(at, numbers) for at, numbers in rows))

    def close(self) -> None:
        """Closes files and trackers. What is recorded later opens them again."""
        for file in self._files.values():
            file.close()
        for delivery in self._deliveries:
            delivery.close()

    def _medium(self, medium: Medium) -> None:
        if self._workdir is not None:
            medium.write(self._workdir / "media")
        for delivery in self._deliveries:
            delivery.medium(medium)

    def _call(self, method: str, name: str, value: Any, step: int) -> None:
        """Hand it to the trackers that are objects and have the method."""
        for logger in self._objects if self._is_main else ():
            if callable(log := getattr(logger, method, None)):
                log(name, value, step)


def _as_step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"`step`: expected an integer, got {step!r}. Pass `trainer.step`.") from None


def _leave(deliveries: Iterable[Delivery]) -> None:
    for delivery in deliveries:
        delivery.leave()


def _weakly(say: Callable[[str], None]) -> Callable[[str], None]:
    method = weakref.WeakMethod(say)

    def say_if_there(line: str) -> None:
        if (found := method()) is not None:
            found(line)

    return say_if_there
