"""Errors in the user's functions: notes on their arguments, and tracebacks and warnings that show the user's own lines.

`with_batch_note` adds a note about the batch to an error, and `check_not_traced` refuses what such a function must not read.
`FilteredTraceback` removes the frames of redeqx and JAX from the traceback.
The line of the script is then next to that of the user's function.
"""

import contextlib
import functools
import inspect
import os
import re
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax

from .._tree import array_leaves, listed
from ._names import check_names, note_signature

P = ParamSpec("P")
Result = TypeVar("Result")

_traced: ContextVar[str | None] = ContextVar("traced", default=None)  # the name of the user's function that is traced

# --- notes -----------------------------------------------------------------------------------------------------------


def with_batch_note(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps a function of `(model, ..., batch, key)`, which is only traced, so that its errors have a note with the shapes
    of the batch, and `check_not_traced` knows that it runs."""

    @functools.wraps(fn, updated=())
    def with_note(*args: Any) -> Any:
        before = _traced.set(name)
        try:
            with note(f"`{name}` was called with ", lambda: _describe_batch(args[-2])):
                return fn(*args)
        finally:
            _traced.reset(before)

    return with_note


def check_not_traced(what: str) -> None:
    """Raises ValueError if a function of `with_batch_note` reads this: its value would be the same in all later steps."""
    if (name := _traced.get()) is not None:
        raise ValueError(
            f"`{what}`: expected to be read outside of `{name}`, got read inside: `{name}` is traced once, and later "
            "steps would use the value of now. Pass what changes in the examples. Where the gradient of one model passes "
            "through another, train both as the fields of one model."
        )


def _describe_batch(batch: Any) -> str:
    leaves = array_leaves(batch)
    shapes = listed([f"`{path}` {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()])
    n_rows = next((leaf.shape[0] for leaf in leaves.values() if leaf.shape), 0)
    return (
        f"this batch: {', '.join(shapes)}. The leading dim is the batch, of {n_rows} rows; an Equinox module takes one row, "
        "so `jax.vmap(model)(...)` takes them all."
    )


def example_note(what: str, places: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """A context that adds the indices of examples, or their positions in an iterable, to errors. `what` is the beginning."""
    return note(what, lambda: f" {', '.join(listed([str(i) for i in places], 16))}, counted from 0.")


@contextlib.contextmanager
def note(text: str, rest: Callable[[], str] = str) -> Iterator[None]:
    """A context that adds a note to errors: `text`, and what `rest` returns, which is called only for an error."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith(text) for note in getattr(error, "__notes__", ())):  # else an inner function added it
            with contextlib.suppress(Exception):  # a note that fails must not hide the error
                error.add_note(text + rest())
        raise


class RemoteTraceback(Exception):
    """The traceback, as text, of an exception that another process raised; used as the `__cause__` of the exception here."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


# --- tracebacks ------------------------------------------------------------------------------------------------------

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_JAX = str(Path(jax.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = _PACKAGE + "models" + os.sep  # the reference models count as the user's

# The message of `eqx.error_if`, inside the runtime's error.
_RAISED_IN_STEP = re.compile(r"_EquinoxRuntimeError: (.*?)(?:\n-{10}|\Z)", re.DOTALL)


@functools.cache
def is_ours(file: str) -> bool:
    """Returns whether a file belongs to the library, except for the reference models."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


def warn(message: str) -> None:
    """Warns at the innermost line outside of the library, JAX and the import system."""
    between, level, frame = (_JAX, "<frozen", "<string", "<@", contextlib.__file__), 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if not (is_ours(file) or file.startswith(between)):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class Once:
    """Says something once: passes the first message to `say`, such as `warn`, and drops those after it."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._has_said = say, False

    def __call__(self, message: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(message)


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


def filter_traceback(fn: Callable[P, Result], redco: Mapping[str, str] = MappingProxyType({})) -> Callable[P, Result]:
    """Decorates a public function or method: its errors are filtered by `FilteredTraceback`, and a call with arguments that
    it does not take raises the error of `check_names` in place of Python's. `redco` maps Redco's names to their
    replacements."""
    signature = inspect.signature(fn)
    of = fn.__qualname__.rpartition(".")[0] if fn.__name__ == "__init__" else fn.__name__
    note_signature(of, signature)

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        with FilteredTraceback():
            try:
                return fn(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # by the function, and not by its call
                of_python = error
            for name in redco.keys() & kwargs.keys():
                raise TypeError(f"`{of}({name}=)`: expected an argument of redeqx, got one of Redco. {redco[name]}")
            check_names(signature, of, args, kwargs)
            raise of_python

    return called


def _filter_frames(error: Exception, traceback: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    is_users = [not is_ours(file) and not file.startswith((*_INSTALLED, "<frozen")) for file in files]
    last = max((i for i, file in enumerate(files) if is_ours(file)), default=-1)
    if isinstance(error.__cause__, RemoteTraceback):
        last = len(frames)  # the cause shows the user's function
    elif not any(is_users[last + 1 :]):
        is_of_argument = str(error).startswith("`") and ": expected " in str(error)
        if last + 1 < len(frames) or not is_of_argument:
            return frames[0] if frames else None
        last -= 1
    made = None
    for i, frame in reversed([*enumerate(frames)]):
        if i > last or is_users[i]:
            made = types.TracebackType(made, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return made
