"""The metrics of updates: read a few steps late, checked, shown and recorded."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from ..data import Batch
from ..errors import warn
from ..monitor import ProgressLine, Work
from ._progress import Progress

UNMOVED = "share of updates that rounding loses"  # computed by the step for 16-bit parameters; checked, not recorded
_MOST_UNMOVED = 0.5  # warn above this share
LAG = 2  # this many newest steps stay unread, so that the device has one queued while the host reads


@dataclass(frozen=True)
class Update:
    """An update that the device may still be computing.

    **Arguments:**

    - `step`: the engine's step after it.
    - `epoch`: in a fit, the epoch, from 0; None outside a fit.
    - `names`, `vector`: the names of the metrics; their values, and then the weight of the loss.
    - `batch`: without its arrays on devices, so that their memory can be freed.
    - `work`: its work on one device.
    """

    step: int
    epoch: int | None
    names: Sequence[str]
    vector: jax.Array
    batch: Batch
    work: Work

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; waits for the device."""
        return {name: value for name, value in self._values().items() if name != UNMOVED}

    def unmoved(self) -> float:
        """Returns the share of updates that are lost to rounding; waits for the device."""
        return self._values().get(UNMOVED, 0.0)

    @property
    def has_weight(self) -> bool:
        """Whether the weight that divided the loss is not 0. Waits for the device."""
        return bool(np.asarray(self.vector)[-1])

    def _values(self) -> dict[str, float]:
        return dict(zip(self.names, np.asarray(self.vector)[:-1].tolist(), strict=True))


Explain = Callable[[Update], str]


def _first_nonfinite(metrics: dict[str, float]) -> str | None:
    """Returns the first of the metrics that must be finite and is not."""
    return next((name for name in ("loss", "grad_norm") if not np.isfinite(metrics[name])), None)


class Metrics:
    """Reads, checks, shows and records the metrics of an engine's updates.

    **Arguments:**

    - `record`: maps `(metrics, step, speed)` to nothing; records one row.
    - `say`: prints a line.
    - `skips`, `max_skipped`: whether steps skip updates that are not finite, and how many in a row.

    **Attributes:**

    - `last`: the metrics of the newest update that has been read.

    Methods raise ValueError for an update that is not finite, unless it may be skipped. Their argument `explain` maps
    such an update to the reason and the next step, as sentences that end an error.
    """

    def __init__(self, record: Callable[..., None], say: Callable[[str], None], skips: bool, max_skipped: int):
        self.last: dict[str, float] = {}
        self._record, self._say = record, say
        self._skips, self._max_skipped = skips, max_skipped
        self._n_skipped_in_a_row = 0
        self._has_warned = False  # of parameters that do not move
        self._unread: deque[Update] = deque()

    def add(self, update: Update, line: ProgressLine, progress: Progress, explain: Explain) -> None:
        """Adds the newest update, and reads the one that is due.

        **Arguments:**

        - `progress`: counts skipped updates.
        """
        update.vector.copy_to_host_async()
        self._unread.append(update)
        if len(self._unread) > LAG:
            self._read(line, progress, explain)

    def read_all(self, line: ProgressLine, progress: Progress, explain: Explain) -> None:
        """Reads all updates; arguments as for `add`."""
        while self._unread:
            self._read(line, progress, explain)

    def forget(self) -> None:
        """Drops the unread updates, whose arrays have been replaced."""
        self._unread.clear()
        self._n_skipped_in_a_row = 0

    def newest_unread(self, n_skipped: int, explain: Explain) -> tuple[dict[str, float], int]:
        """Returns the newest update's metrics, and the number of skipped updates, without showing or removing anything.

        **Arguments:**

        - `n_skipped`: the number of skipped updates among those that have been read.
        """
        metrics = self.last
        for update in self._unread:
            metrics = update.metrics()
            if (name := _first_nonfinite(metrics)) is not None:
                if not self._skips:
                    raise self._error(update, name, metrics, explain)
                n_skipped += 1
        return metrics, n_skipped

    def _read(self, line: ProgressLine, progress: Progress, explain: Explain) -> None:
        update = self._unread.popleft()
        metrics = update.metrics()
        name = _first_nonfinite(metrics)
        self._n_skipped_in_a_row = 0 if name is None else self._n_skipped_in_a_row + 1
        if name is not None:
            if not self._skips or self._n_skipped_in_a_row > self._max_skipped:
                self._unread.clear()
                raise self._error(update, name, metrics, explain)
            progress.n_skipped += 1
            text = f"skipped, as `{name}` is {metrics[name]}; {progress.n_skipped} so far"
            self._say(f"step {update.step}: {text}")
        elif not self._has_warned and update.unmoved() > _MOST_UNMOVED:
            self._has_warned = True
            warn(
                f"`model`: expected 16-bit parameters that updates change, got {update.unmoved():.0%} of the updates of "
                f"step {update.step} lost: each is less than half of its parameter's last digit. Pass "
                "`compute=redeqx.Precision(parameters='bfloat16')`, which keeps float32 copies of them, add "
                "`rounding='stochastic'` to need none, or store them in float32: `compute='bfloat16'`."
            )
        self.last = metrics
        epoch = None if update.epoch is None else update.epoch + 1
        line.update(
            update.step,
            metrics=metrics,
            n_examples=update.batch.n_examples,
            n_tokens=update.batch.n_tokens,
            epoch=epoch,
            work=update.work,
        )
        shown = {} if epoch is None else {"epoch": epoch}
        self._record({**shown, **metrics}, update.step, line.speed())

    def _error(self, update: Update, name: str, metrics: dict[str, float], explain: Explain) -> ValueError:
        what = "the loss" if name == "loss" else "the gradient's norm"
        often = f" for {self._n_skipped_in_a_row} steps one after the other" if self._skips else ""
        return ValueError(
            f"`{name}` at step {update.step}: expected {what} to be finite, got {metrics[name]}{often}. {explain(update)}"
        )
