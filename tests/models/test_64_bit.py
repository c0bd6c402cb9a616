"""Every family trains, evaluates and generates in JAX's 64-bit mode, with the numbers of 32-bit mode."""

import json

import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import from_pretrained
from tests.models.families import _generation
from tests.models.families._case import collect, fill, read_golden

TRAININGS = collect("TRAININGS")
pytestmark = pytest.mark.usefixtures("x64")


def marked(name, quick):
    return pytest.param(name, marks=[] if name in quick else [pytest.mark.sweep])


@pytest.mark.parametrize("search", ["greedy", "beams"])
@pytest.mark.parametrize("name", [marked(name, ["gpt2-padded", "t5-padded"]) for name in _generation.CASES])
def test_generates_the_tokens_of_transformers(name, search, tmp_path):
    case = _generation.CASES[name]
    record = read_golden(case)
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    fill(tmp_path / record["file"], record["tensors"])
    model, _ = from_pretrained(tmp_path)
    found = _generation.ours(model, case, _generation.SEARCHES[search])
    np.testing.assert_array_equal(found, _generation.read_golden(name)[search])


def trained(training, model):
    trainer = redeqx.Trainer(
        redeqx.Deployer(0, 2, 2, verbose=False),
        model=model,
        optimizer=optax.sgd(training.learning_rate),
        collate_fn=lambda rows: {name: np.stack([row[name] for row in rows]) for name in rows[0]},
        loss_fn=training.loss_fn,
    )
    n = len(training.examples)
    return [trainer.update(training.examples)["loss"], trainer.eval_loss(training.examples, batch_size=n)]


@pytest.mark.parametrize("training", [pytest.param(each, id=each.name) for each in TRAININGS])
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_trains_and_evaluates(training):
    """A model in float32, as a folder has it. With another precision a random model would have other weights."""
    jax.config.update("jax_enable_x64", False)
    model = training.make(jax.random.key(0))
    expected = trained(training, model)
    jax.config.update("jax_enable_x64", True)
    np.testing.assert_allclose(trained(training, model), expected, rtol=1e-5)
