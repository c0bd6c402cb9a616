"""What a text of Whisper begins with: tokens that say the language, the task and whether there are times; and the rules of
times.

The folder's `generation_config.json` has the ids of these tokens. Source: the generation of Whisper in `transformers` 5.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redeqx.errors import check_choice, wrong

# The keys of `generation_config.json` that this file reads, or that only timing of words and longer recordings need.
KEYS = (
    "forced_decoder_ids",
    "lang_to_id",
    "task_to_id",
    "language",
    "task",
    "no_timestamps_token_id",
    "return_timestamps",
    "max_initial_timestamp_index",
    "is_multilingual",
    "alignment_heads",
    "prev_sot_token_id",
    "prompt_condition_type",
)


def first_tokens(
    keys: Mapping[str, Any], start: int, *, language: str | None, task: str | None, timestamps: bool
) -> list[int | None]:
    """Returns the first tokens of a text. None stands for a language that is to be detected.

    **Arguments:**

    - `keys`: of `generation_config.json`.
    - `start`: the very first token.
    - `language`: a code such as `"en"`; None takes the folder's, or detects it. `task`: None takes the folder's.

    Raises ValueError for a language or a task that the folder does not name, and if it has no tokens for times.
    """
    languages, tasks = keys.get("lang_to_id") or {}, keys.get("task_to_id") or {}
    language = keys.get("language") if language is None else language
    task = keys.get("task") if task is None else task
    tokens: list[int | None] = [start]
    forced = keys.get("forced_decoder_ids")
    if language is None and task is None and forced:
        if [place for place, _ in forced] != [*range(1, 1 + len(forced))]:
            raise wrong("forced_decoder_ids", "pairs of places from 1 and tokens", forced, "Correct it.")
        tokens += [token for _, token in forced]
    if language is not None:
        check_choice(language.strip("<|>"), "language", tuple(name.strip("<|>") for name in languages))
        tokens[1:2] = [languages[f"<|{language.strip('<|>')}|>"]]
    elif languages and len(tokens) == 1:
        tokens.append(None)
    elif not languages:
        tokens = [token for token in tokens if token is not None]
    if task is not None:
        check_choice(task, "task", tuple(tasks))
        tokens.append(tasks[task])
    elif language is not None and "transcribe" in tasks:
        tokens.append(tasks["transcribe"])
    without = keys.get("no_timestamps_token_id")
    if timestamps:
        if without is None:
            raise ValueError("`timestamps`: expected False, since the folder has no `no_timestamps_token_id`, got True.")
        return tokens[:-1] if tokens[-1] == without else tokens
    return tokens if without is None or tokens[-1] == without else [*tokens, without]


class Timestamps(eqx.Module):
    """The rules of times in a text, a `logits_processor` of `generate`: times come in pairs, never decrease, and are chosen
    if they are likelier together than each other token. `Whisper.timestamps` makes it.

    **Arguments:**

    - `first`: the token of second 0; those after it are times.
    - `eos`: the token that ends a text; those below it are text.
    - `begin`: the number of tokens that the text begins with.
    - `max_initial`: the largest index of the first time; None for all.
    """

    first: int = eqx.field(static=True)
    eos: int = eqx.field(static=True)
    begin: int = eqx.field(static=True)
    max_initial: int | None = eqx.field(static=True, default=None)

    def __call__(self, text: Int[Array, " text"], scores: Float[Array, " vocab"], length: Any) -> Float[Array, " vocab"]:
        """Returns the scores of the tokens that may follow; the others are minus infinity."""
        first, places, tokens = self.first, jnp.arange(len(text)), jnp.arange(len(scores))
        is_time, n_new = tokens >= first, length - self.begin
        times = (text >= first) & (places >= self.begin) & (places < length)
        ends_in_time = times[length - 1]
        before_is_time = (n_new < 2) | times[length - 2]
        newest = text[jnp.max(jnp.where(times, places, -1))]
        lowest = jnp.where(ends_in_time & ~before_is_time, newest, newest + 1)
        forbidden = (tokens == first - 1) | (is_time & times.any() & (tokens < lowest))
        forbidden |= ends_in_time & jnp.where(before_is_time, is_time, tokens < self.eos)
        at_start = ~is_time if self.max_initial is None else ~is_time | (tokens > first + self.max_initial)
        forbidden |= (n_new == 0) & at_start
        scores = jnp.where(forbidden, -jnp.inf, scores)
        chances = jax.nn.log_softmax(scores)
        is_chosen = jax.nn.logsumexp(chances[first:]) > chances[:first].max()
        return jnp.where(is_chosen & ~is_time, -jnp.inf, scores)
