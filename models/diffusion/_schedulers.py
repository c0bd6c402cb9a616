"""The schedulers of betas: DDPM, DDIM and Euler. Each timestep adds noise of the variance beta.

Sources: Ho et al. 2020, *Denoising Diffusion Probabilistic Models* (DDPM); Song et al. 2021, *Denoising Diffusion Implicit
Models* (DDIM); Karras et al. 2022, *Elucidating the Design Space of Diffusion-Based Generative Models* (Euler). The variants
of the schedules are those of `diffusers`.

Dims: shape = shape of a sample, any. Timesteps count from 0, which has the least noise. alpha is the cumulative product of
`1 - beta`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from redeqx.errors import wrong

from .._kinds import COUNT, RATE
from ..hf import Field, Fields, Fixed, Only
from ..nn import check_choice
from ._scheduler import Sample, Scheduler, Step

_BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_SPACINGS = ("leading", "trailing", "linspace")
_VARIANCES = ("fixed_small", "fixed_large")


@dataclass(frozen=True)
class BetaScheduler(Scheduler):
    """The base of the schedulers of betas: the amount of noise at each timestep, and what a model predicts.

    **Arguments:** those of `Scheduler`, and

    - `beta_start`, `beta_end`, `beta_schedule`: the variance of the noise that each timestep adds: "linear" interpolates
        between the first two, "scaled_linear" interpolates their square roots, and "squaredcos_cap_v2" uses neither.
    - `has_zero_snr`: whether the betas are rescaled so that the last timestep is pure noise (Lin et al. 2023).
    - `prediction_type`: what a model predicts: "epsilon", the noise; "sample"; or "v_prediction", the velocity between them.
    - `clip_range`: the predicted sample is clipped to [-clip_range, clip_range]; None for no clipping, as latents are
        unbounded.
    - `timestep_spacing`, `steps_offset`: how fewer steps are distributed over the timesteps (see `timesteps`).

    Raises ValueError for an unknown name, and for sizes below 1.
    """

    rounds_timesteps: ClassVar[bool] = True  # whether timesteps are whole numbers if they are evenly spaced

    beta_start: float = 1e-4
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    has_zero_snr: bool = False
    prediction_type: str = "epsilon"
    clip_range: float | None = 1.0
    timestep_spacing: str = "leading"
    steps_offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "beta_schedule", _BETAS)
        check_choice(self, "prediction_type", _PREDICTIONS)
        check_choice(self, "timestep_spacing", _SPACINGS)

    rows = (
        *Scheduler.rows,
        Only("trained_betas", None, is_written=False),
        *Fields("beta_start", "beta_end", kind=RATE),
        Only("beta_schedule", *_BETAS, name="beta_schedule"),
        Field("rescale_betas_zero_snr", "has_zero_snr"),
        Only("prediction_type", *_PREDICTIONS, name="prediction_type"),
        Only("timestep_spacing", *_SPACINGS, name="timestep_spacing"),
        Field("steps_offset", kind=COUNT),
    )
    clipping = (
        Only("thresholding", False, is_written=False),
        # Two keys, whether samples are clipped and the range, are one field, which is None for no clipping.
        Field("clip_sample", "clip_range", default=True, save=lambda config: config.clip_range is not None),
        Field(
            "clip_sample_range",
            "clip_range",
            default=1.0,
            load=lambda size, known: size if known["clip_range"] else None,
            save=lambda config: 1.0 if config.clip_range is None else config.clip_range,
        ),
    )

    # --- noise --------------------------------------------------------------------------------------------------------

    @cached_property
    def alphas(self) -> np.ndarray:
        """Returns the fraction of a sample's variance that remains at each timestep, `[n_train_steps]`.

        Betas are in float32 and their products in float64, as in torch: the first alpha is so close to 1 that rounding its
        last bit changes the noise by a thousandth.
        """
        if self.beta_schedule == "linear":
            betas = np.linspace(self.beta_start, self.beta_end, self.n_train_steps).astype(np.float32)
        elif self.beta_schedule == "scaled_linear":
            roots = np.linspace(self.beta_start**0.5, self.beta_end**0.5, self.n_train_steps)
            betas = roots.astype(np.float32) ** 2
        else:
            left = np.cos((np.arange(self.n_train_steps + 1) / self.n_train_steps + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - left[1:] / left[:-1], 0.999).astype(np.float32)
        alphas = np.cumprod(1 - betas, dtype=np.float64).astype(np.float32)
        if not self.has_zero_snr:
            return alphas
        roots = np.sqrt(alphas)
        return ((roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))) ** 2

    def _alpha(self, timestep: Step) -> Float[Array, ""]:
        return jnp.asarray(self.alphas)[timestep]

    def add_noise(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        alpha = self._alpha(timestep)
        return (jnp.sqrt(alpha) * sample + jnp.sqrt(1 - alpha) * noise).astype(sample.dtype)

    def velocity(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        """Returns the target of a model with prediction type "v_prediction", for the same arguments as `add_noise`."""
        alpha = self._alpha(timestep)
        return (jnp.sqrt(alpha) * noise - jnp.sqrt(1 - alpha) * sample).astype(sample.dtype)

    def target(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        if self.prediction_type == "v_prediction":
            return self.velocity(sample, noise, timestep)
        return noise if self.prediction_type == "epsilon" else sample

    # --- steps --------------------------------------------------------------------------------------------------------

    def timesteps(self, n_steps: int) -> Num[Array, " n_steps"]:
        """Returns the timesteps for denoising in `n_steps`, in decreasing order of noise.

        "leading" counts from timestep 0 and adds `steps_offset`, "trailing" counts from the last timestep, and "linspace"
        includes both ends. Raises ValueError for more steps than timesteps, and for an offset that exceeds the last
        timestep.
        """
        return jnp.asarray(self._spaced(n_steps), jnp.int32 if self.rounds_timesteps else jnp.float32)

    def _spaced(self, n_steps: int) -> np.ndarray:
        n = self.n_train_steps
        self._check_steps(n_steps)
        if self.timestep_spacing == "leading":
            steps = np.arange(n_steps)[::-1] * (n // n_steps) + self.steps_offset
        elif self.timestep_spacing == "trailing":
            steps = np.round(np.arange(n, 0, -n / n_steps))[:n_steps] - 1
        else:
            steps = np.linspace(0, n - 1, n_steps)[::-1]
            steps = np.round(steps) if self.rounds_timesteps else steps
        if steps[0] >= n:
            raise ValueError(
                f"`steps_offset`: expected timesteps below `n_train_steps`={n}, got {int(steps[0])} with {n_steps} steps "
                f"and an offset of {self.steps_offset}. Use fewer steps."
            )
        return steps

    def _alpha_after(self, timestep: Step, n_steps: int, end: Any) -> Float[Array, ""]:
        """Returns the alpha of the next timestep; `end` if there is none."""
        steps = self.timesteps(n_steps)
        previous = jnp.where(steps < timestep, steps, -1).max()
        return jnp.where(previous < 0, end, self._alpha(jnp.maximum(previous, 0)))

    def _predict(self, output: Sample, alpha: Float[Array, ""], sample: Sample) -> tuple[Sample, Sample]:
        """Returns the clipped clean sample and the noise, both derived from the model's prediction."""
        kept, added = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
        if self.prediction_type == "epsilon":
            clean, noise = (sample - added * output) / kept, output
        elif self.prediction_type == "sample":
            clean, noise = output, (sample - kept * output) / added
        else:
            clean, noise = kept * sample - added * output, kept * output + added * sample
        return clean if self.clip_range is None else jnp.clip(clean, -self.clip_range, self.clip_range), noise


@dataclass(frozen=True)
class DDPM(BetaScheduler):
    """DDPM: each step draws from the posterior of the next sample.

    **Arguments:** those of `BetaScheduler`, and

    - `variance_type`: the variance of the noise that each step adds: "fixed_small", the posterior's for a known clean
        sample, or "fixed_large", the variance that the step removes.
    """

    class_name: ClassVar[str] = "DDPMScheduler"

    variance_type: str = "fixed_small"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "variance_type", _VARIANCES)

    rows = (*BetaScheduler.rows, *BetaScheduler.clipping, Only("variance_type", *_VARIANCES, name="variance_type"))

    def _step(self, model_output, timestep, sample, n_steps):
        alpha, alpha_after = self._alpha(timestep), self._alpha_after(timestep, n_steps, 1.0)
        ratio = alpha / alpha_after  # alpha of this step alone
        clean, _ = self._predict(model_output, alpha, sample)
        of_clean, of_sample = jnp.sqrt(alpha_after) * (1 - ratio), jnp.sqrt(ratio) * (1 - alpha_after)
        small, large = (1 - alpha_after) / (1 - alpha) * (1 - ratio), 1 - ratio
        variance = jnp.where(timestep > 0, small if self.variance_type == "fixed_small" else large, 0.0)
        return (of_clean * clean + of_sample * sample) / (1 - alpha), jnp.sqrt(variance)


@dataclass(frozen=True)
class DDIM(BetaScheduler):
    """DDIM: deterministic steps, so that few of them are enough. With `eta`, each step also adds noise.

    **Arguments:** those of `BetaScheduler`, and

    - `ends_clean`: whether the last step removes all noise; else the noise of timestep 0 remains. `scheduler_config.json`
        calls it `set_alpha_to_one`.
    - `eta`: the noise that a step adds, from 0 for none to 1 for as much as DDPM. It is not saved: diffusers takes it as an
        argument of each step.
    """

    class_name: ClassVar[str] = "DDIMScheduler"

    ends_clean: bool = True
    eta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eta <= 1:
            raise wrong("eta", "0 to 1", self.eta, "Pass 0 for no noise, 1 for DDPM's.")

    rows = (*BetaScheduler.rows, *BetaScheduler.clipping, Field("set_alpha_to_one", "ends_clean"))

    def _step(self, model_output, timestep, sample, n_steps):
        # As in diffusers, steps have equal length even if the timesteps are not evenly spaced.
        previous = timestep - self.n_train_steps // n_steps
        alpha = self._alpha(timestep)
        alpha_after = jnp.where(previous < 0, 1.0 if self.ends_clean else self._alpha(0), self._alpha(previous))
        clean, noise = self._predict(model_output, alpha, sample)
        variance = self.eta**2 * (1 - alpha_after) / (1 - alpha) * (1 - alpha / alpha_after)
        mean = jnp.sqrt(alpha_after) * clean + jnp.sqrt(1 - alpha_after - variance) * noise
        return mean, jnp.sqrt(variance) if self.eta else None


@dataclass(frozen=True)
class Euler(BetaScheduler):
    """Euler's method on the differential equation of Karras et al. 2022: deterministic steps of any length.

    Samples have the scale of DDIM's, so that they are a model's input as they are; those of `diffusers` are
    `sqrt(alpha)` times smaller in the input than between steps. With whole timesteps of equal length, the steps are DDIM's.

    **Arguments:** those of `BetaScheduler`, of which nothing is clipped, and

    - `ends_clean`: whether the last step removes all noise; else the noise of timestep 0 remains. `scheduler_config.json`
        calls it `final_sigmas_type`.
    - `has_karras`: whether steps between the first and the last are distributed as Karras et al. do it: the seventh roots
        of the noise's standard deviations are evenly spaced.
    """

    class_name: ClassVar[str] = "EulerDiscreteScheduler"
    rounds_timesteps: ClassVar[bool] = False

    clip_range = None
    timestep_spacing = "linspace"
    ends_clean: bool = True
    has_karras: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range is not None:
            raise wrong("clip_range", "None for Euler", self.clip_range, "Use DDIM to clip samples.")

    rows = (
        *BetaScheduler.rows,
        Only("interpolation_type", "linear"),
        Field("use_karras_sigmas", "has_karras"),
        *(Only(f"use_{kind}_sigmas", False, None) for kind in ("exponential", "beta")),
        *Fixed(sigma_min=None, sigma_max=None, timestep_type="discrete"),
        Field(
            "final_sigmas_type",
            "ends_clean",
            via=lambda reader, key, default: reader.only(key, "zero", "sigma_min") == "zero",
            save=lambda config: "zero" if config.ends_clean else "sigma_min",
        ),
    )

    @cached_property
    def _sigmas(self) -> np.ndarray:
        """Returns the standard deviation of the noise at each timestep, for samples of which nothing is lost."""
        alphas = self.alphas.copy()
        if self.has_zero_snr:
            alphas[-1] = 2.0**-24  # as in diffusers, since no signal at all would be infinite noise
        return np.sqrt((1 - alphas) / alphas)

    def _alpha(self, timestep: Step) -> Float[Array, ""]:
        """Returns the alpha of a timestep, which need not be whole: sigmas are interpolated, or their logarithms where
        `timesteps` are found by them."""
        sigmas = np.log(self._sigmas) if self.has_karras else self._sigmas
        sigma = jnp.interp(jnp.asarray(timestep, jnp.float32), np.arange(len(sigmas), dtype=np.float32), sigmas)
        return 1 / (1 + jnp.square(jnp.exp(sigma) if self.has_karras else sigma))

    def timesteps(self, n_steps: int) -> Num[Array, " n_steps"]:
        if not self.has_karras:
            return super().timesteps(n_steps)
        places = np.arange(self.n_train_steps)
        return jnp.asarray(np.interp(np.log(self._karras(n_steps)), np.log(self._sigmas), places), jnp.float32)

    def _karras(self, n_steps: int) -> np.ndarray:
        """Returns the standard deviation of the noise at each step."""
        ends = self._spaced(n_steps)[[0, -1]]
        first, last = np.interp(ends, np.arange(self.n_train_steps), self._sigmas) ** (1 / 7)
        return (first + np.linspace(0, 1, n_steps) * (last - first)) ** 7

    def _alphas_of(self, timestep: Step, n_steps: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the alphas before and after a step."""
        if not self.has_karras:
            return self._alpha(timestep), self._alpha_after(timestep, n_steps, 1.0 if self.ends_clean else self._alpha(0))
        sigmas = np.append(self._karras(n_steps), 0.0 if self.ends_clean else self._sigmas[0])
        alphas = jnp.asarray(1 / (1 + sigmas**2), jnp.float32)
        i = jnp.argmin(jnp.abs(self.timesteps(n_steps) - timestep))
        return alphas[i], alphas[i + 1]

    def begin(self, noise: Sample, n_steps: int) -> Sample:
        """Returns the sample with which denoising begins, as in diffusers: the noise itself with "leading" timesteps, else
        the share of noise in the first timestep's samples."""
        if self.timestep_spacing == "leading":
            return noise
        return (jnp.sqrt(1 - self._alpha(self.timesteps(n_steps)[0])) * noise).astype(noise.dtype)

    def _step(self, model_output, timestep, sample, n_steps):
        alpha, alpha_after = self._alphas_of(timestep, n_steps)
        clean, noise = self._predict(model_output, alpha, sample)
        return jnp.sqrt(alpha_after) * clean + jnp.sqrt(1 - alpha_after) * noise, None
