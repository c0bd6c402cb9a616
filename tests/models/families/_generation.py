"""Test cases of `generate`: searches on the families' cases, and the tokens that `transformers` generates."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.families._case import Case, collect

NEW, PAD = 7, 0
ENDS = (2, 5, 17, 33)  # several, so that some texts end early

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[30], [2], [10, 11], [39, 7, 8], *([i, i + 3] for i in range(3, 40))],
    "begin_suppress_tokens": [*range(5, 20)],
    "suppress_tokens": [*range(40, 45)],
    "min_new_tokens": 3,
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy-penalties": PENALTIES,
    "beams-penalties": {**PENALTIES, "num_beams": 3, "num_return_sequences": 2, "renormalize_logits": True},
    "greedy-forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 5, "begin_suppress_tokens": [*range(30)]},
    "beams-source": {"num_beams": 2, "encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 0.5},
    "greedy-source": {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 2.0},
    "beams": {"num_beams": 3},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": True},
    "beams-never": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never"},
    "beams-short": {"num_beams": 2, "length_penalty": 0.5, "early_stopping": "never"},
}
# One case with padding for every family that generates.
CASES = {case.name: case for case in collect("CASES") if case.generates}


def searches(case: Case) -> list[str]:
    """Returns the searches of a case. An image has no tokens that the text could repeat."""
    return [name for name in SEARCHES if "pixels" not in case.inputs or not name.endswith("source")]


def ours(model: Any, case: Case, name: str) -> np.ndarray:
    """Returns our tokens, `[batch, sequences, NEW]`."""
    from redeqx.models import generate

    prompt, mask = _prompt(case, name)
    options = {"num_return_sequences": 1, **SEARCHES[name]}
    return np.asarray(generate(model, prompt, mask=mask, max_new_tokens=NEW, eos_token_id=ENDS, pad_token_id=PAD, **options))


def theirs(module: Any, case: Case, name: str) -> np.ndarray:
    """Returns the tokens of the torch module. Tokens after the end of a text are replaced by padding."""
    import torch

    prompt, mask = _prompt(case, name)
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
        **SEARCHES[name],
    ).numpy()
    tokens = tokens[:, 1 if module.config.is_encoder_decoder else prompt.shape[1] :]
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    for row in tokens:
        (ends,) = np.nonzero(np.isin(row, ENDS))
        row[ends[0] + 1 if len(ends) else NEW :] = PAD
    return tokens.reshape(len(prompt), -1, NEW)


def _prompt(case: Case, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the inputs and the mask. In transformers, padding of a source counts as tokens that must not be repeated."""
    prompt = case.inputs["pixels" if "pixels" in case.inputs else "ids"]
    return prompt, None if name.endswith("source") else case.inputs.get("mask")


def golden_path(name: str) -> Path:
    return Path(__file__).parents[1] / "golden" / "generation" / f"{name}.json"


def read_golden(name: str) -> dict[str, Any]:
    return {search: np.array(tokens) for search, tokens in json.loads(golden_path(name).read_text()).items()}
