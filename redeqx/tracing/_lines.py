"""The line of the user's code that an equation comes from, and the package that a function comes from."""

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import is_ours

# Libraries whose frames are skipped in the search for a line that the user can change. redeqx's own modules are skipped
# too (`is_ours`), except the models.
_LIBRARIES = ("jax", "equinox", "einops", "jaxtyping")


def line_of(eqn: Any, *skipped: str) -> str:
    """Returns the line of code of an equation, `file.py:12`, or an empty string if it is unknown.

    **Arguments:**

    - `skipped`: packages whose frames are skipped too.
    """
    traceback, folders = eqn.source_info.traceback, tuple(filter(None, map(_folder, skipped)))
    frames = () if traceback is None else ((frame.file_name, frame.line_num) for frame in traceback.frames)
    return line_among(frame for frame in frames if not frame[0].startswith(folders))


def line_among(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the innermost frame outside libraries."""
    return next((f"{name}:{line}" for name, line in frames if _is_code(name)), "")


def made_in(closed: Any, *packages: str) -> bool:
    """Whether the function of a closed jaxpr is defined in one of these packages, which need not be installed."""
    return (closed.jaxpr.debug_info.func_filename or "").startswith(tuple(filter(None, map(_folder, packages))))


def is_wrapped_outside(eqn: Any, closed: Any, *packages: str) -> bool:
    """Whether a function is one of `equinox.filter_custom_vjp`, which others than these packages call.

    Its jaxpr tells the file of the wrapper, not that of the function. `equinox.nn` calls functions of the user too.
    """
    wrapper, traceback = os.path.join("equinox", "_ad.py"), eqn.source_info.traceback
    if traceback is None or not (closed.jaxpr.debug_info.func_filename or "").endswith(wrapper):
        return False
    files = (frame.file_name for frame in traceback.frames)
    caller = next((file for file in files if not file.startswith((_folder("jax"), "<")) and not file.endswith(wrapper)), "")
    return not caller.startswith(tuple(filter(None, map(_folder, packages))))


@cache
def _folder(package: str) -> str:
    spec = find_spec(package)
    return f"{Path(spec.origin).parent}{os.sep}" if spec and spec.origin else ""


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


@cache
def _is_code(name: str) -> bool:
    return not name.startswith((*map(_folder, _LIBRARIES), "<")) and not is_ours(name) and Path(name).name != "contextlib.py"
