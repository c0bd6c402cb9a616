"""The stream of the console: a terminal, a file or a pipe. Its failures do not end a run."""

import atexit
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from ..distributed import discard


class Terminal(RichConsole):
    """A stream to print to, by default standard output. A reader that is gone (the `tee` or `ssh` that showed it), a full
    disk, and letters that its encoding lacks are no errors. If `is_terminal` is None, the stream is asked.

    Attributes: `owns_stdout`, whether the user's output goes there too; `shown`, the progress line that is shown, or None.
    """

    def __init__(self, stream: Any, is_terminal: bool | None, prints: bool):
        # Only the stream decides on escape codes: rich obeys FORCE_COLOR, and would draw live lines into a CI log.
        if is_terminal is None:
            is_terminal = isatty(sys.stdout if stream is None else stream)
        # With `file=None` rich looks up `sys.stdout` at each print, so it may be redirected later. A notebook gets the plain
        # lines of a file.
        super().__init__(
            file=stream, force_terminal=is_terminal, force_jupyter=False, highlight=False, markup=False, emoji=False
        )
        self.prints = prints
        self.owns_stdout: bool = stream is None
        self.shown: Any = None

    @property
    def file(self) -> Any:
        return _Lasting(super().file)

    @file.setter
    def file(self, new_file: Any) -> None:
        self._file = new_file

    def show(self, text: Text) -> None:
        """Prints, if this process prints."""
        if self.prints:
            self.print(text, soft_wrap=True)  # the terminal wraps it

    def say(self, message: str) -> None:
        """Prints a message unchanged."""
        self.show(Text(message))


def isatty(stream: Any) -> bool:
    return stream is not None and stream.isatty()


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
