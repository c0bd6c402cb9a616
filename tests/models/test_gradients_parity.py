"""Compares gradients of every family, and outputs on a mesh, with those that `test_parity.py` compares with."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import equinox as eqx
import jax
from safetensors.numpy import load_file

import redeqx
from redeqx.models import from_pretrained
from redeqx.models.hf._save import to_disk
from tests.models.families._case import assert_equal, call_rows, collect, torch_folder, weights_file

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
    """Gradients of a loss with a different weight for each output, for every tensor on disk."""
    import torch

    folder, _, expected = folder_of(case)
    module = torch_folder(case, tmp_path / "torch")
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    module.zero_grad()
    (case.run(module, case.inputs) * torch.tensor(weights)).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in module.buffers():  # they are not trained; our leaves for them have no gradient
            buffer.zero_()
    # Saved as if they were weights, since only files have common names.
    module.save_pretrained(tmp_path / "gradients")
    theirs = load_file(weights_file(tmp_path / "gradients"))

    model, config = from_pretrained(folder)
    model = eqx.nn.inference_mode(model)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return (call_rows(case, model, case.inputs) * weights).sum()

    grads = gradient(model)
    ours = to_disk(eqx.combine(grads, model), type(model).weight_map(config))
    scale = max(np.abs(tensor).max() for tensor in theirs.values())
    for name, tensor in ours.items():
        error = np.linalg.norm(np.asarray(tensor) - theirs[name])
        # A gradient that is zero in exact arithmetic is only rounding error.
        assert error < 1e-3 * np.linalg.norm(theirs[name]) + 1e-6 * scale, name
