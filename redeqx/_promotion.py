"""Lets the library's own code mix ranks and dtypes as NumPy does, also in a script that forbids it for its own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax


def promoting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, called without the script's `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion`. The
    user's functions are traced under the script's settings first. Steps and kernels are traced later."""

    @wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return fn(*args, **kwargs)

    return called
