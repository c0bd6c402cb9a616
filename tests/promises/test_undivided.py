"""An update is that of the undivided loss, also of one whose rows share a count, an order or a statistic of the data."""

import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from tests.promises.drawing import EXAMPLES, collate_fn, dense
from tests.promises.test_draws import (
    MESHES,
    SEED,
    assert_first_update_matches,
    key_of_step,
    make_deployer,
    make_trainer,
    plain,
)


def row_losses(p, batch):
    logits = jnp.tanh(batch["x"] @ p["w"]) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.mean(1), batch["label"])


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
    (masked_mean, "2x2x2", 2),
    (mixup, "4", 2),
    (normalised_advantages, "8", 1),
    (pairs, "2x2x2", 2),
}
COVERING = {  # each loss on two other meshes, and each mesh with each number of micro-batches
    (loss_fn, mesh, (1, 2, 4)[(i + j) % 3])
    for i, loss_fn in enumerate(EXACT)
    for j, mesh in enumerate(MESHES)
    if (i + j) % 2
}


@pytest.mark.parametrize(
    ("loss_fn", "mesh", "accumulate"),
    [
        pytest.param(
            *case, id="-".join((case[0].__name__, *map(str, case[1:]))), marks=() if case in QUICK else pytest.mark.sweep
        )
        for case in sorted({*QUICK, *COVERING}, key=lambda case: (case[0].__name__, *case[1:]))
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
    [masked_mean, *(pytest.param(each, marks=pytest.mark.sweep) for each in (mixup, sum_of_rows, spread_times))],
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


def test_a_step_traces_the_loss_once_for_each_number_of_rows():
    """16 rows in two micro-batches, then 4 rows on each device. The loss has a value of the whole batch."""
    n_traces = Counter()

    def counted(p, batch, key):
        n_traces[len(batch["x"])] += 1
        return masked_mean(p, batch, key)

    trainer = make_trainer(counted, dense(), "8", 2)
    trainer.train(EXAMPLES[:16], 1)
    n_traces.clear()
    trainer.train(EXAMPLES[16:36], 1)
    assert max(n_traces.values()) == 1, n_traces


# --- metrics that mix rows ---------------------------------------------------------------------------------------------


def drawing_with_rmse(p, batch, key):
    """A root of a mean, with noise."""
    x = batch["x"] + jax.random.normal(key, batch["x"].shape)
    errors = (jnp.tanh(x @ p["w"]).mean(1) @ p["v"] - batch["target"]) ** 2
    return redeqx.Loss(errors.sum(), len(errors), {"rmse": jnp.sqrt(errors.mean()) * len(errors), "mean": errors.sum()})


def masked_with_perplexity(p, batch, key):
    """The loss needs the count of the whole batch. A part has the perplexity of its own mean."""
    mask = batch["target"] > 0.5
    loss = (row_losses(p, batch) * mask).sum() / mask.sum()
    hits = ((row_losses(p, batch) < 2) * mask).sum() / mask.sum()
    return redeqx.Loss(loss, 1.0, {"perplexity": jnp.exp(loss), "hits": hits})


def folded_with_matches(p, batch, key):
    """The numbers of rows are those of the whole batch for the draw, and those of the part for the metric."""
    numbers = jnp.arange(len(batch["x"]))
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(numbers)
    one, two = (jnp.tanh(batch["x"].mean(1) @ p[name]) for name in ("w", "mean"))
    losses = (one * two).sum(1) * noise
    return redeqx.Loss(losses.sum(), len(losses), {"matched": ((one @ two.T).argmax(1) == numbers).sum()})


def with_drawn_order(p, batch, key):
    """Only the metric has a draw that no part of the rows can make."""
    losses, own = row_losses(p, batch), jax.random.gamma(key, 2.0, batch["target"].shape)
    return redeqx.Loss(losses.sum(), len(losses), {"order": (jnp.sort(losses) * own).sum()})


def with_callback(p, batch, key):
    """A metric that is computed by NumPy."""
    losses = row_losses(p, batch)
    ranked = jax.pure_callback(
        lambda x: np.float32(np.median(x)), jax.ShapeDtypeStruct((), "float32"), jax.lax.stop_gradient(losses)
    )
    return redeqx.Loss(losses.sum(), len(losses), {"median": ranked * len(losses)})


METRICS = {
    drawing_with_rmse: ("separable; metric `rmse` mixes at", "jnp.sqrt(errors.mean())"),
    masked_with_perplexity: ("separable after 2 values of the whole batch; metric `perplexity` mixes at", "jnp.exp(loss)"),
    folded_with_matches: ("separable; metric `matched` mixes at", "(one @ two.T)"),
    with_drawn_order: ("separable; metric `order` mixes at", "jnp.sort(losses)"),
    with_callback: ("separable; metric `median` mixes at", "jax.pure_callback("),
}


@pytest.mark.parametrize(
    ("loss_fn", "mesh", "accumulate"),
    [
        pytest.param(*case, id="-".join((case[0].__name__, *map(str, case[1:]))), marks=marks)
        for i, loss_fn in enumerate(METRICS)
        for case, marks in (
            ((loss_fn, "8", 1), () if i < 2 else pytest.mark.sweep),
            ((loss_fn, ("4", "2x2x2")[i % 2], (1, 2, 4)[(i + (1, 3)[i % 2]) % 3]), pytest.mark.sweep),
        )
    ],
)
def test_a_loss_is_exact_whatever_its_metrics_mix(loss_fn, mesh, accumulate):
    examples = EXAMPLES[:20]
    metrics, grads = plain(loss_fn, dense(), collate_fn(examples), key_of_step(0))
    assert_first_update_matches(make_trainer(loss_fn, dense(), mesh, accumulate), examples, exact(metrics), grads)


def exact(metrics):
    return {name: metrics[name] for name in ("loss", "mean", "hits") if name in metrics}


@pytest.mark.parametrize("loss_fn", [drawing_with_rmse, masked_with_perplexity, folded_with_matches, with_callback])
def test_a_metric_that_mixes_rows_is_one_of_each_micro_batch(loss_fn):
    """Two of 10 rows. The draws are those of the whole batch, and so are the loss and its gradient."""
    batch, key = collate_fn(EXAMPLES[:20]), key_of_step(0)
    name = METRICS[loss_fn][0].split("`")[1]
    noise = jax.random.normal(key, batch["x"].shape)
    metrics, grads = plain(loss_fn, dense(), batch, key)
    found = assert_first_update_matches(make_trainer(loss_fn, dense(), "1", 2), EXAMPLES[:20], exact(metrics), grads)

    def of_part(rows):
        part = jax.tree.map(lambda x: jnp.asarray(x[rows]), batch)
        if loss_fn is drawing_with_rmse:
            errors = (jnp.tanh((part["x"] + noise[rows]) @ dense()["w"]).mean(1) @ dense()["v"] - part["target"]) ** 2
            return jnp.sqrt(errors.mean())
        loss = loss_fn(dense(), part, key)
        return loss.metrics[name] / loss.weight

    parts = jax.jit(lambda: [of_part(rows) for rows in (slice(10), slice(10, None))])()
    assert found[name] == pytest.approx(float(sum(parts)) / 2, rel=1e-6)
    assert found[name] != pytest.approx(float(metrics[name]), rel=1e-4)


def said_by(trainer):
    """Returns the last line of the plan's explanation."""
    assert trainer.plan is not None
    return trainer.plan.explain().splitlines()[-1]


def line_of(code):
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if code in line)


@pytest.mark.parametrize("loss_fn", METRICS)
def test_a_metric_that_mixes_rows_is_said_once_with_its_line(loss_fn, capsys):
    said, code = METRICS[loss_fn]
    trainer = make_trainer(loss_fn, dense(), deployer=make_deployer("1", verbose=True))
    trainer.update(EXAMPLES[:20])
    number = line_of(code)
    header = " ".join(capsys.readouterr().out.split())
    assert header.count("mixes") == 1 and f"rows {said}" in header
    assert said_by(trainer).startswith(f"rows: {said}")
    assert said_by(trainer).endswith(f"test_undivided.py:{number}")


def test_a_loss_that_mixes_rows_is_mixed_at_its_own_line():
    """Also where a metric mixes them before."""

    def loss_fn(p, batch, key):
        spread = jnp.sqrt(row_losses(p, batch).mean())
        return redeqx.Loss(contrastive(p, batch, key) * len(batch["x"]), len(batch["x"]), {"spread": spread})

    trainer = make_trainer(loss_fn, dense(), "1")
    trainer.update(EXAMPLES[:20])
    number = line_of("(one @ two.T, ")
    assert said_by(trainer).startswith(f"rows: mixed at tests/promises/test_undivided.py:{number} (")
    assert "spread" not in said_by(trainer)


# --- losses that mix rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["8", "2x2x2"])
def test_a_loss_that_mixes_rows_is_not_divided(mesh):
    """20 rows divide over four shards. On eight devices each computes all of them."""
    trainer, examples = make_trainer(contrastive, dense(), mesh), EXAMPLES[:20]
    warned = pytest.warns(UserWarning, match="The loss mixes rows at .*test_undivided.py:") if mesh == "8" else nullcontext()
    with warned:
        assert_first_update_matches(trainer, examples, *plain(contrastive, dense(), collate_fn(examples), key_of_step(0)))


def test_an_evaluation_and_a_prediction_take_the_number_of_all_rows(capsys):
    """So do the times of a diffusion in equal steps. The number of an iterable's rows is not known, which a line says."""

    def places(p, batch, key):
        return (jnp.arange(len(batch["x"])) + 0.5) / len(batch["x"])

    trainer = make_trainer(spread_times, dense(), "4", deployer=make_deployer("4", verbose=True))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), 1), 1)
    want, _ = plain(spread_times, dense(), collate_fn(EXAMPLES[:21]), key)
    for size in (21, 8, 5):
        assert trainer.eval_loss(EXAMPLES[:21], batch_size=size) == pytest.approx(float(want["loss"]), rel=1e-5)
        predictor = trainer.get_default_predictor(places)
        found = predictor.predict(EXAMPLES[:21], batch_size=size)
        np.testing.assert_allclose(found, (np.arange(21) + 0.5) / 21, rtol=1e-6)
    assert "depends on the batch size" not in capsys.readouterr().out
    other = make_trainer(spread_times, dense(), "4", deployer=make_deployer("4", verbose=True))
    other.eval_loss(iter(EXAMPLES[:21]), batch_size=8)
    assert "the loss depends on the batch size" in capsys.readouterr().out


def test_a_last_evaluation_batch_of_one_row_does_not_warn():
    """JAX writes `linspace` for one row with other equations. The batch is whole, so its loss is as written."""

    def spaced(p, batch, key):
        return (jnp.linspace(0, 1, len(batch["x"])) * row_losses(p, batch)).mean()

    trainer = make_trainer(spaced, dense(), "4")
    parts = [collate_fn(EXAMPLES[i : i + 5]) for i in (0, 5)] + [collate_fn(EXAMPLES[10:11])]
    want = sum(float(spaced(dense(), part, None)) * len(part["x"]) for part in parts) / 11
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.eval_loss(EXAMPLES[:11], batch_size=5) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("n", "batch_size"), [(20, 8), (13, 13)])
def test_a_prediction_that_depends_on_weights_alone_is_not_scaled(n, batch_size):
    """As what it is in one batch: it is no share of a sum over rows."""

    def pred_fn(model, batch, key):
        return {"bias": jnp.broadcast_to(model["bias"], (len(batch), 3)), "x": batch * model["bias"].sum()}

    predictor = redeqx.Predictor(
        redeqx.Deployer(verbose=False), model={"bias": jnp.arange(3.0)}, collate_fn=np.stack, pred_fn=pred_fn
    )
    outputs = predictor.predict(np.ones((n, 2), np.float32), batch_size=batch_size)
    np.testing.assert_array_equal([row["bias"] for row in outputs], np.tile(np.arange(3.0), (n, 1)))
    np.testing.assert_array_equal([row["x"] for row in outputs], np.full((n, 2), 3.0))
