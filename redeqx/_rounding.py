"""Stochastic rounding: up or down by chance, to each neighbour in proportion to how near it is. The mean is then exact."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt


def to_bfloat16(x: Array, noise: UInt[Array, "..."]) -> Array:
    """Float32 as bfloat16, rounded by chance.

    **Arguments:**

    - `noise`: uint16 in the shape of `x`, drawn uniformly.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)  # a bfloat16 is the upper half of a float32
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
