"""Errors in the user's functions: notes on their arguments, and tracebacks without the library's frames.

`with_batch_note` adds a note about the batch to an error. `FilteredTraceback` removes the frames of redeqx and JAX from the
traceback, so that the line of the script is next to the line of the user's function.
"""

import functools
import re
import sysconfig
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax

from .._tree import is_array_like, listed, named_leaves
from ._frames import is_ours
from ._names import with_names

P = ParamSpec("P")
Result = TypeVar("Result")

# --- notes -----------------------------------------------------------------------------------------------------------


def with_batch_note(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function of `(model, ..., batch, key)` so that its errors have a note with the shapes of the batch."""

    @functools.wraps(fn, updated=())
    def with_note(*args: Any) -> Any:
        with Note(f"`{name}` was called with ", lambda: _describe_batch(args[-2])):
            return fn(*args)

    return with_note


def _describe_batch(batch: Any) -> str:
    leaves = {path: leaf for path, leaf in named_leaves(batch).items() if is_array_like(leaf)}
    shapes = listed([f"`{path}` {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()])
    n_rows = next((leaf.shape[0] for leaf in leaves.values() if leaf.shape), 0)
    return (
        f"this batch: {', '.join(shapes)}. The leading dim is the batch, of {n_rows} rows; an Equinox module takes one row, "
        "so `jax.vmap(model)(...)` takes them all."
    )


class Note:
    """A context manager that adds a note to errors.

    **Arguments:**

    - `text`: the note, or its beginning.
    - `rest`: returns the rest of it. It is called only for an error.
    """

    def __init__(self, text: str, rest: Callable[[], str] = str):
        self._text, self._rest = text, rest

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        if not isinstance(error, Exception) or any(note.startswith(self._text) for note in getattr(error, "__notes__", ())):
            return  # an inner function added it
        try:
            error.add_note(self._text + self._rest())
        except Exception:  # a note that fails must not hide the error
            return


def example_note(what: str, places: Sequence[int]) -> Note:
    """Returns a context manager that adds a note with the examples' numbers to errors.

    **Arguments:**

    - `what`: the beginning of the note.
    - `places`: the examples' indices, or their positions in an iterable.
    """
    return Note(what, lambda: f" {', '.join(listed([str(i) for i in places], 16))}, counted from 0.")


class RemoteTraceback(Exception):
    """The traceback, as text, of an exception that another process raised; used as the `__cause__` of the exception here."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


# --- tracebacks ------------------------------------------------------------------------------------------------------

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})


# The message of `eqx.error_if`, inside the runtime's error.
_RAISED_IN_STEP = re.compile(r"_EquinoxRuntimeError: (.*?)(?:\n-{10}|\Z)", re.DOTALL)


class FilteredTraceback:
    """A context manager that filters the tracebacks of errors: the script's line and the user's functions remain.

    Frames of redeqx and JAX are removed. An error that redeqx itself raises keeps its last frame if it is about an
    argument (`` `name`: expected ... ``), and otherwise all frames. JAX_TRACEBACK_FILTERING=off keeps all frames.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        # Set on the error itself: raising it again would add a frame.
        if isinstance(error, KeyboardInterrupt) and error.args:  # the fit was stopped, and its step is saved
            error.__traceback__ = None
        if isinstance(error, Exception) and getattr(jax.config, "jax_traceback_filtering", None) != "off":
            error.__traceback__ = _filter_frames(error, traceback)
            if (raised := _RAISED_IN_STEP.search(str(error))) is not None:
                raise eqx.EquinoxRuntimeError(
                    f"{raised[1].strip()}\nRaised by an `eqx.error_if` while the step was computed. With "
                    "`EQX_ON_ERROR=breakpoint` in the environment a debugger opens there."
                ) from None


def filter_traceback(fn: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap a public method in a `FilteredTraceback` context, and in `with_names`."""
    named = with_names(fn)

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        with FilteredTraceback():
            return named(*args, **kwargs)

    return called


def _filter_frames(error: Exception, traceback: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    last = max((i for i, frame in enumerate(frames) if _is_library_frame(frame)), default=-1)
    below = frames[last + 1 :]
    if isinstance(error.__cause__, RemoteTraceback):
        last = len(frames)  # the cause shows the user's function
    elif not any(_is_user_frame(frame) for frame in below):
        if not (below == [] and str(error).startswith("`") and ": expected " in str(error)):
            return frames[0] if frames else None
        last -= 1
    kept = [frame for i, frame in enumerate(frames) if i > last or _is_user_frame(frame)]
    made = None
    for frame in reversed(kept):
        made = types.TracebackType(made, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return made


def _is_library_frame(traceback: types.TracebackType) -> bool:
    return is_ours(traceback.tb_frame.f_code.co_filename)


def _is_user_frame(traceback: types.TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return not _is_library_frame(traceback) and not file.startswith((*_INSTALLED, "<frozen"))
