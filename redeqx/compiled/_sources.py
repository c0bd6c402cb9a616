"""The origin of an operation: its JAX name, and its lines of code."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import optax

from ..tracing import line_among

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


def shortened(line: str) -> str:
    """Makes a line's file relative to the import path or the current folder: `redeqx/models/opt.py:318`.

    A line in a cell of a notebook is named by the cell: `In[2]:5`.
    """
    file, _, number = line.rpartition(":")
    if (cell := _cell_of(file)) is not None:
        return f"{cell}:{number}"
    folders = (path for path in (*sys.path, os.getcwd()) if path and line.startswith(path + os.sep))
    folder = max(folders, key=len, default="")
    return line.removeprefix(folder + os.sep) if folder else line


def _cell_of(file: str) -> str | None:
    """Returns the name of the notebook cell that a file holds, or None for any other file."""
    try:
        _, cell = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
    except (KeyError, AttributeError, TypeError):  # no IPython, an old one, or no cell
        return None
    return cell


def split_name(op_name: str) -> list[str]:
    """Splits the JAX name of an operation: `jit(step)/jvp(mlp)/dot_general` into `jit`, `step`, `jvp` and so on."""
    return [part for part in re.split(r"[/()\s;:]+", op_name) if part]


def words_of(op_name: str) -> str:
    """Shortens the JAX name of an operation to its last two parts without transformations: `mlp/dot_general`."""
    return "/".join([part for part in split_name(op_name) if part not in _TRANSFORMATIONS][-2:])
