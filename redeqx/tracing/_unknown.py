"""Runs a search over equations that may fail on an unknown form, such as that of another version of JAX."""

from collections.abc import Callable
from typing import TypeVar

from ..errors import warn

T = TypeVar("T")


def or_as_written(search: Callable[[], T], otherwise: T, what: str) -> T:
    """Returns the result of a search. If it fails, warns and returns `otherwise`: the function is computed as written.

    **Arguments:**

    - `what`: what the search looks for, for the warning.
    """
    try:
        return search()
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        warn(
            f"`loss_fn`: expected a form that the search for {what} knows, got {type(error).__name__} ({error}). "
            "It is computed as it is written, with the same numbers. Please report it as a bug.",
        )
        return otherwise
