"""Console output of a run: header, live line, plain lines, tables. `_records.py` stores what a run records.

It takes strings and Python numbers, and knows nothing of devices, meshes, models or the meaning of a metric.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ..errors import printable
from ._live import ProgressLine
from ._records import Records
from ._terminal import Terminal
from ._trackers import Tracker
from ._units import aligned


class Console:
    """Prints to one stream and records in one folder.

    **Arguments:**

    - `verbose`: whether to print. Files and trackers do not depend on it.
    - `is_main`: whether this process prints and records for the run. The others do nothing.
    - `file`, `terminal`: the stream to print to, and whether it is a terminal, with colours and a live line; see `Terminal`.
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
        self._terminal = Terminal(file, terminal, is_main and verbose)
        self._peak_memory = peak_memory
        self.records: Records = Records(workdir, loggers, is_main, self._terminal.say)

    @property
    def shows_speed(self) -> bool:
        """Whether the rates of a run are printed or recorded in this process."""
        return self._terminal.prints or self.records.is_kept

    def info(self, message: str, *, title: str | None = None) -> None:
        """Prints a message unchanged, under a `title` if one is given."""
        if title is not None:
            self._terminal.show(Text(title, style="bold"))
            message = "\n".join(f"  {line}" for line in message.splitlines())
        self._terminal.say(message)

    def header(self, rows: Mapping[str, str], *, title: str = "redeqx") -> None:
        """Prints names and values, aligned. Values are not cut, so paths can be copied in one piece."""
        self._title(title)
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            # A folder of somebody else may have control characters in its names and texts.
            lines = printable(value).replace("\n", "\n" + " " * (width + 4))
            self._terminal.show(Text.assemble((f"  {name:<{width}}  ", "dim"), lines))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Prints a table, aligned: one line per row, which is never cut."""
        self._title(title)
        for line in aligned([[printable(cell) for cell in row] for row in (columns, *rows)]):
            self._terminal.show(Text(f"  {line}"))

    def _title(self, title: str) -> None:
        self._terminal.show(Text(printable(title), style="bold"))

    def progress(self, **options: Any) -> ProgressLine:
        """Returns a context manager that shows a loop's progress; call its `update` after each step. Options as for
        `ProgressLine`."""
        return ProgressLine(self._terminal, self._peak_memory, self.records.goodput, **options)
