"""The training state: the arrays that are carried from step to step, and the key of each step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray


class TrainState(eqx.Module):
    """What training carries from step to step: a checkpoint is these arrays and a record.

    The leaves are arrays, or their shapes, or their shardings. Lists are in the order of the model's tree.
    """

    trained: list[Any]
    frozen: list[Any]
    opt_state: list[Any]
    layers: list[Any]  # the state of layers such as BatchNorm
    counts: Any  # int32 `[2]`: the number of steps taken, and of skipped ones among them
    stream: Any  # int `[2]`, from which each step derives its key (`stream_key`)

    def delete_donated(self) -> None:
        """Deletes the arrays that a step was given, so that whoever still holds one gets JAX's error if they use it.

        On several devices JAX 0.10.2 ends the process by a segmentation fault if a compiled function gets an array that was
        only donated (openxla/xla#22604, 2026-11-30); `tests/distributed/test_workarounds.py` tells when it no longer does.
        """
        for array in (*self.trained, *self.opt_state, *self.layers):
            array.delete()


def stream_dtype() -> np.dtype:
    """Returns the dtype of a stream: 64 bits in 64-bit mode, where a key depends on all bits of its seed."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def stream_key(stream: Array) -> PRNGKeyArray:
    """Returns the key of a stream. As a part of a program it needs no compilation of its own."""
    seed, n = stream
    return jax.random.fold_in(jax.random.key(seed), n.astype(jnp.uint32))
