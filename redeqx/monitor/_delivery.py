"""Delivers records to a built-in tracker in a thread: a slow or failing tracker neither delays nor ends a run.

Failed deliveries are kept and retried. The position of the delivery is stored in the workdir, so that a resumed run
continues the tracker's run: steps that are repeated are not delivered twice, and missed records are delivered.
"""

import json
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from .._at_end import AtEnd
from ..storage import make_subfolder, read_file, write_file
from ._media import MediaFile
from ._trackers import TRACKERS, NamedTracker, Row

GAP = 1.0  # seconds between two deliveries: a request contains the records since the previous one
FIRST_RETRY, LAST_RETRY = 2.0, 60.0  # seconds between attempts, doubled each time
PATIENCE = 60.0  # seconds that the last delivery may take at the end
ROOM = 2**28  # bytes in the queue; above this the oldest records are dropped
ROW_SIZE = 1024  # bytes, roughly
BATCH = 1000  # rows per delivery

Record = Row | MediaFile | dict[str, Any]  # metrics, an image or a text, the configuration
# A position in the records of a trainer, or in the images or texts of a name: a step, and the number of them at it so far. A
# rerun records the same.
Mark = tuple[int, int]
NOTHING: Mark = (-1, 0)
Marks = dict[str, Mark]  # by the `of` of a record: trainers count their own steps


class Delivery:
    """Delivers to one tracker. The first record opens the tracker's run. Without a workdir nothing is stored: neither the
    run's id, nor what was delivered. Attribute `is_new`: whether this process began the run, rather than an earlier one."""

    def __init__(self, name: str, workdir: Path | None, log: Callable[[str], None]):
        self._name, self._workdir, self._log = name, workdir, log
        self._kind = TRACKERS[name]
        self._file = None if workdir is None else workdir / "trackers" / f"{name}.json"
        self._run_id, self._sent = _load_state(self._file)
        self.is_new: bool = self._run_id is None
        self._skip_until = self._sent.copy()  # records up to here are not delivered again
        self._newest: Marks = {}  # of the newest records
        self._pending: deque[tuple[Record, Mark]] = deque()
        self._size, self._lock = 0, threading.Lock()
        # The marks of the newest records that the tracker has, and of the newest of earlier steps. A kill may lose what is
        # after `_sent`, which the next process delivers again.
        self._delivered: Marks = {}
        self._before_newest: Marks = {}
        self._tracker: NamedTracker | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._forget: Callable[[], object] = _nothing  # unregisters `close` from the end of the process
        self._has_failed = self._has_warned = self._is_stuck = False

    # --- called by the run --------------------------------------------------------------------------------------------

    def record(self, item: Row | MediaFile) -> None:
        """Delivers metrics, an image or a text, unless the tracker has them from before a rewind."""
        step, n = self._newest.get(item.of, NOTHING)
        mark = self._newest[item.of] = (item.step, n + 1 if item.step == step else 1)
        if mark > self._skip_until.get(item.of, NOTHING):
            self._enqueue(item, mark)

    def config(self, values: Mapping[str, Any]) -> None:
        """Delivers the configuration of a run, by name; before other records, with the first of them. A fit that follows may
        continue an earlier run of the tracker."""
        self._enqueue(dict(values), starts=False)

    def rewind(self, step: int, rows: Iterable[Row], is_of_another: Callable[[Record], bool], *, begins: bool) -> None:
        """Continues a trainer after `step`. Delivers those of all recorded rows that the tracker lacks. A later record stays
        if it `is_of_another` trainer. `begins`: whether nothing is left of an earlier process, so that a new run of the
        tracker begins."""
        self._end()
        if begins and not self.is_new:
            self._run_id, self._sent, self.is_new = None, {}, True
        self._newest = {}

        def stays(item: Record) -> bool:
            return isinstance(item, dict) or item.step <= step or is_of_another(item)

        with self._lock:
            self._pending = deque(each for each in self._pending if stays(each[0]))
            self._size = sum(_size(item) for item, _ in self._pending)
        self._skip_until = self._sent.copy()
        for item, mark in self._pending:
            if not isinstance(item, dict):
                _advance(self._skip_until, item.of, mark)
        for row in rows:
            self.record(row)

    def close(self) -> None:
        """Delivers the queue and ends the tracker's run; warns if that takes too long. Later records continue the run."""
        if self._pending and not self._is_stuck:
            try:
                self._start()
            except RuntimeError:  # no thread can start while the interpreter shuts down
                self._thread = None
                self._closing.set()
                self._run()
        self._end()

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        thread.join(PATIENCE)
        if thread.is_alive():
            self._is_stuck = True
            self._warn(f"to take its last records within {PATIENCE:g} s, got no answer")

    def request_close(self) -> None:
        """Starts what `close` does, without waiting for it."""
        self._closing.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _enqueue(self, item: Record, mark: Mark = NOTHING, *, starts: bool = True) -> None:
        if self._is_stuck:
            return
        with self._lock:
            self._pending.append((item, mark))
            self._size += _size(item)
            while self._size > ROOM:
                self._size -= _size(self._pending.popleft()[0])
        if self._forget is _nothing:
            self._forget = AtEnd(self.close).forget
        if starts:
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name=f"redeqx-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        wait, is_closing = 0.0, False
        while not is_closing:
            is_closing = self._closing.wait(wait)
            with self._warning():
                self._deliver()
                if self._has_failed:
                    self._log(f"{self._name}: records again")
                self._has_failed, wait = False, GAP
                continue
            self._has_failed, wait = True, min(max(2 * wait, FIRST_RETRY), LAST_RETRY)
        tracker, self._tracker = self._tracker, None
        if tracker is not None:  # even if the last delivery failed: otherwise the tracker shows a run that never ends
            with self._warning():
                tracker.close(_is_failing())
                self._mark_as_sent(self._delivered)
        forget, self._forget = self._forget, _nothing
        forget()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """A context that turns the errors of the tracker into a warning."""
        try:
            yield
        except Exception as error:
            self._warn(f"to record, got {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _mark_as_sent(self, marks: Marks) -> None:
        before = self._sent.copy()
        for of, mark in marks.items():
            _advance(self._sent, of, mark)
        if self._sent != before:
            self._save_state()

    def _deliver(self) -> None:
        # What was delivered before is safe by now.
        self._mark_as_sent(self._before_newest if self._kind.keeps == "after the step" else self._delivered)
        if self._tracker is None:
            self._tracker = self._kind(self._workdir, self._run_id)
            self._forget()
            self._forget = AtEnd(self.close).forget  # before what the package has registered
            self._run_id = self._tracker.run_id
            self._save_state()
            self._log(f"{self._name}: {self._tracker.where}")
        while True:
            with self._lock:
                first = list(islice(self._pending, BATCH))
            if not first:
                return
            item = first[0][0]
            if isinstance(item, Row):
                first = list(takewhile(lambda each: isinstance(each[0], Row), first))
                self._tracker.rows([row for row, _ in first if isinstance(row, Row)])
            else:
                first = first[:1]
                self._tracker.medium(item) if isinstance(item, MediaFile) else self._tracker.config(item)
            for item, mark in first:
                if not isinstance(item, dict):
                    newest = self._delivered.get(item.of, NOTHING)
                    if mark[0] > newest[0]:
                        self._before_newest[item.of] = newest
                    _advance(self._delivered, item.of, mark)
            if self._kind.keeps == "at once":
                self._mark_as_sent(self._delivered)
            delivered = {id(each) for each in first}
            with self._lock:  # some may have been dropped already, above `ROOM`
                while self._pending and id(self._pending[0]) in delivered:
                    self._size -= _size(self._pending.popleft()[0])

    def _save_state(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # checkpoints report a full disk
                make_subfolder(self._file.parent, self._file.parents[1])
                write_file(self._file, json.dumps({"run_id": self._run_id, "sent": self._sent}).encode())

    def _warn(self, got: str) -> None:
        """Warns once, from any thread. If warnings are errors, prints it instead: a tracker must not end a run."""
        if self._has_warned:
            return
        self._has_warned = True
        kept = "" if self._workdir is None else " All of it is in the workdir, too."
        message = (
            f"`loggers`: expected {self._name} {got}. Training goes on; what it misses is kept, and sent when it works "
            f"again.{kept}"
        )
        try:
            warnings.warn(message, stacklevel=3)
        except Warning:
            print(message, file=sys.stderr)


def _nothing() -> None:
    pass


def _size(item: Record) -> int:
    return len(item.data) if isinstance(item, MediaFile) else ROW_SIZE


def _advance(marks: Marks, of: str, mark: Mark) -> None:
    marks[of] = max(marks.get(of, mark), mark)


def _load_state(file: Path | None) -> tuple[str | None, Marks]:
    """Returns the id of the tracker's run that an earlier process began, and the marks of what it has."""
    try:
        state = {} if file is None else json.loads(read_file(file))
        return str(state["run_id"]), {str(of): (int(step), int(n)) for of, (step, n) in state["sent"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, {}


def _is_failing() -> bool:
    """Returns whether an exception ends this script. In a notebook the exception of a cell does not."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
