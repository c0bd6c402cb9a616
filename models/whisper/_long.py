"""`transcribe`: the text of a recording of any length, window by window, with times.

Each window begins at the last time that the text of the one before has, so that no word is cut. The rules are those of
`transformers`. `_trials.py` reads a window.

Dims: mels, frames = those of the features of the whole recording.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx.errors import wrong

from ._model import Whisper
from ._trials import Trials

_FRAMES = 2  # of features, in one step of times: the stride of the convolutions
_SECONDS = 0.02  # in one step of times
_SURE = 0.5  # texts that were read at this temperature or at a higher one are not given to the next window


class Segment(NamedTuple):
    """A part of a recording's text: its first and last second, and its tokens, those of times among them."""

    start: float
    end: float
    tokens: list[int]


def transcribe(
    model: Whisper,
    features: Float[Array, "mels frames"] | Float[np.ndarray, "mels frames"],
    *,
    language: str | None = None,
    task: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | Sequence[float] = 0.0,
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    condition_on_prev_tokens: bool = False,
    key: PRNGKeyArray | None = None,
    **options: Any,
) -> list[Segment]:
    """Transcribes a recording of any length. Returns the segments of its text, in order.

    ```python
    features = LogMel.from_pretrained(folder)(read_wav("lecture.wav"), is_long=True)
    segments = transcribe(model, features, language="en")
    text = tokenizer.decode([token for segment in segments for token in segment.tokens])
    ```

    **Arguments:**

    - `features`: as `LogMel` returns them with `is_long=True`.
    - `language`, `task`: as for `model.prompt`. The language is detected in the first window.
    - `max_new_tokens`: the number of tokens of a window's text, at most as many as positions are left; None for all of them.
    - `temperature`: 0 for the likeliest tokens; above 0, tokens are drawn. Of several temperatures, the next one is tried if
        a text fails a threshold; that of the last one is kept.
    - `compression_ratio_threshold`: texts that can be compressed more repeat themselves, and fail.
    - `logprob_threshold`: texts whose tokens have a smaller mean log-probability fail.
    - `no_speech_threshold`: if such a text's window is silent with a larger probability, the window has no text.
    - `condition_on_prev_tokens`: whether texts depend on the earlier ones, of which half as many tokens as there are
        positions are given, unless the last one was read at a temperature from 0.5. Each number of tokens that are given is
        compiled; it soon stays the same.
    - `key`: for temperatures above 0.
    - `options`: further arguments of `generate`. Those of sampling hold for temperatures above 0, `num_beams` for 0.

    Raises ValueError for features of another number of bands, if the folder has no tokens for times, and for thresholds
    without what they need.
    """
    config, features = model.config, np.asarray(features)
    if features.ndim != 2 or features.shape[0] != config.n_mels:
        raise wrong("features", f"{config.n_mels} bands of frames", features.shape, "Pass one recording.")
    n_frames, total, window = config.n_frames, features.shape[1], _window(features, 0, config.n_frames)
    first = model.prompt(window, language=language, task=task, timestamps=True)
    temperatures = tuple(np.ravel(temperature).tolist())
    trials = Trials(temperatures, compression_ratio_threshold, logprob_threshold, no_speech_threshold)
    trials.check(options.get("num_beams") or config.prompting.get("num_beams") or 1)
    segments, seek, earlier = [], 0, []
    while seek < total:
        window, n = _window(features, seek, n_frames), min(total - seek, n_frames)
        start = jnp.concatenate([jnp.array([earlier], jnp.int32), first], 1)
        rules = model.timestamps(start)
        n_left = config.n_positions - start.shape[1]
        options["max_new_tokens"] = n_left if max_new_tokens is None else min(max_new_tokens, n_left)
        key_here = None if key is None else jax.random.fold_in(key, seek)
        text, used = trials.read(model, window, start, len(earlier), key_here, logits_processor=rules, **options)
        found, step = ([], n) if text is None else _cut(text, rules.first, n)
        offset = seek / _FRAMES
        segments += [Segment((offset + a) * _SECONDS, (offset + b) * _SECONDS, tokens) for a, b, tokens in found]
        earlier = _earlier(model, segments, rules.first) if condition_on_prev_tokens and used < _SURE else []
        seek += step or n  # a text that ends at its beginning would be repeated forever
    return segments


def _window(features: np.ndarray, seek: int, n_frames: int) -> Float[Array, "1 mels frames"]:
    """Returns the features of one window, with zeros after the end of the recording."""
    cut = features[:, seek : seek + n_frames]
    return jnp.asarray(np.pad(cut, ((0, 0), (0, n_frames - cut.shape[1]))))[None]


def _earlier(model: Whisper, segments: Sequence[Segment], first: int) -> list[int]:
    """Returns the last tokens of the texts so far, which the next one depends on. Of the two times between segments, the one
    of a last segment that is incomplete is read again.

    **Arguments:**

    - `first`: the token of second 0.
    """
    keys, tokens = model.config.prompting, []
    for _, _, part in segments:
        tokens += part[:-1] if len(part) > 2 and part[-2] >= first else part
    # In folders that do not name `<|startofprev|>`, it is the second to last of the tokens that are suppressed.
    suppressed = keys.get("suppress_tokens") or []
    start = keys.get("prev_sot_token_id") or (suppressed[-2] if len(suppressed) > 1 else None)
    return [] if not tokens else [*([] if start is None else [start]), *tokens[-(model.config.n_positions // 2 - 1) :]]


def _cut(text: list[int], first: int, n: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Returns the segments of a window's text, each with its times, and the number of frames to the next window.

    **Arguments:**

    - `first`: the token of second 0; those after it are times.
    - `n`: the number of the window's frames in the recording.
    """
    is_time = [token >= first for token in text]
    ends = [i + 1 for i in range(len(text) - 1) if is_time[i] and is_time[i + 1]]  # two times: of an end and a beginning
    if not ends:
        times = [token - first for token in text if token >= first]
        return [(0, times[-1] if times and times[-1] else n // _FRAMES, text)], n
    is_complete = is_time[-2:] == [False, True]  # no speech follows
    # Otherwise the last segment includes the beginning of the next one, whose text is read again.
    ends = [*ends, len(text)] if is_complete else [*ends[:-1], ends[-1] + 1]
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    places = [-1] * (len(parts) - 1) + [-1 if is_complete else -2]
    segments = [(part[0] - first, part[place] - first, part) for part, place in zip(parts, places, strict=True)]
    return segments, n if is_complete else (text[ends[-1] - 2] - first) * _FRAMES
