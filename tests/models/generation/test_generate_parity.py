"""Compares `generate` with that of `transformers`, token by token; needs the `parity` extra."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from redeqx.models import from_pretrained
from tests.models.families import _generation
from tests.models.families._case import torch_folder

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("name", _generation.CASES)
def test_generates_the_same_tokens(name, tmp_path):
    case = _generation.CASES[name]
    module = torch_folder(case, tmp_path)
    model, _ = from_pretrained(tmp_path)
    for search in _generation.searches(case):
        found, expected = _generation.ours(model, case, search), _generation.theirs(module, case, search)
        np.testing.assert_array_equal(found, expected, err_msg=search)
