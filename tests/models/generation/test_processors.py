"""The options of `generate` that change scores: against computations by hand, for a model whose scores are a table."""

import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import generate
from redeqx.models.nn import Cache

KEY = jax.random.key(0)


class Table(eqx.Module):
    """A model whose next token depends only on its position."""

    logits: jax.Array  # [places, vocab]

    def init_cache(self, length):
        return Cache.empty(1, length, 1, 1, jnp.float32)

    def decode(self, ids, cache, *, mask=None):
        return self.logits[cache.index + len(ids) - 1], cache.end(len(ids))


def table(logits, places=8):
    return Table(jnp.tile(jnp.asarray(logits, jnp.float32), (places, 1)))


def tokens(model, prompt, n=4, **options):
    return generate(model, np.array([prompt]), max_new_tokens=n, **options)[0].tolist()


# --- penalties and forbidden tokens ------------------------------------------------------------------------------------


def test_repetition_penalty_divides_positive_scores_and_multiplies_negative_ones():
    """The prompt counts, padding does not: token 3 is at padding only."""
    model = table([2.0, 1.9, -1.0, 1.5, -1.2])
    assert tokens(model, [4, 2], repetition_penalty=1.5) == [0, 1, 3, 0]  # 2.0 -> 1.33, 1.9 -> 1.27, 1.5 -> 1
    padded = generate(model, np.array([[3, 0]]), mask=np.array([[False, True]]), max_new_tokens=3, repetition_penalty=1.5)
    assert padded[0].tolist() == [1, 3, 0]
    negative = table([-1.0, -1.1, -1.3])
    assert tokens(negative, [0], n=3, repetition_penalty=1.2) == [1, 0, 0]  # -1.2; then -1.32; all are penalized
    assert tokens(negative, [0], n=3, repetition_penalty=0.5) == [0, 0, 0]


def test_no_ngram_occurs_twice():
    model = table([3.0, 2.0, 1.0, 0.0])
    assert tokens(model, [2], n=4, no_repeat_ngram_size=1) == [0, 1, 3, 0]  # all tokens are taken: the first
    found = tokens(model, [0, 1], n=8 - 2, no_repeat_ngram_size=2)
    text = [0, 1, *found]
    assert found == [0, 0, 2, 0, 3, 0]  # 0 1 is taken, then 0 0 too
    assert len(set(itertools.pairwise(text))) == len(text) - 1
    assert tokens(model, [0], n=3, no_repeat_ngram_size=9) == [0, 0, 0]  # longer than the text


def test_no_ngram_of_the_prompt_occurs_again():
    """The new tokens may repeat themselves, but not the prompt of a decoder. A penalty above 1 favors its tokens."""
    model = table([3.0, 2.0, 1.0, 0.0])
    assert tokens(model, [0, 1, 3], encoder_no_repeat_ngram_size=1) == [2, 2, 2, 2]
    assert tokens(model, [0, 1, 0], encoder_no_repeat_ngram_size=2) == [0, 0, 0, 0]
    assert tokens(model, [0, 0, 1], encoder_no_repeat_ngram_size=2) == [0, 2, 0, 2]  # 0 0 and 0 1 are in the prompt
    assert tokens(model, [1], n=2, encoder_repetition_penalty=2.0) == [1, 1]
    assert tokens(model, [0], n=2, encoder_repetition_penalty=0.5) == [1, 1]


def test_words_and_tokens_are_not_generated():
    model = table([3.0, 2.0, 1.0, 0.0])
    assert tokens(model, [3], bad_words_ids=[[0]]) == [1, 1, 1, 1]
    assert tokens(model, [3], bad_words_ids=[[0, 0], [0, 1, 0]]) == [0, 1, 1, 0]
    assert tokens(model, [0], n=2, bad_words_ids=[[0, 0]]) == [1, 0]  # the prompt counts
    assert tokens(model, [3], n=2, bad_words_ids=[[0], [1]], eos_token_id=0, pad_token_id=3) == [0, 3]  # not the end
    assert tokens(model, [3], suppress_tokens=[0, 2]) == [1, 1, 1, 1]
    assert tokens(model, [3], begin_suppress_tokens=[0, 1]) == [2, 0, 0, 0]
    assert tokens(model, [3], begin_suppress_tokens=[0], forced_bos_token_id=2) == [
        2,
        1,
        0,
        0,
    ]  # begins after the forced one
    assert tokens(model, [3], forced_eos_token_id=[1, 2]) == [0, 0, 0, 1]
    assert tokens(model, [3], n=3, num_beams=2, bad_words_ids=[[0, 0]], suppress_tokens=[2]) == [0, 1, 0]


def test_the_users_processor_comes_after_the_options():
    """It sees -1 at padding and at later places, and may hold arrays."""

    class Ban(eqx.Module):
        allowed: jax.Array

        def __call__(self, text, scores, length):
            assert text.shape == (6,)
            is_clean = (text[:1] == -1).all() & (text[1] == 3) & (jnp.where(jnp.arange(6) < length, -1, text) == -1).all()
            last = text[length - 1]
            return jnp.where(self.allowed[last] & is_clean & jnp.isneginf(scores[0]), scores, -jnp.inf)

    allowed = jnp.asarray([[0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]], bool)
    inputs, mask = np.array([[7, 3]]), np.array([[False, True]])
    for num_beams in (1, 2):
        options: dict[str, Any] = {
            "mask": mask,
            "suppress_tokens": [0],
            "num_beams": num_beams,
        }
        found = generate(table([3.0, 2.0, 1.0, 0.0]), inputs, max_new_tokens=4, logits_processor=Ban(allowed), **options)
        assert found[0].tolist() == [1, 2, 1, 2]


# --- sampling ----------------------------------------------------------------------------------------------------------

P = np.array([0.42, 0.27, 0.15, 0.1, 0.04, 0.02])


def typical(p, mass):
    distance = np.abs(-np.log(p) - np.sum(-p * np.log(p)))
    order = np.argsort(distance)
    kept = order[: 1 + np.sum(np.cumsum(p[order]) < mass)]
    return np.isin(np.arange(len(p)), kept)


ENTROPY = np.sum(-P * np.log(P))
CUTS = [
    ({"min_p": 0.3}, P >= 0.3 * 0.42),
    ({"typical_p": 0.6}, typical(P, 0.6)),
    ({"epsilon_cutoff": 0.12}, P >= 0.12),
    ({"eta_cutoff": 0.3}, min(0.3, math.sqrt(0.3) * math.exp(-ENTROPY)) <= P),
    ({"top_k": 4, "top_p": 0.85, "min_p": 0.2}, P >= 0.15),  # of the 0.94 of four tokens, the first three have 0.89
]


@pytest.mark.parametrize(("options", "kept"), CUTS, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_samples_are_of_the_tokens_that_are_kept(options, kept):
    """The scores are those of the distribution that is left, and the log-probabilities those of the model."""
    assert 0 < kept.sum() < len(P)
    prompts, n = np.zeros((500, 1), int), 1
    found = generate(table(np.log(P)), prompts, max_new_tokens=n, do_sample=True, key=KEY, output_scores=True, **options)
    drawn = np.asarray(found.tokens)[:, 0]
    assert {*drawn} == {*np.flatnonzero(kept)}
    np.testing.assert_allclose(found.log_probs[:, 0], np.log(P)[drawn], rtol=1e-5)
    np.testing.assert_allclose(found.scores[:, 0], np.log(P / P[kept].sum())[drawn], rtol=1e-5)


def test_beam_sampling_draws_candidates_without_replacement():
    """Two beams draw four of six tokens; the better two of them end. A draw takes each next token in proportion."""
    expected = {}
    for order in itertools.permutations(range(6), 4):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * P[token] / left, left - P[token]
        best = tuple(sorted(order)[:2])  # sorted by probability
        expected[best] = expected.get(best, 0) + chance
    n = 4000
    options: dict[str, Any] = {"do_sample": True, "num_beams": 2, "num_return_sequences": 2, "key": KEY}
    found = generate(table(np.log(P)), np.zeros((n, 1), int), max_new_tokens=1, **options)
    pairs, counts = np.unique(np.asarray(found)[:, :, 0], axis=0, return_counts=True)
    assert counts.sum() == n and {*map(tuple, pairs.tolist())} <= {*expected}
    for pair, count in zip(pairs.tolist(), counts, strict=True):
        p = expected[tuple(pair)]
        assert abs(count / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_scores_of_greedy_decoding_and_of_beams():
    """After a text's end they are 0. The scores of beams add up to those of the texts."""
    logits = np.array([[1.0, 2.0, 0.5], [0.2, 0.1, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0]])
    log_p = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    model = Table(jnp.asarray(logits, jnp.float32))
    given: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": 2, "pad_token_id": 1}
    found = generate(model, np.ones((2, 1), int), output_scores=True, suppress_tokens=[1], **given)
    assert found.tokens.tolist() == [[0, 0, 2, 1]] * 2 and found.sequence_scores is None
    np.testing.assert_allclose(found.log_probs[0], [log_p[0, 0], log_p[1, 0], log_p[2, 2], 0], rtol=1e-5)
    left = np.exp(log_p[:, [0, 2]]).sum(-1)
    np.testing.assert_allclose(found.scores[1], [*(found.log_probs[1] - np.log(left))[:3], 0], rtol=1e-5)

    found = generate(
        model, np.ones((1, 1), int), output_scores=True, num_beams=3, num_return_sequences=3, length_penalty=0.3, **given
    )
    lengths = [1 + text.index(2) if 2 in text else 4 for text in found.tokens[0].tolist()]
    assert len({*lengths}) > 1
    for text, length, scores, log_probs, total in zip(
        found.tokens[0], lengths, found.scores[0], found.log_probs[0], found.sequence_scores[0], strict=True
    ):
        np.testing.assert_allclose(log_probs[:length], log_p[np.arange(length), text[:length]], rtol=1e-5)
        np.testing.assert_array_equal(scores, log_probs)  # no options change them
        assert not scores[length:].any()
        np.testing.assert_allclose(total, scores.sum() / length**0.3, rtol=1e-5)


@pytest.mark.parametrize(("p", "expected"), [(0.45, [[1, 1, 0], [1, 0, 2]]), (0.12, [[1, 0, 2], [0, 2, 2]])])
def test_a_beam_may_reach_its_score_over_its_own_length(p, expected):
    """After two tokens, the texts `0` and `1 0` have ended, with scores of log(0.3) = -1.20 and more. The beam `1 1` goes on
    if log(0.6 p) over its length of 2 is above -1.20. For 0.45 it is -0.65, but over 1 it would be -1.31. For 0.12 it is
    -1.32, but over 3 it would be -0.88."""
    share = [[0.3, 0.6, 0.1], [0.98 - p, p, 0.02], *[[0.98, 0.01, 0.01]] * 3]
    options: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2, "eos_token_id": 0, "pad_token_id": 2}
    found = generate(Table(jnp.log(jnp.asarray(share))), np.ones((1, 1), int), max_new_tokens=5, **options)
    assert found[0, :, :3].tolist() == expected


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, r"`repetition_penalty`: expected a finite number above 0, got 0\.0\. Pass 1\.0"),
        ({"no_repeat_ngram_size": -1}, r"`no_repeat_ngram_size`: expected at least 0, got -1"),
        ({"bad_words_ids": [[]]}, r"`bad_words_ids`: expected a list of words"),
        ({"min_p": 0.1}, r"`min_p`: expected None without sampling, got 0\.1\. Pass `do_sample=True`"),
        ({"do_sample": True, "min_p": 1.0}, r"`min_p`: expected a share in \[0, 1\), got 1\.0"),
        ({"do_sample": True, "typical_p": 0.0}, r"`typical_p`: expected a share in \(0, 1\], got 0\.0"),
        (
            {"do_sample": True, "num_beams": 2, "num_return_sequences": 3},
            r"`num_return_sequences`: expected at most `num_beams`=2, got 3\. Raise `num_beams`\.",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        generate(table([0.0, 1.0]), np.zeros((1, 1), int), max_new_tokens=3, key=KEY, **options)
