"""Compares `generate` with that of `transformers`, token by token; needs the `parity` extra."""

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from redeqx.models import from_pretrained, generate
from tests.models.families import _generation
from tests.models.families._case import torch_folder
from tests.models.generation.test_processors import table
from tests.models.generation.test_stop import STOPS, Script, byte_level

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


# Each search with two or three families, one of which has an encoder. All of them: the stored tokens of three families.
BY_KIND = sorted(_generation.CASES, key=lambda name: name.startswith(("bart", "t5", "vision")))


@pytest.mark.parametrize("name", BY_KIND)
def test_generates_the_same_tokens(name, tmp_path):
    case = _generation.CASES[name]
    module = torch_folder(case, tmp_path)
    model, _ = from_pretrained(tmp_path)
    searches = [*_generation.SEARCHES][-BY_KIND.index(name) % 3 :: 3]
    for search in (search for search in searches if search in _generation.searches(case)):
        found, expected = _generation.ours(model, case, search), _generation.theirs(module, case, search)
        np.testing.assert_array_equal(found, expected, err_msg=search)


CUTS = [
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"min_p": 0.2, "top_p": 0.9},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.02, "temperature": 1.5},
    {"eta_cutoff": 0.1},
    {"top_k": 20, "typical_p": 0.9, "min_p": 0.05, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
]


@pytest.mark.parametrize("options", CUTS, ids=lambda options: "-".join(options))
def test_samples_from_the_same_distribution(options):
    """Every draw has the probability that the processors of transformers leave it, and each of their tokens is drawn."""
    import torch
    import transformers

    logits = np.random.default_rng(0).normal(size=24).astype(np.float32) * 2
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=24))
    module.generation_config._eos_token_tensor = config._eos_token_tensor = None
    processors = module._get_logits_processor(config, input_ids_seq_length=1)
    left = torch.log_softmax(processors(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None]), -1)[0].numpy()
    assert 1 < np.isfinite(left).sum() < 24
    found = generate(
        table(logits), np.zeros((4000, 1), int), max_new_tokens=1, do_sample=True, key=jax.random.key(0),
        output_scores=True, **options,
    )  # fmt: skip
    drawn = np.asarray(found.tokens)[:, 0]
    np.testing.assert_allclose(found.scores[:, 0], left[drawn], rtol=1e-4)
    likely = np.flatnonzero(np.exp(left) > 0.005)
    assert {*likely} <= {*drawn} <= {*np.flatnonzero(np.isfinite(left))}


def test_scores_of_beams_are_the_same(tmp_path):
    import torch

    case = _generation.CASES["gpt2-padded"]
    module = torch_folder(case, tmp_path)
    model, _ = from_pretrained(tmp_path)
    ids, mask = case.inputs["ids"], case.inputs["mask"]
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0, "repetition_penalty": 1.3}
    found = generate(model, ids, mask=mask, max_new_tokens=7, eos_token_id=(), pad_token_id=0, output_scores=True, **options)
    theirs = module.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask).long(), max_new_tokens=7, eos_token_id=None, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    np.testing.assert_array_equal(found.tokens.reshape(-1, 7), theirs.sequences[:, ids.shape[1] :].numpy())
    np.testing.assert_allclose(found.sequence_scores.reshape(-1), theirs.sequences_scores.numpy(), rtol=1e-4)
    scores = module.compute_transition_scores(theirs.sequences, theirs.scores, theirs.beam_indices, normalize_logits=False)
    np.testing.assert_allclose(found.scores.reshape(-1, 7), scores.numpy(), rtol=1e-3, atol=1e-5)


def test_stop_strings_end_a_text_in_the_same_token():
    import torch
    import transformers

    pytest.importorskip("tokenizers")
    tokenizer = byte_level()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    criteria = transformers.StopStringCriteria(theirs, list(STOPS))
    rng = np.random.default_rng(3)
    script = rng.integers(0, 14, (14, 15))
    prompts = np.concatenate([np.arange(14)[:, None], script[:, 1:3]], 1)
    found = generate(
        table(np.zeros(15), 15), prompts, max_new_tokens=12, pad_token_id=14, stop_strings=STOPS, tokenizer=theirs,
        logits_processor=Script(script),
    )  # fmt: skip
    lengths = []
    for row, prompt, tokens in zip(np.asarray(found), prompts, script[:, 3:], strict=True):
        stops = [criteria(torch.tensor([[*prompt, *tokens[:n]]]), None).item() for n in range(1, 13)]
        lengths.append(1 + stops.index(True) if True in stops else 12)
        assert row.tolist() == [*tokens[: lengths[-1]], *[14] * (12 - lengths[-1])]
    assert len({*lengths}) > 3
