"""Random configs of every noise scheduler, against `diffusers`: equal trajectories, or an error that names the key.

    python -m tests.models.families._random_schedulers 1000 [SEED]

Files of schedulers have any keys that the class of diffusers has. As `_random.py`, it is run by hand.
"""

import dataclasses
import inspect
import json
import random
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redeqx.models.schedulers import DDIM, DDPM, PNDM, Euler, FlowMatchEuler, denoise
from tests.models.families._random import run_draws

SHAPE = (2, 3, 4)
FLAGS = [True, False]
POOL: dict[str, list[Any]] = {
    "num_train_timesteps": [1000, 100, 37],
    "beta_start": [1e-4, 0.00085, 0.01],
    "beta_end": [0.02, 0.012, 0.05],
    "beta_schedule": ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"],
    "trained_betas": [None, [0.01] * 1000],
    "clip_sample_range": [1.0, 0.3, 2.0],
    "steps_offset": [0, 1, 3],
    "prediction_type": ["epsilon", "sample", "v_prediction", "flow_prediction"],
    "dynamic_thresholding_ratio": [0.9],
    "sample_max_value": [2.0],
    "timestep_spacing": ["leading", "trailing", "linspace"],
    "variance_type": ["fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range"],
    "interpolation_type": ["linear", "log_linear"],
    "sigma_min": [None, 0.1],
    "sigma_max": [None, 5.0],
    "timestep_type": ["discrete", "continuous"],
    "final_sigmas_type": ["zero", "sigma_min"],
    "shift": [1.0, 0.4, 3.0, 12.0],
    "base_shift": [0.5, 0.3, 1.0],
    "max_shift": [1.15, 2.0],
    "base_image_seq_len": [256, 100],
    "max_image_seq_len": [4096, 300],
    "time_shift_type": ["exponential", "linear"],
    "shift_terminal": [None, 0.1],
}
RARE = ("thresholding", "use_", "trained_betas", "sigma_m", "interpolation", "timestep_type", "invert", "stochastic")
CLASSES = (DDPM, DDIM, PNDM, Euler, FlowMatchEuler)


def draw(cls: Any, rng: random.Random) -> tuple[dict[str, Any], int, float]:
    """Returns a `scheduler_config.json`, the number of steps, and DDIM's `eta`."""
    import diffusers

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(getattr(diffusers, cls.class_name).__init__).parameters.items()
        if name != "self"
    }
    names = rng.sample(sorted(defaults), rng.randint(0, len(defaults)))
    # What is refused alone would refuse most configs.
    names = [name for name in names if not name.startswith(RARE) or name == "use_karras_sigmas" or rng.random() < 0.1]
    flags = {name: FLAGS for name in names if isinstance(defaults[name], bool)}
    config = {name: rng.choice({**POOL, **flags}.get(name, [defaults[name]])) for name in names}
    if cls is PNDM and rng.random() < 0.9:
        config["skip_prk_steps"] = True
    if cls is FlowMatchEuler and rng.random() < 0.5:
        config["use_dynamic_shifting"] = True
    return config, rng.choice([1, 2, 3, 7, 20, 37]), rng.choice([0.0, 0.5, 1.0])


def compare(cls: Any, folder: Path, drawn: tuple[dict[str, Any], int, float]) -> str:
    """Returns what became of a config: invalid in diffusers, refused by us, equal, or how it differs."""
    import diffusers
    import torch

    config, n_steps, eta = drawn
    rng = np.random.default_rng(n_steps)
    start, drift, clean = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    (folder / "scheduler_config.json").write_text(json.dumps({"_class_name": cls.class_name, **config}))
    options = {"eta": eta} if cls is DDIM else {}
    is_euler, is_flow = cls is Euler, cls is FlowMatchEuler
    unsaved = {**options, **({"n_patches": 1024} if is_flow else {})}
    key = jax.random.key(0)
    normals = iter(())

    def predict(sample, timestep, drift):
        return sample * 0.75 + drift * (0.5 - timestep / 1000)

    def normal(*_, **__):
        return torch.tensor(np.asarray(jax.random.normal(next(normals), SHAPE)))

    file = inspect.getmodule(getattr(diffusers, cls.class_name)).__name__
    try:
        other = getattr(diffusers, cls.class_name).from_pretrained(folder)
        shift = {"mu": _mu(other.config)} if is_flow and other.config.use_dynamic_shifting else {}
        other.set_timesteps(n_steps, **shift)
        now = torch.tensor(start) * (other.init_noise_sigma if is_euler else 1)
        keys = jax.random.split(key, len(other.timesteps))
        with unittest.mock.patch(f"{file}.randn_tensor", normal, create=True):
            for each, timestep in zip(keys, other.timesteps, strict=True):
                normals = iter([each])
                scaled = other.scale_model_input(now, timestep) if is_euler else now
                now = other.step(predict(scaled, timestep, torch.tensor(drift)), timestep, now, **options).prev_sample
        expected = now.numpy() * (float(1 + other.sigmas[-1] ** 2) ** -0.5 if is_euler else 1.0)
        at = other.timesteps[len(other.timesteps) // 2][None]
        if is_flow:
            noisy = other.scale_noise(torch.tensor(clean)[None], at, torch.tensor(drift)[None])[0].numpy()
        else:
            noisy = other.add_noise(torch.tensor(clean)[None], torch.tensor(drift)[None], at)[0].numpy()
            if is_euler:
                noisy = noisy * float(1 + other.sigmas[len(other.timesteps) // 2] ** 2) ** -0.5
    except Exception as error:
        return f"invalid: {cls.__name__} {error!r}"
    if not (np.abs(expected) < 1e6).all():
        return "invalid: not finite"
    try:
        scheduler = cls.from_pretrained(folder)
        scheduler = dataclasses.replace(scheduler, **unsaved)
        steps = scheduler.timesteps(n_steps)
        found = jax.jit(lambda x: denoise(scheduler, lambda x, t: predict(x, t, drift), x, n_steps, key=key))(start)
        ours_noisy = scheduler.add_noise(clean, drift, steps[len(steps) // 2])
    except (ValueError, TypeError) as error:
        text = str(error)
        return (
            f"refused: {cls.__name__} {text.split('json`: ')[-1]}" if text.startswith("`") else f"unclear error: {error!r}"
        )
    again = cls.from_pretrained(scheduler.save_pretrained(folder / "again"))
    if dataclasses.replace(again, **unsaved) != scheduler:
        return f"saved as {again}, not {scheduler}"
    if len(steps) != len(other.timesteps) or not np.allclose(
        steps, other.timesteps.numpy(), rtol=1e-6, atol=1e-3
    ):  # Karras: near pure noise
        return f"timesteps {steps}, not {other.timesteps}"
    for name, got, wanted in (("denoised", found, expected), ("noisy", ours_noisy, noisy)):
        if not (worst := np.abs(got - wanted).max()) < 2e-4 * max(1.0, np.abs(wanted).max()):
            return f"{name}: differs by {worst:.2g} of {np.abs(wanted).max():.2g}"
    return "equal"


def _mu(config: Any) -> float:
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    return calculate_shift(1024, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)


def main(n: int, seed: int = 0) -> None:
    run_draws(CLASSES, n, seed, draw, compare)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
