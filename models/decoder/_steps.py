"""`InitialSteps`: how long the steps of a state space are before training. `_mixers.py` creates its layers.

Each number of its state decays with steps, so that a layer with long ones forgets within a few tokens, and learns to keep
little. Drawn steps differ by a factor of a hundred.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


@dataclass(frozen=True)
class InitialSteps:
    """The initial steps, whose logarithms are drawn from a uniform distribution.

    **Arguments:**

    - `least`, `most`: their range.
    - `floor`: smaller ones are this.
    - `scale`: of a Mamba-1, the largest size of the weights of steps, in units of `step_rank ** -0.5`. They are drawn from a
        uniform distribution.
    - `is_constant`: whether these weights all have this size instead.
    """

    least: float = 0.001
    most: float = 0.1
    floor: float = 1e-4
    scale: float = 1.0
    is_constant: bool = False

    def bias(self, n: int, key: PRNGKeyArray) -> Float[Array, " n"]:
        """Returns numbers whose softplus are steps."""
        share = jax.random.uniform(key, (n,))
        steps = jnp.maximum(self.least ** (1 - share) * self.most**share, self.floor)
        return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus

    def weight(self, n: int, rank: int, key: PRNGKeyArray) -> Float[Array, "n rank"]:
        """Returns the weights of the steps of a Mamba-1."""
        size = self.scale * rank**-0.5
        if self.is_constant:
            return jnp.full((n, rank), size, dtype=float)
        return jax.random.uniform(key, (n, rank), minval=-size, maxval=size)


DRAWN = InitialSteps()
