"""Checks of the numbers that the optimizers share. They may be traced, as by `optax.inject_hyperparams`."""

import math
from typing import Any

from ..errors import check_number

_AT_LEAST_0 = ("a finite number of at least 0", lambda value: 0 <= value < math.inf)
_DECAY_RATE = ("a number from 0 to below 1", lambda value: 0 <= value < 1, "Published values are 0.9 to 0.999.")
_RULES = {
    "learning_rate": (*_AT_LEAST_0, "Pass a number, or a schedule such as `optax.cosine_decay_schedule`."),
    "weight_decay": (*_AT_LEAST_0, "0.1 is usual, 0 turns it off."),
    "eps": (*_AT_LEAST_0, "1e-8 is usual."),
    **dict.fromkeys(("b1", "b2", "beta", "decay"), _DECAY_RATE),
}


def check_numbers(**given: Any) -> None:
    """Raises TypeError for an argument that is no number, ValueError for one that breaks the rule of its name."""
    for name, value in given.items():
        if not (name == "learning_rate" and callable(value)):  # a schedule
            check_number(value, name, *_RULES[name])
