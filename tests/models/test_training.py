"""Every family trains on a mesh of three axes in 64 bits, to the numbers of one device in 32 bits."""

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
# What they are made of, others here have too: layers of an encoder, a decoder, experts, images, cross attention.
LEFT_OUT = ("bert-classes", "llama", "roberta-mlm", "distilbert", "clip", "vit", "mixtral", "opt", "unet")
LEFT_OUT += ("bart", "gemma3", "gptj", "siglip", "vision-encoder-decoder", "minimax-m2", "mistral4", "granite-4")
LEFT_OUT += ("qwen3-next", "lfm2-moe", "bamba")  # `promises/test_sequence.py` has their mixers
# A decoder and an encoder-decoder are evaluated too: what an evaluation adds is the same for all.
EVALUATED = ("gpt2", "t5")


class Log:
    def __init__(self):
        self.losses, self.evaluated = [], []

    def log(self, metrics, step):
        for name, losses in (("loss", self.losses), ("eval_loss", self.evaluated)):
            losses += [metrics[name]] if name in metrics else []


def collate_fn(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def fit_in_64_bits(training, model):
    """The model is in float32, as a folder has it."""
    log = Log()
    deployer = redeqx.Deployer(0, 2, 2, verbose=False, loggers=[log])
    jax.config.update("jax_enable_x64", True)
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(training.learning_rate, momentum=0.9),
        collate_fn=collate_fn,
        loss_fn=training.loss_fn,
    )
    rows = len(training.examples) // deployer.n_batch_shards
    trainer.fit(training.examples, rows, 6, eval_examples=training.examples if training.name in EVALUATED else None)
    jax.config.update("jax_enable_x64", False)
    return trainer, log.losses, log.evaluated


def fit_by_hand(training, model):
    """Returns the weights after six steps on one device in 32 bits, without redeqx; the loss before each, and after all."""
    batch, optimizer = collate_fn(training.examples), optax.sgd(training.learning_rate, momentum=0.9)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def mean(params, batch):
        loss = training.loss_fn(eqx.combine(params, static), batch, jax.random.key(0))
        return loss.total / loss.weight if isinstance(loss, redeqx.Loss) else loss

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(mean)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(6):
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return params, [*losses, step(params, state, batch)[2]]


@pytest.mark.parametrize("training", [pytest.param(x, id=x.name) for x in TRAININGS if x.name not in LEFT_OUT])
@pytest.mark.sweep
@pytest.mark.timeout(900)  # the SDXL and the VAE take minutes on a loaded machine
def test_trains_to_the_same_numbers_on_a_mesh_and_in_64_bits(training, x64):
    jax.config.update("jax_enable_x64", False)
    model = training.make(jax.random.key(0))  # one operation at a time: a program of all would take longer to compile
    expected, expected_losses = fit_by_hand(training, model)
    trainer, losses, evaluated = fit_in_64_bits(training, model)
    assert dict(trainer.deployer.mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "model": 2}
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, expected_losses[:6], rtol=1e-5)
    np.testing.assert_allclose(evaluated, expected_losses[1:] if training.name in EVALUATED else [], rtol=1e-5)
    found, wanted = (named_leaves(eqx.filter(model, eqx.is_inexact_array)) for model in (trainer.model, expected))
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in training.zero_gradient):
            error = np.linalg.norm(np.asarray(found[name]) - np.asarray(leaf))
            assert error <= 1e-5 * np.linalg.norm(leaf) + 1e-7, name


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
@pytest.mark.sweep
def test_the_plan_splits_every_large_leaf(training):
    """Large for such a model: a layer's matrix, with at least 2 % of the parameters."""
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    model = eqx.filter_eval_shape(training.make, jax.random.key(0))
    plan = deployer.plan(model, training.loss_fn, collate_fn(training.examples))
    assert not plan.warnings
    for name, leaf in plan.leaves.items():
        # No data meets the query of a learned probe, and here it is too small to be stored split.
        is_of_probe = name.endswith("pooler.attention.query.weight")
        if np.prod(leaf.shape) >= max(0.02 * plan.n_parameters, 1024) and not is_of_probe:
            assert leaf.n_shards > 1, f"{name} {leaf.shape}: {leaf.reason}"
