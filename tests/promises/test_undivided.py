"""An update is that of the undivided loss, also of one whose rows share a count, an order or a statistic of the data."""

import itertools
from collections import Counter
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from tests.promises.drawing import EXAMPLES, collate_fn, dense
from tests.promises.test_draws import MESHES, assert_first_update_matches, key_of_step, make_trainer, plain


def row_losses(p, batch):
    logits = jnp.tanh(batch["x"] @ p["w"]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.mean(1), batch["label"])


def row_losses_mean(p, batch, key):
    return row_losses(p, batch).mean()


def masked_mean(p, batch, key):
    mask = batch["target"] > 0.5
    return (row_losses(p, batch) * mask).sum() / mask.sum()


def mixup(p, batch, key):
    order = jax.random.permutation(key, len(batch["x"]))
    return row_losses(p, {**batch, "x": 0.7 * batch["x"] + 0.3 * jnp.take(batch["x"], order, 0)}).mean()


def normalised_advantages(p, batch, key):
    advantage = (batch["target"] - batch["target"].mean()) / (batch["target"].std() + 1e-6)
    return (advantage * row_losses(p, batch)).mean()


def spread_times(p, batch, key):
    """Times of a diffusion in equal steps over the batch, as in Equinox's score-based example."""
    n = len(batch["x"])
    time = jax.random.uniform(key, (n,), maxval=1 / n) + jnp.arange(n) / n
    return (jnp.cos(time)[:, None] * (batch["x"].mean(1) @ p["mean"]) ** 2).mean()


def sum_of_rows(p, batch, key):
    return (row_losses(p, batch) * jax.random.uniform(key, batch["label"].shape)).sum()


def constant_weight(p, batch, key):
    return redeqx.Loss(row_losses(p, batch).sum(), 3.0, {"largest": (batch["target"].sum(), 1.0)})


def pairs(p, batch, key):
    reward = (batch["x"].mean(1) @ p["v"]).reshape(-1, 2)
    return -jax.nn.log_sigmoid(reward[:, 0] - reward[:, 1]).mean()


def contrastive(p, batch, key):
    """Rows are mixed by the model: only an undivided update is the loss's own."""
    one, two = (jnp.tanh(batch["x"].mean(1) @ p[name]) for name in ("w", "mean"))
    return optax.softmax_cross_entropy_with_integer_labels(one @ two.T, jnp.arange(len(one))).mean()


EXACT = (masked_mean, mixup, normalised_advantages, spread_times, sum_of_rows, constant_weight, pairs)
QUICK = {
    (masked_mean, "8", 1),
    (masked_mean, "2x2x2", 2),
    (mixup, "4", 2),
    (normalised_advantages, "8", 1),
    (spread_times, "2x2x2", 2),
    (sum_of_rows, "8", 2),
    (constant_weight, "4", 2),
    (pairs, "4", 2),
}


@pytest.mark.parametrize(
    ("loss_fn", "mesh", "accumulate"),
    [
        pytest.param(
            *case, id="-".join((case[0].__name__, *map(str, case[1:]))), marks=() if case in QUICK else pytest.mark.sweep
        )
        for case in itertools.product(EXACT, MESHES, (1, 2, 4))
    ],
)
def test_an_update_is_that_of_the_undivided_loss(loss_fn, mesh, accumulate):
    examples = EXAMPLES[:20]
    want = plain(loss_fn, dense(), collate_fn(examples), key_of_step(0))
    assert_first_update_matches(make_trainer(loss_fn, dense(), mesh, accumulate), examples, *want)


def test_a_masked_mean_whose_remainder_has_no_unmasked_row_is_finite():
    """16 rows and a remainder of 4 on 8 devices: the mean over the remainder alone would be 0 / 0."""
    examples = [{**example, "target": example["target"] * (i < 16)} for i, example in enumerate(EXAMPLES[:20])]
    want = plain(masked_mean, dense(), collate_fn(examples), key_of_step(0))
    assert_first_update_matches(make_trainer(masked_mean, dense(), "8"), examples, *want)


@pytest.mark.parametrize(
    "loss_fn",
    [masked_mean, mixup, sum_of_rows, pytest.param(spread_times, marks=pytest.mark.sweep)],
    ids=lambda f: f.__name__,
)
def test_a_last_update_of_fewer_micro_batches_counts_its_rows_alone(loss_fn):
    """16 rows in four micro-batches, then 8 rows. Repeated rows would count in a value of the whole batch."""
    trainer = make_trainer(loss_fn, dense(), "4", 4, rate=0.1)
    trainer.train(EXAMPLES[:24], 1)
    expected = dense()
    for step, rows in enumerate((slice(16), slice(16, 24))):
        _, grads = plain(loss_fn, expected, collate_fn(EXAMPLES[rows]), key_of_step(step))
        expected = jax.tree.map(lambda x, g: x - 0.1 * g, expected, jax.tree.unflatten(jax.tree.structure(expected), grads))
    for found, value in zip(jax.tree.leaves(trainer.model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("loss_fn", [row_losses_mean, masked_mean, sum_of_rows], ids=lambda f: f.__name__)
def test_a_step_traces_the_loss_once_for_each_number_of_rows(loss_fn):
    """16 rows in two micro-batches, then 4 rows on each device."""
    n_traces = Counter()

    def counted(p, batch, key):
        n_traces[len(batch["x"])] += 1
        return loss_fn(p, batch, key)

    trainer = make_trainer(counted, dense(), "8", 2)
    trainer.train(EXAMPLES[:16], 1)
    n_traces.clear()
    trainer.train(EXAMPLES[16:36], 1)
    assert max(n_traces.values()) == 1, n_traces


@pytest.mark.parametrize("mesh", ["8", "2x2x2"])
def test_a_loss_that_mixes_rows_is_not_divided(mesh):
    """20 rows divide over four shards. On eight devices each computes all of them."""
    trainer, examples = make_trainer(contrastive, dense(), mesh), EXAMPLES[:20]
    warned = pytest.warns(UserWarning, match="The loss mixes rows at .*test_undivided.py:") if mesh == "8" else nullcontext()
    with warned:
        assert_first_update_matches(trainer, examples, *plain(contrastive, dense(), collate_fn(examples), key_of_step(0)))
