"""Every family generates in JAX's 64-bit mode, with the numbers of 32-bit mode; `test_training.py` trains them in it."""

import json

import numpy as np
import pytest

from redeqx.models import from_pretrained
from tests.models.families import _generation
from tests.models.families._case import fill, read_golden

pytestmark = pytest.mark.usefixtures("x64")


# A search for each family, and both for a decoder and for an encoder-decoder.
QUICK = [("gpt2-padded", "greedy"), ("t5-padded", "beams")]
COVERING = {(name, ("greedy", "beams")[i % 2]) for i, name in enumerate(_generation.CASES)}
COVERING |= {(name, search) for name, _ in QUICK for search in ("greedy", "beams")}


@pytest.mark.parametrize(
    ("name", "search"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep) for case in sorted(COVERING)]
)
def test_generates_the_tokens_of_transformers(name, search, tmp_path):
    case = _generation.CASES[name]
    record = read_golden(case)
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    fill(tmp_path / record["file"], record["tensors"])
    model, _ = from_pretrained(tmp_path)
    found = _generation.ours(model, case, search)
    np.testing.assert_array_equal(found, _generation.read_golden(name)[search])
