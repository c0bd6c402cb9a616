"""Collate functions that the worker processes of the tests import, including every way to fail."""

import os
import signal

import numpy as np


def stack_with_pid(examples):
    return {"x": np.stack([np.asarray(x) for x in examples]), "pid": np.full(len(examples), os.getpid())}


def stack_numbers(examples):
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


def raises_end_of_file(examples):
    raise EOFError("a truncated file")


def raises_lost_connection(examples):
    raise ConnectionResetError("a lost connection")


def returns_ragged_lists(examples):
    return {"x": [[0] * x for x in examples]}


def returns_unpicklable_batch(examples):
    return {"x": np.asarray(examples), "f": lambda: None}


def exits(examples):
    os._exit(3)


def kills_itself(examples):
    os.kill(os.getpid(), signal.SIGKILL)


def uses_jax(examples):
    import jax
    import jax.numpy as jnp

    return {"x": jnp.asarray(examples) + 1, "on_cpu": np.full(len(examples), jax.default_backend() == "cpu")}


class FailsToUnpickle:
    """A function that can be pickled but not unpickled."""

    def __call__(self, examples):
        return {}

    def __reduce__(self):
        return _fail_to_unpickle, ()


def _fail_to_unpickle():
    raise ImportError("no such module there")
