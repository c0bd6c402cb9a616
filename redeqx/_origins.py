"""Origins of arrays: which ones were read from a folder of weights, and which ones training has changed since.

A model is a PyTree of arrays, which cannot say where they come from. Origins are kept beside it, by the identity of each
array, as long as it exists: a copy or a changed array has none.
"""

import weakref
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

CHANGED = ""  # the origin of an array that training has changed, or an adapter's folder

_origins: dict[int, tuple[weakref.ref, str]] = {}


def set_origin(array: Any, origin: str) -> None:
    """Notes where an array comes from: the folder that it was read from, or `CHANGED`."""
    if not isinstance(array, jax.Array | np.ndarray) or isinstance(array, Tracer):  # in a dry run, models are NumPy's zeros
        return
    key = id(array)
    _origins[key] = weakref.ref(array, lambda _: _origins.pop(key, None)), origin


def origin_of(array: Any) -> str | None:
    """Returns the origin of an array; None if it is not known."""
    ref, origin = _origins.get(id(array), (None, None))
    return origin if ref is not None and ref() is array else None
