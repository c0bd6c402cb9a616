"""Random options of `generate` on tiny models, against `transformers`: equal tokens and scores, or an error.

    python -m tests.models.families._random_generation 1000 [SEED] [NAME ...]

Options are arguments or keys of `generation_config.json`; searches are greedy, by beams, by sampling, with a draft or a
stream; prompts have any lengths, and transformers reads each of them alone, without padding. A random choice cannot be the
same: transformers draws our tokens, so that scores are compared, and both choose the best beams in place of random ones. As
`_random.py`, it is run by hand.
"""

import contextlib
import json
import random
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redeqx.models import from_pretrained, generate, stream
from tests.models.families import _generation
from tests.models.families._case import Case, torch_folder
from tests.models.families._decoders import CASES
from tests.models.families._random import run_draws

PAD = 0
ENDS = [(), (2,), (2, 5), (2, 5, 17, 33), (*range(2, 40, 3),)]
KINDS = ["greedy", "greedy", "beams", "beams", "sample", "beam-sample", "draft", "stream"]


def words(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1, 40) for _ in range(rng.choice([1, 1, 2, 2, 3]))] for _ in range(rng.choice([1, 5, 60]))]


def some(rng: random.Random) -> list[int]:
    return rng.sample(range(1, 41), rng.choice([1, 5, 30]))


# The values of each option, or a function that draws one.
OPTIONS: dict[str, Any] = {
    "min_new_tokens": [0, 1, 3, 5],
    "repetition_penalty": [0.5, 0.9, 1.0, 1.4, 3.0],
    "encoder_repetition_penalty": [0.5, 1.0, 1.7],
    "no_repeat_ngram_size": [0, 1, 2, 3, 20],
    "encoder_no_repeat_ngram_size": [0, 1, 2, 3, 20],
    "bad_words_ids": words,
    "suppress_tokens": some,
    "begin_suppress_tokens": some,
    "forced_bos_token_id": [7, 2],
    "forced_eos_token_id": [5, 2, [5, 9]],
    "renormalize_logits": [True, False],
}
OF_BEAMS: dict[str, Any] = {
    "length_penalty": [-1.0, 0.0, 0.5, 1.0, 2.5],
    "early_stopping": [True, False, "never"],
}
OF_SAMPLES: dict[str, Any] = {
    "temperature": [0.3, 1.0, 1.7],
    "top_k": [1, 2, 5, 30, 1000],
    "top_p": [0.05, 0.5, 0.9, 1.0],
    "min_p": [0.0, 0.05, 0.5],
    "typical_p": [0.1, 0.6, 0.95, 1.0],
    "epsilon_cutoff": [0.0, 0.01, 0.2],
    "eta_cutoff": [0.0, 0.01, 0.3],
}
# Keys of the file that are no arguments: lengths, and keys that are refused or change nothing.
OF_FILES: dict[str, Any] = {
    "max_length": [3, 20, 25],
    "min_length": [0, 2, 14],
    "sequence_bias": [[[[3], 4.0]], []],
    "exponential_decay_length_penalty": [[2, 1.5]],
    "remove_invalid_values": [True, False],
    "guidance_scale": [1, 1.5],
    "diversity_penalty": [0.0, 0.5],
    "num_beam_groups": [1, 2],
    "penalty_alpha": [0.0, 0.6],
    "use_cache": [True, False],
    "top_h": [0.4],
    "prompt_lookup_num_tokens": [3],
    "cache_implementation": ["static", "quantized"],
    "token_healing": [False],
    "stop_strings": [[], ["a"]],
    "max_time": [100.0],
}


def draw(case: Case, rng: random.Random) -> dict[str, Any]:
    """Returns the kind of a call, its arguments, the keys of the file, and the lengths and the form of the prompts."""
    del case
    kind = rng.choice(KINDS)
    pool = OPTIONS | (OF_BEAMS if "beam" in kind else {}) | (OF_SAMPLES if "sample" in kind else {})
    names = rng.sample(sorted(pool), min(len(pool), rng.choice([0, 1, 2, 3, 5, 8])))
    options = {name: value(rng) if callable(value := pool[name]) else rng.choice(value) for name in names}
    options |= {"max_new_tokens": rng.choice([1, 2, 6, 9]), "eos_token_id": rng.choice(ENDS)}
    if "sample" in kind:
        options["do_sample"] = True
        options.setdefault("top_k", 1000)  # transformers' default is 50
    if "beam" in kind:
        options["num_beams"] = rng.choice([2, 3, 5])
    if kind != "draft" and "e" in kind and rng.random() < 0.5:
        options["num_return_sequences"] = rng.randint(1, options.get("num_beams", 3 if kind == "sample" else 1))
    share = rng.choice([0.0, 0.5, 1.0])
    file = {name: options.pop(name) for name in [*options] if rng.random() < share}
    file = {"eos_token_id": [2], **file, "pad_token_id": PAD}
    file["eos_token_id"] = [*file["eos_token_id"]] or None
    if rng.random() < 0.3:
        file |= {name: rng.choice(OF_FILES[name]) for name in rng.sample(sorted(OF_FILES), rng.choice([1, 1, 2]))}
    if rng.random() < 0.3:  # which only sampling reads
        file = {name: rng.choice(OF_SAMPLES[name]) for name in rng.sample(sorted(OF_SAMPLES), 2)} | file
    form = rng.choice(["list", "mask", "equal"])
    # A forced first token depends on whether there is one token before it, padding or not.
    lengths = [rng.choice([2, 5, 8] if form != "equal" else [1, 2, 5, 8]) for _ in range(rng.choice([1, 6]))]
    lengths = lengths[:1] * len(lengths) if form == "equal" else lengths
    return {"kind": kind, "options": options, "file": file, "lengths": lengths, "form": form, "seed": rng.randrange(10**6)}


def compare(case: Case, folder: Path, call: dict[str, Any]) -> str:
    """Returns what became of a call: invalid in transformers, refused by us, equal, or how it differs."""
    module = torch_folder(case, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **call["file"]}))
    try:
        module = type(module).from_pretrained(folder).eval()
    except ValueError as error:
        return f"invalid: {error}"
    rng = np.random.default_rng(call["seed"])
    is_of_tokens = "pixels" not in case.inputs
    prompts = [rng.integers(1, 40, n) for n in call["lengths"]] if is_of_tokens else [*case.inputs["pixels"]]
    try:
        found = ours(folder, call, prompts)
    except (ValueError, TypeError) as error:
        return f"refused: {str(error).split('json`: ')[-1]}" if str(error).startswith("`") else f"unclear error: {error!r}"
    try:
        expected = [theirs(module, call, *pair) for pair in zip(prompts, found, strict=True)]
    except Exception as error:
        return f"invalid: {error!r}"
    for i, pair in enumerate(zip(found, expected, strict=True)):
        for (tokens, scores), (their_tokens, their_scores) in zip(*pair, strict=True):
            if tokens != their_tokens:
                return f"row {i}: {tokens}, not {their_tokens}; {scores}, not {their_scores}"
            if scores is not None and not np.allclose(scores, their_scores, rtol=2e-3, atol=2e-3):
                return f"row {i}: scores {scores}, not {their_scores}"
    return "equal"


def ours(folder: Path, call: dict[str, Any], prompts: list[np.ndarray]) -> list[list[tuple[list[int], Any]]]:
    """Returns the tokens and scores of each sequence of each prompt. A stream has no scores."""
    model, _ = from_pretrained(folder)
    given: dict[str, Any] = {**call["options"], "key": jax.random.key(call["seed"])}
    inputs: Any = prompts if call["form"] == "list" and call["kind"] != "stream" else None
    if prompts[0].ndim > 1:
        inputs = np.stack(prompts)
    elif inputs is None:
        mask = np.arange(max(map(len, prompts))) < np.array([[len(prompt)] for prompt in prompts])
        mask = mask if hasattr(model, "encode") else mask[:, ::-1]
        inputs = np.full(mask.shape, PAD, np.int32)
        inputs[mask] = np.concatenate(prompts)
        given["mask"] = mask
    if call["kind"] == "stream":
        steps = np.stack([*stream(model, inputs, **given)], -1)
        is_single, tokens, scores = steps.ndim == 2, steps, None
    else:
        best = unittest.mock.patch("jax.random.gumbel", lambda key, shape: jnp.zeros(shape))
        with best if call["kind"] == "beam-sample" else contextlib.nullcontext():
            if call["kind"] == "beam-sample":
                jax.clear_caches()
            if call["kind"] == "draft":
                given |= {"assistant_model": model, "num_assistant_tokens": 1 + call["seed"] % 4}
            found = generate(model, inputs, output_scores=True, **given)
        is_single = "num_return_sequences" not in {**call["options"], **call["file"]} or found.tokens[0][0].ndim == 0
        tokens, scores = found.tokens, found.scores
    result = []
    for i in range(len(prompts)):
        rows = [tokens[i]] if is_single else tokens[i]
        of_rows = [None] * len(rows) if scores is None else [scores[i]] if is_single else scores[i]
        result.append([_cut(np.asarray(row), of_row, call) for row, of_row in zip(rows, of_rows, strict=True)])
    return result


def theirs(module: Any, call: dict[str, Any], prompt: np.ndarray, rows: list[Any]) -> list[tuple[list[int], Any]]:
    """The same for one prompt, for which sampling draws the tokens of our rows."""
    import torch

    given: dict[str, Any] = dict(call["options"])
    if "eos_token_id" in given:
        module.generation_config.eos_token_id = [*given.pop("eos_token_id")] or None
    inputs = torch.tensor(prompt)[None]
    if prompt.ndim == 1:
        inputs = inputs.long()
        given["attention_mask"] = torch.ones_like(inputs)
    drawn = iter(np.array([tokens + [PAD] * (20 - len(tokens)) for tokens, _ in rows]).T)

    def multinomial(p: Any, num_samples: int) -> Any:
        return torch.topk(p, num_samples)[1] if num_samples > 1 else torch.tensor(next(drawn))[:, None]

    with torch.no_grad(), unittest.mock.patch("torch.multinomial", multinomial):
        found = module.generate(inputs, return_dict_in_generate=True, output_scores=True, **given)
    beams = getattr(found, "beam_indices", None)
    scores = module.compute_transition_scores(found.sequences, found.scores, beams, normalize_logits=beams is None)
    tokens = found.sequences[:, 1 if module.config.is_encoder_decoder else inputs.shape[1] :].numpy()
    return [_cut(*pair, call) for pair in zip(tokens, scores.numpy(), strict=True)]


def _cut(tokens: np.ndarray, scores: Any, call: dict[str, Any]) -> tuple[list[int], Any]:
    """Returns a sequence up to its end, after which there is only padding."""
    (places,) = np.nonzero(np.isin(tokens, {**call["file"], **call["options"]}["eos_token_id"] or ()))
    end = places[0] + 1 if len(places) else len(tokens)
    assert (tokens[end:] == PAD).all(), tokens
    return tokens[:end].tolist(), None if scores is None else np.asarray(scores)[:end].tolist()


def main(n: int, seed: int = 0, *names: str) -> None:
    cases = [*_generation.CASES.values(), *CASES]
    run_draws([case for case in cases if not names or case.name in names], n, seed, draw, compare)


if __name__ == "__main__":
    _, count, *rest = sys.argv
    main(int(count), *map(int, rest[:1]), *rest[1:])
