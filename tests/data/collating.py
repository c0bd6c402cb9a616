"""What worker processes of the tests import: functions that collate, and fail, in every way."""

import os
import signal

import numpy as np


def pids(examples):
    return {"x": np.stack([np.asarray(x) for x in examples]), "pid": np.full(len(examples), os.getpid())}


def numbers(examples):
    return {"x": np.asarray(examples, np.int64)}


def fails_at_9(examples):
    if 9 in examples:
        raise ValueError("nine will not do")
    return {"x": np.asarray(examples)}


class TwoWords(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def raises_what_does_not_unpickle(examples):
    raise TwoWords("one", "other")


def ragged(examples):
    return {"x": [[0] * x for x in examples]}


def returns_what_does_not_pickle(examples):
    return {"x": np.asarray(examples), "f": lambda: None}


def leaves(examples):
    os._exit(3)


def is_killed(examples):
    os.kill(os.getpid(), signal.SIGKILL)


def uses_jax(examples):
    import jax
    import jax.numpy as jnp

    return {"x": jnp.asarray(examples) + 1, "on_cpu": np.full(len(examples), jax.default_backend() == "cpu")}


class Unreadable:
    """A function that pickles, and that another process cannot read."""

    def __call__(self, examples):
        return {}

    def __reduce__(self):
        return _unread, ()


def _unread():
    raise ImportError("no such module there")
