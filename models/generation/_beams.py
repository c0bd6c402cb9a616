"""Beam search, with or without sampling, by the rules of `transformers` 5.

Prefill and the decoding step are those of `_loop.py`.

Dims: batch, beams, new = tokens generated, vocab.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._loop import Chances, Generated, Request, axes_of, decoder, no_chances, pick, prefill, prompt_of, repeat, write
from ._options import Options
from ._processors import process
from ._sampling import distribution

_IMPOSSIBLE = -1e9  # the score of an impossible candidate; finite, as in transformers, so that sums can be compared


class _Texts(eqx.Module):
    """Sequences of each example, sorted by score, on request with the chances of each token."""

    tokens: Int[Array, "batch beams new"]
    chances: Chances | None

    def select(self, beams: Int[Array, "batch k"]) -> "_Texts":
        return jax.tree.map(lambda leaf: _select(leaf, beams), self)

    def join(self, other: "_Texts") -> "_Texts":
        return jax.tree.map(lambda one, two: jnp.concatenate([one, two], 1), self, other)


class _Beams(eqx.Module):
    """The state of a beam search. Running and finished sequences are each sorted by score."""

    step: Int[Array, ""]
    logits: Float[Array, "batch beams vocab"]
    cache: Any
    running: _Texts
    running_scores: Float[Array, "batch beams"]  # sums of log-probabilities
    finished: _Texts
    finished_scores: Float[Array, "batch beams"]  # including the length penalty
    is_finished: Bool[Array, "batch beams"]  # whether this slot holds a finished sequence
    can_improve: Bool[Array, " batch"]
    all_end: Bool[Array, " batch"]  # whether no sequence continues
    stop: Int[Array, "batch beams"] | None  # the states of `request.stop`


def beam_search(model: Any, request: Request) -> Generated:
    """Returns the best sequences of each example, `[batch, sequences, new]`."""
    options = request.options
    n, new = options.num_beams, options.new
    logits, cache = prefill(model, request)
    batch, vocab = logits.shape
    # Enough candidates that `n` can continue even if all others end.
    n_candidates = min(max(2, 1 + len(options.eos)) * n, n * vocab)
    cache = repeat(cache, n)
    decode, axes = decoder(model, cache), axes_of(cache, shares_memory=True)
    empty = _Texts(jnp.full((batch, n, new), options.pad, jnp.int32), no_chances((batch, n, new), request))
    # All beams start equal. Only the first one is possible, so that the first step does not select each token `n` times.
    first = jnp.full((batch, n), _IMPOSSIBLE).at[:, 0].set(0.0)

    def reorder(cache: Any, beams: Int[Array, "batch beams"]) -> Any:
        selected = lambda axis, leaf: leaf if axis is None else _select(leaf, beams, axis + 1)  # noqa: E731
        return jax.tree.map(selected, axes, cache, is_leaf=lambda x: x is None)

    def extend(state: _Beams) -> tuple[_Beams, Int[Array, "batch beams"], Int[Array, "batch beams"]]:
        """Returns the state after one more token; the beam that each running sequence continues; and its token."""
        step = state.step
        log_probs = _log_probs(state, request)
        total = (log_probs + state.running_scores[..., None]).reshape(batch, -1)
        scores, flat = _candidates(total, n_candidates, step, request)
        origin, token = flat // vocab, (flat % vocab).astype(jnp.int32)
        texts = _continued(state, origin, token, log_probs)
        ends, stop = options.ends(token) | (step + 1 == new), state.stop
        if stop is not None:
            assert request.stop is not None
            stop, is_stopped = request.stop.advance(_select(stop, origin), token)
            ends = ends | is_stopped

        running_scores, kept = jax.lax.top_k(scores + jnp.where(ends, _IMPOSSIBLE, 0.0), n)
        # Only the best `n` candidates may finish. The others can only continue.
        finishes = ends & (jnp.arange(n_candidates) < n)
        is_full = state.is_finished.all(-1) & (options.early_stopping is True)
        is_closed = is_full | ~state.can_improve
        final = scores / (step + 1).astype(jnp.float32) ** options.length_penalty
        final = final + jnp.where(is_closed[:, None], _IMPOSSIBLE, 0.0) + jnp.where(finishes, 0.0, _IMPOSSIBLE)
        finished_scores, best = jax.lax.top_k(jnp.concatenate([state.finished_scores, final], 1), n)
        is_finished = _select(jnp.concatenate([state.is_finished, finishes], 1), best)

        worst = jnp.where(is_finished, finished_scores.min(-1, keepdims=True), _IMPOSSIBLE)
        possible = _best_possible(running_scores[:, :1], step + 1, options)
        state = _Beams(
            step=step + 1,
            logits=state.logits,
            cache=state.cache,
            running=texts.select(kept),
            running_scores=running_scores,
            finished=state.finished.join(texts).select(best),
            finished_scores=finished_scores,
            is_finished=is_finished,
            can_improve=state.can_improve & (possible > worst).any(-1),
            all_end=ends.all(-1),
            stop=None if stop is None else _select(stop, kept),
        )
        return state, _select(origin, kept), _select(token, kept)

    def advance(carry: tuple) -> tuple:
        state, origin, token = carry
        logits, cache = decode(token, reorder(state.cache, origin))
        return extend(eqx.tree_at(lambda s: (s.logits, s.cache), state, (logits, cache)))

    def is_running(carry: tuple) -> Array:
        state = carry[0]
        all_full = state.is_finished.all() & (options.early_stopping is True)
        return state.can_improve.any() & ~all_full & ~state.all_end.all()

    begin = _Beams(
        step=jnp.int32(0),
        logits=jnp.repeat(logits[:, None], n, 1),
        cache=cache,
        running=empty,
        running_scores=first,
        finished=empty,
        finished_scores=jnp.full((batch, n), _IMPOSSIBLE),
        is_finished=jnp.zeros((batch, n), bool),
        can_improve=jnp.ones(batch, bool),
        all_end=jnp.zeros(batch, bool),
        stop=None if request.stop is None else request.stop.start(prompt_of(request), (batch, n)),
    )
    state, _, _ = jax.lax.while_loop(is_running, advance, extend(begin))
    n_return = options.num_return_sequences or 1
    found = jax.tree.map(lambda leaf: leaf[:, :n_return], (state.finished, state.finished_scores))
    texts, sequence_scores = found
    if texts.chances is None:
        return Generated(texts.tokens)
    log_probs, scores = texts.chances
    return Generated(texts.tokens, log_probs, scores, sequence_scores)


def _select(array: Array, beams: Int[Array, "batch k"], axis: int = 1) -> Array:
    """Selects the given beams of each example. `axis` is the beam axis; the batch axis precedes it."""
    shape = [1] * array.ndim
    shape[axis - 1], shape[axis] = beams.shape
    return jnp.take_along_axis(array, beams.reshape(shape), axis)


def _log_probs(state: _Beams, request: Request) -> Float[Array, "batch beams vocab"]:
    """Returns the log-probabilities of the next token of each running sequence, after all options."""
    options = request.options
    scores = jax.nn.log_softmax(state.logits.astype(jnp.float32))
    scores = process(scores, state.running.tokens, state.step, options, request.given)
    if options.do_sample:
        scores = distribution(scores, options)
    return jax.nn.log_softmax(scores) if options.renormalize_logits else scores


def _candidates(
    total: Float[Array, "batch all"], n: int, step: Any, request: Request
) -> tuple[Float[Array, "batch n"], Int[Array, "batch n"]]:
    """Returns the scores and places of the best `n` candidates, sorted by score. When sampling, `n` are drawn without
    replacement, in proportion to their probabilities."""
    if not request.options.do_sample:
        scores, best = jax.lax.top_k(total, n)
        return scores, best
    assert request.key is not None
    noise = jax.random.gumbel(jax.random.fold_in(request.key, step), total.shape)
    drawn = jax.lax.top_k(total + noise, n)[1]  # arXiv:1903.06059
    scores, order = jax.lax.top_k(jnp.take_along_axis(total, drawn, -1), n)
    return scores, jnp.take_along_axis(drawn, order, -1)


def _continued(
    state: _Beams, origin: Int[Array, "batch k"], token: Int[Array, "batch k"], log_probs: Float[Array, "batch beams vocab"]
) -> _Texts:
    """Returns the candidates: each is the running sequence `origin` and its next token."""
    texts, step = state.running.select(origin), state.step
    tokens = write(texts.tokens, token, step)
    if texts.chances is None:
        return _Texts(tokens, None)
    logits = _select(state.logits.astype(jnp.float32), origin)
    scores = jnp.take_along_axis(_select(log_probs, origin), token[..., None], -1)[..., 0]
    of_model, after_options = texts.chances
    return _Texts(tokens, (write(of_model, pick(logits, token), step), write(after_options, scores, step)))


def _best_possible(score: Float[Array, "batch 1"], length: Int[Array, ""], options: Options) -> Float[Array, "batch 1"]:
    """Returns the best score that a running sequence of this length may still reach, by the rule of `early_stopping`."""
    longest = options.new if options.early_stopping == "never" and options.length_penalty > 0 else length
    return score / jnp.asarray(longest, jnp.float32) ** options.length_penalty
