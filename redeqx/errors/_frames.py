"""Whose file a frame of a traceback is in: redeqx's own, or code that a user can read and change."""

import os
from functools import cache
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = _PACKAGE + "models" + os.sep  # the reference models count as a user's own


@cache
def is_ours(file: str) -> bool:
    """Whether a file is one of the library's, the reference models apart."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)
