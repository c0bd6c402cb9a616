"""Checks for all families: sizes, heads and dropout rates of configs; lengths, masks and segments of examples."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from redeqx import errors
from redeqx.errors import wrong


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError for a field below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise wrong(name, "at least 1", getattr(config, name), "Pass a positive size.")


def check_heads(config: Any, width: str = "d_model", heads: str = "n_heads") -> None:
    """Raises ValueError if the heads do not divide the width."""
    if getattr(config, width) % getattr(config, heads):
        rule = f"a divisor of `{width}`={getattr(config, width)}"
        raise wrong(heads, rule, getattr(config, heads), "Choose a width that is a multiple of the heads.")


def check_rates(config: Any, *names: str) -> None:
    """Raises ValueError for a dropout rate outside [0, 1)."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise wrong(name, "a rate in [0, 1)", getattr(config, name), "Pass 0 for none.")


def check_choice(config: Any, name: str, choices: Iterable[str]) -> None:
    """Raises ValueError for a field whose value is not one of the choices."""
    errors.check_choice(getattr(config, name), name, tuple(choices))


def check_patches(config: Any) -> None:
    """Raises ValueError if a patch is larger than the image."""
    if config.patch_size > config.image_size:
        raise wrong("patch_size", f"at most `image_size`={config.image_size}", config.patch_size, "Choose smaller patches.")


def check_length(what: str, length: int, n_positions: int) -> None:
    """Raises ValueError if there are more tokens than the model has positions."""
    if length > n_positions:
        rule = f"at most `n_positions`={n_positions} tokens"
        raise wrong(what, rule, length, "Cut the example, or make the model with more positions.")


def check_segments(segments: Any, mask: Any, length: int, prefix: str = "") -> None:
    """Raises ValueError if segments are not one integer per token, or if there is a mask too.

    **Arguments:**

    - `prefix`: what the names of both arguments begin with.
    """
    if segments is None:
        return
    if segments.shape != (length,) or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"`{prefix}segments`: expected integers, one for each of {length} tokens, got "
            f"{segments.dtype}{list(segments.shape)}. "
            "Pass those of `redeqx.data.pack`."
        )
    if mask is not None:
        raise wrong(f"{prefix}mask", f"None with `{prefix}segments`", list(mask.shape), "Give padding another segment.")
