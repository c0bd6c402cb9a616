"""Compares gradients of every family, and outputs on a mesh, with those that `test_parity.py` compares with."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import equinox as eqx
import jax

import redeqx
from redeqx.models import from_pretrained
from tests.models.families._case import assert_equal, call_rows, collect, gradients, torch_folder

# torch and its libraries emit deprecation warnings.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
CASES = collect("CASES")
# A mesh changes what layers send, not their options. `test_training.py` trains the other families on one.
ON_A_MESH = ("bart", "bert-odd-head-size", "bert-classes", "clip", "distilbert", "gpt2-cross-attention", "gptj", "llama")
ON_A_MESH += ("llama-single-kv-head", "mistral", "opt", "roberta", "sd3-5", "siglip", "t5-v1.1", "vit")
ON_A_MESH += ("vision-encoder-decoder",)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_A_MESH], ids=lambda case: case.name)
def test_outputs_on_a_mesh(case, folder_of):
    folder, _, expected = folder_of(case)
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    model, _ = from_pretrained(folder, deployer=deployer)
    for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        assert leaf.sharding.mesh == deployer.mesh
    examples = [{name: value[i] for name, value in case.inputs.items()} for i in range(len(expected))]
    predictor = redeqx.Predictor(
        deployer,
        model=model,
        collate_fn=lambda rows: {name: np.stack([row[name] for row in rows]) for name in rows[0]},
        pred_fn=lambda model, batch, key: call_rows(case, model, batch),
    )
    assert_equal(case, np.stack(predictor.predict(examples, 1)), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.gradients], ids=lambda case: case.name)
def test_gradients(case, folder_of, tmp_path):
    """For every tensor on disk."""
    folder, _, _ = folder_of(case)
    model, config = from_pretrained(folder)
    found = gradients(
        case, torch_folder(case, tmp_path / "torch"), model, type(model).weight_map(config), tmp_path / "found"
    )
    scale = max(np.abs(theirs).max() for theirs, _ in found.values())
    for name, (theirs, ours) in found.items():
        # A gradient that is zero in exact arithmetic is only rounding error.
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs) + 1e-6 * scale, name
