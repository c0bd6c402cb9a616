"""A file of JSON lines, one per step, that survives kills and can be rewound."""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from ..errors import Once, brief, warn
from ..storage import fsync_folder, open_new, open_old, read_file, remove_foreign, write_file

_ROOM = 2**26  # bytes of lines that wait for a full disk; above this the oldest are dropped


class JsonLines:
    """Appends lines such as `{"step": 3, "loss": 2.5}` to a file.

    Numbers read back to the same bits. NaN and the infinities, which JSON lacks, are the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float` accepts. Each line is given to the operating system at once, so a killed process loses at
    most the line it was writing. Lines that a full disk refuses are kept, and written as soon as there is room. Several
    objects of one path may be alive, such as those of two Deployers in a notebook.
    """

    _alive: ClassVar["weakref.WeakSet[JsonLines]"] = weakref.WeakSet()

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[bytes] | None = None
        self._waiting = b""  # lines that are not in the file yet
        self._warn_of_disk = Once(warn)
        self._alive.add(self)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends a line; the first one creates the file. If the disk refuses it, warns once, and goes on."""
        self._waiting += f"{to_json({'step': step, **numbers})}\n".encode()
        if len(self._waiting) > _ROOM:
            self._waiting = self._waiting.split(b"\n", 1)[1]
        try:
            self._write_waiting()
        except OSError as error:
            self._warn_of_disk(
                f"`{self._path}`: expected to record, got {error.strerror or error}. Training goes on; what is missing is "
                "kept, and written when there is room."
            )

    def _write_waiting(self) -> None:
        if self._file is None:
            self._file = self._opened()
            weakref.finalize(self, self._file.close)  # avoids a ResourceWarning if `close` is not called
        fd, data, n = self._file.fileno(), self._waiting, 0
        try:
            while n < len(data):
                n += os.write(fd, data[n:])
        except OSError:
            with suppress(OSError):
                if n:  # no part of a line
                    os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - n)
            raise
        self._waiting = b""

    def rewind(self, step: int, keeps: Callable[[Mapping[str, Any]], bool] = lambda numbers: False) -> None:
        """Deletes the lines after `step`, except those whose numbers `keeps` wants. An incomplete last line is dropped; any
        other line that cannot be read is dropped with a warning."""
        for each in self._alive:
            if each._path == self._path:  # it opens the file that may replace this one
                each.close()
        self._waiting = b""
        text = self._text()
        *lines, _torn = text.split(b"\n")
        left = []
        for number, line in enumerate(lines, start=1):
            row = _row_of(line)
            if row is None:
                warn(
                    f"`{self._path}`: expected JSON with a `step` in line {number}, got "
                    f"{brief(line[:80].decode('utf-8', 'replace'))}. It is left out.",
                )
            elif row.pop("step") <= step or keeps(row):
                left.append(line + b"\n")
        if (content := b"".join(left)) == text:
            return
        if text.startswith(content):  # needs no room on a full disk
            with open_old(self._path, "wb") as file:
                file.truncate(len(content))
                os.fsync(file.fileno())
        else:
            write_file(self._path, content)
        fsync_folder(self._path.parent)

    def read(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the step and the numbers of each readable line."""
        for line in self._text().splitlines():
            if (row := _row_of(line)) is not None:
                yield row.pop("step"), {name: float(value) for name, value in row.items()}

    def close(self) -> None:
        """Closes the file. A later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        """Opens the file, after removing an incomplete last line, left by a kill, which a new line would continue."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._text()
        if not self._path.exists():
            open_new(self._path).close()
        file = open_old(self._path, "ab")
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        return file

    def _text(self) -> bytes:
        """Returns the content of the file. Warns about a link or a pipe in its place, and removes it."""
        if (found := remove_foreign(self._path)) is not None:
            warn(f"`{self._path}`: expected a file that an earlier run wrote, got {found}. It is removed, and a file begun.")
        return read_file(self._path) if self._path.exists() else b""


def to_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Returns a value as one line of JSON, in which NaN and the infinities are strings that `float` accepts. `default` is as
    for `json.dumps`."""
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


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Returns what a line holds, with an integer as its `step`; None if it cannot be read."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def prefix_of(numbers: Mapping[str, Any]) -> str | None:
    """Returns the prefix that the names of all numbers have, as in `critic/loss`; None without one."""
    prefixes = {prefix if slash else None for prefix, slash, _ in (name.partition("/") for name in numbers)}
    return prefixes.pop() if len(prefixes) == 1 else None
