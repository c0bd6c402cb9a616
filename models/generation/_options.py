"""The options of one generation: their defaults, their ranges, and which of them contradict each other.

Names and meanings are those of `transformers` 5. What the options do to scores is in `_processors.py` and `_sampling.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from redeqx.errors import brief, check_choice, check_count, check_key, check_number, wrong

from .._kinds import COUNT, FLAG, LIST, NOT_NEGATIVE, NUMBER, POSITIVE, SIZE, Kind

# Options that do nothing unless tokens are sampled.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def _option(kind: Kind, default: Any) -> Any:
    """Returns the field of an option. `kind` is that of its value in `generation_config.json`."""
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True)
class Options:
    """The options of one generation, with their defaults. They are static under jit."""

    max_new_tokens: int | None = _option(SIZE, None)
    min_new_tokens: int = _option(COUNT, 0)
    do_sample: bool = _option(FLAG, False)
    temperature: float = _option(NOT_NEGATIVE, 1.0)
    top_k: int | None = _option(COUNT, None)
    top_p: float | None = _option(NOT_NEGATIVE, None)
    min_p: float | None = _option(NOT_NEGATIVE, None)
    typical_p: float | None = _option(NOT_NEGATIVE, None)
    epsilon_cutoff: float | None = _option(NOT_NEGATIVE, None)
    eta_cutoff: float | None = _option(NOT_NEGATIVE, None)
    num_beams: int = _option(SIZE, 1)
    num_return_sequences: int | None = _option(SIZE, None)
    length_penalty: float = _option(NUMBER, 1.0)
    early_stopping: bool | str = False
    repetition_penalty: float = _option(POSITIVE, 1.0)
    encoder_repetition_penalty: float = _option(POSITIVE, 1.0)
    no_repeat_ngram_size: int = _option(COUNT, 0)
    encoder_no_repeat_ngram_size: int = _option(COUNT, 0)
    bad_words_ids: tuple[tuple[int, ...], ...] | None = _option(LIST, None)
    suppress_tokens: tuple[int, ...] | None = _option(LIST, None)
    begin_suppress_tokens: tuple[int, ...] | None = _option(LIST, None)
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    renormalize_logits: bool = _option(FLAG, False)
    # The remaining ones do not come from `generation_config.json`.
    eos: tuple[int, ...] = ()
    pad: int = 0  # NO_TOKEN where the lengths of texts are needed
    has_encoder: bool = False
    n_given: int = 1  # tokens of the decoder before the first new one, including padding

    @property
    def new(self) -> int:
        assert self.max_new_tokens is not None
        return self.max_new_tokens

    @property
    def rows(self) -> int:
        """The number of sequences that are decoded for each example."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences or 1

    @property
    def needs_source(self) -> bool:
        """Whether scores depend on the encoder's inputs; a decoder's prompt, if it has no encoder."""
        return self.encoder_repetition_penalty != 1 or self.encoder_no_repeat_ngram_size > 0

    @property
    def needs_text(self) -> bool:
        """Whether scores depend on the tokens so far."""
        has_words = any(len(word) > 1 for word in self.bad_words_ids or ())
        n_grams = self.no_repeat_ngram_size, self.encoder_no_repeat_ngram_size
        return self.repetition_penalty != 1 or any(n_grams) or has_words

    def ends(self, token: Int[Array, "*rows"]) -> Bool[Array, "*rows"]:
        return jnp.isin(token, jnp.array(self.eos, jnp.int32))


DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(Options)}


def hashable(value: Any) -> Any:
    """Returns lists and arrays as tuples, so that options are static under jit."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(hashable(item) for item in value) if isinstance(value, list | tuple) else value


def check(options: Mapping[str, Any], *, n_given: int, n_positions: int | None, key: PRNGKeyArray | None) -> None:
    """Raises ValueError for options that are out of range or contradict each other.

    **Arguments:**

    - `n_given`: the number of tokens before the first new one.
    - `n_positions`: the number of positions of the model; None if there is no limit.
    """
    for name in ("max_new_tokens", "num_beams", "num_return_sequences"):
        if options[name] is not None:
            check_count(options[name], name)
    if options["max_new_tokens"] is None:
        raise wrong("max_new_tokens", "the number of tokens to generate", "None", "Pass a positive number.")
    for name in ("do_sample", "renormalize_logits"):
        check_choice(options[name], name, (True, False))
    check_number(
        options["length_penalty"], "length_penalty", "a finite number", math.isfinite, "Pass 1.0 for the mean of a sequence."
    )
    new, num_beams, n_return = (options[name] for name in ("max_new_tokens", "num_beams", "num_return_sequences"))
    if not 0 <= options["min_new_tokens"] <= new:
        raise wrong("min_new_tokens", f"0 to `max_new_tokens`={new}", options["min_new_tokens"], "Lower it.")
    if options["early_stopping"] not in (True, False, "never"):
        raise wrong("early_stopping", "True, False or 'never'", repr(options["early_stopping"]), "Pass one of them.")
    _check_penalties(options)
    _check_sampling(options, key)
    if n_return is not None and n_return > num_beams and (num_beams > 1 or not options["do_sample"]):
        other = "." if num_beams > 1 else ", or pass `do_sample=True`."
        raise ValueError(
            f"`num_return_sequences`: expected at most `num_beams`={num_beams}, got {n_return}. Raise `num_beams`{other}"
        )
    # The last new token is never fed back, so it needs no position.
    if n_positions is not None and n_given + new - 1 > n_positions:
        if n_given > n_positions:
            raise wrong("inputs", f"at most `n_positions`={n_positions} tokens a prompt", n_given, "Cut the prompts.")
        raise ValueError(
            f"`max_new_tokens`: expected at most {n_positions - n_given + 1} after {n_given} given ones, since the model "
            f"has `n_positions`={n_positions}, got {new}. Generate fewer, or cut the prompts."
        )


def _check_penalties(options: Mapping[str, Any]) -> None:
    for name in ("repetition_penalty", "encoder_repetition_penalty"):
        check_number(
            options[name], name, "a finite number above 0", lambda value: 0 < value < math.inf, "Pass 1.0 for no penalty."
        )
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        check_count(options[name], name, 0)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if options[name] is not None and not _are_tokens(options[name]):
            raise wrong(name, "a list of token ids", brief(options[name]), "Pass those to leave out.")
    words = options["bad_words_ids"]
    if words is not None and not (isinstance(words, tuple) and all(_are_tokens(word) and word for word in words)):
        step = "Pass what the tokenizer returns for each word, without special tokens."
        raise wrong("bad_words_ids", "a list of words, each a list of token ids", brief(words), step)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        several = name == "forced_eos_token_id" and _are_tokens(options[name])
        if options[name] is not None and not several and not _are_tokens((options[name],)):
            raise wrong(name, "a token id", brief(options[name]), "Pass that of the tokenizer.")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in value)


def _check_sampling(options: Mapping[str, Any], key: PRNGKeyArray | None) -> None:
    if not options["do_sample"]:
        for name in SAMPLING:
            if options[name] != DEFAULTS[name]:
                raise wrong(name, f"{DEFAULTS[name]} without sampling", options[name], "Pass `do_sample=True`.")
        return
    if key is None:
        raise wrong("key", "a key to sample with", "None", "Pass the `key` of `pred_fn`.")
    advice = "Pass `do_sample=False` for the likeliest token."
    check_number(options["temperature"], "temperature", "more than 0", lambda value: value > 0, advice)
    if options["top_k"] is not None:
        check_count(options["top_k"], "top_k", advice="Pass the size of the vocabulary for all tokens.")
    for name in ("top_p", "typical_p"):
        if options[name] is not None:
            check_number(options[name], name, "a share in (0, 1]", lambda value: 0 < value <= 1, "Pass 1.0 for all tokens.")
    for name in ("min_p", "epsilon_cutoff", "eta_cutoff"):
        if options[name] is not None:
            check_number(options[name], name, "a share in [0, 1)", lambda value: 0 <= value < 1, "Pass 0.0 for all tokens.")
    check_key(key)
