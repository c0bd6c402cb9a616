"""Where an operation comes from: JAX's words for it, and the lines of code that asked for it."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import einops
import equinox
import jax
import jaxtyping
import optax

from ..errors import is_ours

# Libraries whose frames are skipped in the search for a line that the user can change. redeqx's own modules are skipped
# too (`is_ours`), except for the models.
_LIBRARIES = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (jax, equinox, einops, jaxtyping))
_OPTAX = f"{Path(optax.__file__).parent}{os.sep}"
# Words of operation names that say how JAX came to an operation, and not what it is.
_TRANSFORMATIONS = {
    *("jit", "pjit", "jvp", "transpose", "vmap", "while", "body", "cond", "closed_call", "custom_vjp_call"),
    *("custom_jvp_call", "checkpoint", "remat2", "rematted_computation", "shard_map", "step_fn"),
}


def line_of(eqn: Any) -> str:
    """The line of code, `file.py:12`, that an equation comes from; empty if it is not known."""
    traceback = eqn.source_info.traceback
    return "" if traceback is None else line_among((frame.file_name, frame.line_num) for frame in traceback.frames)


def line_among(frames: Iterable[tuple[str, int]]) -> str:
    """The innermost frame outside of libraries."""
    return next((f"{name}:{line}" for name, line in frames if _is_code(name)), "")


@cache
def _is_code(name: str) -> bool:
    return not name.startswith((*_LIBRARIES, "<")) and not is_ours(name) and Path(name).name != "contextlib.py"


def frames_of(source: Sequence[str]) -> list[tuple[str, int]]:
    """The files and lines of an operation's source, `file.py:12` each."""
    return [(name, int(line)) for name, _, line in (text.rpartition(":") for text in source)]


def own_line(source: Sequence[str]) -> str:
    """The innermost line of the script or of a model, shortened; without one, the innermost of all.

    **Arguments:**

    - `source`: of an operation, `file.py:12` each, innermost first.
    """
    line = line_among(frame for frame in frames_of(source) if not frame[0].startswith(_OPTAX))
    return shortened(line or next(iter(source), ""))


def shortened(line: str) -> str:
    """A line with its file relative to the import path or the current folder: `redeqx/models/opt.py:318`. A line in a cell
    of a notebook is named by the cell: `In[2]:5`."""
    file, _, number = line.rpartition(":")
    if (cell := _cell_of(file)) is not None:
        return f"{cell}:{number}"
    folders = (path for path in (*sys.path, os.getcwd()) if path and line.startswith(path + os.sep))
    folder = max(folders, key=len, default="")
    return line.removeprefix(folder + os.sep) if folder else line


def _cell_of(file: str) -> str | None:
    try:
        _, cell = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
    except (KeyError, AttributeError, TypeError):  # no IPython, an old one, or no cell
        return None
    return cell


def split_name(op_name: str) -> list[str]:
    """The parts of JAX's name of an operation: `jit(step)/jvp(mlp)/dot_general` has `jit`, `step`, `jvp` and so on."""
    return [part for part in re.split(r"[/()\s;:]+", op_name) if part]


def words_of(op_name: str) -> str:
    """What an operation computes, by its name, without JAX's transformations: `mlp/dot_general`; empty if it has none."""
    return "/".join([part for part in split_name(op_name) if part not in _TRANSFORMATIONS][-2:])
