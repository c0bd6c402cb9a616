"""Stop strings: ends a text as soon as it contains one of the given strings, inside the compiled loop.

The strings become one automaton over bytes (Aho and Corasick 1975, *Efficient string matching*), and each token of the
vocabulary one step of it: a table from state and token to the next state. Tokens may hold parts of characters, a string or
several. As in `transformers`, a string may begin in a decoder's prompt, but must end in a new token.

Dims: batch, states of the automaton, vocab.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from redeqx.errors import brief, wrong


class Stop(eqx.Module):
    """A table of the automaton's steps."""

    table: Int[Array, "states vocab"]  # twice the next state, plus 1 if a string ends within the token
    longest: int = eqx.field(static=True)  # of the strings, in bytes

    @staticmethod
    def of(strings: Any, tokenizer: Any) -> "Stop":
        """Returns the table of these strings for the tokens of a tokenizer.

        Raises TypeError or ValueError if there are no strings, or for an object that is no tokenizer of `tokenizers` or
        `transformers`.
        """
        strings = (strings,) if isinstance(strings, str) else strings
        is_list = isinstance(strings, Sequence) and all(isinstance(string, str) and string for string in strings)
        if not is_list or not strings:
            raise wrong("stop_strings", "one text or several", brief(strings), "Pass None for no stop.")
        tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if tokenizer is None:
            raise wrong("tokenizer", "that of the model with `stop_strings`", "None", "Pass it too.")
        if not all(hasattr(tokenizer, name) for name in ("get_vocab", "get_vocab_size", "decoder", "encode")):
            step = "Pass `tokenizers.Tokenizer.from_file(folder / 'tokenizer.json')`, say."
            raise wrong("tokenizer", "one of `tokenizers` or `transformers`", brief(tokenizer), step, TypeError)
        encoded = tuple(string.encode() for string in strings)
        table = _table(tokenizer, encoded, tokenizer.get_vocab_size())
        return Stop(jnp.asarray(table), max(map(len, encoded)))

    def start(self, prompt: Int[Array, "batch prompt"] | None, shape: tuple[int, ...]) -> Int[Array, "batch rows"]:
        """Returns the state of each row after its prompt."""
        states = jnp.zeros(shape[0], jnp.int32)
        if prompt is not None:
            last = prompt[:, -self.longest :].T  # a token has at least one byte
            states = jax.lax.scan(lambda states, token: (self.advance(states, token)[0], None), states, last)[0]
        return jnp.broadcast_to(states[:, None], shape)

    def advance(
        self, states: Int[Array, "*rows"], token: Int[Array, "*rows"]
    ) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
        """Returns the states after one more token of each row, and whether a string ends in it."""
        unknown = self.table.shape[1] - 1  # padding, and ids without a text
        found = self.table[states, jnp.where((token >= 0) & (token < unknown), token, unknown)]
        return found // 2, found % 2 == 1


@functools.lru_cache(maxsize=8)
def _table(tokenizer: Any, strings: tuple[bytes, ...], n_tokens: int) -> np.ndarray:
    """Returns the table, with one more token that has no text and begins anew. `n_tokens` tells whether the tokenizer has
    got more tokens since."""
    texts = _texts(tokenizer, n_tokens)
    steps, accepts = _automaton(strings)
    n_states, vocab = len(steps), max(texts) + 1
    lengths = np.zeros(vocab + 1, np.int64)
    letters = np.zeros((vocab + 1, max(map(len, texts.values()), default=0)), np.uint8)
    for token, text in texts.items():
        lengths[token] = len(text)
        letters[token, : len(text)] = np.frombuffer(text, np.uint8)
    states = np.tile(np.arange(n_states)[:, None], (1, vocab + 1))
    ended = np.zeros((n_states, vocab + 1), bool)
    for place in range(letters.shape[1]):
        (longer,) = np.nonzero(lengths > place)
        states[:, longer] = steps[states[:, longer], letters[longer, place]]
        ended[:, longer] |= accepts[states[:, longer]]
    states[:, vocab] = 0
    return (2 * states + ended).astype(np.int32)


def _automaton(strings: tuple[bytes, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next state for each state and byte, and whether a string ends in a state. A state is the longest end of
    the text that begins a string."""
    prefixes = sorted({string[:n] for string in strings for n in range(len(string) + 1)}, key=lambda x: (len(x), x))
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    steps = np.zeros((len(prefixes), 256), np.int64)
    for prefix, i in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            steps[i, byte] = next(number[text[n:]] for n in range(len(text) + 1) if text[n:] in number)
    return steps, np.array([prefix.endswith(strings) for prefix in prefixes])


@functools.lru_cache(maxsize=1)  # for other strings the texts are the same: 0.2 s for 128,000 tokens
def _texts(tokenizer: Any, n_tokens: int) -> dict[int, bytes]:
    """Returns the bytes that each token adds to a text. `n_tokens` is as for `_table`."""
    del n_tokens
    kinds = set() if tokenizer.decoder is None else _kinds(json.loads(tokenizer.decoder.__getstate__()))
    decode = " ".join if tokenizer.decoder is None else tokenizer.decoder.decode
    before = tokenizer.encode("abcdef", add_special_tokens=False).tokens  # so that no space at the beginning is removed
    start = len(decode(before))
    byte_of = _byte_of() if "ByteLevel" in kinds and "ByteFallback" not in kinds else {}
    texts = {}
    for token, number in tokenizer.get_vocab().items():
        if byte_of and all(letter in byte_of for letter in token):
            texts[number] = bytes(byte_of[letter] for letter in token)
        elif "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            texts[number] = bytes.fromhex(token[3:5])
        else:
            texts[number] = decode([*before, token])[start:].encode()
    return texts


def _kinds(decoder: Any) -> set[str]:
    """Returns the types of a decoder and of those that it is made of."""
    if isinstance(decoder, dict):
        return {decoder.get("type", "")}.union(*map(_kinds, decoder.values()))
    return set[str]().union(*map(_kinds, decoder)) if isinstance(decoder, list) else set()


def _byte_of() -> dict[str, int]:
    """Returns the byte of each letter of a byte-level vocabulary, by the rule of GPT-2: printable bytes are themselves, the
    others have the letters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
