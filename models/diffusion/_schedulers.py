"""Noise schedulers, DDPM and DDIM: noisy samples for training, and denoising steps.

Sources: Ho et al. 2020, *Denoising Diffusion Probabilistic Models* (DDPM); Song et al. 2021, *Denoising Diffusion Implicit
Models* (DDIM). The variants of the schedules are those of `diffusers`. A scheduler is a configuration with pure functions.
The next step depends only on the timestep and the number of steps, so a loop over the steps can be a `jax.lax.scan`.

Dims: shape = shape of a sample, any. Timesteps count from 0, which has the least noise. alpha is the cumulative product of
`1 - beta`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from redeqx.storage import disk_path

from .._kinds import COUNT, RATE, Kind
from ..hf import ConfigReader, Field, FolderConfig, Only, read_config, replace_json
from ..nn import check_choice, check_sizes
from ._blocks import diffusers

CONFIG = "scheduler_config.json"
_BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_SPACINGS = ("leading", "trailing", "linspace")
_VARIANCES = ("fixed_small", "fixed_large")

_STEPS = Kind(int, "a whole number from 1 to 1000000", lambda n: 1 <= n <= 10**6)  # a table holds one beta for each step

Self = TypeVar("Self", bound="Scheduler")
Step = Int[Array, ""] | int


@dataclass(frozen=True)
class Scheduler(FolderConfig):
    """The base of all schedulers: the amount of noise at each timestep, and what a model predicts.

    **Arguments:**

    - `n_train_steps`: the number of timesteps.
    - `beta_start`, `beta_end`, `beta_schedule`: the variance of the noise that each timestep adds: "linear" interpolates
        between the first two, "scaled_linear" interpolates their square roots, and "squaredcos_cap_v2" uses neither.
    - `has_zero_snr`: whether the betas are rescaled so that the last timestep is pure noise (Lin et al. 2023).
    - `prediction_type`: what a model predicts: "epsilon", the noise; "sample"; or "v_prediction", the velocity between them.
    - `clip_range`: the predicted sample is clipped to [-clip_range, clip_range]; None for no clipping, as latents are
        unbounded.
    - `timestep_spacing`, `steps_offset`: how fewer steps are distributed over the timesteps (see `timesteps`).
    - `extra`: keys of a folder's `scheduler_config.json` that do not change the scheduler. They are saved with it.

    Raises ValueError for an unknown name, and for sizes below 1.
    """

    class_name: ClassVar[str]

    n_train_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    has_zero_snr: bool = False
    prediction_type: str = "epsilon"
    clip_range: float | None = 1.0
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_sizes(self, "n_train_steps")
        check_choice(self, "beta_schedule", _BETAS)
        check_choice(self, "prediction_type", _PREDICTIONS)
        check_choice(self, "timestep_spacing", _SPACINGS)

    rows = (
        *diffusers(lambda config: config.class_name),
        Only("trained_betas", None, is_written=False),
        Only("thresholding", False, is_written=False),
        Field("num_train_timesteps", "n_train_steps", _STEPS),
        Field("beta_start", kind=RATE),
        Field("beta_end", kind=RATE),
        Only("beta_schedule", *_BETAS, name="beta_schedule"),
        Field("rescale_betas_zero_snr", "has_zero_snr"),
        Only("prediction_type", *_PREDICTIONS, name="prediction_type"),
        # Two keys, whether samples are clipped and the range, are one field, which is None for no clipping.
        Field("clip_sample", "clip_range", default=True, save=lambda config: config.clip_range is not None),
        Field(
            "clip_sample_range",
            "clip_range",
            default=1.0,
            load=lambda size, known: size if known["clip_range"] else None,
            save=lambda config: 1.0 if config.clip_range is None else config.clip_range,
        ),
        Only("timestep_spacing", *_SPACINGS, name="timestep_spacing"),
        Field("steps_offset", kind=COUNT),
    )

    # --- folders ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls: type[Self], folder: str | Path) -> Self:
        """Returns the scheduler that a folder's `scheduler_config.json` describes, even if the file names another scheduler
        class.

        Raises ValueError, with the file, the key and a remedy, for what is not implemented.
        """
        folder = disk_path(folder)
        return cls.from_hf(ConfigReader(read_config(folder, CONFIG), folder / CONFIG))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes `scheduler_config.json`, which `diffusers` loads. Returns the folder, which is created if it does not
        exist."""
        folder = disk_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(folder / CONFIG, {**self.extra, **self.to_hf()})
        return folder

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

    def add_noise(
        self, sample: Float[Array, "*shape"], noise: Float[Array, "*shape"], timestep: Step
    ) -> Float[Array, "*shape"]:
        """Adds noise to `sample` up to the noise level of `timestep`.

        **Arguments:**

        - `noise`: standard normal noise.
        """
        alpha = self._alpha(timestep)
        return (jnp.sqrt(alpha) * sample + jnp.sqrt(1 - alpha) * noise).astype(sample.dtype)

    def velocity(
        self, sample: Float[Array, "*shape"], noise: Float[Array, "*shape"], timestep: Step
    ) -> Float[Array, "*shape"]:
        """Returns the target of a model with prediction type "v_prediction", for the same arguments as `add_noise`."""
        alpha = self._alpha(timestep)
        return (jnp.sqrt(alpha) * noise - jnp.sqrt(1 - alpha) * sample).astype(sample.dtype)

    def target(
        self, sample: Float[Array, "*shape"], noise: Float[Array, "*shape"], timestep: Step
    ) -> Float[Array, "*shape"]:
        """Returns the target of a model with this `prediction_type`, for the same arguments as `add_noise`."""
        if self.prediction_type == "v_prediction":
            return self.velocity(sample, noise, timestep)
        return noise if self.prediction_type == "epsilon" else sample

    # --- steps --------------------------------------------------------------------------------------------------------

    def timesteps(self, n_steps: int) -> Int[Array, " n_steps"]:
        """Returns the timesteps for denoising in `n_steps`, in decreasing order of noise.

        "leading" counts from timestep 0 and adds `steps_offset`, "trailing" counts from the last timestep, and "linspace"
        includes both ends. Raises ValueError for more steps than timesteps, and for an offset that exceeds the last
        timestep.
        """
        n = self.n_train_steps
        if not 1 <= n_steps <= n:
            raise ValueError(f"`n_steps`: expected from 1 to `n_train_steps`={n}, got {n_steps}. Pass fewer steps.")
        if self.timestep_spacing == "leading":
            steps = np.arange(n_steps)[::-1] * (n // n_steps) + self.steps_offset
        elif self.timestep_spacing == "trailing":
            steps = np.round(np.arange(n, 0, -n / n_steps))[:n_steps] - 1
        else:
            steps = np.round(np.linspace(0, n - 1, n_steps))[::-1]
        if steps[0] >= n:
            raise ValueError(
                f"`steps_offset`: expected timesteps below `n_train_steps`={n}, got {int(steps[0])} with {n_steps} steps "
                f"and an offset of {self.steps_offset}. Use fewer steps."
            )
        return jnp.asarray(steps, jnp.int32)

    def step(
        self,
        model_output: Float[Array, "*shape"],
        timestep: Step,
        sample: Float[Array, "*shape"],
        *,
        n_steps: int | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*shape"]:
        """Removes the noise of one step from a sample. It may be jitted, with `timestep` traced.

        **Arguments:**

        - `model_output`: the model's prediction from `sample` and `timestep`.
        - `timestep`: one of `timesteps(n_steps)`.
        - `n_steps`: the number of steps of the whole denoising; None for all timesteps.
        - `key`: draws the noise that a step adds, if it adds any.

        Raises ValueError if noise must be drawn and there is no key.
        """
        x = sample.astype(jnp.float32)
        n_steps = self.n_train_steps if n_steps is None else n_steps
        mean, std = self._step(model_output.astype(jnp.float32), timestep, x, n_steps)
        if std is None:
            return mean.astype(sample.dtype)
        if key is None:
            raise ValueError("`key`: expected one, since this step draws noise, got None. Pass `key=jax.random.key(...)`.")
        return (mean + std * jax.random.normal(key, x.shape)).astype(sample.dtype)

    def _step(
        self, model_output: Float[Array, "*shape"], timestep: Step, sample: Float[Array, "*shape"], n_steps: int
    ) -> tuple[Float[Array, "*shape"], Float[Array, ""] | None]:
        """Returns the mean and standard deviation of the next sample. The latter is None if no noise is drawn."""
        raise NotImplementedError

    def _predict(
        self, output: Array, alpha: Float[Array, ""], sample: Array
    ) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
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
class DDPM(Scheduler):
    """DDPM: each step draws from the posterior of the next sample.

    **Arguments:** those of `Scheduler`, and

    - `variance_type`: the variance of the noise that each step adds: "fixed_small", the posterior's for a known clean
        sample, or "fixed_large", the variance that the step removes.
    """

    class_name: ClassVar[str] = "DDPMScheduler"

    variance_type: str = "fixed_small"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "variance_type", _VARIANCES)

    rows = (*Scheduler.rows, Only("variance_type", *_VARIANCES, name="variance_type"))

    def _step(self, model_output, timestep, sample, n_steps):
        steps = self.timesteps(n_steps)
        previous = jnp.where(steps < timestep, steps, -1).max()
        alpha = self._alpha(timestep)
        alpha_after = jnp.where(previous < 0, 1.0, self._alpha(previous))
        ratio = alpha / alpha_after  # alpha of this step alone
        clean, _ = self._predict(model_output, alpha, sample)
        of_clean, of_sample = jnp.sqrt(alpha_after) * (1 - ratio), jnp.sqrt(ratio) * (1 - alpha_after)
        small, large = (1 - alpha_after) / (1 - alpha) * (1 - ratio), 1 - ratio
        variance = jnp.where(timestep > 0, small if self.variance_type == "fixed_small" else large, 0.0)
        return (of_clean * clean + of_sample * sample) / (1 - alpha), jnp.sqrt(variance)


@dataclass(frozen=True)
class DDIM(Scheduler):
    """DDIM: deterministic steps, so that few of them are enough. With `eta`, each step also adds noise.

    **Arguments:** those of `Scheduler`, and

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
            raise ValueError(f"`eta`: expected 0 to 1, got {self.eta}. Pass 0 for no noise, 1 for DDPM's.")

    rows = (*Scheduler.rows, Field("set_alpha_to_one", "ends_clean"))

    def _step(self, model_output, timestep, sample, n_steps):
        # As in diffusers, steps have equal length even if the timesteps are not evenly spaced.
        previous = timestep - self.n_train_steps // n_steps
        alpha = self._alpha(timestep)
        alpha_after = jnp.where(previous < 0, 1.0 if self.ends_clean else self._alpha(0), self._alpha(previous))
        clean, noise = self._predict(model_output, alpha, sample)
        variance = self.eta**2 * (1 - alpha_after) / (1 - alpha) * (1 - alpha / alpha_after)
        mean = jnp.sqrt(alpha_after) * clean + jnp.sqrt(1 - alpha_after - variance) * noise
        return mean, jnp.sqrt(variance) if self.eta else None


# --- the denoising loop -----------------------------------------------------------------------------------------------


def denoise(
    scheduler: Scheduler,
    model_fn: Callable[[Array, Array], Array],
    sample: Float[Array, "*shape"],
    n_steps: int,
    *,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "*shape"]:
    """Denoises a sample, or a batch of them, in `n_steps`, with one `jax.lax.scan`.

    ```python
    text = lambda x, t: jax.vmap(unet, (0, None, 0))(x, t, contexts)
    nothing = lambda x, t: jax.vmap(unet, (0, None, None))(x, t, empty_context)
    latents = denoise(DDIM.from_pretrained(folder), guided(text, nothing, 7.5), noise, 50)
    ```

    **Arguments:**

    - `model_fn`: maps noisy samples and a timestep, the same for all of them, to the model's prediction.
    - `sample`: standard normal noise.
    - `key`: for the noise that steps add; not needed if they add none.
    """

    def body(sample: Array, now: tuple[Array, Any]) -> tuple[Array, None]:
        timestep, key = now
        return scheduler.step(model_fn(sample, timestep), timestep, sample, n_steps=n_steps, key=key), None

    keys = None if key is None else jax.random.split(key, n_steps)
    return jax.lax.scan(body, sample, (scheduler.timesteps(n_steps), keys))[0]


def guided(
    model_fn: Callable[[Array, Array], Array], unconditional_fn: Callable[[Array, Array], Array], scale: float
) -> Callable[[Array, Array], Array]:
    """Returns a `model_fn` for `denoise` with classifier-free guidance (Ho and Salimans 2022): the difference of the
    conditional prediction from the unconditional one is multiplied by `scale`."""

    def predict(sample: Array, timestep: Array) -> Array:
        unconditional = unconditional_fn(sample, timestep)
        return unconditional + scale * (model_fn(sample, timestep) - unconditional)

    return predict
