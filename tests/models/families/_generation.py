"""Test cases of `generate`: searches on the families' cases, and the tokens that `transformers` generates."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.families._case import Case, collect

NEW, PAD = 7, 0
ENDS = (2, 5, 17, 33)  # several, so that some texts end early

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"n_beams": 3},
    "beams-returned": {"n_beams": 4, "n_return": 3, "length_penalty": 2.0, "early_stopping": True},
    "beams-never": {"n_beams": 3, "length_penalty": -1.0, "early_stopping": "never"},
    "beams-short": {"n_beams": 2, "length_penalty": 0.5, "early_stopping": "never"},
}
# One case with padding for every family that generates.
CASES = {case.name: case for case in collect("CASES") if case.generates}


def ours(model: Any, case: Case, search: dict[str, Any]) -> np.ndarray:
    """Returns our tokens, `[batch, sequences, NEW]`."""
    from redeqx.models import generate

    prompt, mask = _prompt(case)
    options = {"n_return": 1, **search}
    return np.asarray(generate(model, prompt, mask=mask, max_new_tokens=NEW, eos_token_id=ENDS, pad_token_id=PAD, **options))


def theirs(module: Any, case: Case, search: dict[str, Any]) -> np.ndarray:
    """Returns the tokens of the torch module. Tokens after the end of a text are replaced by padding."""
    import torch

    prompt, mask = _prompt(case)
    options = {
        "num_beams": search.get("n_beams", 1),
        "num_return_sequences": search.get("n_return", 1),
        "length_penalty": search.get("length_penalty", 1.0),
        "early_stopping": search.get("early_stopping", False),
    }
    given = {}
    if "pixels" not in case.inputs:  # without a mask transformers masks tokens equal to the padding id
        given["attention_mask"] = torch.tensor(np.ones_like(prompt) if mask is None else mask).long()
    tokens = module.generate(
        torch.tensor(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=list(ENDS),
        pad_token_id=PAD,
        **given,
        **options,
    ).numpy()
    tokens = tokens[:, 1 if module.config.is_encoder_decoder else prompt.shape[1] :]
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    for row in tokens:
        (ends,) = np.nonzero(np.isin(row, ENDS))
        row[ends[0] + 1 if len(ends) else NEW :] = PAD
    return tokens.reshape(len(prompt), -1, NEW)


def _prompt(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    prompt = case.inputs["pixels" if "pixels" in case.inputs else "ids"]
    return prompt, case.inputs.get("mask")


def golden_path(name: str) -> Path:
    return Path(__file__).parents[1] / "golden" / "generation" / f"{name}.json"


def read_golden(name: str) -> dict[str, Any]:
    return {search: np.array(tokens) for search, tokens in json.loads(golden_path(name).read_text()).items()}
