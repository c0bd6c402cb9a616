"""Compares every family with stored outputs of `transformers` and `diffusers`, with the weights of `fill`."""

import json
import re

import numpy as np
import pytest

from redeqx.models import from_pretrained
from tests.models.families._case import assert_equal, collect, fill, golden_path, outputs, read_golden

CASES = collect("CASES")


# A case of each family. The parity tests compare every option of a config with torch itself.
FIRST = re.compile(r"[a-z0-9]+|vision-encoder-decoder")


SLOW = ("unet", "vae", "clip", "siglip", "llava", "vision-encoder-decoder", "sd3", "sdxl")
ALIKE = ("distilbert", "roberta", "qwen2", "gptj", "opt")  # tables of an encoder or a decoder of which others are quick


def marked(case):
    return pytest.param(case, id=case.name, marks=pytest.mark.sweep if case.name in (*SLOW, *ALIKE) else [])


@pytest.mark.parametrize("case", [marked(case) for case in CASES if FIRST.fullmatch(case.name)])
def test_outputs(case, tmp_path):
    golden = read_golden(case)
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    fill(tmp_path / golden["file"], golden["tensors"])
    model, _ = from_pretrained(tmp_path)
    assert_equal(case, outputs(case, model), np.array(golden["outputs"]).reshape(golden["shape"]))


def test_every_golden_file_has_a_case():
    folder = golden_path(CASES[0]).parent
    assert {path.stem for path in folder.glob("*.json")} == {case.name for case in CASES}
