"""Runs a search over equations that may fail on a form that it does not know, such as one of another version of JAX."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import warn

T = TypeVar("T")


def or_as_written(search: Callable[[], T], otherwise: T, what: str) -> T:
    """What a search finds. Where it fails, `otherwise`, with a warning: the function is computed as it is written.

    **Arguments:**

    - `what`: what is searched for, as the warning names it.
    """
    try:
        return search()
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        warn(
            f"`loss_fn`: expected a form that the search for {what} knows, got {type(error).__name__} ({error}). "
            "It is computed as it is written, with the same numbers. Please report it as a bug.",
        )
        return otherwise
