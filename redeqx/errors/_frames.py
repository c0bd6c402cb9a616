"""Tells the library's own files from code that a user can read and change."""

import os
from functools import cache
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = _PACKAGE + "models" + os.sep  # the reference models count as the user's


@cache
def is_ours(file: str) -> bool:
    """Whether a file belongs to the library, except for the reference models."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)
