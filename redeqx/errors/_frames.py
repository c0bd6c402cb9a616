"""Distinguishes the library's files from the user's code, so that warnings point to the user's lines."""

import contextlib
import inspect
import os
import warnings
from functools import cache
from pathlib import Path

import jax

_JAX = str(Path(jax.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = _PACKAGE + "models" + os.sep  # the reference models count as the user's


@cache
def is_ours(file: str) -> bool:
    """Return whether a file belongs to the library, except for the reference models."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


def warn(message: str) -> None:
    """Warn at the innermost line outside of the library."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_internal(file: str) -> bool:
    """Return whether a frame between the user's call and a warning is the library's, JAX's, or the import system's."""
    return is_ours(file) or file.startswith((_JAX, "<frozen", "<string", "<@")) or file == contextlib.__file__
