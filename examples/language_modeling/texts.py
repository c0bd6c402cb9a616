"""Training data of a language model: texts cut into rows of tokens.

An example is a dict of arrays `[seq_len]`: `tokens`, and `labels`, which are the next tokens, or -100 for no label.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples._texts import embedding_rows, load_tokenizer, standard_library

PROMPT = 32  # maximum number of held-out tokens that a sample continues

Rows = Sequence[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Vocabulary:
    """Encodes and decodes text; has the number of ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    n_ids: int


def load_vocabulary(path: Path | None, n_ids: int | None = None) -> Vocabulary:
    """Loads the vocabulary of a `tokenizer.json` or its folder; bytes by default.

    **Arguments:**

    - `n_ids`: the number of ids of an existing model.
    """
    if path is None:
        return Vocabulary(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), 256)
    tokenizer = load_tokenizer(path, n_ids)
    n_ids = n_ids or embedding_rows(tokenizer.get_vocab_size())
    return Vocabulary(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode, n_ids)


def read_texts(path: Path | None) -> tuple[str, str]:
    """Returns the training and held-out text. One file in twenty is held out, deterministically, or the first part of a
    single file."""
    if path is None:
        files = standard_library()
    elif path.is_file():
        files = [path]
    else:  # ordered by a hash of their names, so that the first bytes are a fair sample
        found = [file for file in path.rglob("*") if file.is_file()]
        files = sorted(found, key=lambda file: (zlib.crc32(file.relative_to(path).as_posix().encode()), file))
    texts = []
    for file in files:
        try:
            texts.append(file.read_text("utf-8"))
        except UnicodeDecodeError:
            print(f"{file}: not UTF-8, skipped")
    if len(texts) == 1:
        texts = [texts[0][: len(texts[0]) // 20], texts[0][len(texts[0]) // 20 :]]
    n_held_out = max(1, len(texts) // 20)
    train, held_out = "\n\n".join(texts[n_held_out:]), "\n\n".join(texts[:n_held_out])
    if min(len(train), len(held_out)) <= PROMPT:
        raise ValueError(
            f"`--data`: expected text for training and evaluation, got {len(train)} characters in {path}. "
            "Pass a longer text, or a folder of texts."
        )
    return train, held_out


def cut(ids: Sequence[int], seq_len: int) -> Rows:
    """Cuts ids into examples that overlap by one token, so that each token but the first is predicted once. The last row
    is padded."""
    filled = np.pad(np.array(ids, np.int32), (0, -(len(ids) - 1) % seq_len), constant_values=-100)
    rows = np.lib.stride_tricks.sliding_window_view(filled, seq_len + 1)[::seq_len]
    return [{"tokens": np.maximum(row[:-1], 0), "labels": row[1:]} for row in rows]


def prompt_of(example: dict[str, np.ndarray]) -> list[int]:
    """Returns the first tokens of an example, at most half of them, because a model of such rows may have no more
    positions."""
    ids = example["tokens"]
    return ids[: min(PROMPT, len(ids) // 2)].tolist()
