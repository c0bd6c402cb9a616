"""The origin of an operation: its JAX name, and its lines of code."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import optax

from ..tracing import line_among, shortened

_OPTAX = f"{Path(optax.__file__).parent}{os.sep}"
# Parts of operation names that name JAX's transformations, not the operation.
_TRANSFORMATIONS = {
    *("jit", "pjit", "jvp", "transpose", "vmap", "while", "body", "cond", "closed_call", "custom_vjp_call"),
    *("custom_jvp_call", "checkpoint", "remat2", "rematted_computation", "shard_map", "step_fn"),
}


def frames_of(source: Sequence[str]) -> list[tuple[str, int]]:
    """Splits each line of an operation's source, `file.py:12`, into file and line."""
    return [(name, int(line)) for name, _, line in (text.rpartition(":") for text in source)]


def own_line(source: Sequence[str]) -> str:
    """Returns the innermost line of the script or of a model, shortened, or else the innermost line of all.

    **Arguments:**

    - `source`: the lines of an operation, `file.py:12` each, innermost first.
    """
    line = line_among(frame for frame in frames_of(source) if not frame[0].startswith(_OPTAX))
    return shortened(line or next(iter(source), ""))


def split_name(op_name: str) -> list[str]:
    """Splits the JAX name of an operation: `jit(step)/jvp(mlp)/dot_general` into `jit`, `step`, `jvp` and so on."""
    return [part for part in re.split(r"[/()\s;:]+", op_name) if part]


def words_of(op_name: str) -> str:
    """Shortens the JAX name of an operation to its last two parts without transformations: `mlp/dot_general`."""
    return "/".join([part for part in split_name(op_name) if part not in _TRANSFORMATIONS][-2:])
