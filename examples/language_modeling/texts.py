"""Training data of a language model: texts cut into rows of tokens, or instructions with responses, packed into rows.

An example is a dict of arrays `[seq_len]`: `tokens`, and `labels`, which are the next tokens, or -100 for no label. Packed
rows also have `segments`, so that no pair attends to another.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples._texts import embedding_rows, load_tokenizer, read_pairs, standard_library
from redeqx.data import pack

PROMPT = 32  # maximum number of held-out tokens that a sample continues

Pairs = list[tuple[str, str]]  # prompts and their responses
Rows = Sequence[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Vocabulary:
    """Encodes and decodes text; has the number of ids, and the id that ends a response."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    n_ids: int
    end: int


def load_vocabulary(path: Path | None, end: int | None = None, n_ids: int | None = None) -> Vocabulary:
    """Loads the vocabulary of a `tokenizer.json` or its folder. By default bytes, with 0 as the end: no text contains it.

    **Arguments:**

    - `end`: the id that ends a response. By default, a new id after the tokenizer's.
    - `n_ids`: the number of ids of an existing model.
    """
    if path is None:
        return Vocabulary(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), 256, end=0)
    tokenizer = load_tokenizer(path, n_ids)
    end = tokenizer.get_vocab_size() if end is None else end
    n_ids = n_ids or embedding_rows(end + 1)
    return Vocabulary(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode, n_ids, end)


def read_examples(
    path: Path | None, vocabulary: Vocabulary, seq_len: int, limits: tuple[int, int], keys: tuple[str, str]
) -> tuple[Rows, Rows, str]:
    """Returns training examples, held-out examples, and the text that the latter predict.

    **Arguments:**

    - `limits`: the maximum number of bytes for training and for held-out text.
    - `keys`: the keys of a prompt and a response in a .jsonl.
    """
    if path is not None and path.suffix == ".jsonl":
        pairs = [within(part, n) for part, n in zip(split_pairs(path, *keys), limits, strict=True)]
        train, held_out = (pack_pairs(part, vocabulary, seq_len) for part in pairs)
        return train, held_out, "\n".join(response for _, response in pairs[1])
    texts = [text.encode()[:n].decode(errors="ignore") for text, n in zip(read_texts(path), limits, strict=True)]
    train, held_out = (cut(vocabulary.encode(text), seq_len) for text in texts)
    return train, held_out, texts[1]


# --- texts ------------------------------------------------------------------------------------------------------------


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


# --- instructions -----------------------------------------------------------------------------------------------------


def split_pairs(path: Path, prompt_key: str, response_key: str) -> tuple[Pairs, Pairs]:
    """Reads prompts and responses from a .jsonl with one object per line: those for training, and one in twenty held out."""
    rows = read_pairs(path, prompt_key, response_key)
    pairs = [(prompt.strip() + "\n\n", response.strip()) for prompt, response in rows]
    if len(pairs) < 2:
        raise ValueError(f"`{path}`: expected rows for training and evaluation, got {len(pairs)}. Add more.")
    return [pair for i, pair in enumerate(pairs) if i % 20], pairs[::20]


def within(pairs: Pairs, n_bytes: int) -> Pairs:
    """Returns the first pairs with at most `n_bytes` in total, but at least one."""
    sizes = np.cumsum([len((prompt + response).encode()) for prompt, response in pairs])
    return pairs[: max(1, int(np.searchsorted(sizes, n_bytes, side="right")))]


def pack_pairs(pairs: Pairs, vocabulary: Vocabulary, seq_len: int) -> Rows:
    """Packs pairs, each a prompt, a response and an end token, into rows. A prompt that is too long for a row keeps its last
    tokens."""
    examples = []
    for prompt, response in pairs:
        answer = [*vocabulary.encode(response), vocabulary.end]
        if len(answer) > seq_len:
            raise ValueError(
                f"`--seq-len`: expected at least {len(answer)}, for the response {response[:40]!r}..., got {seq_len}. "
                "Raise it, or remove that row."
            )
        tokens = [*vocabulary.encode(prompt)[-(seq_len + 1 - len(answer)) :], *answer]
        labels = [*[-100] * (len(tokens) - 1 - len(answer)), *answer]
        examples.append({"tokens": tokens[:-1], "labels": labels})
    return pack(examples, seq_len)


def prompt_of(example: dict[str, np.ndarray]) -> list[int]:
    """Returns the start of a sample: the prompt of the first instruction, or the first tokens of a text, at most half of the
    row, because a model of such rows may have no more positions."""
    ids, n = example["tokens"], int(np.argmax(example["labels"] >= 0)) + 1
    return ids[: min(PROMPT, len(ids) // 2) if n == 1 else n].tolist()


def pad_left(prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """Returns a batch of prompts, padded on the left as `generate` expects."""
    width = max(map(len, prompts))
    return {
        "ids": np.stack([np.pad(np.array(ids, np.int32), (width - len(ids), 0)) for ids in prompts]),
        "mask": np.stack([np.arange(width) >= width - len(ids) for ids in prompts]),
    }
