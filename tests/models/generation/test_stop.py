"""Stop strings: a text ends in the token that completes one, as a search in the decoded text says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import generate
from tests.models.generation.test_processors import table

tokenizers = pytest.importorskip("tokenizers")

PIECES = ["a", "b", "Ġ", "!", "ab", "Ġb", "ba", "Ã", "©", "Ã©", "!Ã", "©a", "bab", "!b", "<end>"]  # Ã© is a byte-level é
NEW, ROWS, STOPS = 12, 48, ("é!", "ab b", "!!", "babb")


def byte_level():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def bytes_of(tokens):
    """The text of tokens, by the alphabet of `PIECES`: each letter is a byte, but `Ġ` is a space."""
    return "".join(PIECES[token] for token in tokens).encode("latin-1", "replace").replace(b"?", b" ")


class Script(eqx.Module):
    """Makes row i, whose prompt begins with token i, continue as a table says."""

    tokens: jax.Array  # [rows, prompt + new]

    def __call__(self, text, scores, length):
        return jnp.where(jnp.arange(len(scores)) == self.tokens[text[0], length], 0.0, -jnp.inf)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_text_ends_where_it_contains_a_string(num_beams):
    """Tokens hold parts of characters, and strings begin in a token, in several, or in the prompt."""
    rng = np.random.default_rng(0)
    script = rng.integers(0, 14, (ROWS, 3 + NEW))
    prompts = np.concatenate([np.arange(ROWS)[:, None], script[:, 1:3]], 1)
    prompts[:, 0] %= 14  # all rows of a number continue alike
    script = script[prompts[:, 0]]
    found = generate(
        table(np.zeros(15), 3 + NEW), prompts, max_new_tokens=NEW, num_beams=num_beams, pad_token_id=14,
        stop_strings=STOPS, tokenizer=byte_level(), logits_processor=Script(jnp.asarray(script)),
    )  # fmt: skip
    lengths = []
    for row, prompt, tokens in zip(np.asarray(found), prompts, script[:, 3:], strict=True):
        ends = [
            n for n in range(1, NEW + 1)
            for before in [len(bytes_of([*prompt, *tokens[: n - 1]]))] for stop in map(str.encode, STOPS)
            if bytes_of([*prompt, *tokens[:n]]).find(stop, max(0, before - len(stop) + 1)) >= 0
        ]  # fmt: skip
        lengths.append(min([*ends, NEW]))
        assert row.tolist() == [*tokens[: lengths[-1]], *[14] * (NEW - lengths[-1])]
    assert 1 in lengths and NEW in lengths and len({*lengths}) > 4


def test_other_tokenizers():
    """Pieces with a mark for a space, single bytes, and words that are joined by spaces."""
    fallback = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "▁y": 1, "<0xC3>": 2, "<0xA9>": 3}, "x"))
    fallback.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    fallback.decoder = tokenizers.decoders.Sequence(parts)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "y": 1}, "x"))
    for tokenizer, tokens, stop, n in [
        (fallback, [0, 1, 1, 1], "x y", 2),
        (fallback, [0, 2, 3, 1], "xé", 3),
        (words, [0, 1, 0, 1], "y x", 3),
    ]:
        script = Script(jnp.asarray([[0, *tokens]]))
        found = generate(
            table(np.zeros(5)), np.zeros((1, 1), int), max_new_tokens=4, pad_token_id=4, stop_strings=stop,
            tokenizer=tokenizer, logits_processor=script,
        )  # fmt: skip
        assert found[0].tolist() == [*tokens[:n], *[4] * (4 - n)]


def test_bad_strings():
    model = table(np.zeros(3))
    for options, error, message in [
        ({"stop_strings": "a"}, ValueError, r"`tokenizer`: expected that of the model with `stop_strings`, got None"),
        ({"stop_strings": ""}, ValueError, r"`stop_strings`: expected one text or several, got"),
        ({"stop_strings": "a", "tokenizer": 3}, TypeError, r"`tokenizer`: expected one of `tokenizers` or `transformers`"),
    ]:
        with pytest.raises(error, match=message):
            generate(model, np.zeros((1, 1), int), max_new_tokens=2, **options)
