"""`generate`: checks its arguments, fills in those of the folder, and runs the search under one jit.

Decoding is greedy, by sampling, or by beam search. The rules are those of `transformers` 5, so that both produce the same
tokens. A model provides three methods: `encode` (encoder-decoders only), `init_cache` and `decode`. The options are in
`_options.py`, what they do to scores in `_processors.py` and `_sampling.py`, the searches in `_loop.py` and `_beams.py`.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, PRNGKeyArray

from redeqx.errors import brief, check_names, filter_traceback, wrong

from ._beams import beam_search
from ._config import Generation
from ._loop import Generated, Request, State, advance, in_loop, search, start
from ._options import DEFAULTS, Options, check, hashable
from ._processors import NO_TOKEN, Given
from ._speculative import check_assistant, speculate
from ._stop import Stop


@filter_traceback
def generate(
    model: Any,
    inputs: Array | np.ndarray | Sequence[Any],
    *,
    max_new_tokens: int | None = None,
    mask: Bool[Array, "batch source"] | Bool[np.ndarray, "batch source"] | None = None,
    decoder_input_ids: Array | np.ndarray | Sequence[int] | None = None,
    pixels: Array | np.ndarray | None = None,
    min_new_tokens: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    epsilon_cutoff: float | None = None,
    eta_cutoff: float | None = None,
    num_beams: int | None = None,
    num_return_sequences: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    repetition_penalty: float | None = None,
    encoder_repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    encoder_no_repeat_ngram_size: int | None = None,
    bad_words_ids: Sequence[Sequence[int]] | None = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: int | Sequence[int] | None = None,
    renormalize_logits: bool | None = None,
    logits_processor: Callable[[Array, Array, Array], Array] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    num_assistant_tokens: int = 5,
    output_scores: bool = False,
    eos_token_id: int | tuple[int, ...] | None = None,
    pad_token_id: int | None = None,
    ignore: Sequence[str] = (),
    key: PRNGKeyArray | None = None,
) -> Any:
    """Generates tokens, `[batch, max_new_tokens]`. Each row is padded after its end-of-text token.

    The whole batch runs as one program, which stops when all rows have ended. The program is compiled once for each input
    shape, so pad prompts on the left to a common length. A list of prompts of any lengths is padded here, and a list
    of texts without padding returned, each a numpy array. Inside `pred_fn` it runs on the model's mesh. The options have the
    names and the meaning of `transformers`.

    An argument that is None takes its value from `generation_config.json` in the model's folder, or from the old keys of
    `config.json` if there is no such file, as in `transformers`. If the folder does not set it either, the default in
    parentheses below applies.

    **Arguments:**

    - `model`: a decoder (GPT-2, LLaMA, ...) or an encoder-decoder (T5, BART, ...) of redeqx.models, or your own. Dropout is
        turned off.
    - `inputs`: a batch of prompts, `[batch, prompt]`. For an encoder-decoder, the inputs of its encoder: token ids or
        images.
    - `mask`: True for tokens, False for padding. A decoder's prompts are padded on the left; this is checked if the mask is
        a numpy array, and cannot be checked under jit. No option takes padding for a token. None: all are tokens,
        also those equal to `pad_token_id`. (transformers takes these for padding, unless that token also ends texts.)
    - `decoder_input_ids`: the tokens that the texts of an encoder-decoder begin with, `[batch, target]`, or `[target]` for
        all rows. They are not returned. They are taken as given. (transformers puts `decoder_start_token_id` before them, if
        no row begins with it.) None takes those of `model.decoder_prompt(inputs)`, if the model has this method, as
        Whisper does, else `decoder_start_token_id`.
    - `pixels`: the images of a decoder that reads images, such as LLaVA, `[batch, images, channels, height, width]`.
    - `max_new_tokens`, `min_new_tokens`: the number of tokens to generate, including the end-of-text token (no default; 0).
    - `do_sample`: whether to sample each token from its distribution instead of taking the most likely one (False).
    - `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`: the sampling distribution.
        Logits are divided by `temperature` (1.0). Then the others leave tokens out, in this order: all but the `top_k` most
        likely (none; transformers leaves out all but 50), all but the most likely ones that sum to `top_p`, those below
        `min_p` times the largest probability, all but the most typical ones that sum to `typical_p`, those below
        `epsilon_cutoff`, and those below the smaller of `eta_cutoff` and `sqrt(eta_cutoff) * exp(-entropy)` (none).
    - `num_beams`: the number of beams; 1 turns off beam search (1). With `do_sample`, candidates are drawn.
    - `num_return_sequences`: the number of sequences to return for each prompt, `[batch, num_return_sequences,
        max_new_tokens]`: the best beams, or independent samples (one, without that dim). As in transformers, beams are
        repeated, with scores near -1e9, where fewer texts are possible.
    - `length_penalty`: for beam search; the sum of log-probabilities is divided by `length ** length_penalty` (1.0).
    - `early_stopping`: when a beam search with `num_beams` finished sequences stops. True: at once. False: when no running
        sequence is likely to be better. `"never"`: when no running sequence can be better (False).
    - `repetition_penalty`: divides the positive scores of tokens that the text contains, prompt included, and multiplies the
        negative ones (1.0). `encoder_repetition_penalty` does the reverse for tokens of the encoder's inputs, or of the
        prompt without an encoder (1.0).
    - `no_repeat_ngram_size`, `encoder_no_repeat_ngram_size`: no n tokens in a row occur twice, or are taken from the
        encoder's inputs or the prompt; 0 allows them (0).
    - `bad_words_ids`: words that are not generated, each as its token ids. `suppress_tokens`, `begin_suppress_tokens`:
        tokens that are not generated, or not first (none).
    - `forced_bos_token_id`, `forced_eos_token_id`: the first token if the decoder has no prompt, and the last one (none).
    - `renormalize_logits`: whether a beam search adds log-probabilities that the options leave normalized (False).
    - `logits_processor`: a function `(text, scores, length) -> scores` for one row, which is traced: `scores`, float
        `[vocab]`, are those of the next token after the options above; `text`, int `[prompt + max_new_tokens]`, holds prompt
        and tokens so far in its first `length` places, and -1 at padding and later places (none). Pass the same function in
        each call: a new one is compiled again. An `eqx.Module` may hold arrays.
    - `stop_strings`: texts that end a row, in the token that completes one; they need the `tokenizer`, of `tokenizers` or
        `transformers` (none).
    - `assistant_model`: a smaller model of the same vocabulary that proposes `num_assistant_tokens` tokens (5) at a time,
        which the model checks in one call. The tokens are those of greedy decoding, up to rounding (none).
    - `output_scores`: whether to return a `Generated`, which has the log-probability of each token.
    - `eos_token_id`, `pad_token_id`: None takes them from the config. Without a padding token, the end-of-text token pads.
    - `ignore`: keys of `generation_config.json` that are not implemented here, and that are to be ignored.
    - `key`: for sampling.

    Raises ValueError for inputs without a row or a token, for counts below 1, for more tokens than the model has positions,
    for sampling without a key, for arguments that contradict each other, and for options of the folder that are not
    implemented. Raises TypeError for a model that cannot generate.
    """
    request = _request(model, inputs, **{name: value for name, value in locals().items() if name in _REQUEST})
    options, draft = request.options, None
    if assistant_model is not None:
        check_assistant(model, assistant_model, num_assistant_tokens, request)
        draft = eqx.nn.inference_mode(assistant_model)
    found = _run(eqx.nn.inference_mode(model), draft, request, num_assistant_tokens)
    if options.num_return_sequences is None:
        found = jax.tree.map(lambda array: array[:, 0], found)
    found = _trimmed(found) if options.pad == NO_TOKEN else found
    return found if output_scores else found.tokens


@filter_traceback
def stream(model: Any, inputs: Array | np.ndarray | Sequence[Any], **options: Any) -> Generator[np.ndarray]:
    """Generates tokens one at a time: returns an iterator over the tokens of each step, int `[batch]`, or
    `[batch, num_return_sequences]`. It ends when all rows have ended; a row that has ended before has padding.

    The tokens are those of `generate`. Each step is a call of a compiled program, and the next one runs while the caller
    uses the tokens. Under `jit`, use `generate`.

    **Arguments:**

    - `model`, `inputs`, `options`: as for `generate`, but without beams, lists of prompts, `assistant_model` and
        `output_scores`.

    Raises what `generate` raises, and ValueError for options that a stream does not have.
    """
    check_names(_SIGNATURE, "stream", (model, inputs), options)
    for name in ("assistant_model", "num_assistant_tokens", "output_scores"):
        if options.pop(name, None):
            raise wrong(name, "none in `stream`", "one", "Call `generate`, or leave it out.")
    request = _request(model, inputs, **options)
    if request.options.num_beams > 1:
        rule = "1 in `stream`, since a beam search may still change earlier tokens"
        raise wrong("num_beams", rule, request.options.num_beams, "Call `generate`, or pass `num_beams=1`.")
    if request.options.pad == NO_TOKEN:
        raise wrong("inputs", "an array in `stream`", "a list", "Pad the prompts on the left.")
    return _steps(eqx.nn.inference_mode(model), request)


def _steps(model: Any, request: Request) -> Generator[np.ndarray]:
    is_single = request.options.num_return_sequences is None
    state, shown = _start(model, request)
    for step in range(1, request.options.new + 1):
        (token, is_running), is_last = shown, step == request.options.new
        if not is_last:  # begins before the last tokens are read, so that the device does not wait
            state, shown = _advance((model, request), state)
        yield np.asarray(token)[:, 0] if is_single else np.asarray(token)
        if not is_running:
            return


@eqx.filter_jit
def _start(model: Any, request: Request) -> tuple[State, tuple[Array, Array]]:
    state = in_loop(start(model, request))
    return state, (state.token, ~state.done.all())


@eqx.filter_jit(donate="all-except-first")
def _advance(fixed: tuple[Any, Request], state: State) -> tuple[State, tuple[Array, Array]]:
    model, request = fixed
    state = advance(model, state, request)
    return state, (state.token, ~state.done.all())


def _request(
    model: Any,
    inputs: Any,
    *,
    mask: Any = None,
    decoder_input_ids: Any = None,
    pixels: Any = None,
    logits_processor: Any = None,
    stop_strings: Any = None,
    tokenizer: Any = None,
    output_scores: bool = False,
    eos_token_id: Any = None,
    pad_token_id: Any = None,
    ignore: Sequence[str] = (),
    key: Any = None,
    **chosen: Any,
) -> Request:
    """Checks the arguments of `generate`, and returns what a search starts from."""
    chosen = {name: chosen.get(name) for name in _CHOSEN}
    if not (hasattr(model, "decode") and hasattr(model, "init_cache")):
        step = "Pass a decoder or an encoder-decoder of redeqx.models, or give yours these two methods."
        raise wrong("model", "one with `init_cache` and `decode`", type(model).__name__, step, TypeError)
    config, is_encoder_decoder = getattr(model, "config", None), hasattr(model, "encode")
    is_ragged = isinstance(inputs, list | tuple) and all(np.ndim(row) == 1 for row in inputs)
    if is_ragged:
        inputs, mask = _padded(inputs, mask, left=not is_encoder_decoder)
    ids, mask = _checked(inputs, mask, is_encoder_decoder=is_encoder_decoder)
    if not is_encoder_decoder:
        _check_ids(inputs, mask, getattr(config, "vocab_size", None))
    eos, pad = _ends(config, eos_token_id, pad_token_id)
    has_prompt = hasattr(model, "decoder_prompt")
    if decoder_input_ids is None and has_prompt:
        decoder_input_ids = model.decoder_prompt(ids)
    start = None if decoder_input_ids is None else _started(decoder_input_ids, len(ids), is_decoder=not is_encoder_decoder)
    n_given = ids.shape[1] if not is_encoder_decoder else 1 if start is None else start.shape[1]
    generation = getattr(config, "generation", None) or Generation()
    own = [name for name in getattr(config, "prompt_keys", ()) if name in generation.keys]
    # In transformers, lengths of a model with its own prompt do not include it, as far as there are positions.
    options, keys = generation.complete(chosen, n_given=0 if has_prompt else n_given, ignore=(*ignore, *own))
    if has_prompt and "max_new_tokens" in keys:
        options["max_new_tokens"] = min(options["max_new_tokens"], model.config.n_positions - n_given)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if chosen[name] is None:
            options[name] = hashable(getattr(config, name, options[name]))
    try:
        check(options, n_given=n_given, n_positions=getattr(config, "n_positions", None), key=key)
    except ValueError as error:
        raise generation.with_source(error, keys) from None
    rules = Options(**options, eos=eos, pad=NO_TOKEN if is_ragged else pad, n_given=n_given, has_encoder=is_encoder_decoder)
    if rules.needs_source and not _is_of_tokens(ids):
        name = "encoder_repetition_penalty" if rules.encoder_repetition_penalty != 1 else "encoder_no_repeat_ngram_size"
        raise wrong(name, "none, since the inputs are no tokens", options[name], "Leave it out.")
    mask = None if mask is None else jnp.asarray(mask, bool)
    if mask is not None and not is_encoder_decoder:
        ids = jnp.where(mask, ids, 0)  # the padding id may be outside the vocabulary
    first = (model.config.decoder_start_token_id if start is None else start) if is_encoder_decoder else None
    given = Given.of(ids, mask, first, rules, logits_processor)
    stop = None if stop_strings is None else Stop.of(stop_strings, tokenizer)
    pixels = None if pixels is None else _images(pixels, len(ids), model)
    return Request(ids, mask, key if rules.do_sample else None, given, stop, rules, output_scores, start, pixels)


def _checked(inputs: Any, mask: Any, *, is_encoder_decoder: bool) -> tuple[Array, Any]:
    """Returns the inputs as an array, and their mask. Raises TypeError or ValueError for others than `generate` takes."""
    if isinstance(inputs, str) or (not hasattr(inputs, "shape") and np.asarray(inputs).dtype.kind not in "biuf"):
        raise wrong("inputs", "an array of token ids", brief(inputs), "Pass what the tokenizer returns.", TypeError)
    ids = jnp.asarray(inputs)
    if ids.ndim < 2 or ids.size == 0 or not (_is_of_tokens(ids) or is_encoder_decoder):
        wanted = "a batch of inputs of the encoder" if is_encoder_decoder else "token ids of shape (batch, prompt)"
        raise wrong("inputs", wanted, f"{ids.dtype} {ids.shape}", "Pass at least one row, and one token each.")
    mask = np.asarray(mask) if isinstance(mask, list | tuple) else mask
    if mask is not None and mask.shape != ids.shape:
        raise wrong("mask", f"the shape of `inputs`, {ids.shape}", mask.shape, "Pass one entry per token.")
    if isinstance(mask, np.ndarray) and not is_encoder_decoder and not mask[:, -1].all():
        row = int(np.argmin(mask[:, -1]))
        raise wrong("mask", "a token at the end of each prompt", f"padding there in row {row}", "Pad prompts on the left.")
    return ids, mask


def _is_of_tokens(ids: Array) -> bool:
    return ids.ndim == 2 and jnp.issubdtype(ids.dtype, jnp.integer)


def _ends(config: Any, eos: Any, pad: Any) -> tuple[tuple[int, ...], int]:
    """Returns the tokens that end a text and the one that pads it: the given ones, or those of the config."""
    for name, token in {"eos_token_id": eos, "pad_token_id": pad}.items():
        if token is not None and np.size(token) and not np.issubdtype(np.asarray(token).dtype, np.integer):
            raise wrong(name, "a token id", brief(token), "Pass that of the tokenizer.", TypeError)
    eos = eos if eos is not None else getattr(config, "eos_token_id", None)
    eos = () if eos is None else tuple(int(token) for token in np.ravel(np.asarray(eos)))
    pad = pad if pad is not None else getattr(config, "pad_token_id", None)
    return eos, pad if pad is not None else eos[0] if eos else 0


def _images(pixels: Any, n_rows: int, model: Any) -> Array:
    if not hasattr(model, "see"):
        raise wrong("pixels", f"none for {type(model).__name__}, which reads no images so", "some", "Omit them.")
    pixels = jnp.asarray(pixels)
    if pixels.ndim != 5 or len(pixels) != n_rows:
        rule = f"[batch, images, channels, height, width] with {n_rows} rows"
        raise wrong("pixels", rule, pixels.shape, "Add the dim of images.")
    return pixels


def _started(ids: Any, n_rows: int, *, is_decoder: bool) -> Array:
    """Returns the tokens that the decoder begins with, `[batch, target]`."""
    if is_decoder:
        raise wrong("decoder_input_ids", "none for a decoder", "some", "Pass them as `inputs`.")
    ids = jnp.asarray(ids)
    ids = jnp.tile(ids, (n_rows, 1)) if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != n_rows or ids.shape[1] == 0 or not jnp.issubdtype(ids.dtype, jnp.integer):
        rule = f"token ids, at least one for each of {n_rows} rows"
        raise wrong("decoder_input_ids", rule, f"{ids.dtype} {ids.shape}", "Pass `[batch, target]` or `[target]`.")
    return ids.astype(jnp.int32)


def _padded(rows: Sequence[Any], mask: Any, *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts of any lengths as one array, and its mask."""
    if mask is not None:
        raise wrong("mask", "None for a list of prompts, which are padded here", "one", "Leave it out.")
    if any(isinstance(row, Tracer) for row in rows):
        raise ValueError(_NO_LIST)
    rows = [np.asarray(row) for row in rows]
    if not rows or not all(len(row) and np.issubdtype(row.dtype, np.integer) for row in rows):
        raise wrong("inputs", "prompts of token ids", brief(rows), "Pass at least one token in each.")
    longest = max(map(len, rows))
    ids, mask = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), longest), bool)
    for i, row in enumerate(rows):
        places = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, places], mask[i, places] = row, True
    return ids, mask


def _trimmed(found: Generated) -> Generated:
    """Returns the texts as lists of arrays without padding."""
    if isinstance(found.tokens, Tracer):
        raise ValueError(_NO_LIST)
    tokens = np.asarray(found.tokens)
    lengths = (tokens != NO_TOKEN).sum(-1)

    def trim(array: Any, lengths: Any) -> Any:
        if np.ndim(lengths):
            return [trim(row, length) for row, length in zip(array, lengths, strict=True)]
        return array[: int(lengths)]

    log_probs, scores = (
        None if array is None else trim(np.asarray(array), lengths) for array in (found.log_probs, found.scores)
    )
    return Generated(trim(tokens, lengths), log_probs, scores, found.sequence_scores, found.accepted)


@eqx.filter_jit
def _run(model: Any, draft: Any, request: Request, drafted: int) -> Generated:
    if draft is not None:
        return speculate(model, draft, request, drafted)
    return beam_search(model, request) if request.options.num_beams > 1 else search(model, request)


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


_NO_LIST = "`inputs`: expected an array under jit, got a list. Pad the prompts on the left, and pass a `mask`."
_SIGNATURE = inspect.signature(generate)
_CHOSEN = [name for name in DEFAULTS if name in _SIGNATURE.parameters]
_REQUEST = [name for name in inspect.signature(_request).parameters if name not in ("model", "inputs", "chosen")] + _CHOSEN
