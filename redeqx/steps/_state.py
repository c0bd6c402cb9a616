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

    **Arguments:**

    - `trained`, `frozen`: the leaves of the model.
    - `opt_state`, `layers`: the leaves of the optimizer state, and of the state of layers such as BatchNorm.
    - `counts`: int32 `[2]`: the number of steps taken, and of skipped ones among them.
    - `stream`: int `[2]`, from which each step derives its key (`stream_key`).
    """

    trained: list[Any]
    frozen: list[Any]
    opt_state: list[Any]
    layers: list[Any]
    counts: Any
    stream: Any


def stream_dtype() -> np.dtype:
    """Returns the dtype of a stream: 64 bits in 64-bit mode, where a key depends on all bits of its seed."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def stream_key(stream: Array) -> PRNGKeyArray:
    """Returns the key of a stream. As a part of a program it needs no compilation of its own."""
    seed, n = stream
    return jax.random.fold_in(jax.random.key(seed), n.astype(jnp.uint32))
