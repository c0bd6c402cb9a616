"""Checks of the arguments that the optimizers share. Numbers may be traced, as by `optax.inject_hyperparams`."""

import math
from typing import Any

from ..errors import check_number


def check_rate(learning_rate: Any) -> None:
    """Raises TypeError for a learning rate that is neither a number nor a schedule, ValueError for NaN or below 0."""
    if not callable(learning_rate):
        check_at_least_0(
            learning_rate, "learning_rate", "Pass a number, or a schedule such as `optax.cosine_decay_schedule`."
        )


def check_at_least_0(value: Any, name: str, advice: str) -> None:
    """Raises TypeError for anything but a number, ValueError for one that is negative or not finite."""
    check_number(value, name, "a finite number of at least 0", lambda value: 0 <= value < math.inf, advice)


def check_decay_rate(value: Any, name: str) -> None:
    """Raises TypeError for anything but a number, ValueError for one outside of 0 to below 1."""
    check_number(
        value, name, "a number from 0 to below 1", lambda value: 0 <= value < 1, "Published values are 0.9 to 0.999."
    )


def check_weight_decay(value: Any) -> None:
    """Raises TypeError for anything but a number, ValueError for one that is negative or not finite."""
    check_at_least_0(value, "weight_decay", "0.1 is usual, 0 turns it off.")
