"""The scheduler of flow matching: samples are on the line between a clean sample and noise, a model predicts its direction.

Sources: Lipman et al. 2022, *Flow Matching for Generative Modeling*; Esser et al. 2024, *Scaling Rectified Flow Transformers
for High-Resolution Image Synthesis*. The variants are those of `diffusers`.

Dims: shape = shape of a sample, any. A timestep is the noise level in (0, 1] times `n_train_steps`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._kinds import POSITIVE
from ..hf import Field, Only
from ._scheduler import Scheduler, Step


@dataclass(frozen=True)
class FlowMatchEuler(Scheduler):
    """Flow matching: straight lines from samples to noise, followed backwards by Euler's method.

    **Arguments:** those of `Scheduler`, and

    - `shift`: the noise level `s` becomes `shift * s / (1 + (shift - 1) * s)`: above 1, more of the steps are at high noise
        levels, as large images need.

    Raises ValueError for a shift that is not positive.
    """

    class_name: ClassVar[str] = "FlowMatchEulerDiscreteScheduler"

    shift: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shift > 0:
            raise ValueError(f"`shift`: expected a positive number, got {self.shift}. Pass 1 for evenly spaced steps.")

    rows = (
        *Scheduler.rows,
        Field("shift", kind=POSITIVE),
        Only("use_dynamic_shifting", False),
        Only("shift_terminal", None),
        Only("invert_sigmas", False),
        Only("stochastic_sampling", False),
        *(Only(f"use_{kind}_sigmas", False, None) for kind in ("karras", "exponential", "beta")),
    )

    def add_noise(
        self, sample: Float[Array, "*shape"], noise: Float[Array, "*shape"], timestep: Step
    ) -> Float[Array, "*shape"]:
        level = self._level(timestep)
        return ((1 - level) * sample + level * noise).astype(sample.dtype)

    def target(
        self, sample: Float[Array, "*shape"], noise: Float[Array, "*shape"], timestep: Step
    ) -> Float[Array, "*shape"]:
        del timestep
        return noise - sample

    def draw_timestep(self, key: PRNGKeyArray) -> Float[Array, ""]:
        """Draws a timestep for training: its noise level is the logistic function of a standard normal number (Esser et al.
        2024, equation 19), shifted."""
        return self.n_train_steps * self._shifted(jax.nn.sigmoid(jax.random.normal(key)))

    def timesteps(self, n_steps: int) -> Float[Array, " n_steps"]:
        """Returns the timesteps for denoising in `n_steps`, in decreasing order of noise, from pure noise to the shifted
        lowest level of training. As in diffusers, levels between the two are shifted, and so is the lowest one once more.

        Raises ValueError for more steps than timesteps.
        """
        self._check_steps(n_steps)
        n = self.n_train_steps
        levels = np.linspace(1.0, float(self._shifted(np.float32(1 / n))), n_steps)  # in float64
        return jnp.asarray(self._shifted(levels).astype(np.float32) * np.float32(n))

    def _shifted(self, level):
        return self.shift * level / (1 + (self.shift - 1) * level)

    def _level(self, timestep: Step) -> Float[Array, ""]:
        return jnp.asarray(timestep, jnp.float32) / self.n_train_steps

    def _step(self, model_output, timestep, sample, n_steps):
        steps = self.timesteps(n_steps)
        after = jnp.where(steps < timestep, steps, 0).max()
        return sample + (self._level(after) - self._level(timestep)) * model_output, None
