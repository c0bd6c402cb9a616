"""Compares schedulers with `diffusers` over whole trajectories, with the same noise; needs the `parity` extra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from redeqx.models.schedulers import DDIM, DDPM, PNDM, Euler, FlowMatchEuler, denoise

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SHAPE = (2, 3, 4)
LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_range": None}  # Stable Diffusion
SHARED = [
    ({}, 50),
    ({}, 7),  # the number of steps does not divide the timesteps
    ({}, 1),
    ({"steps_offset": 1, **LATENT}, 50),
    ({"timestep_spacing": "trailing", "prediction_type": "v_prediction", "has_zero_snr": True, **LATENT}, 30),
    ({"timestep_spacing": "linspace", "prediction_type": "sample", "beta_schedule": "squaredcos_cap_v2"}, 20),
    ({"timestep_spacing": "trailing", "clip_range": 0.7, "prediction_type": "sample"}, 9),
    ({"timestep_spacing": "linspace", "prediction_type": "v_prediction"}, 13),
    ({"n_train_steps": 20, "beta_end": 0.3}, 20),
]
CASES = [
    *[(DDIM(**fields), n_steps) for fields, n_steps in SHARED],
    *[(DDPM(**fields), n_steps) for fields, n_steps in SHARED],
    (DDIM(ends_clean=False, steps_offset=1, **LATENT), 50),
    (DDIM(eta=1.0), 50),
    (DDIM(eta=0.5, **LATENT), 20),
    (DDPM(variance_type="fixed_large"), 50),
    (DDPM(variance_type="fixed_large", steps_offset=1, **LATENT), 40),
    (PNDM(steps_offset=1, **LATENT), 50),  # Stable Diffusion 1
    (PNDM(prediction_type="v_prediction", timestep_spacing="linspace"), 7),
    (PNDM(ends_clean=True, timestep_spacing="trailing", **LATENT), 3),
    (PNDM(), 1),
]


EULER = [
    (Euler(), 30),
    (Euler(timestep_spacing="leading", steps_offset=1, **LATENT), 50),  # Stable Diffusion XL
    (Euler(timestep_spacing="leading", steps_offset=1, **LATENT), 1),
    (Euler(timestep_spacing="trailing", prediction_type="v_prediction", has_zero_snr=True, **LATENT), 25),
    (Euler(ends_clean=False, beta_schedule="squaredcos_cap_v2"), 7),
    (Euler(prediction_type="sample", n_train_steps=100), 100),
    (Euler(has_karras=True, timestep_spacing="leading", steps_offset=1, **LATENT), 20),
    (Euler(has_karras=True, ends_clean=False, prediction_type="v_prediction"), 7),
    (Euler(has_karras=True, timestep_spacing="trailing", **LATENT), 1),
]
FLOW = [
    (FlowMatchEuler(), 28),
    (FlowMatchEuler(shift=3.0), 28),
    (FlowMatchEuler(100, 0.5), 100),
    (FlowMatchEuler(shift=3.0), 1),
    (FlowMatchEuler(is_dynamic=True, n_patches=1024, shift=3.0), 28),
    (FlowMatchEuler(100, is_dynamic=True, base_shift=0.3, max_patches=300, n_patches=320), 7),
    (FlowMatchEuler(is_dynamic=True, shift_kind="linear", max_shift=3.0, n_patches=4000), 20),
]


def theirs(scheduler, folder):
    """Returns the scheduler that diffusers loads from a folder that we wrote."""
    import diffusers

    return getattr(diffusers, scheduler.class_name).from_pretrained(scheduler.save_pretrained(folder))


def shift(scheduler):
    """Returns what a pipeline of diffusers passes to its scheduler."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    if not getattr(scheduler, "is_dynamic", False):
        return {}
    line = scheduler.base_patches, scheduler.max_patches, scheduler.base_shift, scheduler.max_shift
    return {"mu": calculate_shift(scheduler.n_patches, *line)}


def predict(tables, sample, timestep):
    """A model of sums and products only, so that it is the same in both libraries."""
    return sample * 0.75 + tables[timestep] * 0.25


@pytest.mark.parametrize(("scheduler", "n_steps"), CASES)
def test_trajectory(scheduler, n_steps, tmp_path, monkeypatch):
    import torch

    rng = np.random.default_rng(0)
    tables = rng.normal(size=(scheduler.n_train_steps, *SHAPE)).astype(np.float32)
    start = rng.normal(size=SHAPE).astype(np.float32)

    other = theirs(scheduler, tmp_path)
    other.set_timesteps(n_steps)
    keys = jax.random.split(jax.random.key(0), len(other.timesteps))
    np.testing.assert_array_equal(scheduler.timesteps(n_steps), other.timesteps.numpy())
    np.testing.assert_allclose(scheduler.alphas, other.alphas_cumprod.numpy(), rtol=0, atol=1e-6)
    sample = torch.tensor(start)
    for key, timestep in zip(keys, other.timesteps, strict=True):
        noise = torch.tensor(np.asarray(jax.random.normal(key, SHAPE)))
        module = f"diffusers.schedulers.scheduling_{scheduler.class_name[:4].lower()}"
        monkeypatch.setattr(f"{module}.randn_tensor", lambda *_, n=noise, **__: n, raising=False)  # PNDM draws none
        more = {"eta": scheduler.eta} if type(scheduler) is DDIM else {}
        sample = other.step(predict(torch.tensor(tables), sample, timestep), timestep, sample, **more).prev_sample

    model_fn = lambda sample, timestep: predict(jnp.asarray(tables), sample, timestep)  # noqa: E731
    found = jax.jit(lambda start: denoise(scheduler, model_fn, start, n_steps, key=jax.random.key(0)))(start)
    assert np.std(found) > 0.1
    np.testing.assert_allclose(found, sample.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("scheduler", "n_steps"), [*EULER, *FLOW])
def test_trajectory_of_float_timesteps(scheduler, n_steps, tmp_path):
    """Every step of it. Euler's samples are compared in the scale of the model's input."""
    import torch

    rng = np.random.default_rng(0)
    start, drift = rng.normal(size=(2, *SHAPE)).astype(np.float32)
    predict = lambda sample, timestep, drift: sample * 0.75 + drift * (1 - timestep / 1000)  # noqa: E731

    other = theirs(scheduler, tmp_path)
    other.set_timesteps(n_steps, **shift(scheduler))
    timesteps = scheduler.timesteps(n_steps)
    np.testing.assert_allclose(timesteps, other.timesteps.numpy(), rtol=2e-7)
    is_euler = isinstance(scheduler, Euler)
    theirs_now = torch.tensor(start) * (other.init_noise_sigma if is_euler else 1)
    step = jax.jit(
        lambda sample, timestep: scheduler.step(predict(sample, timestep, drift), timestep, sample, n_steps=n_steps)
    )
    ours_now = scheduler.begin(jnp.asarray(start), n_steps)
    for timestep, now in zip(other.timesteps, timesteps, strict=True):
        scaled = other.scale_model_input(theirs_now, timestep) if is_euler else theirs_now
        np.testing.assert_allclose(ours_now, scaled.numpy(), rtol=0, atol=1e-5 * np.abs(ours_now).max())
        theirs_now = other.step(predict(scaled, timestep, torch.tensor(drift)), timestep, theirs_now).prev_sample
        ours_now = step(ours_now, now)
    scale = float(1 + other.sigmas[-1] ** 2) ** -0.5 if is_euler else 1.0
    np.testing.assert_allclose(ours_now, theirs_now.numpy() * scale, rtol=0, atol=1e-5 * np.abs(ours_now).max())
    assert np.std(ours_now) > 0.1

    found = jax.jit(lambda start: denoise(scheduler, lambda x, t: predict(x, t, drift), start, n_steps))(start)
    np.testing.assert_allclose(found, ours_now, rtol=0, atol=1e-5 * np.abs(ours_now).max())


@pytest.mark.parametrize("scheduler", [FlowMatchEuler(), FlowMatchEuler(shift=3.0)])
def test_noise_of_flow_matching(scheduler, tmp_path):
    import torch

    clean, noise = np.random.default_rng(0).normal(size=(2, 3, *SHAPE)).astype(np.float32)
    other = theirs(scheduler, tmp_path)
    timesteps = other.timesteps[[0, 400, 999]]
    expected = other.scale_noise(torch.tensor(clean), timesteps, torch.tensor(noise))
    found = jax.vmap(scheduler.add_noise)(clean, noise, timesteps.numpy())
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheduler", [DDPM(), DDIM(has_zero_snr=True, **LATENT)], ids=str)
def test_noise_and_velocity(scheduler, tmp_path):
    import torch

    rng = np.random.default_rng(0)
    clean, noise = rng.normal(size=(2, 4, *SHAPE)).astype(np.float32)
    timesteps = np.array([0, 1, 500, 999], np.int32)
    other = theirs(scheduler, tmp_path)
    arguments = [torch.tensor(x) for x in (clean, noise, timesteps)]
    for ours, expected in (
        (scheduler.add_noise, other.add_noise(*arguments)),
        (scheduler.velocity, other.get_velocity(*arguments)),
    ):
        np.testing.assert_allclose(jax.vmap(ours)(clean, noise, timesteps), expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler"])
def test_reads_what_diffusers_writes(name, tmp_path):
    import diffusers

    fields = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    more = {"skip_prk_steps": True} if name == "PNDMScheduler" else {}
    getattr(diffusers, name)(**fields, **more).save_pretrained(tmp_path)
    wanted = {
        "DDPMScheduler": DDPM(**fields),
        "DDIMScheduler": DDIM(**fields),
        "PNDMScheduler": PNDM(**fields),
        "EulerDiscreteScheduler": Euler(**fields),
    }[name]
    assert type(wanted).from_pretrained(tmp_path) == wanted
