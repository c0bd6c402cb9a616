"""Compares outputs and folders of every family with `transformers` and `diffusers`; needs the `parity` extra."""

import fnmatch

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file

from redeqx.models import from_pretrained, save_pretrained
from tests.models.families._case import assert_equal, collect, outputs, weights_file

# torch and its libraries emit deprecation warnings.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
CASES = collect("CASES")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs(case, folder_of):
    folder, _, expected = folder_of(case)
    model, config = from_pretrained(folder)
    assert model.config == config
    assert_equal(case, outputs(case, model), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip(case, folder_of, tmp_path):
    import torch

    folder, module, expected = folder_of(case)
    model, config = from_pretrained(folder)
    save_pretrained(model, config, tmp_path)
    theirs, ours = load_file(weights_file(folder)), load_file(weights_file(tmp_path))
    assert ours.keys() <= theirs.keys()
    weight_map = type(model).weight_map(config)
    for name in theirs.keys() - ours.keys():  # a second copy of a tied tensor, or not a weight
        assert name in weight_map.copies or any(fnmatch.fnmatchcase(name, pattern) for pattern in weight_map.ignored), name
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        found, wanted = (np.ravel(x).view(np.uint8) for x in (tensor, theirs[name]))
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    again, info = type(module).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    held = again.state_dict()
    assert held.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(held[name], tensor), name
    with torch.no_grad():  # torch's rounding depends on the alignment of its arrays, though the weights have the same bits
        np.testing.assert_allclose(case.run(again.eval(), case.inputs).numpy(), expected, rtol=1e-6, atol=1e-6)


def test_cases_have_unique_names():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
