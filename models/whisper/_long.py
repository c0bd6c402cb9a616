"""`transcribe`: the text of a recording of any length, window by window, with times.

Each window begins at the last time that the text of the one before has, so that no word is cut. The rules are those of
`transformers` with its default options: a window's text does not depend on the earlier ones, and none is tried twice.

Dims: mels, frames = those of the features of the whole recording.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..generation import generate
from ._model import Whisper

_FRAMES = 2  # of features, in one step of times: the stride of the convolutions
_SECONDS = 0.02  # in one step of times


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
    - `max_new_tokens`: the number of tokens of a window's text; None for as many as the model has positions.
    - `options`: further arguments of `generate`, such as `num_beams`.

    Raises ValueError for features of another number of bands, and if the folder has no tokens for times.
    """
    config, features = model.config, np.asarray(features)
    if features.ndim != 2 or features.shape[0] != config.n_mels:
        raise ValueError(f"`features`: expected {config.n_mels} bands of frames, got {features.shape}. Pass one recording.")
    n_frames, total, window = config.n_frames, features.shape[1], _window(features, 0, config.n_frames)
    start = model.prompt(window, language=language, task=task, timestamps=True)
    rules = model.timestamps(start)
    options["max_new_tokens"] = config.n_positions - start.shape[1] if max_new_tokens is None else max_new_tokens
    segments, seek = [], 0
    while seek < total:
        window, n = _window(features, seek, n_frames), min(total - seek, n_frames)
        text = np.asarray(generate(model, window, decoder_input_ids=start, logits_processor=rules, **options))[0].tolist()
        text = text[: text.index(rules.eos)] if rules.eos in text else text
        found, step = _cut(text, rules.first, n)
        offset = seek / _FRAMES
        segments += [Segment((offset + a) * _SECONDS, (offset + b) * _SECONDS, tokens) for a, b, tokens in found]
        seek += step or n  # a text that ends at its beginning would be repeated forever
    return segments


def _window(features: np.ndarray, seek: int, n_frames: int) -> Float[Array, "1 mels frames"]:
    """Returns the features of one window, with zeros after the end of the recording."""
    cut = features[:, seek : seek + n_frames]
    return jnp.asarray(np.pad(cut, ((0, 0), (0, n_frames - cut.shape[1]))))[None]


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
