"""Meta-learning: gradients through the inner steps on every mesh, task construction, and tiny runs that learn."""

import zipfile
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import redeqx
from examples.meta_learning.main import AFTER, Args, Learner, interval, loss_fn, main, metric_fn, pred_fn
from examples.meta_learning.network import convolve
from examples.meta_learning.tasks import SIZE, Sinusoids, filled, omniglot

from ._run import run_example

TASKS = Sinusoids(n_shots=4)


def learner(first_order=False, width=8, rate=0.05):
    net = eqx.nn.MLP(1, 1, width, depth=2, activation=jnp.tanh, key=jax.random.key(0))
    return Learner(net, rate, 2, first_order)


def batch(n_tasks=4) -> Any:
    return TASKS.collate_fn(list(TASKS.draw(n_tasks, 3, (0,))))


def write_characters(folder, n_characters, n_drawings, size=8):
    rng = np.random.default_rng(0)
    for i in range(n_characters):
        character = folder / f"Alphabet{i % 2}" / f"character{i:02}"
        character.mkdir(parents=True)
        glyph = rng.random((size, size)) < 0.5
        for j in range(n_drawings):
            noise = rng.random((size, size)) < 0.02
            Image.fromarray(np.where(glyph ^ noise, 0, 255).astype(np.uint8)).convert("1").save(character / f"{j:02}.png")
    return folder


# --- the gradient ------------------------------------------------------------------------------------------------------


class Line(eqx.Module):
    """y = w x, whose gradients can be derived by hand."""

    w: jax.Array

    def __call__(self, x):
        return self.w * x


@pytest.mark.parametrize("first_order", [False, True])
def test_meta_gradient_matches_the_derivation(first_order):
    """A step of rate a on mean((w x - y)^2): w' = w - 2 a (w mean(x x) - mean(x y)), so dw'/dw = 1 - 2 a mean(x x)."""
    data = batch()
    w, a = 0.7, 0.05
    expected = []
    for sx, sy, qx, qy in zip(
        *(data[name][..., 0] for name in ("support_x", "support_y", "query_x", "query_y")), strict=True
    ):
        adapted = w - 2 * a * (w * np.mean(sx * sx) - np.mean(sx * sy))
        through = 1.0 if first_order else 1 - 2 * a * np.mean(sx * sx)
        expected.append(2 * (adapted * np.mean(qx * qx) - np.mean(qx * qy)) * through)
    model = Learner(Line(jnp.asarray(w)), a, 1, first_order)
    found = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, data, jax.random.key(0)).net.w
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-5)


@pytest.mark.sweep
def test_meta_gradient_through_several_steps_equals_finite_differences():
    data, model = jax.tree.map(jnp.asarray, batch()), learner()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = jax.jit(lambda params: loss_fn(eqx.combine(params, static), data, jax.random.key(0)))
    grads = jax.jit(jax.grad(loss))(params)
    leaves, treedef = jax.tree.flatten(grads)
    for i, grad in enumerate(leaves):  # along each leaf's own gradient, where the loss changes most
        size = float(jnp.linalg.norm(grad))
        direction = jax.tree.unflatten(treedef, [grad / size if j == i else 0 * g for j, g in enumerate(leaves)])
        up, down = (loss(jax.tree.map(lambda x, d, h=h: x + h * d, params, direction)) for h in (1e-2, -1e-2))
        np.testing.assert_allclose(size, (up - down) / 2e-2, rtol=1e-2)
    first_order = eqx.filter_jit(eqx.filter_grad(loss_fn))(learner(first_order=True), data, jax.random.key(0))
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(first_order), strict=True)
    assert max(float(jnp.abs(g - f).max() / jnp.abs(g).max()) for g, f in pairs) > 0.1


@pytest.mark.sweep
def test_values_and_meta_gradients_do_not_depend_on_the_mesh():
    """Compares the mesh (data=2, fsdp=2, model=2) with the plain function: one SGD step of rate 1 gives the gradient."""
    # 64 x 64 is the smallest weight that FSDP splits. At a rate of 0.05 this network overshoots, and each step doubles the
    # rounding difference between two meshes, from 1e-7 to 7e-5 after ten (in float64 from 2e-16 to 9e-14). At the paper's
    # rate of 0.01 it does not grow.
    tasks, model = list(TASKS.draw(8, 3, (0,))), learner(width=64, rate=0.01)
    data: Any = TASKS.collate_fn(tasks)
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model, data, jax.random.key(0))
    before = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    grads = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(grads, eqx.is_array))]
    plain = jax.jit(lambda: pred_fn(model, data, jax.random.key(0)))()

    deployer = redeqx.Deployer(0, n_model_shards=2, n_fsdp_shards=2, verbose=False)
    assert dict(deployer.mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "model": 2}
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(1.0), collate_fn=TASKS.collate_fn, loss_fn=loss_fn)
    assert trainer.eval_loss(tasks, 2) == pytest.approx(float(loss), rel=1e-5)
    outputs = trainer.get_default_predictor(pred_fn).predict(tasks, 2)
    for name in ("outputs", "errors"):
        np.testing.assert_allclose(np.stack([out[name] for out in outputs]), plain[name], rtol=1e-4, atol=1e-5)
    assert trainer.train(tasks, 2)["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert any(
        "model" in str(x.sharding.spec) and "fsdp" in str(x.sharding.spec)
        for x in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    )
    after = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    for old, new, grad in zip(before, after, grads, strict=True):
        np.testing.assert_allclose(old - np.asarray(new), grad, rtol=1e-4, atol=1e-5)


def test_predictions_match_gradient_descent_on_the_support_set():
    data, model = batch(n_tasks=1), learner()
    outputs = eqx.filter_jit(pred_fn)(model, data, jax.random.key(0))
    x, y, query_x, query_y = (data[name][0] for name in ("support_x", "support_y", "query_x", "query_y"))
    grad = eqx.filter_jit(eqx.filter_grad(lambda net: jnp.mean((jax.vmap(net)(x) - y) ** 2)))
    predict = eqx.filter_jit(lambda net: jax.vmap(net)(query_x))
    net = model.net
    for step in range(3):
        expected = np.asarray(predict(net))
        np.testing.assert_allclose(outputs["outputs"][0, step], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outputs["errors"][0, step], np.mean((expected - query_y) ** 2), rtol=1e-4)
        net = eqx.apply_updates(net, jax.tree.map(lambda g: -0.05 * g, grad(net)))


# --- tasks and scores ---------------------------------------------------------------------------------------------------


def test_sinusoids_follow_the_paper_and_differ_each_epoch():
    rows = TASKS.draw(2000, 3, (0, 0, 1))
    for column, (low, high) in {0: (0.1, 5.0), 1: (0, np.pi), 2: (-5, 5)}.items():
        assert low <= rows[:, column].min() < low + 0.02 * (high - low)
        assert high >= rows[:, column].max() > high - 0.02 * (high - low)
    data = TASKS.collate_fn(list(rows))
    assert data["support_x"].shape == (2000, 4, 1) and data["query_y"].shape == (2000, 3, 1)
    np.testing.assert_allclose(data["query_y"][7, 1, 0], rows[7, 0] * np.sin(rows[7, 7] - rows[7, 1]), rtol=1e-5)
    np.testing.assert_array_equal(rows, TASKS.draw(2000, 3, (0, 0, 1)))
    assert not (rows == TASKS.draw(2000, 3, (0, 0, 2))).any()


def test_omniglot_parts_share_no_character_and_only_training_rotates_them(tmp_path):
    parts = omniglot(write_characters(tmp_path, n_characters=20, n_drawings=6), n_ways=3, n_shots=2, n_query=3)
    assert [len(part.classes) for part in parts] == [4 * 12, 4, 4]
    characters = [{int(image) % 120 // 6 for drawn in part.classes for image in drawn} for part in parts]
    assert sum(map(len, characters)) == 20 and len(set.union(*characters)) == 20
    assert all(image < 120 for part in parts[1:] for drawn in part.classes for image in drawn)
    train = parts[0]
    np.testing.assert_array_equal(train.images[120:240], np.rot90(train.images[:120], axes=(1, 2)))
    tasks = train.draw(5, 3, (0,))
    assert tasks.shape == (5, 3, 5) and all(len(set(row)) == 5 for task in tasks for row in task)
    data = train.collate_fn(list(tasks))
    assert data["support_x"].shape == (5, 6, 1, SIZE, SIZE) and data["query_x"].shape == (5, 9, 1, SIZE, SIZE)
    np.testing.assert_array_equal(data["support_y"][0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(data["query_x"][4, 3, 0] * 255, train.images[tasks[4, 1, 2]], rtol=1e-5)


def test_zip_reads_like_its_folder(tmp_path):
    folder = write_characters(tmp_path / "characters", n_characters=6, n_drawings=3)
    with zipfile.ZipFile(tmp_path / "characters.zip", "w") as archive:
        for file in folder.rglob("*.png"):
            archive.write(file, file.relative_to(tmp_path))
    one, other = (omniglot(path, 2, 1, 1)[0] for path in (folder, tmp_path / "characters.zip"))
    np.testing.assert_array_equal(one.images, other.images)
    np.testing.assert_array_equal(one.classes, other.classes)


@pytest.mark.parametrize("size", [7, 8])
def test_convolve_matches_conv2d(size):
    conv = eqx.nn.Conv2d(2, 5, 3, stride=2, padding=1, use_bias=False, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, size, size))
    np.testing.assert_allclose(eqx.filter_jit(convolve)(conv, x), eqx.filter_jit(conv)(x), rtol=1e-4, atol=1e-5)


def test_scores_are_task_means_with_confidence_intervals():
    errors = np.random.default_rng(0).normal(3.0, 2.0, (10_000, 11))
    mean, half = interval(errors)
    assert mean[0] == pytest.approx(3.0, abs=0.1) and half[0] == pytest.approx(1.96 * 2 / 100, rel=0.05)
    assert metric_fn(errors, [{"errors": row} for row in errors]) == {"error": pytest.approx(mean[AFTER])}


# --- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_tiny_run_learns_sinusoids(tmp_path):
    sizes = (
        "--tasks-per-epoch",
        4800,
        "--n-epochs",
        2,
        "--batch-size",
        64,
        "--n-validation-tasks",
        64,
        "--n-test-tasks",
        128,
    )
    out = run_example("meta_learning", *sizes, "--inner-rate", 0.03, "--learning-rate", 0.02, workdir=tmp_path)
    (scores,) = [line for line in out.metrics if "test_ratio" in line]
    assert scores["test_error_after"] < 0.6 * scores["test_error_before"]
    assert scores["test_ratio"] == pytest.approx(scores["test_error_after"] / scores["test_error_before"])
    assert scores["test_error_after"] < 0.8 * scores["test_pretrained_error_after"]
    losses = out.series("loss")
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])
    assert (tmp_path / "errors.png").stat().st_size > 20_000
    best = f"ckpts/step_{scores['step']:08}"
    assert best in out.output and (tmp_path / best / "model.safetensors").is_file()


@pytest.mark.sweep
def test_tiny_run_learns_characters(tmp_path):
    folder = write_characters(tmp_path / "characters", n_characters=9, n_drawings=4)
    sizes = ("--n-ways", 3, "--n-query", 2, "--n-validation-tasks", 8, "--n-test-tasks", 40, "--width", 8)
    run = ("--tasks-per-epoch", 160, "--n-epochs", 2, "--batch-size", 8, "--learning-rate", 0.01)
    out = run_example("meta_learning", "--data", folder, *sizes, *run, workdir=tmp_path)
    (scores,) = [line for line in out.metrics if "test_accuracy" in line]
    assert scores["test_accuracy"] > 0.5  # chance is one third; with 240 drawings one standard deviation is 0.03
    assert scores["test_accuracy"] == pytest.approx(1 - scores["test_error_after"])
    assert (tmp_path / "errors.png").is_file()


# --- bad input ----------------------------------------------------------------------------------------------------------


def test_folder_without_characters_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"`{tmp_path}`: expected at least 15 characters, 5 each.*got 0\. Pass"):
        main(Args(data=tmp_path, workdir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_too_few_characters_for_three_parts_are_refused(tmp_path):
    folder = write_characters(tmp_path, n_characters=8, n_drawings=2)
    with pytest.raises(ValueError, match=r"expected at least 9 characters.*got 8\. .*lower --n-ways"):
        omniglot(folder, n_ways=3, n_shots=1, n_query=1)


def test_too_few_drawings_for_a_task_are_refused(tmp_path):
    folder = write_characters(tmp_path, n_characters=6, n_drawings=3)
    (folder / "Alphabet1/character01/00.png").unlink()
    message = r"character 'Alphabet1/character01': expected at least 1 drawings to adapt on \+ 2 queries, got 2\."
    with pytest.raises(ValueError, match=message):
        omniglot(folder, n_ways=2, n_shots=1, n_query=2)


@pytest.mark.parametrize(("name", "found"), [("characters.zip", "a file of another kind"), ("none.zip", "none")])
def test_path_that_is_neither_folder_nor_zip_is_refused(tmp_path, name, found):
    (tmp_path / "characters.zip").write_text("not a zip")
    with pytest.raises(ValueError, match=rf"`{tmp_path / name}`: expected a folder or a .zip of .*, got {found}\."):
        omniglot(tmp_path / name, 5, 1, 1)


def test_file_that_is_not_an_image_is_refused(tmp_path):
    (tmp_path / "Alphabet/character01").mkdir(parents=True)
    (tmp_path / "Alphabet/character01/01.png").write_text("not an image")
    with pytest.raises(ValueError, match=r"Alphabet/character01/01.png`: expected an image, got a file that"):
        omniglot(tmp_path, 5, 1, 1)


def test_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"`--n-shots`: expected at least 1, got 0\."):
        filled(Args(n_shots=0))
    assert filled(Args()).n_shots == 10 and filled(Args(n_shots=3)).n_shots == 3
