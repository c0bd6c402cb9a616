"""The line of the user's code that an equation comes from."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import einops
import equinox
import jax
import jaxtyping

from ..errors import is_ours

# Libraries whose frames are skipped in the search for a line that the user can change. redeqx's own modules are skipped
# too (`is_ours`), except the models.
_LIBRARIES = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (jax, equinox, einops, jaxtyping))


def line_of(eqn: Any) -> str:
    """Returns the line of code of an equation, `file.py:12`, or an empty string if it is unknown."""
    traceback = eqn.source_info.traceback
    return "" if traceback is None else line_among((frame.file_name, frame.line_num) for frame in traceback.frames)


def line_among(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the innermost frame outside libraries."""
    return next((f"{name}:{line}" for name, line in frames if _is_code(name)), "")


@cache
def _is_code(name: str) -> bool:
    return not name.startswith((*_LIBRARIES, "<")) and not is_ours(name) and Path(name).name != "contextlib.py"
