"""PNDM: DDIM's steps with predictions that are extrapolated from the last ones, the scheduler of Stable Diffusion 1.

Of the methods of the paper, this is the one without Runge-Kutta steps (PLMS), which Stable Diffusion uses.

Source: Liu et al. 2022, *Pseudo Numerical Methods for Diffusion Models on Manifolds* (arXiv:2202.09778), as in `diffusers`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from redeqx.errors import wrong

from ..hf import Field, Only
from ._scheduler import Sample, Step
from ._schedulers import DDIM, BetaScheduler

# The weights of a prediction and of the three before it, by the number of calls of the model before: those of Adams and
# Bashforth, as soon as there are enough of them. The second call repeats the first step with the mean of its two ends.
_WEIGHTS = np.array(
    [
        [1, 0, 0, 0],
        [1 / 2, 1 / 2, 0, 0],
        [3 / 2, -1 / 2, 0, 0],
        [23 / 12, -16 / 12, 5 / 12, 0],
        [55 / 24, -59 / 24, 37 / 24, -9 / 24],
    ],
    np.float32,
)


@dataclass(frozen=True)
class PNDM(DDIM):
    """PNDM without Runge-Kutta steps: deterministic, with one call of the model more than steps. `step` by itself is DDIM's;
    `denoise` also remembers the last predictions.

    **Arguments:** those of `DDIM`, of which nothing is clipped and `eta` is 0.
    """

    class_name: ClassVar[str] = "PNDMScheduler"

    clip_range = None
    ends_clean = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, wanted in {"clip_range": None, "eta": 0.0, "has_zero_snr": False}.items():
            if (value := getattr(self, name)) != wanted:
                raise wrong(name, f"{wanted} for PNDM", value, "Use DDIM for another.")
        if self.prediction_type == "sample":
            raise wrong("prediction_type", "'epsilon' or 'v_prediction' for PNDM", "'sample'", "Use DDIM.")

    rows = (
        *(row for row in BetaScheduler.rows if "has_zero_snr" not in row.keys),
        Field("set_alpha_to_one", "ends_clean"),
        Only("skip_prk_steps", True, default=False),
    )

    def timesteps(self, n_steps: int) -> Num[Array, " n_calls"]:
        steps = super().timesteps(n_steps)
        return jnp.concatenate([steps[:2], steps[1:]])

    def memory(self, sample: Sample) -> Any:
        return jnp.int32(0), jnp.zeros((3, *sample.shape)), sample

    def recall(
        self, memory: Any, model_output: Sample, timestep: Step, sample: Sample, *, n_steps: int
    ) -> tuple[Any, tuple[Sample, Step, Sample]]:
        n_calls, last, first_sample = memory
        recent = jnp.concatenate([model_output[None].astype(last.dtype), last])
        combined = jnp.tensordot(jnp.asarray(_WEIGHTS)[jnp.minimum(n_calls, 4)], recent, 1)
        is_again = n_calls == 1
        memory = n_calls + 1, jnp.where(is_again, last, recent[:3]), jnp.where(n_calls == 0, sample, first_sample)
        timestep = timestep + jnp.where(is_again, self.n_train_steps // n_steps, 0)
        return memory, (combined, timestep, jnp.where(is_again, first_sample, sample))
