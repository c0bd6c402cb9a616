"""The loop of greedy decoding and sampling: prefill, then one token a step, until all rows have ended.

`generate` runs the whole loop as one program, and `stream` runs its steps one by one. Beam search has its own loop, in
`_beams.py`; it shares the prefill and the decoding step.

Dims: batch, prompt = tokens given, rows = sequences of one example, new = tokens generated, vocab.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._options import Options
from ._processors import NO_TOKEN, Given, process
from ._sampling import distribution
from ._stop import Stop


class Request(eqx.Module):
    """What one generation starts from: the inputs, and what its options need. The options are static."""

    inputs: Array
    mask: Bool[Array, "batch source"] | None
    key: PRNGKeyArray | None
    given: Given
    stop: Stop | None
    options: Options = eqx.field(static=True)
    output_scores: bool = eqx.field(static=True, default=False)
    # The tokens that an encoder-decoder's texts begin with; None for `decoder_start_token_id`.
    decoder_inputs: Int[Array, "batch target"] | None = None
    pixels: Float[Array, "batch images channels height width"] | None = None  # of a decoder that reads images


class Generated(eqx.Module):
    """Generated tokens with their scores. With `num_return_sequences`, there is a dim of sequences after the batch's. For a
    list of prompts, the first three are lists of arrays without padding.

    **Arguments:**

    - `tokens`: the tokens, with padding after the end of each text.
    - `log_probs`: the model's own log-probability of each token, before all options; 0 after the end of a text.
    - `scores`: the log-probability of each token in the distribution that it was chosen from, after all options; 0 after the
        end. In a beam search it is not normalized again after the options, as in `transformers`.
    - `sequence_scores`: of a beam search, the sum of a text's `scores` over `length ** length_penalty`; None otherwise.
    - `accepted`: with an `assistant_model`, the share of its tokens that the model agreed with; None otherwise.
    """

    tokens: Int[Array, "*sequences new"] | list[Any]
    log_probs: Float[Array, "*sequences new"] | list[Any] | None = None
    scores: Float[Array, "*sequences new"] | list[Any] | None = None
    sequence_scores: Float[Array, "*sequences"] | None = None
    accepted: Float[Array, "*sequences"] | None = None


# `log_probs` and `scores` of each token; see `Generated`.
Chances = tuple[Float[Array, "batch rows new"], Float[Array, "batch rows new"]]


class State(eqx.Module):
    """The state of the loop after some steps."""

    step: Int[Array, ""] | int
    token: Int[Array, "batch rows"]  # the last one of each row
    tokens: Int[Array, "batch rows new"]
    done: Bool[Array, "batch rows"]
    cache: Any
    chances: Chances | None  # on request
    stop: Int[Array, "batch rows"] | None  # the states of `request.stop`


def no_chances(shape: tuple[int, ...], request: "Request") -> Chances | None:
    zeros = jnp.zeros(shape, jnp.float32)
    return (zeros, zeros) if request.output_scores else None


def axes_of(cache: Any, *, shares_memory: bool = False) -> Any:
    """Returns the axes of a cache for `jax.vmap` over rows: those that it says by `axes`, as `nn.Cache` does, else the first
    ones.

    **Arguments:**

    - `shares_memory`: whether all rows attend to the same memory, as the beams of one example do.
    """
    return cache.axes(shares_memory=shares_memory) if hasattr(cache, "axes") else jax.tree.map(lambda _: 0, cache)


def prefill(model: Any, request: Request, more: int = 0) -> tuple[Float[Array, "batch vocab"], Any]:
    """Returns the logits of each row's first new token, and the cache that holds the prompts, with slots for the new tokens
    and `more` of them."""
    new = request.options.new + more

    def begin(inputs: Array, mask: Array | None, start: Array | None, pixels: Array | None) -> tuple[Array, Any]:
        if not hasattr(model, "encode"):
            # The last token is never fed back, so it needs no slot.
            seen = {} if pixels is None else {"pixels": pixels}
            return model.decode(inputs, model.init_cache(inputs.shape[0] + new - 1), mask=mask, **seen)
        memory = model.encode(inputs) if mask is None else model.encode(inputs, mask=mask)
        start = jnp.full(1, model.config.decoder_start_token_id, jnp.int32) if start is None else start
        return model.decode(start, model.init_cache(len(start) + new - 1, memory, memory_mask=mask))

    given = request.inputs, request.mask, request.decoder_inputs, request.pixels
    _, cache = eqx.filter_eval_shape(begin, *[None if array is None else array[0] for array in given])
    return jax.vmap(begin, out_axes=(0, axes_of(cache)))(*given)


def prompt_of(request: Request) -> Int[Array, "batch prompt"] | None:
    """Returns the prompts of a decoder, with NO_TOKEN at padding; None if the inputs are an encoder's."""
    if request.options.has_encoder:
        return None
    return request.inputs if request.mask is None else jnp.where(request.mask, request.inputs, NO_TOKEN)


def repeat(cache: Any, n: int) -> Any:
    """Returns the cache with `n` rows for each example, in a new dim after the batch's. The rows share the example's
    memory."""
    inner = axes_of(cache, shares_memory=True)

    def repeated(axis: int | None, leaf: Any) -> Any:
        return leaf if axis is None else jnp.repeat(jnp.expand_dims(leaf, axis + 1), n, axis + 1)

    # `axes` is the first tree, because a None in it stands for a subtree, the pair of the memory.
    return jax.tree.map(repeated, inner, cache, is_leaf=lambda x: x is None)


def decoder(model: Any, cache: Any) -> Callable[[Int[Array, "batch rows"], Any], tuple[Array, Any]]:
    """Returns a decoding step for several rows of each example: from one token per row to the logits of the next."""
    inner, outer = axes_of(cache, shares_memory=True), axes_of(cache)
    decode = jax.vmap(lambda token, cache: model.decode(token[None], cache), (0, inner), (0, inner))
    return jax.vmap(decode, (0, outer), (0, outer))


def pick(scores: Float[Array, "*rows vocab"], token: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Returns the log-probability of a token of each row, from scores that need not be normalized."""
    return jnp.take_along_axis(jax.nn.log_softmax(scores), token[..., None], -1)[..., 0]


def write(buffer: Array, values: Array, step: Any) -> Array:
    """Returns the buffer with these values at a step, along the last dim."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values[..., None].astype(buffer.dtype), step, buffer.ndim - 1)


def start(model: Any, request: Request) -> State:
    """Returns the state after the first new token."""
    logits, cache = prefill(model, request)
    n = request.options.rows
    cache = repeat(cache, n)
    logits = jnp.repeat(logits[:, None], n, 1)
    shape = (*logits.shape[:2], request.options.new)
    state = State(
        step=0,
        token=jnp.zeros(shape[:2], jnp.int32),
        tokens=jnp.full(shape, request.options.pad, jnp.int32),
        done=jnp.zeros(shape[:2], bool),
        cache=cache,
        chances=no_chances(shape, request),
        stop=None if request.stop is None else request.stop.start(prompt_of(request), shape[:2]),
    )
    return _take(logits, cache, state, request)


def advance(model: Any, state: State, request: Request) -> State:
    """Returns the state after one more token."""
    logits, cache = decoder(model, state.cache)(state.token, state.cache)
    return _take(logits, cache, state, request)


def is_running(state: State, request: Request) -> Bool[Array, ""]:
    return (state.step < request.options.new) & ~state.done.all()


def search(model: Any, request: Request) -> Generated:
    """Returns the tokens of greedy decoding or sampling, `[batch, rows, new]`."""
    state = start(model, request)
    state = jax.lax.while_loop(
        lambda state: is_running(state, request), lambda state: advance(model, state, request), in_loop(state)
    )
    return Generated(state.tokens, *(state.chances or ()))


def in_loop(state: State) -> State:
    return eqx.tree_at(lambda s: s.step, state, jnp.int32(state.step))


def _take(logits: Float[Array, "batch rows vocab"], cache: Any, state: State, request: Request) -> State:
    """Returns the state after the tokens that are chosen from these logits."""
    options, step = request.options, state.step
    logits = logits.astype(jnp.float32)
    scores = process(logits, state.tokens, step, options, request.given)
    if options.do_sample:
        assert request.key is not None
        scores = distribution(scores, options)
        token = jax.random.categorical(jax.random.fold_in(request.key, step), scores).astype(jnp.int32)
    else:
        token = jnp.argmax(scores, -1).astype(jnp.int32)
    chances = state.chances
    if chances is not None:
        of_token = (jnp.where(state.done, 0.0, pick(of_all, token)) for of_all in (logits, scores))
        log_probs, kept = (write(buffer, values, step) for buffer, values in zip(chances, of_token, strict=True))
        chances = log_probs, kept
    token = jnp.where(state.done, options.pad, token)
    done, stop = state.done | options.ends(token), state.stop
    if stop is not None:
        assert request.stop is not None
        stop, is_stopped = request.stop.advance(stop, token)
        done = done | is_stopped
    return State(
        step=step + 1,
        token=token if options.pad >= 0 else jnp.maximum(token, 0),  # it is fed to the model
        tokens=write(state.tokens, token, step),
        done=done,
        cache=cache,
        chances=chances,
        stop=stop,
    )
