"""Federated learning: a round equals a plain loop over clients, on every mesh; and mistakes are named."""

import json
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from examples._images import digits
from examples.federated_learning.fedavg import client_of, cut_clients, draw_rounds, federated_gradient
from examples.federated_learning.main import Args, Classifier, check, collate_fn, loss_fn, loss_of
from redeqx.machine import make_mesh

from ._run import run_example

SIZES = (5, 9, 16, 12)  # images per client
LOCAL = {"epochs": 3, "batch_size": 4, "learning_rate": 0.3}


@pytest.fixture(scope="module")
def clients():
    train = digits()[0]
    starts = np.cumsum([0, *SIZES])
    return [client_of(train[start : start + n]) for start, n in zip(starts, SIZES, strict=False)]


def make_model():
    return Classifier(eqx.nn.MLP(64, 10, 8, 1, key=jax.random.key(3)))


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]


def train_client(model, images, labels, key, epochs, batch_size, learning_rate, n_rows):
    """Trains one client in plain loops over its own images."""

    @jax.jit
    @jax.grad
    def grad(params, images, labels):
        logits = jax.vmap(eqx.combine(params, static))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params, static = eqx.partition(model, eqx.is_array)
    for epoch_key in jax.random.split(key, epochs):
        order = np.argsort(np.asarray(jax.random.uniform(epoch_key, (n_rows,)))[: len(labels)])
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            params = jax.tree.map(lambda x, g: x - learning_rate * g, params, grad(params, images[rows], labels[rows]))
    return arrays(params)


def average_models(models):
    return [sum(n * x for n, x in zip(SIZES, leaves, strict=True)) / sum(SIZES) for leaves in zip(*models, strict=True)]


@pytest.mark.sweep
def test_unit_step_along_the_gradient_averages_the_client_models(clients):
    model, key = make_model(), jax.random.key(7)
    batch = jax.tree.map(jnp.asarray, collate_fn(clients, 16))
    loss, grads = eqx.filter_jit(partial(federated_gradient, loss_of, **LOCAL))(model, batch, key)
    keys = jax.random.split(key, len(clients))
    expected = average_models(
        [train_client(model, *own, k, **LOCAL, n_rows=16) for own, k in zip(clients, keys, strict=True)]
    )
    for before, grad, after in zip(arrays(model), arrays(grads), expected, strict=True):
        np.testing.assert_allclose(before - grad, after, rtol=1e-4, atol=1e-6)
    images, labels = (np.concatenate(x) for x in zip(*clients, strict=True))
    nats = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels)
    assert float(loss.total / loss.weight) == pytest.approx(float(nats.mean()), rel=1e-5)
    assert float(loss.weight) == sum(SIZES)


def make_trainer(shape, local):
    devices = jax.devices()[: int(np.prod(shape))]
    deployer = redeqx.Deployer(0, verbose=False)
    deployer._mesh = make_mesh(shape[2], shape[1], devices)
    return redeqx.Trainer(
        deployer, model=make_model(), optimizer=optax.sgd(1.0), collate_fn=partial(collate_fn, n_rows=16), loss_fn=loss_fn,
        grad_fn=partial(federated_gradient, loss_of, **local),
    )  # fmt: skip


@pytest.mark.sweep
def test_rounds_match_the_loop_on_two_meshes(clients):
    one, four = make_trainer((1, 1, 1), LOCAL), make_trainer((2, 1, 2), LOCAL)
    losses = [trainer.train(clients * 2, 4 // trainer.deployer.n_batch_shards)["loss"] for trainer in (one, four)]
    assert one.step == four.step == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(arrays(one.model), arrays(four.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    # With all images of a client in one batch, their order has no effect, so the loop needs no key of the Trainer.
    whole = {**LOCAL, "batch_size": 16}
    trainer = make_trainer((2, 1, 2), whole)
    trainer.train(clients, 2)
    expected = average_models([train_client(make_model(), *own, jax.random.key(0), **whole, n_rows=16) for own in clients])
    for found, wanted in zip(arrays(trainer.model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_each_image_goes_to_one_client_with_few_labels():
    train = digits()[0]
    clients = cut_clients(train, 20, 2, seed=1)
    assert len(clients) == 20
    pairs = [pair for images, labels in clients for pair in zip(images, labels.tolist(), strict=True)]

    def listed(pairs):
        return sorted((*image.ravel().tolist(), label) for image, label in pairs)

    assert listed(pairs) == listed(train)
    # A shard may contain two labels.
    assert max(len(set(labels.tolist())) for _, labels in clients) <= 4
    assert np.mean([len(set(labels.tolist())) for _, labels in clients]) < 3
    other = cut_clients(train, 20, 2, seed=2)
    assert [set(labels.tolist()) for _, labels in clients] != [set(labels.tolist()) for _, labels in other]


def test_round_draws_distinct_clients_and_depends_only_on_the_seed(clients):
    def drawn(seed):
        return [len(labels) for _, labels in draw_rounds(clients, 3, 10, seed)]

    assert drawn((0, 4)) == drawn((0, 4)) != drawn((0, 5))
    assert all(len(set(drawn((0, 4))[i : i + 3])) == 3 for i in range(0, 30, 3))
    assert set(drawn((0, 4))) == set(SIZES)


@pytest.mark.sweep
def test_learns_and_saves_picture_checkpoint_and_scores(tmp_path):
    run = run_example(
        "federated_learning", "--n-clients", 6, "--clients-per-round", 4, "--rounds-per-epoch", 5, "--n-epochs", 4,
        "--local-epochs", 2, "--hidden-size", 16, "--centralised-epochs", 3, workdir=tmp_path,
    )  # fmt: skip
    losses, accuracies = run.series("loss"), run.series("eval_accuracy")
    assert len(losses) == 20 and len(accuracies) == 4
    assert losses[0] == pytest.approx(np.log(10), abs=0.2)
    assert losses[-1] < 0.7 * losses[0]
    assert accuracies[-1] > 0.4
    assert run.metrics[-1]["test_accuracy"] > 0.4
    assert run.metrics[-1]["test_centralised_accuracy"] > 0.8
    assert (tmp_path / "federated.png").read_bytes().startswith(b"\x89PNG")
    for ckpts in (tmp_path / "ckpts", tmp_path / "centralised/ckpts"):
        assert (ckpts / json.loads((ckpts / "index.json").read_text())["argmax_accuracy"]).is_dir()
    assert "mesh data=2 x fsdp=1 x model=2" in " ".join(run.output.split())
    assert f"{run.metrics[-1]['test_accuracy']:.3f}  6 clients" in run.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Args(clients_per_round=21), r"`--clients-per-round`: expected 1 to the number of clients, 20, got 21\."),
        (Args(clients_per_round=0), r"`--clients-per-round`: expected 1 to the number of clients, 20, got 0\."),
        (Args(local_epochs=0), r"`--local-epochs`: expected at least 1, got 0\."),
        (Args(local_batch_size=0), r"`--local-batch-size`: expected at least 1, got 0\."),
        (Args(rounds_per_epoch=-1), r"`--rounds-per-epoch`: expected at least 1, got -1\."),
    ],
)
def test_invalid_round_settings_are_refused(args, message):
    check(Args())
    with pytest.raises(ValueError, match=message):
        check(args)


@pytest.mark.parametrize(("n_clients", "shards"), [(100, 20), (0, 2), (5, 0)])
def test_more_shards_than_images_are_refused(n_clients, shards):
    rule = r"`--n-clients`, `--shards-per-client`: expected 1 to 1257 shards in total"
    with pytest.raises(ValueError, match=rf"{rule}, .*, got {n_clients} x {shards} = {n_clients * shards}\."):
        cut_clients(digits()[0], n_clients, shards, seed=0)
