"""Compares a tiny folder of every family of the one decoder with `transformers`; needs the `parity` extra."""

import fnmatch
import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file

from redeqx.models import from_pretrained, generate, save_pretrained
from tests.models.families import _generation
from tests.models.families._case import assert_equal, torch_folder, weights_file
from tests.models.families._decoders import CASES, GOLDEN, HEADED

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
NEW, END = 8, 3


@pytest.mark.parametrize("case", [*CASES, *HEADED], ids=lambda case: case.name)
def test_outputs_tokens_and_folders(case, tmp_path):
    """With left padding: stored logits, and tokens with a cache, not of heads. A folder is written with the same
    bytes, and is loaded."""
    import torch

    module = torch_folder(case, tmp_path)
    model, config = from_pretrained(tmp_path)
    with torch.no_grad():
        expected = case.run(module, case.inputs).numpy()
    stored = json.loads((GOLDEN / f"{case.name}.json").read_text())  # with which `test_decoders.py` compares our outputs
    assert_equal(case, np.reshape(stored["outputs"], expected.shape), expected, atol=2e-5)

    ids, mask = case.inputs["ids"], case.inputs["mask"]
    if case in CASES:
        options = {"attention_mask": torch.tensor(mask).long(), "do_sample": False, "pad_token_id": 0, "eos_token_id": [END]}
        tokens = module.generate(torch.tensor(ids), max_new_tokens=NEW, **options).numpy()[:, ids.shape[1] :]
        tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])))
        found = generate(model, ids, mask=mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=END)
        np.testing.assert_array_equal(found, tokens)

    save_pretrained(model, config, tmp_path / "again")
    weight_map = type(model).weight_map(config)
    theirs = {weight_map.current(name): tensor for name, tensor in load_file(weights_file(tmp_path)).items()}
    ours = load_file(weights_file(tmp_path / "again"))
    unread = theirs.keys() - ours.keys()
    assert not [x for x in unread if not any(fnmatch.fnmatchcase(x, glob) for glob in weight_map.ignored)]
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)
    again, info = type(module).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        np.testing.assert_allclose(case.run(again.eval(), case.inputs).numpy(), expected, rtol=1e-6, atol=1e-6)


SCALED = ("gemma", "gemma2", "gemma3", "gemma4", "vaultgemma", "afmoe", "biogpt", "granite", "falcon-h1")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SCALED], ids=lambda case: case.name)
def test_embeddings_in_bfloat16(case, tmp_path):
    """A scale is rounded where transformers rounds it."""
    import torch

    module = torch_folder(case, tmp_path).bfloat16()
    layers = next(part for part in module.modules() if isinstance(part, torch.nn.ModuleList))
    seen = []

    def see(_, args, kwargs):
        seen.append((*args, *kwargs.values())[0])
        raise StopIteration

    layers[0].register_forward_pre_hook(see, with_kwargs=True)
    with torch.no_grad(), pytest.raises(StopIteration):
        module(torch.tensor(case.inputs["ids"][:1]).long())
    model, _ = from_pretrained(tmp_path, dtype="bfloat16")
    stacks = [name for name in ("first", "stack") if getattr(model, name) is not None]
    for name in stacks:
        model = eqx.tree_at(lambda m, name=name: getattr(m, name), model, lambda carry, *args, **kwargs: carry)
    found = eqx.tree_at(lambda m: m.norm, eqx.nn.inference_mode(model), None).hidden(jnp.asarray(case.inputs["ids"][0]))
    np.testing.assert_array_equal(np.asarray(found, np.float32), seen[0][0].float().numpy())


STATES = ("bamba", "falcon-h1", "granite-4-h", "jamba", "mamba2", "gpt-bigcode")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in STATES], ids=lambda case: case.name)
def test_beams_of_models_with_states(case, tmp_path):
    """Beams that are continued take the states along; and keys of one head for all queries."""
    module = torch_folder(case, tmp_path)
    searches = (_generation.ours, from_pretrained(tmp_path)[0]), (_generation.theirs, module)
    np.testing.assert_array_equal(*(run(found, case, "beams-returned") for run, found in searches))


EXACT = ("deepseek-v2", "deepseek-v3", "dots1", "ernie4-5-moe", "glm4-moe", "glm4-moe-lite", "nemotron-h", "lfm2-moe")
EXACT += ("solar-open", "exaone-moe", "afmoe")
ROUTED = (*EXACT, "mixtral", "qwen3-moe", "mistral4", "minimax-m2", "gpt-oss")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ROUTED], ids=lambda case: case.name)
def test_tensors_that_stay_float32_in_bfloat16(case, tmp_path):
    """As transformers keeps them. There the other routers round their logits too."""
    import torch

    module = torch_folder(case, tmp_path)
    theirs = type(module).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model, config = from_pretrained(tmp_path, dtype="bfloat16")
    save_pretrained(model, config, tmp_path / "ours")
    current, kept = type(model).weight_map(config).current, []
    for name in ("theirs", "ours"):
        tensors = load_file(weights_file(tmp_path / name))
        kept.append({current(name) for name, tensor in tensors.items() if tensor.dtype == np.float32})
    assert kept[0] == kept[1] and bool(kept[0]) == (case.name in EXACT)
