"""Stochastic rounding: rounds up or down at random, in proportion to the distance, so that the mean is exact."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt


def to_bfloat16(x: Array, noise: UInt[Array, "..."]) -> Array:
    """Rounds float32 to bfloat16 stochastically.

    **Arguments:**

    - `noise`: uniform random uint16 in the shape of `x`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)  # a bfloat16 is the upper half of a float32
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
