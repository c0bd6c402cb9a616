"""Speculative decoding: a small draft model proposes tokens, and the model checks them all in one call (arXiv:2211.17192).

The tokens are those of greedy decoding, up to rounding: a call with several tokens may round differently from calls with
one. Each row goes on by the tokens that the model agrees with and one of its own, so rows have their own steps and slots.

Dims: batch, drafted = tokens proposed in a round, window = drafted + 1, new = tokens generated, vocab.
"""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redeqx.errors import check_count, wrong

from ..nn import Cache
from ._loop import Generated, Request, pick, prefill
from ._processors import process


class _State(eqx.Module):
    step: Int[Array, " batch"]
    token: Int[Array, " batch"]  # the last one; it is in no cache yet
    tokens: Int[Array, "batch _"]
    done: Bool[Array, " batch"]
    caches: tuple[Cache, Cache]  # of the model and of the draft
    chances: tuple[Float[Array, "batch _"], Float[Array, "batch _"]] | None
    counts: Int[Array, "2 batch"]  # proposed and accepted tokens


def check_assistant(model: Any, draft: Any, drafted: int, request: Request) -> None:
    """Raises TypeError or ValueError for models and options that do not allow a draft.

    **Arguments:**

    - `drafted`: the number of tokens to propose in a round.
    """
    if not (hasattr(draft, "decode") and hasattr(draft, "init_cache")) or hasattr(draft, "encode") != hasattr(
        model, "encode"
    ):
        rule = f"a model of the same kind as {type(model).__name__}"
        raise wrong("assistant_model", rule, type(draft).__name__, "Pass a smaller one with the same vocabulary.", TypeError)
    if "every" not in inspect.signature(model.decode).parameters:
        raise TypeError(
            f"`model`: expected a `decode(ids, cache, *, mask=None, every=False)` with `assistant_model`, got one without "
            f"`every` in {type(model).__name__}. Return the logits of all `ids` with `every=True`."
        )
    if request.pixels is not None and not hasattr(draft, "see"):
        rule = "one that reads images, as `pixels` are given"
        raise wrong("assistant_model", rule, type(draft).__name__, "Pass one that does, or generate without a draft.")
    check_count(drafted, "num_assistant_tokens")
    options = request.options
    excluded = {
        "stop_strings": request.stop is not None,
        "do_sample": options.do_sample,
        "num_beams": options.num_beams > 1,
        "num_return_sequences": options.rows > 1,
    }
    if given := [name for name, is_given in excluded.items() if is_given]:
        raise wrong(given[0], "none with `assistant_model`, which decodes greedily", "one", "Choose one of the two.")
    for one in (model, draft):
        n_positions, needed = getattr(getattr(one, "config", None), "n_positions", None), options.n_given + options.new - 1
        if n_positions is not None and needed + drafted > n_positions:
            raise ValueError(
                f"`num_assistant_tokens`: expected at most {max(n_positions - needed, 0)} after {needed} tokens, since "
                f"{type(one).__name__} has `n_positions`={n_positions}, got {drafted}. Propose or generate fewer."
            )
    sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (model, draft)]
    if sizes[0] != sizes[1]:
        rule = f"the vocabulary of the model, {sizes[0]} tokens"
        raise wrong("assistant_model", rule, sizes[1], "Pass a draft with the same tokenizer.")


def speculate(model: Any, draft: Any, request: Request, drafted: int) -> Generated:
    """Returns the tokens of greedy decoding, `[batch, 1, new]`, and the share of proposed tokens that were accepted.

    **Arguments:**

    - `drafted`: the number of tokens to propose in a round.
    """
    options, window = request.options, drafted + 1
    new = options.new
    # A round writes all of its tokens, also those that are not accepted.
    logits, cache = prefill(model, request, drafted)
    _, draft_cache = prefill(draft, request, drafted)
    for one, its_cache in ((model, cache), (draft, draft_cache)):
        if not isinstance(its_cache, Cache):
            raise TypeError(
                "`assistant_model`: expected models with a `redeqx.models.nn.Cache`, where tokens can be taken back, got "
                f"{type(its_cache).__name__} of {type(one).__name__}. Generate without a draft."
            )
    batch = len(logits)
    # A round ends at one of the tokens that it has written, or before all of them.
    cache, draft_cache = (_keep(one, window + 1) for one in (cache, draft_cache))
    caches = tuple(eqx.tree_at(lambda c: c.index, c, jnp.full(batch, c.index)) for c in (cache, draft_cache))
    axes, draft_axes = (
        eqx.tree_at(lambda a: a.index, c.axes(), 0, is_leaf=lambda leaf: leaf is None) for c in (cache, draft_cache)
    )
    verify = jax.vmap(lambda ids, cache: model.decode(ids, cache, every=True), (0, axes), (0, axes))
    propose = jax.vmap(lambda token, cache: draft.decode(token[None], cache), (0, draft_axes), (0, draft_axes))
    places = jnp.arange(window)

    def take(logits: Array, count: Array, state: _State, scores: Array, tokens: Array) -> _State:
        """Returns the state with the first `count` of these tokens in each row, up to its end."""
        ends = options.ends(tokens) & (places[: tokens.shape[1]] < count[:, None])
        count = jnp.where(ends.any(-1), 1 + jnp.argmax(ends, -1), count)
        count = jnp.where(state.done, 0, jnp.minimum(count, new - state.step))
        is_taken = places[: tokens.shape[1]] < count[:, None]
        put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
        chances = state.chances
        if chances is not None:
            kept = (jnp.where(is_taken, pick(of_all, tokens), 0.0) for of_all in (logits, scores))
            log_probs, after = (put(buffer, values, state.step, 0) for buffer, values in zip(chances, kept, strict=True))
            chances = log_probs, after
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
        step = state.step + count
        return _State(
            step=step,
            token=jnp.where(count > 0, last, state.token),
            tokens=put(state.tokens, jnp.where(is_taken, tokens, options.pad), state.step, 0),
            done=state.done | (ends & is_taken).any(-1) | (step >= new),
            caches=state.caches,
            chances=chances,
            counts=state.counts,
        )

    def choose(logits: Array, tokens: Array, step: Array) -> tuple[Array, Array]:
        """Returns the scores and the model's tokens of a window, whose first token has this step in each row."""
        one = lambda i: process(logits[:, i, None], tokens[:, None, :new], step + i, options, request.given)  # noqa: E731
        scores = jnp.concatenate([one(i) for i in range(logits.shape[1])], 1)
        return scores, jnp.argmax(scores, -1).astype(jnp.int32)

    def advance(state: _State) -> _State:
        cache, draft_cache = state.caches
        before, draft_before = cache.index, draft_cache.index

        def guess(carry: tuple, _: None) -> tuple[tuple, Array]:
            token, cache = carry
            logits, cache = propose(token, cache)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
            return (token, cache), token

        # The last guess is not used; its call puts the last proposal into the draft's cache.
        (_, draft_cache), guesses = jax.lax.scan(guess, (state.token, draft_cache), None, window)
        proposed = guesses[:-1].T
        logits, cache = verify(jnp.concatenate([state.token[:, None], proposed], 1), cache)
        logits = logits.astype(jnp.float32)
        with_proposed = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(state.tokens, proposed, state.step, 0)
        scores, tokens = choose(logits, with_proposed, state.step)
        agreed = jnp.cumprod(tokens[:, :-1] == proposed, -1).sum(-1)
        was_done = state.done
        after = take(logits, agreed + 1, state, scores, tokens)
        count = after.step - state.step
        caches = (
            eqx.tree_at(lambda c: c.index, cache, before + count),
            eqx.tree_at(lambda c: c.index, draft_cache, draft_before + count),
        )
        round_counts = jnp.where(was_done, 0, jnp.stack([jnp.full_like(agreed, drafted), agreed]))
        return eqx.tree_at(lambda s: (s.caches, s.counts), after, (caches, state.counts + round_counts))

    length = new + window
    zeros = jnp.zeros((batch, length), jnp.float32)
    state = _State(
        step=jnp.zeros(batch, jnp.int32),
        token=jnp.zeros(batch, jnp.int32),
        tokens=jnp.full((batch, length), options.pad, jnp.int32),
        done=jnp.zeros(batch, bool),
        caches=(caches[0], caches[1]),
        chances=(zeros, zeros) if request.output_scores else None,
        counts=jnp.zeros((2, batch), jnp.int32),
    )
    logits = logits[:, None].astype(jnp.float32)
    scores, tokens = choose(logits, state.tokens, state.step)
    state = take(logits, jnp.ones(batch, jnp.int32), state, scores, tokens)
    state = jax.lax.while_loop(lambda state: ~state.done.all(), advance, state)
    accepted = state.counts[1] / jnp.maximum(state.counts[0], 1)
    arrays = jax.tree.map(lambda array: array[:, None, :new], (state.tokens, *(state.chances or ())))
    return Generated(*arrays, accepted=accepted[:, None] if request.output_scores else None)


def _keep(cache: Cache, n: int) -> Cache:
    """Returns a batch of caches, from now on with the last `n` states."""
    if cache.states is None:
        return cache
    axes = cache.axes()
    return jax.vmap(lambda cache: cache.keep(n), (axes,), axes)(cache)
