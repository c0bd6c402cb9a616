"""`stream` and lists of prompts: the tokens of `generate`, one step at a time, or without padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import generate, stream
from tests.models.generation.test_generate import IDS, LEFT, MODEL, VOCAB, greedy_by_hand

KEY = jax.random.key(0)


SAMPLES: dict[str, Any] = {"do_sample": True, "key": KEY, "num_return_sequences": 2, "temperature": 2.0}


@pytest.mark.parametrize("options", [{}, pytest.param(SAMPLES, marks=pytest.mark.sweep)])
def test_a_stream_has_the_tokens_of_generate(options):
    given: dict[str, Any] = {"mask": LEFT, "max_new_tokens": 6, "repetition_penalty": 1.2, **options}
    free = np.asarray(generate(MODEL, IDS, **given))
    ends = tuple({int(token) for token in free[..., 2].ravel()})
    after_end = np.cumsum(np.isin(free, ends), -1) - np.isin(free, ends) > 0
    expected = np.where(after_end, VOCAB - 1, free)
    steps = stream(MODEL, IDS, **given, eos_token_id=ends, pad_token_id=VOCAB - 1)
    first = next(steps)  # the text has not ended yet
    assert isinstance(first, np.ndarray)
    rest = list(steps)
    assert 1 <= len(rest) <= 2
    np.testing.assert_array_equal(np.stack([first, *rest], -1), expected[..., : 1 + len(rest)])


@pytest.mark.parametrize("options", [{}, pytest.param({"num_beams": 2, "num_return_sequences": 2}, marks=pytest.mark.sweep)])
def test_lists_of_prompts_return_lists_of_texts(options):
    prompts = [row[mask].tolist() for row, mask in zip(IDS, LEFT, strict=True)]
    assert len({*map(len, prompts)}) == 3
    given: dict[str, Any] = {"max_new_tokens": 6, **options}
    free = np.asarray(generate(MODEL, IDS, mask=LEFT, **given))
    ends = tuple({int(row.ravel()[i]) for row, i in zip(free, (1, 4, 2), strict=True)})
    padded = np.asarray(generate(MODEL, IDS, mask=LEFT, **given, eos_token_id=ends, pad_token_id=VOCAB - 1))
    found = generate(MODEL, prompts, **given, eos_token_id=ends, pad_token_id=VOCAB - 1, output_scores=True)
    texts = [text for row in found.tokens for text in row] if options else found.tokens
    scores = [text for row in found.scores for text in row] if options else found.scores
    assert len({*map(len, texts)}) > 1
    for text, score, row in zip(texts, scores, padded.reshape(-1, 6), strict=True):
        ended = np.isin(row, ends)
        length = 1 + int(ended.argmax()) if ended.any() else 6
        assert text.tolist() == row[:length].tolist()
        assert score.shape == text.shape and (score < 0).all()


def test_a_prompt_may_fill_all_positions():
    """Its next token needs no position."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 16))
    found = generate(MODEL, ids, max_new_tokens=1)
    np.testing.assert_array_equal(found, greedy_by_hand(ids, np.ones_like(ids, bool), 1))
    with pytest.raises(ValueError, match=r"`inputs`: expected at most `n_positions`=16 tokens a prompt, got 17\. Cut"):
        generate(MODEL, np.zeros((1, 17), int), max_new_tokens=1)


def test_errors():
    for inputs, options, message in [
        (IDS, {"num_beams": 2}, r"`num_beams`: expected 1 in `stream`, .*, got 2"),
        (IDS, {"output_scores": True}, r"`output_scores`: expected none in `stream`"),
        ([[1, 2], [3]], {}, r"`inputs`: expected an array in `stream`, got a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream(MODEL, inputs, max_new_tokens=2, **options)
    with pytest.raises(TypeError, match=r"`stream`: expected the arguments `\(model, .*`, got an unknown one: `beams`"):
        stream(MODEL, IDS, max_new_tokens=2, beams=2)
    with pytest.raises(ValueError, match=r"`mask`: expected None for a list of prompts"):
        generate(MODEL, [[1, 2], [3]], max_new_tokens=2, mask=np.ones((2, 2), bool))
    with pytest.raises(ValueError, match=r"`inputs`: expected prompts of token ids"):
        generate(MODEL, [[1, 2], []], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"`inputs`: expected an array under jit, got a list\. Pad the prompts"):
        jax.jit(lambda ids: generate(MODEL, [ids, ids[:2]], max_new_tokens=2))(jnp.arange(3))
