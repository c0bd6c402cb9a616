"""The same data, seed and global batch give the same numbers on every mesh and for any number of micro-batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests._tree import named_leaves

VOCAB, SEQ, BATCH = 64, 8, 16
EXAMPLES = [row.astype(np.int32) for row in np.random.default_rng(0).integers(0, VOCAB, (3 * BATCH, SEQ + 1))]
REST = 5  # examples to leave out, so that the last step is smaller and does not divide over the devices

# Softmax is invariant to a shift of all scores of a query, so the gradients of these are zero in exact arithmetic. Their
# computed gradients are rounding errors: of the same size on every mesh, but with different values.
ZERO_GRADIENT = ("stack.blocks.attention.key.bias",)


def collate_fn(examples):
    return {"ids": np.stack(examples)}


def loss_fn(model, batch, key):
    """A mean over tokens, with a different number of weighted tokens in each row."""
    inputs, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(inputs, jax.random.split(key, len(inputs)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    counts = labels < VOCAB // 2
    return redeqx.Loss((losses * counts).sum(), counts.sum(), {"ones": counts.sum(), "counted": (counts.sum(), counts.size)})


def make_trainer(n_model, n_fsdp, optimizer, *, accumulate=1, dropout=0.1, **kwargs):
    deployer = redeqx.Deployer(3, n_model, n_fsdp, verbose=False, **kwargs)
    config = GPT2Config(
        VOCAB, SEQ, d_model=32, n_layers=1, n_heads=8, residual_dropout=dropout, embedding_dropout=0.0, attention_dropout=0.0
    )
    model = deployer.init(lambda: GPT2(config, key=jax.random.key(0)))
    return redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optimizer,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
    )


def leaves(trainer):
    arrays = eqx.filter(trainer.model, eqx.is_array)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(arrays).items()}


def assert_close(found, expected):
    assert set(found) == set(expected)
    for name, leaf in expected.items():
        if name not in ZERO_GRADIENT:
            error = np.linalg.norm(found[name] - leaf) / np.linalg.norm(leaf)
            assert error < 1e-5, f"{name}: {error}"


def train(n_model, n_fsdp, optimizer, *, accumulate=1, dropout=0.1, examples=EXAMPLES):
    logged = Log()
    trainer = make_trainer(n_model, n_fsdp, optimizer, accumulate=accumulate, dropout=dropout, loggers=[logged])
    trainer.fit(examples, BATCH // trainer.deployer.n_batch_shards // accumulate, 1)
    return trainer, logged.losses


class Log:
    def __init__(self):
        self.losses, self.counted = [], []

    def log(self, metrics, step):
        self.losses.append(metrics["loss"])
        self.counted.append(metrics["counted"])


@pytest.fixture(scope="module")
def reference():
    trainer, losses = train(1, 1, optax.sgd(0.1, momentum=0.9))
    return leaves(trainer), losses


@pytest.mark.parametrize(
    ("n_model", "n_fsdp"),
    [(2, 2), pytest.param(2, 4, marks=pytest.mark.sweep)],
)
def test_parameters_do_not_depend_on_the_mesh(n_model, n_fsdp, reference):
    trainer, losses = train(n_model, n_fsdp, optax.sgd(0.1, momentum=0.9))
    assert_close(leaves(trainer), reference[0])
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)


@pytest.fixture(scope="module")
def cut_reference():
    trainer, losses = train(1, 1, optax.sgd(0.1, momentum=0.9), dropout=0.0, examples=EXAMPLES[:-REST])
    return leaves(trainer), losses


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("n_model", "n_fsdp", "accumulate"),
    [(1, 8, 1), (4, 2, 2), (8, 1, 4)],
)
def test_parameters_do_not_depend_on_mesh_and_accumulation(n_model, n_fsdp, accumulate, cut_reference):
    """With a smaller last step."""
    trainer, losses = train(
        n_model, n_fsdp, optax.sgd(0.1, momentum=0.9), accumulate=accumulate, dropout=0.0, examples=EXAMPLES[:-REST]
    )
    assert_close(leaves(trainer), cut_reference[0])
    np.testing.assert_allclose(losses, cut_reference[1], rtol=1e-5)


@pytest.mark.sweep
def test_metrics_keep_their_names_for_any_number_of_micro_batches():
    """A step with one micro-batch and a last step with several are two programs. Their metrics have the same order."""
    logged = Log()
    trainer = make_trainer(1, 2, optax.sgd(0.0), loggers=[logged])
    trainer.train(EXAMPLES[:-REST], 4)
    for step, counted in enumerate(logged.counted):
        labels = np.stack(EXAMPLES[:-REST][BATCH * 2 * step : BATCH * 2 * (step + 1)])[:, 1:]
        assert counted == pytest.approx((labels < VOCAB // 2).mean(), rel=1e-6)


@pytest.mark.sweep
def test_evaluation_does_not_depend_on_the_batch_size():
    """Also with a remainder, and with fewer examples than one batch. The loss is a mean over tokens, not a mean of means."""
    trainer = make_trainer(2, 2, optax.sgd(0.1))
    losses = [trainer.eval_loss(EXAMPLES[:13], size) for size in (1, 2, 3, 8)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    on_host = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if eqx.is_array(x) else x, trainer.model)
    model = eqx.nn.inference_mode(on_host)
    whole = loss_fn(model, collate_fn(EXAMPLES[:13]), jax.random.key(0))
    np.testing.assert_allclose(losses[0], float(whole.total / whole.weight), rtol=1e-5)


@pytest.mark.sweep
def test_metrics_of_a_loss_are_summed_like_it():
    trainer = make_trainer(1, 2, optax.sgd(0.1))
    counted = np.mean([label < VOCAB // 2 for row in EXAMPLES for label in row[1:]])
    assert trainer.eval_metrics(EXAMPLES, 3)["counted"] == pytest.approx(counted, rel=1e-6)
