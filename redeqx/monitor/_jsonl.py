"""A file of JSON lines, one a step, that survives kills and can be rewound."""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from ..errors import warn
from ..storage import fsync_folder


class JsonLines:
    """Appends lines such as `{"step": 3, "loss": 2.5}` to a file.

    Numbers read back to the same bits; NaN and the infinities, which JSON has no numbers for, are the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`, which `float` takes. A line is handed to the operating system at once, so that a killed
    process loses at most the line it was writing.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[str] | None = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends a line; the first one creates the file."""
        if self._file is None:
            self._file = _open_to_append(self._path)
            weakref.finalize(self, self._file.close)  # a run that ends without `close` leaves no warning
        line = {name: value if math.isfinite(value) else _non_finite(value) for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Deletes the lines after `step`.

        The new file replaces the old one atomically. An incomplete last line is dropped; any other line that cannot be read
        is dropped with a warning.
        """
        self.close()
        if not self._path.exists():
            return
        *lines, _torn = self._path.read_text("utf-8", errors="replace").split("\n")
        kept = []
        for number, line in enumerate(lines, start=1):
            line_step = _step_of(line)
            if line_step is None:
                warn(
                    f"`{self._path}`: expected JSON with a `step` in line {number}, got {line[:80]!r}. It is left out.",
                )
            elif line_step <= step:
                kept.append(line + "\n")
        beside = self._path.with_name(self._path.name + ".tmp")
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        fsync_folder(self._path.parent)

    def read(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The step and the numbers of each line that can be read."""
        text = self._path.read_text("utf-8", errors="replace") if self._path.exists() else ""
        for line in text.splitlines():
            if (step := _step_of(line)) is not None:
                yield step, {name: float(value) for name, value in json.loads(line).items() if name != "step"}

    def close(self) -> None:
        """Closes the file. What is written later opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _non_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _step_of(line: str) -> int | None:
    """The step of a line, or `None` where it cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _open_to_append(path: Path) -> IO[str]:
    """Opens the file, without the last line that a kill may have torn: ours would be glued to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return open(path, "a", encoding="utf-8", newline="\n")
