"""Counts the programs that XLA compiles, by the name of the jitted function."""

from collections import Counter
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compilations():
    """Yields the number of compilations so far by name: `"step_fn"` for train steps, `"eval_fn"` for evaluations."""
    counts = Counter()

    def record(event, duration_secs, **kwargs):
        if event == _EVENT:
            name = str(kwargs.get("fun_name"))
            counts.update(each for each in ("step_fn", "eval_fn", "predict_fn") if each in name)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
