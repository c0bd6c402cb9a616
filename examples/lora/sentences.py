"""Labelled sentences: from a table, or from Python's own documentation.

The latter come from the language reference, as `pydoc` has it, and from the docstrings of the standard library. The label of
a sentence is its source; the text itself is unchanged. No sentence is in two parts of the data.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split
from tokenizers import Tokenizer

from examples._texts import parse, read_table, standard_library

Labelled = list[tuple[str, int]]

WORDS = ("language", "library")  # the words for the labels 0 and 1 of the documentation's sentences
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SENTENCE = re.compile(r".*[a-z].*[.!?]")


def read_sentences(path: Path, n_labels: int) -> Labelled:
    """Reads a table with the columns `sentence` and `label`, such as SST-2's. Labels are integers from 0."""
    examples = []
    first = 1 if path.suffix == ".jsonl" else 2  # the number of the first row, after a table's header
    for number, row in enumerate(read_table(path, ["sentence", "label"]), start=first):
        if str(row["label"]) not in map(str, range(n_labels)):
            raise ValueError(
                f"`{path}` row {number}: expected a label from 0 to {n_labels - 1}, got {row['label']!r}. "
                "Correct the row, or pass a word for each label by `--words`."
            )
        examples.append((row["sentence"].strip(), int(row["label"])))
    return examples


def split(examples: Labelled, n: int, n_train: int) -> tuple[Labelled, Labelled, Labelled]:
    """Splits sentences into training, validation and test parts.

    At most n examples are used. Half of them are for testing, because only a large test set shows a difference of one point.
    30 % of the rest are for validation, and at most `n_train` for training.
    """
    examples = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))[:n]]

    def cut(examples: Labelled, share: float) -> Any:
        return train_test_split(examples, test_size=share, random_state=0, stratify=[label for _, label in examples])

    rest, test = cut(examples, 0.5)
    train, validation = cut(rest, 0.3)
    return train[:n_train], validation, test


def documentation_sentences(n: int) -> tuple[Labelled, list[str]]:
    """Reads as many sentences of the reference as of docstrings, of 25 to 200 characters. Also returns all sentences read.

    **Arguments:**

    - `n`: files are read until there are this many sentences, or until no file is left.
    """
    reference = dict.fromkeys(sentence for text in topics.values() for sentence in sentences_of(text))
    library: dict[str, None] = {}  # each sentence once, in order
    for _, tree in parse(standard_library()):
        if len(library) >= n:
            break
        docs = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        library |= dict.fromkeys(sentence for text in docs for sentence in sentences_of(text) if sentence not in reference)
    sides = [[sentence for sentence in side if is_plain(sentence)] for side in (reference, library)]
    n_each = min(n // 2, *map(len, sides))
    # Sample evenly along each list, so that every file contributes.
    examples = [(side[i * len(side) // n_each], label) for label, side in enumerate(sides) for i in range(n_each)]
    return examples, [*reference, *library]


def is_plain(sentence: str) -> bool:
    return SENTENCE.fullmatch(sentence) is not None and 25 <= len(sentence) <= 200 and len(sentence.split()) >= 5


def sentences_of(text: str) -> Iterator[str]:
    """Yields the sentences of a text whose paragraphs are separated by blank lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from filter(None, re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())))


def encode(
    examples: Labelled, words: Sequence[str], tokenizer: Tokenizer, bos: int | None, seq_len: int
) -> list[dict[str, np.ndarray]]:
    """Encodes sentences with their prompt, padded on the left, so that the last token's logits predict the label. `answers`
    are the words' ids."""
    endings = [tokenizer.encode(f"\nLabel: {word}", add_special_tokens=False).ids for word in words]
    columns = list(zip(*endings, strict=False))
    n_shared = next((i for i, ids in enumerate(columns) if len(set(ids)) > 1), 0)
    if len(set(columns[n_shared])) < max(len(words), 2):
        raise ValueError(f"`--words`: expected words that begin with different tokens, got {', '.join(words)}. Rename them.")
    prompt, answers = endings[0][:n_shared], np.array([ids[n_shared] for ids in endings], np.int32)
    begin = [] if bos is None else [bos]
    encodings = tokenizer.encode_batch([sentence for sentence, _ in examples], add_special_tokens=False)
    encoded = []
    for (_, label), encoding in zip(examples, encodings, strict=True):
        ids = [*begin, *encoding.ids[: seq_len - len(begin) - len(prompt)], *prompt]
        n_padded = seq_len - len(ids)
        row = {"ids": np.pad(np.array(ids, np.int32), (n_padded, 0)), "mask": np.arange(seq_len) >= n_padded}
        encoded.append({**row, "answers": answers, "label": np.int32(label)})
    return encoded
