"""`SaveEvery`: a callback that saves by the clock, in the background."""

import math
import time
from collections import deque
from statistics import median
from typing import Any, Literal

from ..errors import check_count, check_number, filter_traceback
from ..storage import Location
from ._callbacks import Callback, need_workdir

# With "always", the share of the time that saves may cost.
MAX_COST = 0.02
_N_RATES = 9  # the seconds of a step without a save are the median of this many measurements


class SaveEvery(Callback):
    """Saves a checkpoint every few minutes, or all the time, by the clock of process 0; the files are written in the
    background. Put it last in the list, so that the saved step has been seen by the other callbacks.

    ```python
    trainer.fit(examples, batch_size=32, n_epochs=10, callbacks=[redeqx.SaveEvery(minutes=30)])
    trainer.fit(examples, batch_size=32, n_epochs=10, callbacks=[redeqx.SaveEvery("always")])
    ```

    **Arguments:**

    - `minutes`: the time between two checkpoints; or `"always"`: the next one begins when the last is on disk, unless saves
        would then cost more than 2 % of the time. What a save costs is measured: the copy of the arrays, and how much longer
        the steps take while the files are written. A killed run then repeats few steps.
    - `every`: the clock is read after every `every` steps.
    - `keep_last`: how many of the newest checkpoints are kept.

    Attribute `is_saving`: whether the newest checkpoint is still being written.

    Raises ValueError without a workdir.
    """

    minutes: float | Literal["always"]
    every: int
    keep_last: int
    is_saving: bool

    @filter_traceback
    def __init__(self, minutes: int | float | Literal["always"], *, every: int = 10, keep_last: int = 2):
        if minutes != "always":
            rule, advice = "a number above 0, or 'always'", "Pass the minutes between two checkpoints."
            check_number(minutes, "minutes", rule, lambda minutes: minutes > 0, advice)
        check_count(every, "every")
        check_count(keep_last, "keep_last")
        self.minutes, self.every, self.keep_last = minutes, every, keep_last
        self.is_saving, self._spacing = False, Spacing()

    def on_fit_start(self, trainer: Any) -> None:
        need_workdir(trainer, "SaveEvery")
        self.is_saving, self._spacing = False, Spacing()

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        is_saving, seconds = self.is_saving, trainer.deployer.console.records.goodput.seconds
        self._spacing.note(trainer.step, seconds["steps"] + seconds["saving"], is_saving=is_saving)
        gap = self._spacing.gap if self.minutes == "always" else 60 * self.minutes
        if trainer.deployer.decide(not is_saving and time.monotonic() - self._spacing.began >= gap):
            self.is_saving = True
            self._spacing.begin()
            trainer.save_ckpt(keep_last=self.keep_last, then=self._note_on_disk)

    def _note_on_disk(self, path: Location) -> None:  # in the thread of the save
        self.is_saving = False


class Spacing:
    """The time between the begins of two saves with which they cost at most `MAX_COST` of it.

    A save costs the time for which it stops the loop, and the time by which steps are slower until it is on disk.
    """

    def __init__(self) -> None:
        self.gap = math.inf  # in seconds, once the time of a step without a save is known
        self.began = time.monotonic()  # the newest save; at first this object
        self._rates: deque[float] = deque(maxlen=_N_RATES)  # seconds of a step without a save
        self._last: tuple[int, float] | None = None  # the newest note
        self._is_saving, self._cost = False, 0.0  # in seconds

    def begin(self) -> None:
        """Notes that a save begins, right after `note`."""
        self._is_saving, self._cost, self.began = True, 0.0, time.monotonic()

    def note(self, step: int, seconds: float, *, is_saving: bool) -> None:
        """Notes the steps so far, the seconds that they and the saves took, and whether the newest save is still written."""
        last, self._last = self._last, (step, seconds)
        if last is None or step <= last[0]:
            return
        n_steps, took = step - last[0], seconds - last[1]
        if not self._is_saving:
            self._rates.append(took / n_steps)
            self.gap = 0.0 if math.isinf(self.gap) else self.gap
            return
        if self._rates:
            self._cost += took - n_steps * median(self._rates)
        if not is_saving:
            self._is_saving, self.gap = False, self._cost / MAX_COST
