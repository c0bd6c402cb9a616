"""Console output of a run: header, live line, plain lines, tables. `_records.py` stores what a run records.

It takes strings and Python numbers, and knows nothing of devices, meshes, models or the meaning of a metric.
"""

import atexit
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from rich.console import Console as RichConsole
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..distributed import discard
from ..errors import printable
from ._live import ProgressLine, is_terminal
from ._records import Records
from ._trackers import Tracker

# Minimum width of a header's values in columns; if there are fewer, long values are printed below their names.
MIN_VALUE_WIDTH = 32


class Terminal(RichConsole):
    """A stream to print to, whose failures do not end a run: a reader that is gone (the `tee` or `ssh` that showed it), a
    full disk, letters that its encoding lacks."""

    @property
    def file(self) -> Any:
        return _Lasting(super().file)

    @file.setter
    def file(self, new_file: Any) -> None:
        self._file = new_file


_refused: weakref.WeakSet[Any] = weakref.WeakSet()  # the streams that refused output, each said once


class _Lasting:
    """A text stream that drops what cannot be written, and says so once on standard error."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            discard(self._stream)
        except OSError as error:
            if self._stream in _refused:
                return
            _refused.add(self._stream)
            atexit.register(_discard_if_refused, self._stream)
            with suppress(OSError, ValueError):
                print(
                    f"`{getattr(self._stream, 'name', 'stdout')}`: expected to print, got {error.strerror or error}. "
                    "Training goes on; what cannot be printed is lost.",
                    file=sys.stderr,
                    flush=True,
                )


def _discard_if_refused(stream: Any) -> None:
    """Drops what is left in a stream's buffer if it still cannot be written: Python would end with exit code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        discard(stream)


class Console:
    """Prints to one stream and records in one folder.

    **Arguments:**

    - `workdir`: where `metrics.jsonl`, `speed.jsonl` and `tensorboard/` are written; `None` writes no files.
    - `verbose`: whether to print. Files and trackers do not depend on it.
    - `loggers`: trackers: `"tensorboard"` (needs `workdir`), `"wandb"`, `"mlflow"`, `"trackio"`, or objects whose
        `log(metrics, step)` is called for all metrics.
    - `is_main`: whether this process prints and records for the run. The others do nothing.
    - `file`: the text stream to print to; standard output by default.
    - `terminal`: whether `file` is a terminal, with colours and a live line; by default as the stream reports.
    - `peak_memory`: returns a device's peak memory in bytes, shown and recorded with the speed; None if unknown.

    Raises ValueError for an unknown name and for TensorBoard without a `workdir`, ImportError for a tracker whose package is
    missing, and TypeError for a logger without `log`.
    """

    def __init__(
        self,
        workdir: Path | None,
        *,
        verbose: bool = True,
        loggers: Iterable[Tracker | str] = (),
        is_main: bool = True,
        file: Any = None,
        terminal: bool | None = None,
        peak_memory: Callable[[], int | None] = lambda: None,
    ):
        self._prints = is_main and verbose
        self._own_file = file is not None
        # Only the stream decides on escape codes: rich obeys FORCE_COLOR, and would draw live lines into a CI log.
        if terminal is None:
            terminal = is_terminal(sys.stdout if file is None else file)
        # With `file=None` rich looks up `sys.stdout` at each print, so it may be redirected later. In a notebook this is the
        # stream of the cell, not a display for each print.
        self._terminal = Terminal(
            file=file, force_terminal=terminal, force_jupyter=False, highlight=False, markup=False, emoji=False
        )
        self._is_notebook = file is None and RichConsole().is_jupyter
        self._peak_memory = peak_memory
        self._progress: ProgressLine | None = None
        self.records: Records = Records(workdir, loggers, is_main, self.info)

    def info(self, message: str, *, title: str | None = None) -> None:
        """Prints a message unchanged, under a `title` if one is given."""
        if title is not None:
            self._print(Text(title, style="bold"))
            message = "\n".join(f"  {line}" for line in message.splitlines())
        self._print(Text("\n".join(self._fold(line, _indent_of(line) + 2) for line in message.split("\n"))))

    def header(self, rows: Mapping[str, str], *, title: str = "redeqx") -> None:
        """Prints names and values, aligned; on a narrow terminal, long values below their names.

        Values are not cut, so paths can be copied in one piece.
        """
        self._title(title)
        width = max(map(len, rows), default=0)
        terminal = self._terminal
        is_narrow = terminal.is_terminal and terminal.width < width + 4 + MIN_VALUE_WIDTH
        indent = 4 if is_narrow else width + 4
        for name, value in rows.items():
            value = printable(value)  # a folder of somebody else may have control characters in its names and texts
            beside = f"  {name:<{0 if is_narrow else width}}  "
            is_below = is_narrow and len(beside) + len(value) > terminal.width
            lines = [self._fold(" " * indent + line, indent) for line in value.split("\n")]
            self._print(
                Text.assemble((f"  {name}\n" if is_below else beside, "dim"), "\n".join(lines)[0 if is_below else indent :])
            )

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Prints a table: wrapped to the width of a terminal, one line per row elsewhere, and never cut."""
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        self._title(title)
        if self._terminal.is_terminal:
            # The first column names the rows: the others shrink before it is wrapped. (A fixed width, since rich 15
            # cuts cells if a column's `min_width` does not fit.)
            room = self._terminal.width - sum(width + 2 for width in widths[1:])
            first = min(widths[0], max(room, self._terminal.width // 2))
            table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for i, column in enumerate(columns):
                table.add_column(Text(column), overflow="fold", width=first if i == 0 else None)
            for row in cells:
                table.add_row(*map(Text, row))
            self._print(table)
            return
        for row in [columns, *cells]:
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            self._print(Text(f"  {line}".rstrip()))

    def _fold(self, line: str, indent: int) -> str:
        """Wraps a line between words to the width of a terminal, with an indent from the second line on.

        Text without spaces, such as a path, is not broken, so that it can be copied in one piece.
        """
        if not self._terminal.is_terminal or len(line) <= self._terminal.width:
            return line
        return textwrap.fill(
            line.lstrip(" "),
            self._terminal.width,
            initial_indent=" " * _indent_of(line),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )

    def _title(self, title: str) -> None:
        bold = Text(printable(title), style="bold")
        self._print(Rule(bold, align="left", style="cyan") if self._terminal.is_terminal else bold)

    def _print(self, renderable: Any) -> None:
        if self._prints:
            # The terminal wraps text; the layout of a table or rule depends on the width.
            self._terminal.print(renderable, soft_wrap=isinstance(renderable, Text))

    def metrics(
        self, values: Mapping[str, SupportsFloat], step: int, *, speed: Mapping[str, SupportsFloat] | None = None
    ) -> None:
        """Records metrics of one step in `metrics.jsonl`, TensorBoard, and every tracker.

        **Arguments:**

        - `values`: numbers by name. The name `step` is reserved.
        - `step`: optimizer updates done.
        - `speed`: more numbers, which a rerun does not reproduce; they are written to `speed.jsonl`. For a name in both,
            TensorBoard and trackers get the value of `values`.

        Raises ValueError for a metric called `step` and TypeError for a value that is not one number.
        """
        self.records.metrics(values, step, speed or {})

    def progress(
        self,
        *,
        n_epochs: int | None = None,
        n_steps: int | None = None,
        first_step: int = 0,
        title: str = "",
        unit: str = "step",
    ) -> ProgressLine:
        """Returns a context manager that shows a loop's progress; call `update` after each step.

        A nested one (an evaluation inside a fit) has no line of its own: the outer one reports compilations.

        **Arguments:**

        - `n_epochs`, `n_steps`: the totals, or `None` if unknown; then the time left is not shown.
        - `first_step`: steps done before the loop begins, as after a resume; counted in `n_steps`.
        - `title`: printed at the beginning of the line.
        - `unit`: the name of what is counted, instead of steps.
        """
        return ProgressLine(self, n_epochs=n_epochs, n_steps=n_steps, first_step=first_step, title=title, unit=unit)


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
