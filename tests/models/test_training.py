"""Every family trains with `Trainer.fit` on a mesh with all three axes, to the same numbers as on one device."""

import fnmatch

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from tests._tree import named_leaves
from tests.models.families._case import collect

TRAININGS = collect("TRAININGS")
# Each takes ten seconds or more, most of it compilation.
SLOW = (
    "bart", "bert-classes", "bert-mlm", "clip", "gptj", "llama", "opt", "opt-350m", "qwen3", "t5", "unet", "vae",
    "vision-encoder-decoder", "vit"
)  # fmt: skip


class Log:
    def __init__(self):
        self.losses = []

    def log(self, metrics, step):
        self.losses.append(metrics["loss"])


def fit(training, n_model_shards, n_fsdp_shards):
    log = Log()
    deployer = redeqx.Deployer(0, n_model_shards, n_fsdp_shards, verbose=False, loggers=[log])
    model = deployer.init(lambda: training.make(jax.random.key(0)))
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(training.learning_rate, momentum=0.9),
        collate_fn=lambda rows: {name: np.stack([row[name] for row in rows]) for name in rows[0]},
        loss_fn=training.loss_fn,
    )
    trainer.fit(training.examples, len(training.examples) // deployer.n_batch_shards, 6)
    return trainer, log.losses


def marked(training):
    return pytest.param(training, id=training.name, marks=[pytest.mark.sweep] if training.name in SLOW else [])


@pytest.mark.parametrize("training", [marked(training) for training in TRAININGS])
@pytest.mark.sweep
@pytest.mark.timeout(900)  # the UNet and the VAE take minutes on a loaded machine
def test_trains_to_the_same_numbers_on_every_mesh(training):
    trainer, losses = fit(training, 2, 2)
    assert dict(trainer.deployer.mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "model": 2}
    assert losses[-1] < 0.9 * losses[0]

    single, expected = fit(training, 1, 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found, wanted = (named_leaves(eqx.filter(t.model, eqx.is_array)) for t in (trainer, single))
    for name, leaf in wanted.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in training.zero_gradient):
            error = np.linalg.norm(np.asarray(found[name]) - np.asarray(leaf))
            assert error <= 1e-5 * np.linalg.norm(leaf) + 1e-7, name


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_the_plan_splits_every_large_leaf(training):
    """Large for such a model: a layer's matrix, with at least 2 % of the parameters."""
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    plan = deployer.plan(eqx.filter_eval_shape(training.make, jax.random.key(0)))
    assert not plan.warnings
    for name, leaf in plan.leaves.items():
        if np.prod(leaf.shape) >= max(0.02 * plan.n_parameters, 1024):
            assert leaf.n_shards > 1, f"{name} {leaf.shape}: {leaf.reason}"
