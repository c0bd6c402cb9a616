"""Private training: one image's influence is bounded, noise is correct on every mesh, epsilon matches the accountant."""

import json
from functools import partial

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.stats import binom, norm

import redeqx
from examples._images import digits
from examples.private_training.main import Args, Classifier, check, collate_fn, loss_fn, loss_of_one
from examples.private_training.privacy import (
    calibrate,
    clipped_sums,
    hold_to,
    poisson_samples,
    private_gradient,
    room_for,
    spent,
)
from redeqx.machine import make_mesh

from ._run import run_example

CLIP = 2.0
N_PADDING = 3
PADDING = (np.zeros((1, 8, 8), np.float32), -1)


@pytest.fixture(scope="module")
def examples():
    return digits()[0][:13] + [PADDING] * N_PADDING


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_model(width=8):
    return Classifier(eqx.nn.MLP(64, 10, width, 1, jnp.tanh, key=jax.random.key(3)))


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]


def flat(model):
    return np.concatenate([x.ravel() for x in arrays(model)])


@pytest.fixture(scope="module")
def sums_of():
    """Returns a function for the losses and the clipped gradient sum of examples, as vectors."""
    compiled = eqx.filter_jit(partial(clipped_sums, loss_of_one))

    def sums(model, examples):
        losses, grads = compiled(model, jax.tree.map(jnp.asarray, collate_fn(examples)), CLIP)
        return np.asarray(losses), flat(grads)

    return sums


@pytest.fixture(scope="module")
def grads_of_each(model, examples):
    """The cross-entropy gradient of each true example, computed separately."""

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(model, image, label):
        return -jax.nn.log_softmax(model(image))[label]

    return np.stack([flat(grad(model, image, label)) for image, label in examples[:-N_PADDING]])


# --- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_clipped_sums_match_a_loop(model, examples, sums_of, grads_of_each):
    norms = np.linalg.norm(grads_of_each, axis=1)
    assert norms.min() < CLIP < norms.max()  # some are clipped, some are not
    expected = sum(g * min(1, CLIP / n) for g, n in zip(grads_of_each, norms, strict=True))
    losses, sums = sums_of(model, examples)
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-5)
    assert (losses[:-N_PADDING] > 0).all() and (losses[-N_PADDING:] == 0).all()


def test_one_image_changes_the_sum_by_at_most_the_clip_norm(model, examples, sums_of, grads_of_each):
    _, whole = sums_of(model, examples)
    for i, grad in enumerate(grads_of_each):
        _, without = sums_of(model, [*examples[:i], PADDING, *examples[i + 1 :]])
        moved = np.linalg.norm(whole - without)
        assert moved == pytest.approx(min(CLIP, np.linalg.norm(grad)), rel=1e-3)
    # Even an unrealistic image changes it no further.
    far = (np.linspace(-1e6, 1e6, 64, dtype=np.float32).reshape(1, 8, 8), 0)
    _, other = sums_of(model, [far, *examples[1:]])
    _, without = sums_of(model, [PADDING, *examples[1:]])
    assert np.linalg.norm(other - without) <= CLIP * (1 + 1e-5)


def sgd_update(shape, examples, n_micro, noise_multiplier, sample_size, width=8):
    """What one step of plain SGD subtracts from a model's parameters."""
    devices = jax.devices()[: int(np.prod(shape))]
    deployer = redeqx.Deployer(0, verbose=False)
    deployer._mesh = make_mesh(shape[2], shape[1], devices)
    grad_fn = partial(
        private_gradient, loss_of_one, clip_norm=CLIP, noise_multiplier=noise_multiplier, sample_size=sample_size,
    )  # fmt: skip
    trainer = redeqx.Trainer(
        deployer, model=make_model(width), optimizer=optax.sgd(1.0), collate_fn=collate_fn, loss_fn=loss_fn, grad_fn=grad_fn,
        accumulate_grad_batches=n_micro,
    )  # fmt: skip
    before = flat(trainer.model)
    trainer.train(examples, len(examples) // n_micro // deployer.n_batch_shards)
    assert trainer.step == 1
    return before - flat(trainer.model)


@pytest.mark.parametrize("n_micro", [pytest.param(1, marks=pytest.mark.sweep), 4])
@pytest.mark.sweep
def test_noise_matches_the_accountant_on_every_mesh(n_micro):
    """Padding rows have no gradient, so a step contains only noise."""
    one, four = (sgd_update(shape, [PADDING] * 16, n_micro, 2.0, 10.0, width=256) for shape in ((1, 1, 1), (2, 1, 2)))
    np.testing.assert_allclose(one, four, rtol=1e-3, atol=1e-6)
    n = len(one)
    assert n > 19_000
    assert np.std(one * 10) == pytest.approx(2.0 * CLIP, rel=4 / np.sqrt(2 * n))  # four standard errors
    assert abs(np.mean(one * 10)) < 4 * 2.0 * CLIP / np.sqrt(n)


@pytest.mark.parametrize("n_micro", [pytest.param(1, marks=pytest.mark.sweep), 4])
def test_sum_is_divided_by_the_expected_sample_size(model, examples, sums_of, n_micro):
    _, sums = sums_of(model, examples)
    found = sgd_update((2, 1, 2), examples, n_micro, 0.0, 10.0)
    np.testing.assert_allclose(found, sums / 10, rtol=1e-3, atol=1e-6)


# --- the samples -----------------------------------------------------------------------------------------------------


def test_examples_are_drawn_independently():
    examples = [(np.full((1, 1, 1), i, np.float32), i) for i in range(40)]
    n_steps = 2000
    rows = np.array([label for _, label in poisson_samples(examples, 0.3, n_steps, 30, (0, 1))]).reshape(n_steps, 30)
    assert (np.sort(rows, axis=1)[:, 1:] == np.sort(rows, axis=1)[:, :-1]).any()  # padding
    drawn = np.stack([np.bincount(row[row >= 0], minlength=40) for row in rows])
    assert drawn.max() == 1
    assert np.abs(drawn.mean(0) - 0.3).max() < 4.5 * np.sqrt(0.3 * 0.7 / n_steps)
    # The sizes have the variance of independent draws.
    assert drawn.sum(1).var() == pytest.approx(40 * 0.3 * 0.7, rel=0.15)
    again = [label for _, label in poisson_samples(examples, 0.3, n_steps, 30, (0, 1))]
    assert again == rows.ravel().tolist()
    assert again != [label for _, label in poisson_samples(examples, 0.3, n_steps, 30, (0, 2))]


def test_too_large_sample_is_refused():
    with pytest.raises(ValueError, match=r"`--seed`: expected samples of at most 12 images, got 13\."):
        list(poisson_samples(digits()[0][:13], 1.0, 1, 12, (0,)))


def test_every_sample_fits():
    n_rows = room_for(1257, 0.25, 80, 8)
    assert n_rows % 8 == 0
    assert 80 * binom.sf(n_rows, 1257, 0.25) < 1e-9 < 80 * binom.sf(n_rows - 9, 1257, 0.25)
    assert room_for(1257, 1.0, 80, 1) == 1257


# --- the budget ------------------------------------------------------------------------------------------------------


def test_epsilon_matches_the_gaussian_mechanism():
    """Without sampling, delta has a closed formula (Balle and Wang 2018, arXiv 1805.06530, theorem 8)."""
    n_steps, noise, delta = 9, 6.0, 1e-5
    epsilon, mu = spent(noise, delta, 1.0, n_steps), np.sqrt(n_steps) / noise
    found = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert found == pytest.approx(delta, rel=0.02)


@pytest.mark.sweep
def test_epsilon_falls_with_noise_and_sampling_and_matches_dp_accounting():
    found = [spent(noise, 1e-5, 0.25, 20) for noise in (1.0, 2.0, 4.0, 8.0)]
    assert found == sorted(found, reverse=True) and found[0] > 2 * found[1]
    assert spent(4.0, 1e-5, 0.25, 20) < spent(4.0, 1e-5, 1.0, 20)
    assert spent(4.0, 1e-5, 0.25, 20) < spent(4.0, 1e-5, 0.25, 40)
    # Renyi orders give another, slightly looser upper bound. (Integer orders only: the other series do not converge.)
    accountant = RdpAccountant(orders=range(2, 64))
    step = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(4.0))
    bound = accountant.compose(step, 20).get_epsilon(1e-5)
    assert 0.8 * bound < spent(4.0, 1e-5, 0.25, 20) < bound


@pytest.mark.sweep
def test_noise_uses_the_budget_without_exceeding_it():
    noise = calibrate(2.0, 1e-5, 0.25, 20)
    assert 1.98 < spent(noise, 1e-5, 0.25, 20) <= 2.0


def test_resumed_run_needs_the_same_privacy_settings(tmp_path):
    path = tmp_path / "eps1" / "privacy.json"
    hold_to(path, {"noise_multiplier": 1.5, "n_steps": 80})
    hold_to(path, {"noise_multiplier": 1.5, "n_steps": 80})
    with pytest.raises(ValueError, match=r"privacy.json`: expected .*'n_steps': 90.*, got .*'n_steps': 80.*--workdir"):
        hold_to(path, {"noise_multiplier": 1.5, "n_steps": 90})
    assert json.loads(path.read_text())["n_steps"] == 80


# --- the example -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_learns_and_saves_picture_checkpoints_and_scores(tmp_path):
    run = run_example("private_training", "--epsilons", 3, "--n-epochs", 4, workdir=tmp_path)
    accuracies = {}
    for name in ("eps3", "public"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        accuracies[name] = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
        ckpts = tmp_path / name / "ckpts"
        assert (ckpts / json.loads((ckpts / "index.json").read_text())["last"]).name == "step_00000016"
        assert len(accuracies[name]) == 4
        assert accuracies[name][-1] > max(0.6, accuracies[name][0])
    scores = run.metrics[-1]
    assert set(scores) == {"step", "test_accuracy_eps3", "test_accuracy_public"}
    assert scores["test_accuracy_eps3"] > 0.6
    assert scores["test_accuracy_public"] > 0.8
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "eps3" / "privacy.json").read_text())["n_steps"] == 16
    assert "mesh data=2 x fsdp=1 x model=2" in " ".join(run.output.split())
    assert f"{scores['test_accuracy_eps3']:.3f}" in run.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Args(epsilons=(1.0, 0.0)), r"`--epsilons`: expected different budgets above 0, got \(1\.0, 0\.0\)\."),
        (Args(epsilons=(1.0, 1.0)), r"`--epsilons`: expected different budgets above 0, got \(1\.0, 1\.0\)\."),
        (Args(epsilons=()), r"`--epsilons`: expected different budgets above 0, got \(\)\."),
        (Args(epsilons=(float("nan"),)), r"`--epsilons`: expected different budgets above 0, got \(nan,\)\."),
        (Args(delta=1.0), r"`--delta`: expected a number between 0 and 1, got 1\.0\."),
        (Args(clip_norm=0.0), r"`--clip-norm`: expected a number above 0, got 0\.0\."),
        (Args(sampling_rate=1.5), r"`--sampling-rate`: expected a number above 0, at most 1, got 1\.5\."),
        (Args(n_epochs=0), r"`--n-epochs`, `--steps-per-epoch`: expected both at least 1, got \(0, 4\)\."),
    ],
)
def test_invalid_privacy_settings_are_refused(args, message):
    check(Args())
    with pytest.raises(ValueError, match=message):
        check(args)
