"""Token generation with a key-value cache under one jit, for decoders and encoder-decoders.

Decoding is greedy, by sampling, or by beam search. The rules are those of `transformers` 5, so that both produce the same
tokens. A model provides three methods: `encode` (encoder-decoders only), `init_cache` and `decode`.

Dims: batch, prompt = tokens given, beams, new = tokens generated, vocab.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx.errors import brief, check_choice, check_count, check_key, check_number, filter_traceback

from ..nn import Cache
from ._config import Generation

_IMPOSSIBLE = -1e9  # the score of an impossible candidate; finite, as in transformers, so that sums can be compared


@dataclass(frozen=True)
class _Rules:
    """The options of one generation. They are static under jit."""

    max_new_tokens: int
    min_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    forced_first: int | None
    forced_last: int | None
    sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    n_beams: int
    n_return: int
    length_penalty: float
    early_stopping: bool | str

    def ends(self, token: Int[Array, "*rows"]) -> Bool[Array, "*rows"]:
        return jnp.isin(token, jnp.array(self.eos, jnp.int32))

    def allowed(self, scores: Float[Array, "*rows vocab"], step: Any) -> Float[Array, "*rows vocab"]:
        """Returns the scores, with -inf for tokens that are not allowed at this step."""
        if self.min_new_tokens and self.eos:
            too_short = step < self.min_new_tokens
            scores = jnp.where(too_short & self.ends(jnp.arange(scores.shape[-1])), -jnp.inf, scores)
        for forced, at in ((self.forced_first, 0), (self.forced_last, self.max_new_tokens - 1)):
            if forced is not None:
                alone = jnp.where(jnp.arange(scores.shape[-1]) == forced, 0.0, -jnp.inf)
                scores = jnp.where(step == at, alone, scores)
        return scores


@filter_traceback
def generate(
    model: Any,
    inputs: Array | np.ndarray,
    *,
    max_new_tokens: int | None = None,
    mask: Bool[Array, "batch source"] | Bool[np.ndarray, "batch source"] | None = None,
    min_new_tokens: int | None = None,
    sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    n_beams: int | None = None,
    n_return: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    eos_token_id: int | tuple[int, ...] | None = None,
    pad_token_id: int | None = None,
    ignore: Sequence[str] = (),
    key: PRNGKeyArray | None = None,
) -> Int[Array, "batch new"] | Int[Array, "batch sequences new"]:
    """Generates tokens, `[batch, max_new_tokens]`. Each row is padded after its end-of-text token.

    The whole batch runs as one program, which stops when all rows have ended. The program is compiled once for each input
    shape, so pad prompts on the left to a common length. Inside `pred_fn` it runs on the model's mesh.

    An argument that is None takes its value from `generation_config.json` in the model's folder, or from the old keys of
    `config.json` if there is no such file, as in `transformers`. If the folder does not set it either, the default in
    parentheses below applies.

    **Arguments:**

    - `model`: a decoder (GPT-2, LLaMA, ...) or an encoder-decoder (T5, BART, ...) of redeqx.models. Dropout is turned off.
    - `inputs`: a batch of prompts, `[batch, prompt]`. For an encoder-decoder, the inputs of its encoder: token ids or
        images.
    - `mask`: True for tokens, False for padding. A decoder's prompts are padded on the left; this is checked if the mask is
        a numpy array, and cannot be checked under jit.
    - `max_new_tokens`, `min_new_tokens`: the number of tokens to generate, including the end-of-text token (no default; 0).
    - `sample`: whether to sample each token from its distribution instead of taking the most likely one (False).
    - `temperature`, `top_k`, `top_p`: the sampling distribution. Logits are divided by `temperature` (1.0). Then only the
        `top_k` most likely tokens are kept (all; transformers keeps 50). Then only the smallest set of most likely tokens
        whose probabilities sum to at least `top_p` is kept (all).
    - `n_beams`: the number of beams; 1 turns off beam search (1).
    - `n_return`: the number of sequences to return for each prompt, `[batch, n_return, max_new_tokens]`: the best beams, or
        independent samples (one, without that dim).
    - `length_penalty`: for beam search; the sum of log-probabilities is divided by `length ** length_penalty` (1.0).
    - `early_stopping`: when a beam search with `n_beams` finished sequences stops. True: at once. False: when no running
        sequence is likely to be better. `"never"`: when no running sequence can be better (False).
    - `eos_token_id`, `pad_token_id`: None takes them from the config. Without a padding token, the end-of-text token pads.
    - `ignore`: keys of `generation_config.json` that are not implemented here, and that are to be ignored.
    - `key`: for sampling.

    Raises ValueError for inputs without a row or a token, for counts below 1, for more tokens than the model has positions,
    for sampling without a key, for arguments that contradict each other, and for options of the folder that are not
    implemented. Raises TypeError for a model that cannot generate.
    """
    if not (hasattr(model, "decode") and hasattr(model, "init_cache")):
        raise TypeError(
            f"`model`: expected one with `init_cache` and `decode`, got {type(model).__name__}. "
            "Pass a decoder or an encoder-decoder of redeqx.models, or give yours these two methods."
        )
    config = getattr(model, "config", None)
    is_encoder_decoder = hasattr(model, "encode")
    if isinstance(inputs, str) or (not hasattr(inputs, "shape") and np.asarray(inputs).dtype.kind not in "biuf"):
        raise TypeError(f"`inputs`: expected an array of token ids, got {brief(inputs)}. Pass what the tokenizer returns.")
    ids = jnp.asarray(inputs)
    is_prompt = ids.ndim == 2 and jnp.issubdtype(ids.dtype, jnp.integer)
    if ids.ndim < 2 or ids.size == 0 or not (is_prompt or is_encoder_decoder):
        wanted = "a batch of inputs of the encoder" if is_encoder_decoder else "token ids of shape (batch, prompt)"
        raise ValueError(
            f"`inputs`: expected {wanted}, got {ids.dtype} {ids.shape}. Pass at least one row, and one token each."
        )
    mask = np.asarray(mask) if isinstance(mask, list | tuple) else mask
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"`mask`: expected the shape of `inputs`, {ids.shape}, got {mask.shape}. Pass one entry per token.")
    if isinstance(mask, np.ndarray) and not is_encoder_decoder and not mask[:, -1].all():
        row = int(np.argmin(mask[:, -1]))
        raise ValueError(
            f"`mask`: expected a token at the end of each prompt, got padding there in row {row}. Pad prompts on the left."
        )
    if not is_encoder_decoder:
        _check_ids(inputs, mask, getattr(config, "vocab_size", None))
    for name, token in {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}.items():
        if token is not None and np.size(token) and not np.issubdtype(np.asarray(token).dtype, np.integer):
            raise TypeError(f"`{name}`: expected a token id, got {brief(token)}. Pass that of the tokenizer.")
    given = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "n_beams": n_beams,
        "n_return": n_return,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    n_given = 1 if is_encoder_decoder else ids.shape[1]
    generation = getattr(config, "generation", None) or Generation()
    options, keys = generation.complete(given, n_given=n_given, ignore=ignore)
    try:
        _check(options, n_given, getattr(config, "n_positions", None), key)
    except ValueError as error:
        raise generation.with_source(error, keys) from None
    eos = eos_token_id if eos_token_id is not None else getattr(config, "eos_token_id", None)
    eos = () if eos is None else tuple(int(token) for token in np.ravel(np.asarray(eos)))
    pad = pad_token_id if pad_token_id is not None else getattr(config, "pad_token_id", None)
    first, last = (
        getattr(config, name, generation.keys.get(name)) for name in ("forced_bos_token_id", "forced_eos_token_id")
    )
    rules = _Rules(
        eos=eos,
        pad=pad if pad is not None else eos[0] if eos else 0,
        forced_first=first if n_given == 1 else None,  # only if the decoder has no prompt yet
        forced_last=last,
        **{**options, "n_return": options["n_return"] or 1},
    )
    mask = None if mask is None else jnp.asarray(mask, bool)
    if mask is not None and not is_encoder_decoder:
        ids = jnp.where(mask, ids, 0)  # the padding id may be outside the vocabulary
    tokens = _generate(eqx.nn.inference_mode(model), ids, mask, key, rules)
    return tokens[:, 0] if options["n_return"] is None else tokens


def _check_ids(inputs: Any, mask: Any, vocab_size: int | None) -> None:
    """Raises ValueError for tokens outside of the vocabulary, which are not padding. Under jit they are not known."""
    if vocab_size is None or isinstance(inputs, Tracer) or isinstance(mask, Tracer):
        return
    if not getattr(inputs, "is_fully_addressable", True) or not getattr(mask, "is_fully_addressable", True):
        return
    ids = np.asarray(inputs)
    wrong = ((ids < 0) | (ids >= vocab_size)) & (True if mask is None else np.asarray(mask, bool))
    if wrong.any():
        raise ValueError(
            f"`inputs`: expected token ids from 0 to {vocab_size - 1}, the vocabulary of the model, got {ids[wrong][0]} in "
            f"row {int(np.argwhere(wrong)[0][0])}. Pass the tokenizer of this model's folder, and a `mask` for padding."
        )


def _check(options: Mapping[str, Any], n_given: int, n_positions: int | None, key: PRNGKeyArray | None) -> None:
    """Raises ValueError for options that are out of range or contradict each other."""
    for name in ("max_new_tokens", "n_beams", "n_return"):
        if options[name] is not None:
            check_count(options[name], name)
    if options["max_new_tokens"] is None:
        raise ValueError("`max_new_tokens`: expected the number of tokens to generate, got None. Pass a positive number.")
    check_choice(options["sample"], "sample", (True, False))
    check_number(
        options["length_penalty"], "length_penalty", "a finite number", math.isfinite, "Pass 1.0 for the mean of a sequence."
    )
    new, n_beams, n_return = options["max_new_tokens"], options["n_beams"], options["n_return"]
    if not 0 <= options["min_new_tokens"] <= new:
        raise ValueError(
            f"`min_new_tokens`: expected 0 to `max_new_tokens`={new}, got {options['min_new_tokens']}. Lower it."
        )
    if options["early_stopping"] not in (True, False, "never"):
        raise ValueError(
            f"`early_stopping`: expected True, False or 'never', got {options['early_stopping']!r}. Pass one of them."
        )
    _check_sampling(key=key, **{name: options[name] for name in ("sample", "temperature", "top_k", "top_p", "n_beams")})
    if n_return is not None and n_return > n_beams and not options["sample"]:
        raise ValueError(
            f"`n_return`: expected at most `n_beams`={n_beams}, got {n_return}. Raise `n_beams`, or pass `sample=True`."
        )
    if n_positions is not None and n_given + new > n_positions:
        raise ValueError(
            f"`max_new_tokens`: expected at most {n_positions - n_given} after {n_given} given ones, since the model has "
            f"`n_positions`={n_positions}, got {new}. Generate fewer, or cut the prompts."
        )


def _check_sampling(
    *, sample: bool, temperature: float, top_k: int | None, top_p: float | None, n_beams: int, key: PRNGKeyArray | None
) -> None:
    if not sample:
        for name, value, default in (("temperature", temperature, 1.0), ("top_k", top_k, None), ("top_p", top_p, None)):
            if value != default:
                raise ValueError(f"`{name}`: expected {default} without sampling, got {value}. Pass `sample=True`.")
        return
    if key is None:
        raise ValueError("`key`: expected a key to sample with, got None. Pass the `key` of `pred_fn`.")
    if n_beams > 1:
        raise ValueError(f"`n_beams`: expected 1 with `sample=True`, got {n_beams}. Choose one of the two.")
    check_number(
        temperature, "temperature", "more than 0", lambda value: value > 0, "Pass `sample=False` for the likeliest token."
    )
    if top_k is not None:
        check_count(top_k, "top_k", advice="Pass the size of the vocabulary for all tokens.")
    if top_p is not None:
        check_number(top_p, "top_p", "a share in (0, 1]", lambda value: 0 < value <= 1, "Pass 1.0 for all tokens.")
    check_key(key)


@eqx.filter_jit
def _generate(
    model: Any, inputs: Array, mask: Array | None, key: PRNGKeyArray | None, rules: _Rules
) -> Int[Array, "batch sequences new"]:
    logits, cache = _prefill(model, inputs, mask, rules)
    if rules.n_beams > 1:
        return _beam_search(model, logits, cache, rules)
    cache = _repeat(cache, rules.n_return)
    logits = jnp.repeat(logits[:, None], rules.n_return, 1)
    return _greedy_or_sample(model, logits, cache, key, rules)


def _prefill(model: Any, inputs: Array, mask: Array | None, rules: _Rules) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Returns the logits of each row's first new token, and the cache that holds the prompts."""

    def begin(inputs: Array, mask: Array | None) -> tuple[Array, Cache]:
        if not hasattr(model, "encode"):
            # The last token is never fed back, so it needs no slot.
            return model.decode(inputs, model.init_cache(inputs.shape[0] + rules.max_new_tokens - 1), mask=mask)
        memory = model.encode(inputs) if mask is None else model.encode(inputs, mask=mask)
        start = jnp.full(1, model.config.decoder_start_token_id, jnp.int32)
        return model.decode(start, model.init_cache(rules.max_new_tokens, memory, memory_mask=mask))

    _, cache = eqx.filter_eval_shape(begin, inputs[0], None if mask is None else mask[0])
    return jax.vmap(begin, out_axes=(0, cache.axes()))(inputs, mask)


def _repeat(cache: Cache, n: int) -> Cache:
    """Returns the cache with `n` rows for each example, in a new dim after the batch's. The rows share the example's
    memory."""
    inner = cache.axes(shares_memory=True)

    def repeat(axis: int | None, leaf: Any) -> Any:
        return leaf if axis is None else jnp.repeat(jnp.expand_dims(leaf, axis + 1), n, axis + 1)

    # `axes` is the first tree, because a None in it stands for a subtree, the pair of the memory.
    return jax.tree.map(repeat, inner, cache, is_leaf=lambda x: x is None)


def _decoder(model: Any, cache: Cache) -> Callable[[Int[Array, "batch rows"], Cache], tuple[Array, Cache]]:
    """Returns a decoding step for several rows of each example: from one token per row to the logits of the next."""
    inner, outer = cache.axes(shares_memory=True), cache.axes()
    decode = jax.vmap(lambda token, cache: model.decode(token[None], cache), (0, inner), (0, inner))
    return jax.vmap(decode, (0, outer), (0, outer))


# --- greedy decoding and sampling -----------------------------------------------------------------------------------


def _choose(logits: Float[Array, "batch rows vocab"], step: Any, key: PRNGKeyArray | None, rules: _Rules):
    """Returns the next token of each row."""
    logits = rules.allowed(logits.astype(jnp.float32), step)
    if not rules.sample:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / rules.temperature
    if rules.top_k is not None and rules.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, rules.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if rules.top_p is not None and rules.top_p < 1:
        logits = _nucleus(logits, rules.top_p)
    assert key is not None
    return jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)


def _nucleus(logits: Float[Array, "*rows vocab"], top_p: float) -> Float[Array, "*rows vocab"]:
    """Returns the logits of the smallest set of most likely tokens whose probabilities sum to `top_p` (arXiv:1904.09751);
    -inf for the other tokens."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    before = jnp.cumsum(jax.nn.softmax(ordered), -1) - jax.nn.softmax(ordered)  # the probability of all likelier tokens
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def _greedy_or_sample(
    model: Any, logits: Float[Array, "batch rows vocab"], cache: Cache, key: PRNGKeyArray | None, rules: _Rules
) -> Int[Array, "batch rows new"]:
    decode = _decoder(model, cache)
    token = _choose(logits, 0, key, rules)
    tokens = jnp.full((*token.shape, rules.max_new_tokens), rules.pad, jnp.int32).at[..., 0].set(token)

    def is_running(state: tuple) -> Array:
        step, _, _, done, _ = state
        return (step < rules.max_new_tokens) & ~done.all()

    def advance(state: tuple) -> tuple:
        step, token, tokens, done, cache = state
        logits, cache = decode(token, cache)
        token = jnp.where(done, rules.pad, _choose(logits, step, key, rules))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], step, 2)
        return step + 1, token, tokens, done | rules.ends(token), cache

    return jax.lax.while_loop(is_running, advance, (jnp.int32(1), token, tokens, rules.ends(token), cache))[2]


# --- beam search ----------------------------------------------------------------------------------------------------


class _Beams(eqx.Module):
    """The state of a beam search. Running and finished sequences are each sorted by score."""

    step: Int[Array, ""]
    logits: Float[Array, "batch beams vocab"]
    cache: Cache
    running: Int[Array, "batch beams new"]
    running_scores: Float[Array, "batch beams"]  # sums of log-probabilities
    finished: Int[Array, "batch beams new"]
    finished_scores: Float[Array, "batch beams"]  # including the length penalty
    is_finished: Bool[Array, "batch beams"]  # whether this slot holds a finished sequence
    can_improve: Bool[Array, " batch"]
    all_end: Bool[Array, " batch"]  # whether no sequence continues


def _select_beams(array: Array, beams: Int[Array, "batch k"], axis: int = 1) -> Array:
    """Selects the given beams of each example. `axis` is the beam axis; the batch axis precedes it."""
    shape = [1] * array.ndim
    shape[axis - 1], shape[axis] = beams.shape
    return jnp.take_along_axis(array, beams.reshape(shape), axis)


def _beam_search(
    model: Any, logits: Float[Array, "batch vocab"], cache: Cache, rules: _Rules
) -> Int[Array, "batch sequences new"]:
    n, new = rules.n_beams, rules.max_new_tokens
    batch, vocab = logits.shape
    # Enough candidates that `n` can continue even if all others end.
    n_candidates = min(max(2, 1 + len(rules.eos)) * n, n * vocab)
    cache = _repeat(cache, n)
    decode, axes = _decoder(model, cache), cache.axes(shares_memory=True)
    empty = jnp.full((batch, n, new), rules.pad, jnp.int32)
    # All beams start equal. Only the first one is possible, so that the first step does not select each token `n` times.
    first = jnp.full((batch, n), _IMPOSSIBLE).at[:, 0].set(0.0)

    def reorder(cache: Cache, beams: Int[Array, "batch beams"]) -> Cache:
        pick = lambda axis, leaf: leaf if axis is None else _select_beams(leaf, beams, axis + 1)  # noqa: E731
        return jax.tree.map(pick, axes, cache, is_leaf=lambda x: x is None)

    def extend(state: _Beams) -> tuple[_Beams, Int[Array, "batch beams"], Int[Array, "batch beams"]]:
        """Returns the state after one more token; the beam that each running sequence continues; and its token."""
        step = state.step
        log_probs = rules.allowed(jax.nn.log_softmax(state.logits.astype(jnp.float32)), step)
        scores = (log_probs + state.running_scores[..., None]).reshape(batch, -1)
        scores, flat = jax.lax.top_k(scores, n_candidates)
        origin, token = flat // vocab, (flat % vocab).astype(jnp.int32)
        sequences = _select_beams(state.running, origin)
        sequences = jax.lax.dynamic_update_slice_in_dim(sequences, token[..., None], step, 2)
        ends = rules.ends(token) | (step + 1 == new)

        running_scores, kept = jax.lax.top_k(scores + jnp.where(ends, _IMPOSSIBLE, 0.0), n)
        # Only the best `n` candidates may finish. The others can only continue.
        finishes = ends & (jnp.arange(n_candidates) < n)
        is_full = state.is_finished.all(-1) & (rules.early_stopping is True)
        is_closed = is_full | ~state.can_improve
        final = scores / (step + 1).astype(jnp.float32) ** rules.length_penalty
        final = final + jnp.where(is_closed[:, None], _IMPOSSIBLE, 0.0) + jnp.where(finishes, 0.0, _IMPOSSIBLE)
        finished_scores, best = jax.lax.top_k(jnp.concatenate([state.finished_scores, final], 1), n)
        is_finished = _select_beams(jnp.concatenate([state.is_finished, finishes], 1), best)

        # Whether the best running sequence could still beat the worst finished one.
        longest = new if rules.early_stopping == "never" and rules.length_penalty > 0 else step + 1
        possible = running_scores[:, :1] / jnp.asarray(longest, jnp.float32) ** rules.length_penalty
        worst = jnp.where(is_finished, finished_scores.min(-1, keepdims=True), _IMPOSSIBLE)
        can_improve = state.can_improve & (possible > worst).any(-1)
        state = _Beams(
            step=step + 1,
            logits=state.logits,
            cache=state.cache,
            running=_select_beams(sequences, kept),
            running_scores=running_scores,
            finished=_select_beams(jnp.concatenate([state.finished, sequences], 1), best),
            finished_scores=finished_scores,
            is_finished=is_finished,
            can_improve=can_improve,
            all_end=ends.all(-1),
        )
        return state, _select_beams(origin, kept), _select_beams(token, kept)

    def advance(carry: tuple) -> tuple:
        state, origin, token = carry
        logits, cache = decode(token, reorder(state.cache, origin))
        return extend(eqx.tree_at(lambda s: (s.logits, s.cache), state, (logits, cache)))

    def is_running(carry: tuple) -> Array:
        state = carry[0]
        all_full = state.is_finished.all() & (rules.early_stopping is True)
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
    )
    state, _, _ = jax.lax.while_loop(is_running, advance, extend(begin))
    return state.finished[:, : rules.n_return]
