"""Training data of a language model: texts cut into rows of tokens, or packed into rows in which they stay apart.

An example is a dict of arrays `[seq_len]`: `tokens`, and `labels`, which are the next tokens, or -100 for no label. Packed
rows also have `segments`, the number of the text that a token is in.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples._texts import embedding_rows, load_tokenizer, standard_library
from redeqx.data import pack

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
    """Returns the training and held-out text, each of several files."""
    train, held_out = map("\n\n".join, read_files(path))
    return train, held_out


def read_files(path: Path | None) -> tuple[list[str], list[str]]:
    """Returns the texts of the training and of the held-out files. One file in twenty is held out, deterministically, or the
    first part of a single file."""
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
    train, held_out = texts[n_held_out:], texts[:n_held_out]
    sizes = [sum(map(len, part)) for part in (train, held_out)]
    if min(sizes) <= PROMPT:
        raise ValueError(
            f"`--data`: expected text for training and evaluation, got {sizes[0]} characters in {path}. "
            "Pass a longer text, or a folder of texts."
        )
    return train, held_out


def first_bytes(texts: Sequence[str], n: int) -> list[str]:
    """Returns the texts that have `n` bytes together. The last one is cut."""
    starts = np.cumsum([0, *(len(text.encode()) for text in texts)])[:-1]
    return [text.encode()[: n - at].decode(errors="ignore") for text, at in zip(texts, starts, strict=True) if at < n]


def cut(ids: Sequence[int], seq_len: int) -> Rows:
    """Cuts ids into examples that overlap by one token, so that each token but the first is predicted once. The last row
    is padded."""
    filled = np.pad(np.array(ids, np.int32), (0, -(len(ids) - 1) % seq_len), constant_values=-100)
    rows = np.lib.stride_tricks.sliding_window_view(filled, seq_len + 1)[::seq_len]
    return [{"tokens": np.maximum(row[:-1], 0), "labels": row[1:]} for row in rows]


def pack_apart(texts: Sequence[Sequence[int]], seq_len: int) -> Rows:
    """Packs the ids of several texts into rows, in which no text attends to another. Each token but the first of a text is
    predicted once."""
    rows = pack(texts, seq_len, cut_long=True)
    return [{name: row[name] for name in ("tokens", "labels", "segments")} for row in rows]


def prompt_of(example: dict[str, np.ndarray]) -> list[int]:
    """Returns the first tokens of an example, at most half of them, because a model of such rows may have no more
    positions."""
    ids = example["tokens"]
    return ids[: min(PROMPT, len(ids) // 2)].tolist()
