"""`Scheduler`: what all noise schedulers have in common, the denoising loop, and the loss of a denoising model.

A scheduler is a configuration with pure functions. The next step depends only on the timestep, the number of steps, and what
the scheduler remembers of the previous ones, so a loop over the steps can be a `jax.lax.scan`. `_schedulers.py` and
`_flow.py` say how much noise there is at each timestep, and `_pndm.py` has a scheduler that remembers.

Dims: shape = shape of a sample, any. Timesteps count from 0, which has the least noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from redeqx._rounding import at_least_float32
from redeqx.errors import wrong
from redeqx.storage import disk_path

from .._kinds import Kind
from ..hf import ConfigReader, Field, FolderConfig, read_config, replace_json
from ..nn import check_sizes
from ._blocks import diffusers

CONFIG = "scheduler_config.json"

_STEPS = Kind(int, "a whole number from 1 to 1000000", lambda n: 1 <= n <= 10**6)  # a table holds one beta for each step

Self = TypeVar("Self", bound="Scheduler")
Step = Num[Array, ""] | int | float
Sample = Float[Array, "*shape"]  # also noise, and what a model predicts: of the shape of a sample


@dataclass(frozen=True)
class Scheduler(FolderConfig):
    """The base of all schedulers.

    **Arguments:**

    - `n_train_steps`: the number of timesteps.

    Raises ValueError for sizes below 1.
    """

    class_name: ClassVar[str]

    n_train_steps: int = 1000

    def __post_init__(self) -> None:
        check_sizes(self, "n_train_steps")

    rows = (*diffusers(lambda config: config.class_name), Field("num_train_timesteps", "n_train_steps", _STEPS))

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

    def add_noise(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        """Adds noise to `sample` up to the noise level of `timestep`.

        **Arguments:**

        - `noise`: standard normal noise.
        """
        raise NotImplementedError

    def target(self, sample: Sample, noise: Sample, timestep: Step) -> Sample:
        """Returns what a model should predict, for the same arguments as `add_noise`."""
        raise NotImplementedError

    def draw_timestep(self, key: PRNGKeyArray) -> Num[Array, ""]:
        """Draws a timestep for training: by default, each of them is as likely as the others."""
        return jax.random.randint(key, (), 0, self.n_train_steps)

    # --- steps --------------------------------------------------------------------------------------------------------

    def timesteps(self, n_steps: int) -> Num[Array, " n_calls"]:
        """Returns the timesteps for denoising in `n_steps`, in decreasing order of noise, one for each call of the model.

        Raises ValueError for more steps than timesteps.
        """
        raise NotImplementedError

    def begin(self, noise: Sample, n_steps: int) -> Sample:
        """Returns the sample with which denoising begins, from standard normal noise: by default the noise itself."""
        del n_steps
        return noise

    def memory(self, sample: Sample) -> Any:
        """Returns what a denoising that begins with `sample` remembers before its first step: by default nothing, None."""
        del sample
        return None

    def recall(
        self, memory: Any, model_output: Sample, timestep: Step, sample: Sample, *, n_steps: int
    ) -> tuple[Any, tuple[Sample, Step, Sample]]:
        """Returns the memory after a call of the model, and what `step` gets in place of its first arguments."""
        del n_steps
        return memory, (model_output, timestep, sample)

    def step(
        self,
        model_output: Sample,
        timestep: Step,
        sample: Sample,
        *,
        n_steps: int | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Sample:
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
            raise wrong("key", "one, since this step draws noise", "None", "Pass `key=jax.random.key(...)`.")
        return (mean + std * jax.random.normal(key, x.shape)).astype(sample.dtype)

    def _step(self, model_output: Sample, timestep: Step, sample: Sample, n_steps: int) -> tuple[Sample, Array | None]:
        """Returns the mean and standard deviation of the next sample. The latter is None if no noise is drawn."""
        raise NotImplementedError

    def _check_steps(self, n_steps: int) -> None:
        if not 1 <= n_steps <= self.n_train_steps:
            raise wrong("n_steps", f"from 1 to `n_train_steps`={self.n_train_steps}", n_steps, "Pass fewer steps.")


# --- loops and losses   -----------------------------------------------------------------------------------------------


def denoise(
    scheduler: Scheduler,
    model_fn: Callable[[Array, Array], Array],
    sample: Sample,
    n_steps: int,
    *,
    key: PRNGKeyArray | None = None,
) -> Sample:
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

    def body(carry: tuple[Array, Any], now: tuple[Array, Any]) -> tuple[tuple[Array, Any], None]:
        (sample, memory), (timestep, key) = carry, now
        memory, arguments = scheduler.recall(memory, model_fn(sample, timestep), timestep, sample, n_steps=n_steps)
        return (scheduler.step(*arguments, n_steps=n_steps, key=key), memory), None

    timesteps = scheduler.timesteps(n_steps)
    keys = None if key is None else jax.random.split(key, len(timesteps))
    sample = scheduler.begin(sample, n_steps)
    return jax.lax.scan(body, (sample, scheduler.memory(sample)), (timesteps, keys))[0][0]


def guided(
    model_fn: Callable[[Array, Array], Array],
    unconditional_fn: Callable[[Array, Array], Array],
    scale: Float[Array, ""] | float,
) -> Callable[[Array, Array], Array]:
    """Returns a `model_fn` for `denoise` with classifier-free guidance (Ho and Salimans 2022): the difference of the
    conditional prediction from the unconditional one is multiplied by `scale`."""

    def predict(sample: Array, timestep: Array) -> Array:
        unconditional = unconditional_fn(sample, timestep)
        return unconditional + scale * (model_fn(sample, timestep) - unconditional)

    return predict


def denoising_loss(
    scheduler: Scheduler, model_fn: Callable[[Array, Array], Array], sample: Sample, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Returns the mean squared error of a model's prediction from one sample, with the noise of a random timestep.

    ```python
    losses = jax.vmap(lambda x, text, key: denoising_loss(scheduler, lambda x, t: unet(x, t, text), x, key))(
        latents, contexts, jax.random.split(key, len(latents))
    )
    ```

    For schedulers of betas this is the loss of Ho et al. 2020, for `FlowMatchEuler` that of flow matching (Lipman et al.
    2022, Esser et al. 2024).

    **Arguments:**

    - `model_fn`: maps a noisy sample and a timestep to the model's prediction.
    - `key`: draws the timestep and the noise.
    """
    timestep_key, noise_key = jax.random.split(key)
    timestep, noise = scheduler.draw_timestep(timestep_key), jax.random.normal(noise_key, sample.shape, sample.dtype)
    predicted = model_fn(scheduler.add_noise(sample, noise, timestep), timestep)
    error = (predicted - scheduler.target(sample, noise, timestep)).astype(at_least_float32(sample.dtype))
    return jnp.square(error).mean()
