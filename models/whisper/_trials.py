"""The text of one window: read again at higher temperatures while it is unlikely or repeats itself.

The rules are those of `transformers`.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from redeqx.errors import wrong

from ..generation import SAMPLING, Generated, generate
from ._model import Whisper


@dataclass(frozen=True)
class Trials:
    """When a text is read again. The arguments are those of `transcribe`."""

    temperatures: Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None

    def check(self, num_beams: int) -> None:
        """Raises ValueError for temperatures that are no numbers from 0, and for thresholds without what they need."""
        if not self.temperatures or not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise wrong("temperature", "numbers from 0", self.temperatures, "Pass 0.0 for the likeliest tokens.")
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise wrong("logprob_threshold", "a number with `no_speech_threshold`", "None", "Silence needs both.")
        if self.logprob_threshold is not None and num_beams > 1:
            raise wrong("num_beams", "1 with `logprob_threshold`", num_beams, "Leave one of the two out.")

    def read(
        self,
        model: Whisper,
        window: Float[Array, "1 mels frames"],
        start: Int[Array, "1 target"],
        place: int,
        key: PRNGKeyArray | None,
        **options: Any,
    ) -> tuple[list[int] | None, float]:
        """Returns a window's text without its end, or None if nothing is said, and the temperature it was read at.

        **Arguments:**

        - `start`: the tokens that the text begins with. Those before `place` are of earlier texts.
        - `key`: for temperatures above 0.
        - `options`: of `generate`.
        """
        text, temperature = None, self.temperatures[0]
        silence = 0.0 if self.no_speech_threshold is None else float(_silence(model, window, start, place))
        for i, temperature in enumerate(self.temperatures):
            if temperature > 0:
                key_here = None if key is None else jax.random.fold_in(key, i)
                chosen = options | {"temperature": temperature, "num_beams": 1, "key": key_here}
            else:
                chosen = {name: value for name, value in options.items() if name not in SAMPLING}
            is_drawn = temperature > 0
            found = generate(model, window, decoder_input_ids=start, do_sample=is_drawn, output_scores=True, **chosen)
            tokens, mean = _ended(found, model.config.eos_token_id, is_drawn=is_drawn)
            text = tokens[:-1] if tokens[-1] == model.config.eos_token_id else tokens
            is_unlikely = self.logprob_threshold is not None and mean < self.logprob_threshold
            if is_unlikely and self.no_speech_threshold is not None and silence > self.no_speech_threshold:
                return None, temperature
            limit = self.compression_ratio_threshold
            if not is_unlikely and (limit is None or _compression(tokens, model.config.vocab_size) <= limit):
                break
        return text, temperature


def _ended(found: Generated, eos: Any, *, is_drawn: bool) -> tuple[list[int], float]:
    """Returns the tokens up to the end, and the mean of their log-probabilities: among the tokens that the rules allow, or
    the model's own ones if tokens are drawn, since the temperature has changed the others."""
    tokens = np.asarray(found.tokens)[0].tolist()
    length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    of_tokens = found.log_probs if is_drawn else found.scores
    return tokens[:length], float(np.asarray(of_tokens)[0, :length].mean())


def _compression(tokens: list[int], vocab_size: int) -> float:
    """Returns how many times smaller the tokens are if they are compressed."""
    width = int(math.log2(vocab_size) / 8) + 1
    octets = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(octets) / len(zlib.compress(octets))


@eqx.filter_jit
def _silence(model: Whisper, window: Array, start: Any, place: int) -> Float[Array, ""]:
    """Returns the probability that nothing is said: of the token before those of times, at the first token of a text."""
    logits = eqx.nn.inference_mode(model)(window[0], start[0])[place]
    return jax.nn.softmax(logits)[model.config.prompting["no_timestamps_token_id"] - 1]
