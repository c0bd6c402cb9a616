"""The progress and the speed of a loop: a live line on a terminal, plain lines elsewhere.

It takes counts and reads a clock. Callers pass what a step computes, and the chip's published rates; `_terminal.py` owns the
stream.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ._goodput import Goodput
from ._terminal import Terminal, isatty
from ._units import count_text, duration_text, flops_text, number_text, rate_text, short_name

REDRAWS_PER_SECOND = 5
# Seconds between plain lines: short at first, while the user watches; the last gap repeats.
PLAIN_GAPS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
# Minimum time between two records of the speed, in seconds.
SPEED_GAP = 1.0
# Minimum share of time spent waiting for data that is shown.
MIN_DATA_WAIT = 0.01
BAR_WIDTH = 16
# Time constant of the rates, in seconds: after it the weight of a step is 1/e.
MEMORY = 15.0
# The rates by name, and what of a step each of them sums and divides by the seconds.
RATES = {
    "examples_per_second": "examples",
    "tokens_per_second": "tokens",
    "model_flops_per_second": "flops",
    "mfu": "seconds at peak",
    "data_wait": "seconds without data",
}


@dataclass(frozen=True)
class Work:
    """The work of one device in a step."""

    flops: float  # of the model's matmuls, forward and backward; recomputation is not counted
    seconds: float | None = None  # their time at the published rates of the chip; None if those are unknown

    def __mul__(self, share: float) -> "Work":
        return Work(self.flops * share, None if self.seconds is None else self.seconds * share)


class ProgressLine:
    """The progress of a loop; `Console.progress` makes it.

    On a terminal it is a line that a thread redraws a few times per second, even while a model compiles. Elsewhere plain
    lines are printed: for the first step, then at growing intervals, and for the last. A nested one (an evaluation inside a
    fit) has no line of its own: the outer one reports compilations.

    Attribute `goodput`: where the time of the run goes.
    """

    def __init__(
        self,
        terminal: Terminal,
        peak_memory: Callable[[], int | None],
        goodput: Goodput,
        *,
        n_epochs: int | None = None,
        n_steps: int | None = None,
        first_step: int = 0,
        title: str = "",
        unit: str = "step",
    ):
        # The totals, or None if unknown; then the time left is not shown. They may be set later.
        self.n_epochs = n_epochs
        self.n_steps = n_steps
        self.goodput = goodput
        self._terminal, self._read_peak_memory = terminal, peak_memory
        self._title, self._unit = title, unit
        self._shows = False
        self._outer: ProgressLine | None = None  # the line that is shown, if this one is nested in it
        self._live: Live | None = None
        # Steps done before the loop begins, as after a resume, are counted in `n_steps`.
        self._step = self._first_step = self._printed_step = first_step
        self._epoch: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._activity: tuple[str, float] | None = None  # other work than steps, and when it began
        # Decaying sums over past steps, by name; their ratios are the rates. Unknown sums are missing.
        self._sums: dict[str, float] = {}
        self._last: float | None = None  # when the previous step was finished; None right after compiling
        self._waited: float | None = None  # seconds spent waiting for a batch since then
        self._peak_memory: int | None = None
        self._speed_due = 0.0  # when the speed may be recorded next
        self._began = time.perf_counter()
        self._due = 0.0  # when the next plain line is due
        self._n_lines = 0

    def __enter__(self) -> "ProgressLine":
        terminal = self._terminal
        self._began = time.perf_counter()
        if terminal.shown is not None:
            self._outer = terminal.shown
            return self
        terminal.shown = self
        self._shows = terminal.prints
        if self._shows and terminal.is_interactive:
            self._live = Live(
                console=terminal,
                get_renderable=lambda: Group(*_packed(self._live_fields(), terminal.width)),
                refresh_per_second=REDRAWS_PER_SECOND,
                # The user's output is printed above the line, unless a stream does not go to the terminal: standard error
                # that is sent to a file must stay there.
                redirect_stdout=terminal.owns_stdout,
                redirect_stderr=terminal.owns_stdout and isatty(sys.stderr),
            )
            self._live.start()
            terminal.show_cursor(True)  # rich hides the cursor, and a killed process would leave it hidden
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._terminal.shown is self:
            self._terminal.shown = None
        self._activity = None
        if self._live is not None:
            self._live.transient = self._step == self._first_step  # nothing was counted: a line would say "step 0"
            self._live.stop()
        elif self._shows and self._printed_step != self._step:
            self._print_line(time.perf_counter())
        self._shows, self._live, self._outer = False, None, None

    def update(
        self,
        step: int,
        *,
        metrics: Mapping[str, float],
        n_examples: int,
        n_tokens: int | None = None,
        epoch: int | None = None,
        work: Work | None = None,
    ) -> None:
        """Shows a finished step. Takes microseconds, unless a plain line is due.

        **Arguments:**

        - `step`: steps done, including those before a resume.
        - `metrics`: the numbers to show, by name: `loss`, `learning_rate`, `grad_norm` and others.
        - `n_examples`, `n_tokens`: the size of this step's batch, over all devices; `n_tokens` if it is known.
        - `epoch`: the epoch of the step; the first is 1.
        - `work`: the work of one device in the step, if it is known.
        """
        now = time.perf_counter()
        if not self._sums:  # this line has taken no more than one step
            self.goodput.step()
        if self._last is not None:
            seconds = now - self._last
            new = {
                "seconds": seconds,
                "steps": step - self._step,
                "examples": n_examples,
                "tokens": n_tokens,
                "flops": None if work is None else work.flops,
                "seconds at peak": None if work is None else work.seconds,
                "seconds without data": self._waited,
            }
            memory, old = math.exp(-seconds / MEMORY), self._sums
            self._sums = {of: memory * old.get(of, 0.0) + x for of, x in new.items() if x is not None}
        self._last = now
        self._waited = None if self._waited is None else 0.0
        self._step, self._epoch, self._metrics = step, epoch, metrics
        if self._shows and self._live is None and (now >= self._due or step == self.n_steps):
            self._print_line(now)

    def speed(self) -> dict[str, float]:
        """Returns the rates of the newest steps and `peak_memory_bytes`, by name, to be recorded with a step's metrics.

        These are `examples_per_second`; `tokens_per_second`; `model_flops_per_second` of one device; `mfu`, its share of the
        chip's published rate; `data_wait`, the share of the time spent waiting for a batch. Compilations and pauses do not
        count. Empty if nothing was measured yet, or within a second of the last non-empty result.
        """
        now = time.perf_counter()
        if now < self._speed_due or not (rates := self._rates()):
            return {}
        self._speed_due = now + SPEED_GAP
        self._peak_memory = self._read_peak_memory()
        return rates if self._peak_memory is None else {**rates, "peak_memory_bytes": self._peak_memory}

    def _rates(self) -> dict[str, float]:
        sums = self._sums  # read once: another thread draws while `update` runs
        return {name: sums[of] / sums["seconds"] for name, of in RATES.items() if of in sums} if sums.get("seconds") else {}

    def begin_step(self, done: int) -> None:
        """Begins the step after `done` steps now; the time before it is not counted. For the user's own loops."""
        self._step, self._last = done, time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the loop waits for its next batch; this share of the time is shown and recorded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._waited = (self._waited or 0.0) + seconds
            self.goodput.waited += seconds

    @contextmanager
    def compiling(self, what: str, began: float | None = None) -> Iterator[list[str]]:
        """Prints that `what` compiles, then how long it took, with the notes that the caller adds to the yielded list. Rates
        exclude this time and the next step. `began`: when it began, by `time.perf_counter`, if that was before, in another
        thread."""
        shown, notes = self._outer or self, list[str]()
        if shown._shows and shown._live is None:
            self._terminal.say(f"compiling {what}")
        began = time.perf_counter() if began is None else began
        with self.pause(f"compiling {what}"):
            yield notes
        self._last = shown._last = None
        if shown._shows:
            took = f"compiled {what} in {duration_text(time.perf_counter() - began)}"
            self._terminal.say(", ".join([took, *filter(None, notes)]))

    @contextmanager
    def pause(self, doing: str) -> Iterator[None]:
        """Shows other work, whose time is not counted in the rates. The first word ("evaluating", "saving") is its cause in
        the goodput."""
        before, last, began = self._activity, self._last, time.perf_counter()
        self._activity = doing, began
        try:
            with nullcontext() if self._outer is None else self._outer.pause(doing), self.goodput.during(doing.split()[0]):
                yield
        finally:
            self._activity = before
            if last is not None and self._last is not None:
                self._last = last + time.perf_counter() - began

    def _print_line(self, now: float) -> None:
        width = self._terminal.width if self._terminal.is_terminal else sys.maxsize  # a log file has no width
        self._terminal.say("\n".join(line.plain for line in _packed(self._fields(), width)))
        self._due = now + PLAIN_GAPS[min(self._n_lines, len(PLAIN_GAPS) - 1)]
        self._n_lines += 1
        self._printed_step = self._step

    def _fields(self) -> list[Text]:
        now = time.perf_counter()
        fields = [Text(self._title, style="bold")] if self._title else []
        if self._epoch is not None:
            fields.append(_field("epoch", count_text(self._epoch, self.n_epochs)))
        fields.append(_field(self._unit, count_text(self._step, self.n_steps)))
        fields += [_field(short_name(name), number_text(name, x)) for name, x in self._metrics.items()]
        fields += self._speed_fields()
        sums = self._sums
        # A step that is reported again adds time, but no step.
        seconds = sums["seconds"] / sums["steps"] if sums.get("seconds", 0) > 0 and sums["steps"] > 0 else None
        if self.n_steps is not None and self._step >= self.n_steps:  # a loop of the user's own may exceed its total
            fields.append(_field(duration_text(now - self._began), "in all", dim_first=False))
        elif self.n_steps is not None and seconds is not None:
            fields.append(_field(duration_text((self.n_steps - self._step) * seconds), "left", dim_first=False))
        else:
            fields.append(_field(duration_text(now - self._began), "so far", dim_first=False))
        return fields

    def _speed_fields(self) -> list[Text]:
        """Returns the speed. MFU replaces FLOP/s if the chip's rate is known; short waiting times are left out."""
        rates = self._rates()
        fields = [
            _field(rate_text(rates[name]), unit, dim_first=False)
            for name, unit in (("examples_per_second", "examples/s"), ("tokens_per_second", "tokens/s"))
            if name in rates
        ]
        if "mfu" in rates:
            fields.append(_field("MFU", f"{rates['mfu']:.1%}"))
        elif "model_flops_per_second" in rates:
            fields.append(_field(flops_text(rates["model_flops_per_second"]), "a device", dim_first=False))
        if self._peak_memory is not None:
            fields.append(_field("peak", f"{self._peak_memory / 2**30:.1f} GiB"))
        if rates.get("data_wait", 0) >= MIN_DATA_WAIT:
            fields.append(_field("waiting for data", f"{rates['data_wait']:.0%}"))
        return fields

    def _live_fields(self) -> list[Text]:
        fields = self._fields()
        if self.n_steps:
            full, empty = "━─" if self._terminal.encoding.startswith("utf") else "#-"
            n_full = min(BAR_WIDTH * self._step // self.n_steps, BAR_WIDTH)
            fields.insert(0, Text.assemble((full * n_full, "cyan"), (empty * (BAR_WIDTH - n_full), "dim")))
        if (activity := self._activity) is not None:  # read once: this is called in another thread
            doing, began = activity
            fields.insert(0, Text(f"{doing}, {duration_text(time.perf_counter() - began)}", style="yellow"))
        return fields


def _packed(fields: Sequence[Text], width: int) -> Iterator[Text]:
    """Yields the fields in as few lines as the width allows, without breaking a field."""
    line = Text()
    for field in fields:
        if line and line.cell_len + 2 + field.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, "  ", field) if line else field
    yield line


def _field(first: str, second: str, *, dim_first: bool = True) -> Text:
    return Text.assemble((first, "dim" if dim_first else ""), " ", (second, "" if dim_first else "dim"))
