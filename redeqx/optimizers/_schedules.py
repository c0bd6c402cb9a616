"""Learning rate schedules over the updates of a fit."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from ..errors import check_choice, check_count, check_number, warn


def lr_schedule(
    n_steps: int,
    learning_rate: float | None,
    schedule_type: str,
    warmup_ratio: float,
    warmup_steps: int | None,
    init_learning_rate: float,
    end_learning_rate: float,
) -> optax.Schedule:
    """Returns a linear warm-up, then a decay to update `n_steps`; see `Deployer.get_lr_schedule_fn`."""
    check_number(learning_rate, "learning_rate", "a number", math.isfinite, "Pass that of the updates after the warm-up.")
    assert learning_rate is not None
    check_number(init_learning_rate, "init_learning_rate", "a number", math.isfinite, "Pass that of the first update.")
    check_number(end_learning_rate, "end_learning_rate", "a number", math.isfinite, "Pass that of the last update.")
    check_number(warmup_ratio, "warmup_ratio", "a number", math.isfinite, "Pass a share of all updates.")
    check_count(warmup_steps, "warmup_steps", 0, optional=True)
    check_choice(schedule_type, "schedule_type", ("linear", "cosine", "constant"))
    n_warmup = round(warmup_ratio * n_steps) if warmup_steps is None else warmup_steps
    if not 0 <= n_warmup <= n_steps:
        name, found = ("warmup_ratio", warmup_ratio) if warmup_steps is None else ("warmup_steps", warmup_steps)
        raise ValueError(
            f"`{name}`: expected a warm-up of 0 to the {n_steps} updates of the fit, got {found}. Choose another length."
        )
    n_decay = max(n_steps - n_warmup, 1)
    decay = optax.constant_schedule(learning_rate)
    if schedule_type == "linear":
        decay = optax.linear_schedule(learning_rate, end_learning_rate, n_decay)
    elif schedule_type == "cosine":
        alpha = end_learning_rate / learning_rate if learning_rate else 0.0
        decay = optax.cosine_decay_schedule(learning_rate, n_decay, alpha)
    if n_warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(init_learning_rate, learning_rate, n_warmup), decay], [n_warmup])


def warn_of_zero_rate(schedule: Callable[[Any], Any], n_steps: int) -> None:
    """Warns if a schedule reaches 0 before the last of `n_steps` steps: later updates change nothing."""
    # Not jitted: within one program a rate of 0 may be rounded to another value.
    if n_steps > 2 and not any(float(schedule(jnp.asarray(step, jnp.int32))) for step in (n_steps - 1, n_steps - 2)):
        warn(
            f"`lr_schedule_fn`: expected a learning rate above 0 until step {n_steps}, the last of this fit, got 0 before "
            "it. Pass `get_lr_schedule_fn` the `n_epochs` of all fits.",
        )
