"""The dtype in which numbers are summed, and stochastic rounding, which keeps the mean exact."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt


def at_least_float32(dtype: Any) -> Any:
    """Returns float32, or the dtype itself if it is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def to_bfloat16(x: Array, noise: UInt[Array, "..."]) -> Array:
    """Rounds float32 to bfloat16 up or down at random, in proportion to the distance; `noise` is uniform uint16 in the shape
    of `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)  # a bfloat16 is the upper half of a float32
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
