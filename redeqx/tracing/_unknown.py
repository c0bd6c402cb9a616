"""Runs code that may fail on an unknown form of the traced function. What fails is computed as it is written."""

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import warn
from ._lines import line_of

T = TypeVar("T")


def or_as_written(attempt: Callable[[], T], otherwise: Callable[[], T], what: str, eqn: Any = None) -> T:
    """Returns the result of `attempt`. If it fails, returns that of `otherwise`, and warns.

    If `otherwise` fails too, the fault is the user's function's own, such as an error in a custom derivative: only the error
    of `otherwise` is raised, without a warning.

    The warning names `what` was attempted, a search in a traced function or a rule, and the line of `eqn`, if there is one.
    """
    try:
        return attempt()
    except Warning:  # the warning of an inner attempt, where warnings are errors
        raise
    except Exception as error:  # any: a rule must not end a run
        found = f"{type(error).__name__} ({error})"
    written = otherwise()
    line = "" if eqn is None else line_of(eqn)  # only now: it searches a traceback
    what = f"{what} at {line}" if line else what
    warn(
        f"`loss_fn`: expected a form that {what} knows, got {found}. "
        "It is computed as it is written, with the same numbers. Please report it as a bug.",
    )
    return written
