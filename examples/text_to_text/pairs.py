"""Pairs of a source and a target, from docstrings or a table, and ROUGE of a model's outputs and of copies."""

import ast
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rouge_score.rouge_scorer import RougeScorer

from examples._texts import parse

Pair = tuple[str, str]  # source and target
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
METRICS = ("rouge1", "rouge2", "rougeL")
COPIED = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # numbers of words that the copying rules copy


def words(code: str) -> str:
    """Returns only the words of identifiers: `self.ZipFile.read_all(x)` becomes "zip file read all x"."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", code)
    return " ".join(word.lower() for word in found if word != "self")


def first_sentence(docstring: str) -> str:
    """Returns the first sentence of the first paragraph, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]


def definitions(parent: ast.AST, owner: str = "") -> Iterator[tuple[Definition, str]]:
    """Yields the functions and classes in a tree, each with the name of the definition that contains it."""
    for node in ast.iter_child_nodes(parent):
        is_definition = isinstance(node, Definition)
        if is_definition:
            yield node, owner
        yield from definitions(node, node.name if is_definition else owner)


def describe(node: Definition) -> tuple[str, str, str]:
    """Returns the words of a function or class without its docstring: name, arguments or bases, and body or members."""
    if isinstance(node, ast.ClassDef):
        heading, body = node.bases, [other.name for other, _ in definitions(node)]
    else:
        heading, body = [node.args], [ast.unparse(line) for line in node.body[1:]]
    return words(node.name), words(" ".join(ast.unparse(part) for part in heading)), words(" ".join(body))


def docstring_pairs(files: Sequence[Path]) -> tuple[list[Pair], int]:
    """Returns pairs of code and the first sentence of its docstring, and the number of repeated pairs that were dropped."""
    pairs: list[Pair] = []
    seen: set[str | tuple[str, str, str]] = set()
    n_repeated = 0
    for file, tree in parse(files):
        for node, owner in definitions(tree):
            if target := first_sentence(ast.get_docstring(node) or ""):
                name, heading, body = code = describe(node)
                sentence = " ".join(re.findall(r"\w+", target.lower()))
                if {code, sentence} & seen:
                    n_repeated += 1
                else:
                    pairs.append((f"{name} ({heading}) {words(owner)}, {words(file.stem)}: {body}", target))
                seen |= {code, sentence}
    return pairs, n_repeated


def split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Splits pairs into training, validation and test sets; the last two have a tenth each. Pairs with the same source stay
    together.

    The order is that of a hash of the sources, so an added pair moves few others.
    """
    ordered = sorted(pairs, key=lambda pair: (zlib.crc32(pair[0].encode()), pair))
    ends = [len(ordered) // 10, len(ordered) // 5]
    for i, end in enumerate(ends):
        while 0 < end < len(ordered) and ordered[end][0] == ordered[end - 1][0]:
            end += 1
        ends[i] = end
    return ordered[ends[1] :], ordered[ends[0] : ends[1]], ordered[: ends[0]]


def denoising_pairs(pairs: Sequence[Pair], seed: tuple[int, ...]) -> list[Pair]:
    """Returns pairs of a source's prefix with some words removed and the full prefix: denoising, as in BART's training."""
    rng = np.random.default_rng(seed)
    beginnings = [source.split()[:32] for source, _ in pairs]
    return [
        (" ".join(word for word, is_kept in zip(text, rng.random(len(text)) > 0.15, strict=True) if is_kept), " ".join(text))
        for text in beginnings
    ]


def rouge(pairs: Sequence[Pair], outputs: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 of each ROUGE, in percent. Targets are complete, even if the model's labels are truncated."""
    scorer = RougeScorer(METRICS, use_stemmer=True)
    scores = [scorer.score(target, output) for (_, target), output in zip(pairs, outputs, strict=True)]
    return {name: 100 * float(np.mean([score[name].fmeasure for score in scores])) for name in METRICS}


class Copy(NamedTuple):
    """A rule that copies from a source, and its validation score."""

    name: str
    rule: Callable[[str], str]
    score: float


def common_opening(train: Sequence[Pair]) -> str:
    """Returns the most common first two words of the targets."""
    return Counter(" ".join(target.split()[:2]) for _, target in train).most_common(1)[0][0]


def best_copies(validation: Sequence[Pair], opening: str = "") -> dict[str, Copy]:
    """Returns, for each ROUGE, the rule with the best validation score. A rule copies the first n words, or the first
    clause (of code, its name).

    **Arguments:**

    - `opening`: text in front of the copied text.
    """
    rules: dict[str, Callable[[str], str]] = {
        f"first {n} words": lambda source, n=n: " ".join([opening, *re.findall(r"\w+", source)[:n]]) for n in COPIED
    }
    rules["first clause"] = lambda source: " ".join([opening, re.split(r"[(.:;,!?\n]", source)[0]])
    scores = {name: rouge(validation, [rule(source) for source, _ in validation]) for name, rule in rules.items()}
    best = {metric: max(scores, key=lambda name: scores[name][metric]) for metric in METRICS}
    return {metric: Copy(name, rules[name], scores[name][metric]) for metric, name in best.items()}


def copy_scores(test: Sequence[Pair], copies: dict[str, Copy]) -> dict[str, float]:
    """Returns the test scores of the rules that were selected on validation."""
    return {metric: rouge(test, [copy.rule(source) for source, _ in test])[metric] for metric, copy in copies.items()}
