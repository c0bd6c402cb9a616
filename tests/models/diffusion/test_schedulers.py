"""Schedulers: compared with the formulas of their papers in float64; their configs and errors."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.hf import ConfigReader
from redeqx.models.schedulers import DDIM, DDPM, PNDM, Euler, FlowMatchEuler, denoise, denoising_loss, guided

SHAPE = (2, 3)
LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_range": None}
CLEAN, NOISE = jnp.asarray(np.random.default_rng(0).normal(size=(2, *SHAPE)), jnp.float32)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({}, 0.9999, 4.035830e-05),
        (LATENT, 0.99915, 4.660095e-03),
        ({"beta_schedule": "squaredcos_cap_v2"}, 0.9999587, 2.428e-09),
        ({**LATENT, "has_zero_snr": True}, 0.99915, 0.0),
    ],
)
def test_schedules(fields, first, last):
    alphas = DDIM(**fields).alphas
    assert alphas.shape == (1000,)
    assert alphas.dtype == np.float32
    np.testing.assert_allclose(alphas[[0, -1]], [first, last], rtol=1e-3, atol=1e-12)
    assert np.all(np.diff(alphas) < 0)


def test_alphas_are_cumulative_products():
    betas = np.linspace(1e-4, 0.02, 1000)
    np.testing.assert_allclose(DDPM().alphas, np.cumprod(1 - betas), rtol=1e-5)
    np.testing.assert_allclose(
        DDPM(**LATENT).alphas, np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2), rtol=1e-5
    )


@pytest.mark.parametrize("fields", [{}, LATENT, {"beta_schedule": "squaredcos_cap_v2"}])
def test_zero_snr_rescales_the_square_roots_linearly(fields):
    """Algorithm 1 of arXiv:2305.08891, on the square roots: a line through (first, first) and (last, 0)."""
    roots = np.sqrt(DDIM(**fields).alphas.astype(np.float64))
    line = np.polynomial.Polynomial.fit(roots[[0, -1]], [roots[0], 0.0], 1)
    np.testing.assert_allclose(DDIM(**fields, has_zero_snr=True).alphas, line(roots) ** 2, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("timestep", [0, 400, 999])
def test_noisy_samples_and_targets(timestep):
    scheduler = DDIM()
    a = np.float64(scheduler.alphas[timestep])
    noisy = scheduler.add_noise(CLEAN, NOISE, timestep)
    np.testing.assert_allclose(noisy, a**0.5 * CLEAN + (1 - a) ** 0.5 * NOISE, rtol=0, atol=1e-6)
    velocity = scheduler.velocity(CLEAN, NOISE, timestep)
    np.testing.assert_allclose(velocity, a**0.5 * NOISE - (1 - a) ** 0.5 * CLEAN, rtol=0, atol=1e-6)
    for prediction_type, wanted in (("epsilon", NOISE), ("sample", CLEAN), ("v_prediction", velocity)):
        found = dataclasses.replace(scheduler, prediction_type=prediction_type).target(CLEAN, NOISE, timestep)
        np.testing.assert_array_equal(found, wanted)


def test_keeps_the_dtype_and_vmaps_over_timesteps():
    scheduler = DDPM()
    half = CLEAN.astype(jnp.bfloat16)
    assert scheduler.add_noise(half, half, 3).dtype == jnp.bfloat16
    assert scheduler.step(half, 3, half, key=jax.random.key(0)).dtype == jnp.bfloat16
    timesteps = jnp.array([3, 700])
    batch = jax.jit(jax.vmap(scheduler.add_noise, (None, None, 0)))(CLEAN, NOISE, timesteps)
    for row, timestep in zip(batch, timesteps, strict=True):
        np.testing.assert_allclose(row, scheduler.add_noise(CLEAN, NOISE, timestep), rtol=0, atol=1e-6)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "n_steps", "expected"),
    [
        ({}, 5, [800, 600, 400, 200, 0]),
        ({"steps_offset": 1}, 5, [801, 601, 401, 201, 1]),
        ({}, 3, [666, 333, 0]),
        ({"timestep_spacing": "trailing"}, 5, [999, 799, 599, 399, 199]),
        ({"timestep_spacing": "trailing"}, 3, [999, 666, 332]),
        ({"timestep_spacing": "linspace"}, 5, [999, 749, 500, 250, 0]),
        ({"n_train_steps": 4}, 4, [3, 2, 1, 0]),
    ],
)
def test_timesteps(fields, n_steps, expected):
    assert DDIM(**fields).timesteps(n_steps).tolist() == expected
    assert DDPM(**fields).timesteps(n_steps).tolist() == expected


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("n_steps", [1, 10])
def test_ddim_finds_the_sample_of_an_exact_model(prediction_type, n_steps):
    """With an exact model, any number of steps leads from a noisy sample to the clean one."""
    scheduler = DDIM(prediction_type=prediction_type, timestep_spacing="trailing", **LATENT)
    noisy = scheduler.add_noise(CLEAN, NOISE, 999)
    model_fn = lambda sample, timestep: scheduler.target(CLEAN, NOISE, timestep)  # noqa: E731
    np.testing.assert_allclose(denoise(scheduler, model_fn, noisy, n_steps), CLEAN, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_steps", [1, 8])
def test_flow_matching_finds_the_sample_of_an_exact_model(n_steps):
    scheduler = FlowMatchEuler(shift=3.0)
    model_fn = lambda sample, timestep: scheduler.target(CLEAN, NOISE, timestep)  # noqa: E731
    np.testing.assert_allclose(denoise(scheduler, model_fn, NOISE, n_steps), CLEAN, rtol=0, atol=1e-5)


def test_flow_matching_is_linear_in_the_shifted_level():
    scheduler = FlowMatchEuler(100, shift=3.0)
    np.testing.assert_allclose(scheduler.add_noise(CLEAN, NOISE, 25.0), 0.75 * CLEAN + 0.25 * NOISE, rtol=0, atol=1e-6)
    levels = np.linspace(1, 3 * 0.01 / 1.02, 5)
    np.testing.assert_allclose(scheduler.timesteps(5), 100 * 3 * levels / (1 + 2 * levels), rtol=1e-6)
    drawn = jax.vmap(scheduler.draw_timestep)(jax.random.split(jax.random.key(0), 4000)) / 100
    normal = np.log(drawn / (3 - 2 * drawn)) - np.log1p(-drawn / (3 - 2 * drawn))  # the shift and the logistic inverted
    np.testing.assert_allclose([normal.mean(), normal.std()], [0, 1], atol=0.05)


def test_the_shift_depends_on_the_size_of_an_image():
    dynamic = FlowMatchEuler(100, is_dynamic=True, base_shift=0.0, max_shift=1.0, base_patches=128, max_patches=640)
    levels = np.linspace(1, 0.01, 5)
    for kind, size, shift in (("exponential", 384, np.exp(0.5)), ("exponential", 128, 1.0), ("linear", 384, 0.5)):
        scheduler = dataclasses.replace(dynamic, shift_kind=kind, n_patches=size)
        wanted = 100 * shift * levels / (1 + (shift - 1) * levels)
        np.testing.assert_allclose(scheduler.timesteps(5), wanted, rtol=1e-6)
        shifted = scheduler.draw_timestep(jax.random.key(0)) / 100
        plain = FlowMatchEuler(100).draw_timestep(jax.random.key(0)) / 100
        np.testing.assert_allclose(shifted, shift * plain / (1 + (shift - 1) * plain), rtol=1e-5)
    with pytest.raises(ValueError, match=r"`n_patches`: expected a number, since the shift depends on .*, got None"):
        dynamic.timesteps(5)
    with pytest.raises(ValueError, match="`n_patches`: expected a number whose shift is positive, got 100"):
        dataclasses.replace(dynamic, shift_kind="linear", n_patches=100)


def test_euler_takes_the_steps_of_ddim_if_they_have_equal_length():
    fields = {**LATENT, "timestep_spacing": "leading"}
    model_fn = lambda sample, timestep: 0.3 * sample + NOISE[::-1]  # noqa: E731
    ddim, euler = (denoise(cls(**fields), model_fn, NOISE, 10) for cls in (DDIM, Euler))
    np.testing.assert_allclose(euler, ddim, rtol=0, atol=1e-5)


def test_euler_interpolates_sigmas_and_begins_with_the_share_of_noise():
    """With a model whose noise is constant, samples divided by the root of alpha are on a line in sigma."""
    scheduler = Euler(**LATENT)
    assert scheduler.timesteps(5).tolist() == [999, 749.25, 499.5, 249.75, 0]
    sigmas = np.sqrt(1 / scheduler.alphas.astype(np.float64) - 1)
    first, after = sigmas[999], 0.25 * sigmas[750] + 0.75 * sigmas[749]
    start = scheduler.begin(NOISE, 5)
    np.testing.assert_allclose(start, NOISE * first / np.hypot(first, 1), rtol=1e-5)
    expected = (start * np.hypot(first, 1) + (after - first) * CLEAN) / np.hypot(after, 1)
    np.testing.assert_allclose(scheduler.step(CLEAN, 999.0, start, n_steps=5), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheduler", [DDIM(), DDPM(prediction_type="v_prediction"), Euler(), FlowMatchEuler()])
def test_the_loss_is_zero_for_an_exact_model_only(scheduler):
    key = jax.random.key(0)
    timestep_key, noise_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, SHAPE)

    def exact(sample, timestep):
        np.testing.assert_array_equal(timestep, scheduler.draw_timestep(timestep_key))
        return scheduler.target(CLEAN, noise, timestep)

    assert denoising_loss(scheduler, exact, CLEAN, key) == 0
    found = denoising_loss(scheduler, lambda x, t: exact(x, t) + 2, CLEAN, key)
    np.testing.assert_allclose(found, 4, rtol=1e-5)


@pytest.mark.parametrize("variance_type", ["fixed_small", "fixed_large"])
def test_ddpm_draws_from_the_posterior(variance_type):
    """Bayes' rule on normal densities: the prior at the next timestep, times the likelihood of the current sample."""
    scheduler, timestep, after = DDPM(variance_type=variance_type, clip_range=None), 600, 500
    a, b = (float(scheduler.alphas[t]) for t in (timestep, after))
    x = np.asarray(scheduler.add_noise(CLEAN, NOISE, timestep), np.float64)
    prior, likelihood = 1 / (1 - b), (a / b) / (1 - a / b)  # precisions
    mean = (prior * b**0.5 * CLEAN + likelihood * x / (a / b) ** 0.5) / (prior + likelihood)
    variance = 1 / (prior + likelihood) if variance_type == "fixed_small" else 1 - a / b

    step = jax.jit(jax.vmap(lambda key: scheduler.step(NOISE, timestep, jnp.asarray(x, jnp.float32), n_steps=10, key=key)))
    drawn = step(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.02)
    np.testing.assert_allclose(drawn.std(0), variance**0.5, rtol=0.02)


def test_ddim_with_eta_1_adds_the_noise_of_ddpm():
    x = CLEAN
    keys = jax.random.split(jax.random.key(0), 8)
    # The two differ only if the model's predictions at several steps contradict each other, so compare single steps.
    for timestep in (900, 500, 100):
        ddim, ddpm = (
            jax.vmap(lambda key, s=scheduler, t=timestep: s.step(NOISE, t, x, n_steps=10, key=key))(keys)
            for scheduler in (DDIM(eta=1.0, clip_range=None), DDPM(clip_range=None))
        )
        np.testing.assert_allclose(ddim, ddpm, rtol=0, atol=1e-5)


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("timestep", [900, 400, 100])
def test_a_step_with_eta_is_equation_12_of_ddim(eta, timestep):
    """arXiv:2010.02502, with the deviation of its equation 16, in float64."""
    scheduler, key = DDIM(eta=eta, clip_range=None), jax.random.key(3)
    a, b = (float(scheduler.alphas[t]) for t in (timestep, timestep - 100))
    sigma = eta * np.sqrt((1 - b) / (1 - a)) * np.sqrt(1 - a / b)
    x, output = (np.asarray(array, np.float64) for array in (CLEAN, NOISE))
    clean = (x - np.sqrt(1 - a) * output) / np.sqrt(a)
    drawn = np.asarray(jax.random.normal(key, SHAPE), np.float64)
    wanted = np.sqrt(b) * clean + np.sqrt(1 - b - sigma**2) * output + sigma * drawn
    np.testing.assert_allclose(scheduler.step(NOISE, timestep, CLEAN, n_steps=10, key=key), wanted, rtol=1e-4, atol=1e-4)


def test_predicted_samples_are_clipped():
    scheduler = DDIM(prediction_type="sample", clip_range=0.5)
    far = jnp.full(SHAPE, 3.0)
    np.testing.assert_array_equal(scheduler.step(far, 0, jnp.zeros(SHAPE)), jnp.full(SHAPE, 0.5))
    np.testing.assert_array_equal(dataclasses.replace(scheduler, clip_range=None).step(far, 0, jnp.zeros(SHAPE)), far)


def test_the_last_step_adds_no_noise():
    fields = {"prediction_type": "sample", "clip_range": None}
    for scheduler in (DDPM(**fields), DDPM(**fields, variance_type="fixed_large"), DDIM(**fields, eta=1.0)):
        found = scheduler.step(CLEAN, 0, NOISE, key=jax.random.key(0))
        np.testing.assert_allclose(found, CLEAN, rtol=0, atol=1e-6)
    # Without `ends_clean`, the noise of timestep 0 remains.
    rest = DDIM(prediction_type="sample", clip_range=None, ends_clean=False)
    np.testing.assert_allclose(rest.step(CLEAN, 0, NOISE), NOISE, rtol=0, atol=1e-3)


def test_denoising_follows_the_key_and_is_one_loop():
    def run(scheduler, key):
        return denoise(scheduler, lambda sample, timestep: 0.5 * sample, NOISE, 20, key=key)

    a, same, b = (run(DDPM(), jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    np.testing.assert_array_equal(run(DDIM(), None), run(DDIM(), jax.random.key(0)))
    assert str(jax.make_jaxpr(lambda key: run(DDPM(), key))(jax.random.key(0))).count("scan[") == 1


def test_guidance_extrapolates_from_the_unconditional_prediction():
    text, nothing = (lambda sample, timestep: sample + 1), (lambda sample, timestep: sample)
    for scale, expected in ((0.0, 0.0), (1.0, 1.0), (7.5, 7.5)):
        np.testing.assert_allclose(guided(text, nothing, scale)(jnp.zeros(3), jnp.array(5)), expected)


# --- configurations and folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        DDPM(),
        DDIM(),
        DDPM(variance_type="fixed_large", beta_schedule="squaredcos_cap_v2", clip_range=2.0),
        Euler(ends_clean=False, steps_offset=1, has_karras=True, **LATENT),
        FlowMatchEuler(500, shift=3.0),
        FlowMatchEuler(is_dynamic=True, base_shift=0.4, max_patches=1024, shift_kind="linear"),
        PNDM(ends_clean=True, steps_offset=1, prediction_type="v_prediction"),
        DDIM(ends_clean=False, steps_offset=1, has_zero_snr=True, timestep_spacing="trailing", **LATENT),
    ],
)
def test_round_trip(scheduler, tmp_path):
    assert type(scheduler).from_hf(ConfigReader(scheduler.to_hf())) == scheduler
    assert scheduler.save_pretrained(tmp_path / "scheduler") == tmp_path / "scheduler"
    assert type(scheduler).from_pretrained(tmp_path / "scheduler") == scheduler
    assert json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text()) == scheduler.to_hf()


def test_keys_that_change_nothing_are_kept(tmp_path):
    (tmp_path / "scheduler_config.json").write_text('{"_class_name": "PNDMScheduler", "skip_prk_steps": true}')
    DDIM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert fields["skip_prk_steps"] is True
    assert fields["_class_name"] == "DDIMScheduler"


@pytest.mark.parametrize(
    ("cls", "key", "value", "message"),
    [
        (DDIM, "thresholding", True, "`thresholding`: expected False, .* got True"),
        (DDIM, "trained_betas", [0.1], r"`trained_betas`: expected None, .* got \[0\.1\]"),
        (DDIM, "beta_schedule", "sigmoid", "`beta_schedule`: expected 'linear' or .* got 'sigmoid'"),
        (DDIM, "prediction_type", "flow", "`prediction_type`: expected 'epsilon' or .* got 'flow'"),
        (DDIM, "timestep_spacing", "karras", "`timestep_spacing`: expected 'leading' or .* got 'karras'"),
        (PNDM, "skip_prk_steps", False, "`skip_prk_steps`: expected True, .* got False"),
        (Euler, "use_beta_sigmas", True, "`use_beta_sigmas`: expected False or None, .* got True"),
        (Euler, "sigma_max", 9.0, r"`sigma_max`: expected None, .* got 9\.0"),
        (Euler, "timestep_type", "continuous", "`timestep_type`: expected 'discrete', .* got 'continuous'"),
        (Euler, "final_sigmas_type", "one", "`final_sigmas_type`: expected 'zero' or 'sigma_min', .* got 'one'"),
        (FlowMatchEuler, "time_shift_type", "cubic", "`time_shift_type`: expected 'exponential' or .* got 'cubic'"),
        (FlowMatchEuler, "shift_terminal", 0.1, r"`shift_terminal`: expected None, .* got 0\.1"),
        (DDPM, "variance_type", "learned_range", "`variance_type`: expected 'fixed_small' or .* got 'learned_range'"),
        (DDPM, "variance_type", "fixed_small_log", "`variance_type`: expected 'fixed_small' or .* got 'fixed_small_log'"),
    ],
)
def test_refuses_what_it_does_not_implement(cls, key, value, message, tmp_path):
    path = tmp_path / "scheduler_config.json"
    path.write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=re.escape(f"`{path}`: ") + message):
        cls.from_pretrained(tmp_path)


def test_names_the_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"scheduler_config\.json`: expected a file, got an empty folder\. Pass the folder"):
        DDIM.from_pretrained(tmp_path)


def test_karras_steps_have_evenly_spaced_roots():
    """Equation 5 of arXiv:2206.00364, between the noise of the last and the first timestep. Between its steps, a sample is
    divided by the share that remains of it, and goes along the noise."""
    scheduler, n_steps = Euler(has_karras=True, **LATENT), 5
    table = np.sqrt(1 / scheduler.alphas.astype(np.float64) - 1)
    sigmas = np.linspace(table[-1] ** (1 / 7), table[0] ** (1 / 7), n_steps) ** 7
    timesteps = scheduler.timesteps(n_steps)
    np.testing.assert_allclose(np.exp(np.interp(timesteps, np.arange(1000), np.log(table))), sigmas, rtol=1e-4)
    x = np.asarray(CLEAN, np.float64)
    for timestep, before, after in zip(timesteps, sigmas, [*sigmas[1:], 0], strict=True):
        scaled = x / np.sqrt(1 + before**2)
        x = x + (after - before) * np.asarray(NOISE, np.float64)
        found = scheduler.step(NOISE, timestep, jnp.asarray(scaled, jnp.float32), n_steps=n_steps)
        np.testing.assert_allclose(found, x / np.sqrt(1 + after**2), rtol=1e-3, atol=1e-4)


def test_a_karras_step_has_its_own_noise():
    """Between the last two timesteps, of which one is pure noise: the logarithms of sigmas are interpolated."""
    scheduler, n_steps = Euler(has_karras=True, n_train_steps=100, has_zero_snr=True, beta_end=0.012), 7
    roots = np.linspace(4096 ** (1 / 7), np.sqrt(1 / scheduler.alphas[0].astype(np.float64) - 1) ** (1 / 7), n_steps)
    timestep, sigma = scheduler.timesteps(n_steps)[1], roots[1] ** 7
    assert 0.1 < timestep % 1 < 0.9
    noisy = (np.asarray(CLEAN, np.float64) + sigma * np.asarray(NOISE, np.float64)) / np.sqrt(1 + sigma**2)
    np.testing.assert_allclose(scheduler.add_noise(CLEAN, NOISE, timestep), noisy, rtol=0, atol=1e-4)


def test_pndm_extrapolates_the_last_predictions():
    scheduler, n_steps, ratio = PNDM(steps_offset=1, **LATENT), 6, 1000 // 6
    predict = lambda sample, timestep: 0.5 * sample + timestep / 1000  # noqa: E731
    alphas = scheduler.alphas.astype(np.float64)

    def move(x, predicted, start, stop):
        """Formula 9 of arXiv:2202.09778."""
        a, b = alphas[start], alphas[max(stop, 0)]
        return (b / a) ** 0.5 * x - (b - a) * predicted / (a * (1 - b) ** 0.5 + (a * (1 - a) * b) ** 0.5)

    first, *others = [i * ratio + 1 for i in reversed(range(n_steps))]
    x = np.asarray(NOISE, np.float64)
    past = [predict(x, first)]
    end = predict(move(x, past[0], first, first - ratio), others[0])
    x = move(x, (past[0] + end) / 2, first, others[0])
    for timestep in others:
        past = [predict(x, timestep), *past]
        weights = {2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12)}.get(len(past), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
        combined = sum(weight * each for weight, each in zip(weights, past, strict=False))
        x = move(x, combined, timestep, timestep - ratio)
    assert scheduler.timesteps(n_steps).tolist() == [first, others[0], *others]
    np.testing.assert_allclose(denoise(scheduler, predict, NOISE, n_steps), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (DDIM, {"n_train_steps": 0}, "`n_train_steps`: expected at least 1, got 0"),
        (
            DDIM,
            {"beta_schedule": "cosine"},
            "`beta_schedule`: expected 'linear', 'scaled_linear' or 'squaredcos_cap_v2', got",
        ),
        (PNDM, {"eta": 0.5}, "`eta`: expected 0.0 for PNDM, got 0.5"),
        (PNDM, {"prediction_type": "sample"}, "`prediction_type`: expected 'epsilon' or 'v_prediction' for PNDM, got"),
        (Euler, {"clip_range": 1.0}, "`clip_range`: expected None for Euler, got 1.0"),
        (FlowMatchEuler, {"shift": 0.0}, "`shift`: expected a positive number, got 0.0"),
        (FlowMatchEuler, {"max_patches": 256}, "`max_patches`: expected another number than `base_patches`, got 256"),
        (DDIM, {"eta": -1.0}, "`eta`: expected 0 to 1, got -1.0"),
        (DDIM, {"eta": 2.0}, "`eta`: expected 0 to 1, got 2.0"),
        (
            DDPM,
            {"prediction_type": "noise"},
            "`prediction_type`: expected 'epsilon', 'v_prediction' or 'sample', got 'noise'",
        ),
        (
            DDPM,
            {"timestep_spacing": "even"},
            "`timestep_spacing`: expected 'leading', 'trailing' or 'linspace', got 'even'",
        ),
        (DDPM, {"variance_type": "learned"}, "`variance_type`: expected 'fixed_small' or 'fixed_large', got 'learned'"),
    ],
)
def test_rejects_a_wrong_config(cls, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**fields)


def test_rejects_an_invalid_number_of_steps():
    with pytest.raises(ValueError, match=r"`n_steps`: expected from 1 to `n_train_steps`=1000, got 1001\. Pass fewer"):
        DDIM().timesteps(1001)
    with pytest.raises(ValueError, match=r"`n_steps`: expected from 1 to `n_train_steps`=1000, got 0"):
        DDIM().timesteps(0)
    with pytest.raises(
        ValueError, match=r"`steps_offset`: expected timesteps below `n_train_steps`=1000, got 1000 with 1000"
    ):
        DDPM(steps_offset=1).timesteps(1000)


def test_requires_a_key_if_a_step_draws_noise():
    for scheduler in (DDPM(), DDIM(eta=0.1)):
        with pytest.raises(ValueError, match="`key`: expected one, since this step draws noise, got None"):
            scheduler.step(CLEAN, 3, CLEAN)
