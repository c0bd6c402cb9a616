"""The scheduler of flow matching: samples are on the line between a clean sample and noise, a model predicts its direction.

Sources: Lipman et al. 2022, *Flow Matching for Generative Modeling*; Esser et al. 2024, *Scaling Rectified Flow Transformers
for High-Resolution Image Synthesis*. The variants are those of `diffusers`.

Dims: shape = shape of a sample, any. A timestep is the noise level in (0, 1] times `n_train_steps`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx.errors import wrong

from .._kinds import NUMBER, POSITIVE
from ..hf import Field, Fields, Fixed, Only
from ..nn import check_choice, check_sizes
from ._scheduler import Sample, Scheduler, Step

_SHIFTS = ("exponential", "linear")


@dataclass(frozen=True)
class FlowMatchEuler(Scheduler):
    """Flow matching: straight lines from samples to noise, followed backwards by Euler's method.

    **Arguments:** those of `Scheduler`, and

    - `shift`: the noise level `s` becomes `shift * s / (1 + (shift - 1) * s)`: above 1, more of the steps are at high noise
        levels, as large images need.
    - `is_dynamic`: whether the shift depends on the size of an image, by the arguments below, and not on `shift`.
    - `base_shift`, `max_shift`: a number for images of `base_patches` and one for images of `max_patches`; that for other
        sizes is on the line through the two. `shift_kind`: what the number is, "exponential" for the logarithm of the
        shift, "linear" for the shift itself.
    - `n_patches`: the number of patches of an image; None if it is not known yet. It is not saved: a pipeline sets it.

    Raises ValueError for a shift that is not positive, for an unknown name, and for two sizes that are equal.
    """

    class_name: ClassVar[str] = "FlowMatchEulerDiscreteScheduler"

    shift: float = 1.0
    is_dynamic: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_patches: int = 256
    max_patches: int = 4096
    shift_kind: str = "exponential"
    n_patches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "base_patches", "max_patches", *([] if self.n_patches is None else ["n_patches"]))
        check_choice(self, "shift_kind", _SHIFTS)
        if not self.shift > 0:
            raise wrong("shift", "a positive number", self.shift, "Pass 1 for evenly spaced steps.")
        if self.base_patches == self.max_patches:
            raise wrong("max_patches", "another number than `base_patches`", self.max_patches, "Change one of the two.")
        if self.n_patches is not None and not self._factor > 0:
            raise ValueError(
                f"`n_patches`: expected a number whose shift is positive, got {self.n_patches}, whose shift is "
                f"{self._factor:.3g}. Change `base_shift` or `max_shift`."
            )

    rows = (
        *Scheduler.rows,
        Field("shift", kind=POSITIVE),
        Field("use_dynamic_shifting", "is_dynamic"),
        *Fields("base_shift", "max_shift", kind=NUMBER),
        *Fields(base_patches="base_image_seq_len", max_patches="max_image_seq_len"),
        Only("time_shift_type", *_SHIFTS, name="shift_kind"),
        *Fixed(shift_terminal=None, invert_sigmas=False, stochastic_sampling=False),
        *(Only(f"use_{kind}_sigmas", False, None) for kind in ("karras", "exponential", "beta")),
    )

    def add_noise(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        level = self._level(timestep)
        return ((1 - level) * sample + level * noise).astype(sample.dtype)

    def target(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        del timestep
        return noise - sample

    def draw_timestep(self, key: PRNGKeyArray) -> Float[Array, ""]:
        """Draws a timestep for training: its noise level is the logistic function of a standard normal number (Esser et al.
        2024, equation 19), shifted."""
        return self.n_train_steps * self._shifted(jax.nn.sigmoid(jax.random.normal(key)))

    def timesteps(self, n_steps: int) -> Float[Array, " n_steps"]:
        """Returns the timesteps for denoising in `n_steps`, in decreasing order of noise, from pure noise to the lowest
        level of training. All are shifted; as in diffusers, the lowest one twice if the shift is the same for all images.

        Raises ValueError for more steps than timesteps, and without `n_patches` if the shift depends on it.
        """
        self._check_steps(n_steps)
        n = self.n_train_steps
        lowest = np.float32(1 / n)
        levels = np.linspace(1.0, float(lowest if self.is_dynamic else self._shifted(lowest)), n_steps)  # in float64
        return jnp.asarray(self._shifted(levels).astype(np.float32) * np.float32(n))

    @property
    def _factor(self) -> float:
        """The shift, of an image of `n_patches` if it depends on them."""
        if not self.is_dynamic:
            return self.shift
        if self.n_patches is None:
            rule = "a number, since the shift depends on the size of an image"
            raise wrong("n_patches", rule, "None", "Pass `dataclasses.replace(scheduler, n_patches=...)`.")
        slope = (self.max_shift - self.base_shift) / (self.max_patches - self.base_patches)
        number = self.base_shift + slope * (self.n_patches - self.base_patches)
        return math.exp(number) if self.shift_kind == "exponential" else number

    def _shifted(self, level):
        return self._factor * level / (1 + (self._factor - 1) * level)

    def _level(self, timestep: Step) -> Float[Array, ""]:
        return jnp.asarray(timestep, jnp.float32) / self.n_train_steps

    def _step(self, model_output, timestep, sample, n_steps):
        steps = self.timesteps(n_steps)
        after = jnp.where(steps < timestep, steps, 0).max()
        return sample + (self._level(after) - self._level(timestep)) * model_output, None
