"""The line of the user's code that an equation comes from, and the package that a function comes from."""

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import is_ours
from ._inner import equations

# Libraries whose frames are skipped in the search for a line that the user can change. redeqx's own modules are skipped
# too (`is_ours`), except the models.
_LIBRARIES = ("jax", "equinox", "einops", "jaxtyping")


# Where `filter_custom_jvp`, `filter_custom_vjp`, `custom_gradient` and `defjvps` make a derivative of a given one, and
# `jax.jvp` that of a given function. The file that calls such a function tells whose that is, except with `defjvps`.
_MAKE_DERIVATIVES = (
    os.path.join("equinox", "_ad.py"),
    *(os.path.join("jax", "_src", name) for name in ("api.py", "custom_derivatives.py")),
)
# Of those above, the packages whose own functions have derivatives that are made in this way. Equinox's layers and
# transformations, and the models of this package, call functions of the user too.
_OF_MADE = {"equinox": "equinox.internal", **{name: name for name in ("diffrax", "lineax", "optimistix")}}


def line_of(eqn: Any, *skipped: str) -> str:
    """Returns the line of code of an equation, `file.py:12`, or an empty string if it is unknown. Frames of `skipped`
    packages do not count."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return line_among((f"{frame.file_name}:{frame.line_num}" for frame in frames), *skipped)


def line_among(lines: Iterable[str], *skipped: str) -> str:
    """Returns the first of these lines, `file.py:12`, outside libraries and these packages; an empty string if none is."""
    folders = _folders(*skipped)
    return next((line for line in lines if not line.startswith(folders) and _is_code(line.rpartition(":")[0])), "")


def made_in(closed: Any, *packages: str) -> bool:
    """Whether the function of a closed jaxpr is defined in one of these packages, which need not be installed."""
    return (closed.jaxpr.debug_info.func_filename or "").startswith(_folders(*packages))


def has_derivative_of(eqn: Any, *packages: str) -> bool:
    """Whether the derivative of a `custom_jvp` or `custom_vjp` is defined in one of these packages, whatever function it is
    the derivative of: `jax.custom_jvp(jnp.sin)` may get one of the user's."""
    rule = eqn.params.get("jvp_jaxpr_fun", eqn.params.get("bwd"))
    info = getattr(rule, "debug_info", None)
    if info is None:  # a form of another version of JAX
        return False
    file = info.func_filename or ""
    if file.endswith(_MAKE_DERIVATIVES) and not info.func_name.startswith("_"):
        if info.func_name == "jvp" and info.traced_for == "custom_jvp jvp":  # of `defjvps`, whoever calls the function
            return _is_relu(eqn.params["call_jaxpr"])
        traceback = eqn.source_info.traceback
        files = () if traceback is None else (frame.file_name for frame in traceback.frames)
        outside = (x for x in files if not x.startswith((*_folders("jax"), "<")) and not x.endswith(_MAKE_DERIVATIVES))
        file = next(outside, "")
        packages = tuple(_OF_MADE[name] for name in packages if name in _OF_MADE)
    return file.startswith(_folders(*packages))


def _is_relu(closed: Any) -> bool:
    """Whether a function is that of `jax.nn.relu` or `relu6`, whose derivatives are by `defjvps`: a model may have dozens of
    them, and to check one takes 4 ms. What gives relu another derivative, `jax.custom_jvp(jax.nn.relu)`, calls it."""
    is_named = made_in(closed, "jax") and closed.jaxpr.debug_info.func_name in ("relu", "relu6")
    return is_named and not any(eqn.primitive.name.startswith("custom_") for eqn in equations(closed))


@cache
def _folders(*packages: str) -> tuple[str, ...]:
    """Returns the folders of packages, without those that are not installed."""
    specs = map(find_spec, packages)
    return tuple(f"{Path(spec.origin).parent}{os.sep}" for spec in specs if spec and spec.origin)


def shortened(line: str) -> str:
    """Makes a line's file relative to the import path or the current folder: `redeqx/models/opt.py:318`. A line in a cell of
    a notebook is named by the cell: `In[2]:5`."""
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
    return not name.startswith((*_folders(*_LIBRARIES), "<")) and not is_ours(name) and Path(name).name != "contextlib.py"
