"""Logits processors: what the options of a generation do to the scores of the next token, in the order of `transformers`.

Each function here takes the scores of one row, `[vocab]`, and what they depend on. `process` maps them over all rows. An
option that is off adds no operation. Sampling has further processors, in `_sampling.py`.

Dims: batch, rows = sequences of one example, vocab, new = tokens generated, text = prompt + new, source = tokens of the
encoder's input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._options import Options

NO_TOKEN = -1  # at places of a text that hold padding, or no token yet


class Given(eqx.Module):
    """The tokens that scores depend on, as far as the options need them, and the user's own processor."""

    prompt: Int[Array, "*batch prompt"] | None = None  # NO_TOKEN at padding
    source: Int[Array, "*batch source"] | None = None
    processor: Callable[..., Any] | None = None

    @staticmethod
    def of(inputs: Array, mask: Array | None, start: Any, options: Options, processor: Callable[..., Any] | None) -> "Given":
        """Returns what the options need.

        **Arguments:**

        - `inputs`, `mask`: as for `generate`.
        - `start`: the first token of the decoder, or the first ones of each row, if `inputs` are those of an encoder.
        """
        tokens = inputs if mask is None else jnp.where(mask, inputs, NO_TOKEN)
        prompt = tokens
        if start is not None:
            prompt = start if jnp.ndim(start) else jnp.full((len(inputs), 1), start, jnp.int32)
        needs_text = options.needs_text or processor is not None
        return Given(
            prompt.astype(jnp.int32) if needs_text else None,
            tokens.astype(jnp.int32) if options.needs_source else None,
            processor,
        )


def process(
    scores: Float[Array, "batch rows vocab"],
    tokens: Int[Array, "batch rows new"],
    step: Int[Array, "*examples"] | int,
    options: Options,
    given: Given,
) -> Float[Array, "batch rows vocab"]:
    """Returns the scores after all processors that do not depend on sampling.

    **Arguments:**

    - `tokens`: the tokens generated so far, of which the first `step` count.
    - `step`: of all examples, or of each.
    """

    def of_example(scores: Array, tokens: Array, step: Any, prompt: Array | None, source: Array | None) -> Array:
        given_here = Given(prompt, source, given.processor)
        return jax.vmap(lambda scores, tokens: _process_row(scores, tokens, step, options, given_here))(scores, tokens)

    axes = (0, 0, 0 if jnp.ndim(step) else None, *(None if array is None else 0 for array in (given.prompt, given.source)))
    return jax.vmap(of_example, axes)(scores, tokens, step, given.prompt, given.source)


def _process_row(
    scores: Float[Array, " vocab"], tokens: Int[Array, " new"], step: Any, options: Options, given: Given
) -> Float[Array, " vocab"]:
    vocab, source = len(scores), given.source
    text, length = None, None
    if given.prompt is not None:
        text = jnp.concatenate([given.prompt, jnp.where(jnp.arange(len(tokens)) < step, tokens, NO_TOKEN)])
        length = len(given.prompt) + step
    if options.encoder_repetition_penalty != 1:
        scores = penalize(scores, contains(source, vocab), 1 / options.encoder_repetition_penalty)
    if options.repetition_penalty != 1:
        scores = penalize(scores, contains(text, vocab), options.repetition_penalty)
    if options.no_repeat_ngram_size:
        scores = _forbid(scores, completes_ngram(text, length, text, options.no_repeat_ngram_size, vocab))
    if options.encoder_no_repeat_ngram_size:
        scores = _forbid(scores, completes_ngram(text, length, source, options.encoder_no_repeat_ngram_size, vocab))
    if options.bad_words_ids:
        ends = {(token,) for token in options.eos}
        words = [word for word in options.bad_words_ids if word not in ends]
        scores = _forbid(scores, completes_word(text, length, words, vocab))
    if options.min_new_tokens and options.eos:
        scores = _forbid(scores, (step < options.min_new_tokens) & one_of(options.eos, vocab))
    has_prompt = options.n_given > 1
    if options.forced_bos_token_id is not None and not has_prompt:
        scores = jnp.where(step == 0, _only((options.forced_bos_token_id,), vocab), scores)
    if options.forced_eos_token_id is not None:
        forced = tuple(np.ravel(options.forced_eos_token_id).tolist())
        scores = jnp.where(step == options.new - 1, _only(forced, vocab), scores)
    if options.suppress_tokens:
        scores = _forbid(scores, one_of(options.suppress_tokens, vocab))
    if options.begin_suppress_tokens:
        first = 0 if has_prompt or options.forced_bos_token_id is None else 1
        scores = _forbid(scores, (step == first) & one_of(options.begin_suppress_tokens, vocab))
    if given.processor is not None:
        scores = given.processor(text, scores, length)
    return scores


def penalize(scores: Float[Array, " vocab"], tokens: Bool[Array, " vocab"], penalty: float) -> Float[Array, " vocab"]:
    """Returns the scores with those of `tokens` divided by `penalty` if they are positive, else multiplied by it
    (arXiv:1909.05858)."""
    return jnp.where(tokens, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def contains(text: Int[Array, " text"] | None, vocab: int) -> Bool[Array, " vocab"]:
    """Returns which tokens are in a text."""
    assert text is not None
    return _mark(text, text >= 0, vocab)


def completes_ngram(
    text: Int[Array, " text"] | None, length: Any, source: Int[Array, " source"] | None, n: int, vocab: int
) -> Bool[Array, " vocab"]:
    """Returns which tokens, after the first `length` tokens of `text`, would complete `n` tokens that `source` contains."""
    assert text is not None and source is not None
    n_windows = len(source) - n + 1
    if n_windows < 1 or n - 1 > len(text):
        return jnp.zeros(vocab, bool)
    prefix = jax.lax.dynamic_slice_in_dim(text, length - (n - 1), n - 1)  # clamped if the text is shorter
    last = source[n - 1 :]
    found = (last >= 0) & (length >= n - 1)
    for i in range(n - 1):
        found &= source[i : i + n_windows] == prefix[i]
    return _mark(last, found, vocab)


def completes_word(
    text: Int[Array, " text"] | None, length: Any, words: Sequence[tuple[int, ...]], vocab: int
) -> Bool[Array, " vocab"]:
    """Returns which tokens, after the first `length` tokens of `text`, would complete one of the words."""
    found = one_of([word[0] for word in words if len(word) == 1], vocab)
    for n in sorted({len(word) for word in words} - {1}):
        assert text is not None
        if n - 1 > len(text):
            continue
        group = np.array([word for word in words if len(word) == n], np.int32)
        before = jax.lax.dynamic_slice_in_dim(text, length - (n - 1), n - 1)
        matches = (before == group[:, :-1]).all(-1) & (length >= n - 1)
        found |= _mark(jnp.asarray(group[:, -1]), matches, vocab)
    return found


def one_of(tokens: Sequence[int], vocab: int) -> Bool[Array, " vocab"]:
    """Returns which tokens are among the given ones, as a constant of the program."""
    return jnp.asarray(np.isin(np.arange(vocab), np.array(tokens, np.int64)))


def _mark(tokens: Int[Array, " n"], which: Bool[Array, " n"], vocab: int) -> Bool[Array, " vocab"]:
    """Returns True for each token of `tokens` where `which` is True."""
    return jnp.zeros(vocab, bool).at[jnp.where(which, tokens, vocab)].set(True, mode="drop")


def _forbid(scores: Float[Array, " vocab"], tokens: Bool[Array, " vocab"]) -> Float[Array, " vocab"]:
    return jnp.where(tokens, -jnp.inf, scores)


def _only(tokens: tuple[int, ...], vocab: int) -> Float[Array, " vocab"]:
    return jnp.where(one_of(tokens, vocab), 0.0, -jnp.inf)
