"""A file of JSON lines, one per step, that survives kills and can be rewound."""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import warn
from ..storage import fsync_folder


class JsonLines:
    """Appends lines such as `{"step": 3, "loss": 2.5}` to a file.

    Numbers read back to the same bits. NaN and the infinities, which JSON lacks, are the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float` accepts. Each line is flushed to the operating system at once, so a killed process loses at
    most the line it was writing.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[str] | None = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends a line; the first one creates the file."""
        if self._file is None:
            self._file = _open_to_append(self._path)
            weakref.finalize(self, self._file.close)  # avoids a ResourceWarning if `close` is not called
        self._file.write(to_json({"step": step, **numbers}) + "\n")
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
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        fsync_folder(self._path.parent)

    def read(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the step and the numbers of each readable line."""
        text = self._path.read_text("utf-8", errors="replace") if self._path.exists() else ""
        for line in text.splitlines():
            if (step := _step_of(line)) is not None:
                yield step, {name: float(value) for name, value in json.loads(line).items() if name != "step"}

    def close(self) -> None:
        """Closes the file. A later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def to_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Returns a value as one line of JSON, in which NaN and the infinities are strings that `float` accepts.

    **Arguments:**

    - `default`: as for `json.dumps`.
    """
    text = json.dumps(value, default=default)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(_without_nonfinite(json.loads(text)), allow_nan=False)
    return text


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _step_of(line: str) -> int | None:
    """Returns the step of a line, or `None` if the line cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _open_to_append(path: Path) -> IO[str]:
    """Opens the file for appending. Removes an incomplete last line, left by a kill, which a new line would continue."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return open(path, "a", encoding="utf-8", newline="\n")
