"""Two models and two optimizers in one run: the update schedule, and the separation of their gradients."""

from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from examples._images import judge
from examples.adversarial_training.main import Args, Pair, collate_fn, fixed, loss_fn, main, make_optimizer
from tests.examples._run import run_example

TINY = ("--n-epochs", 3, "--batch-size", 128, "--width", 32, "--n-critic-steps", 2, "--n-samples", 64)


@pytest.fixture
def pair():
    return Pair((1, 4, 4), 3, 8, key=jax.random.key(0))


def batch_of(n):
    images = np.random.default_rng(0).random((n, 1, 4, 4), np.float32)
    return collate_fn([(image, 0) for image in images])


@pytest.mark.sweep
def test_each_model_gets_the_gradient_of_its_own_loss(pair):
    batch, key = batch_of(6), jax.random.key(1)

    def loss_of(name, pair):
        loss = loss_fn(pair, batch, key, penalty=2.0)
        return loss.metrics[name] / loss.weight

    def mean(pair):
        loss = loss_fn(pair, batch, key, penalty=2.0)
        return loss.total / loss.weight

    both = eqx.filter_grad(mean)(pair)
    critic = eqx.filter_grad(lambda pair: loss_of("critic_loss", pair))(pair)
    generator = eqx.filter_grad(lambda pair: loss_of("generator_loss", pair))(pair)
    for grads, own, other in ((critic, "critic", "generator"), (generator, "generator", "critic")):
        for a, b in zip(jax.tree.leaves(getattr(grads, own)), jax.tree.leaves(getattr(both, own)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(getattr(grads, other)))


@pytest.mark.sweep
def test_generator_is_updated_only_every_nth_step(pair):
    optimizer = make_optimizer(Args(n_critic_steps=3))
    params = eqx.filter(pair, eqx.is_inexact_array)
    state = optimizer.init(params)
    updated = []
    for _ in range(7):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        updated.append([any(jnp.any(u != 0) for u in jax.tree.leaves(getattr(updates, n))) for n in ("critic", "generator")])
    assert updated == [[True, i % 3 == 2] for i in range(7)]


@pytest.mark.sweep
def test_fixed_model_computes_the_same(pair):
    image = jnp.ones(16)
    assert fixed(pair.critic)(image) == pair.critic(image)


@pytest.mark.sweep
def test_folder_of_images_is_judged_by_images_outside_training(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(20):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(8, 8), dtype=np.uint8)).save(tmp_path / "data" / "ab"[i % 2] / f"{i}.png")
    sizes = {"image_size": 8, "width": 8, "batch_size": 8, "n_epochs": 1, "n_samples": 32}
    with mock.patch("examples.adversarial_training.main.judge", side_effect=judge) as judged:
        scores = main(Args(data=tmp_path / "data", workdir=tmp_path / "run", **sizes))
    drawn, train, test = judged.call_args.args
    assert (len(drawn), len(train), len(test)) == (32, 14, 4)  # more drawings than training images
    assert scores["test_real_distance"] > 0


@pytest.mark.sweep
def test_runs_on_a_mesh(tmp_path):
    outcome = run_example("adversarial_training", *TINY, workdir=tmp_path)
    assert "data=2 x fsdp=1 x model=2" in outcome.output
    assert len(outcome.series("critic_loss")) == len(outcome.series("generator_loss")) == 27
    assert outcome.series("critic_loss")[-1] < outcome.series("critic_loss")[0]
    assert (tmp_path / "drawings.png").read_bytes().startswith(b"\x89PNG")
    assert {"test_distance", "test_real_distance", "test_rarest_share"} <= outcome.metrics[-1].keys()
