"""GLUE's tables: their formats, and how their rows are read."""

import contextlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from examples._texts import read_table


@dataclass(frozen=True)
class Glue:
    """The format of a GLUE task's tables."""

    folder: str  # The task's folder in GLUE's download.
    texts: tuple[str, ...]  # The columns with the text, or the pair of texts.
    label: str
    classes: tuple[str, ...] = ()  # The names of the classes; empty if the label is a score from 0 to 5.
    labels: tuple[str, ...] = ("0", "1")  # The labels in the file.
    header: tuple[str, ...] | None = None  # The column names of a file without a header.
    dev: str = "dev.tsv"
    metrics: tuple[str, ...] = ("accuracy",)  # GLUE's, in its order. The first one selects the checkpoint.
    has_broken_rows: bool = False  # Such rows of GLUE's files are skipped with a warning.


_PAIR = ("sentence1", "sentence2")
_ENTAILED = ("not_entailment", "entailment")
_INFERENCE = ("contradiction", "neutral", "entailment")

GLUE: dict[str, Glue] = {
    "cola": Glue(
        "CoLA", ("sentence",), "label", ("unacceptable", "acceptable"), header=("source", "label", "mark", "sentence"),
        metrics=("matthews", "accuracy"),
    ),
    "mnli": Glue("MNLI", _PAIR, "gold_label", _INFERENCE, _INFERENCE, dev="dev_matched.tsv"),
    "mrpc": Glue("MRPC", ("#1 String", "#2 String"), "Quality", ("different", "equivalent"), metrics=("f1", "accuracy")),
    "qnli": Glue("QNLI", ("question", "sentence"), "label", _ENTAILED, _ENTAILED),
    "qqp": Glue(
        "QQP", ("question1", "question2"), "is_duplicate", ("different", "duplicate"), metrics=("f1", "accuracy"),
        has_broken_rows=True,
    ),
    "rte": Glue("RTE", _PAIR, "label", _ENTAILED, _ENTAILED),
    "sst2": Glue("SST-2", ("sentence",), "label", ("negative", "positive")),
    "stsb": Glue("STS-B", _PAIR, "score", metrics=("pearson", "spearman")),
    "wnli": Glue("WNLI", _PAIR, "label", ("not_entailment", "entailment")),
}  # fmt: skip


def read_glue(name: str, path: Path) -> list[tuple[tuple[str, ...], int | float]]:
    """Returns the texts of each row, one or a pair, and its label."""
    glue = GLUE[name]
    broken: list[int] | None = [] if glue.has_broken_rows else None
    rows = read_table(path, [*glue.texts, glue.label], names=glue.header, broken=broken)
    if broken:
        warnings.warn(f"`{path}`: {len(broken)} rows of other lengths are skipped, the first row {broken[0]}", stacklevel=2)
    first = 1 if glue.header else 2
    numbers = [number for number in range(first, first + len(rows) + len(broken or ())) if number not in set(broken or ())]
    examples = []
    for number, row in zip(numbers, rows, strict=True):
        found = row[glue.label]
        label = math.nan
        if glue.classes and found in glue.labels:
            label = glue.labels.index(found)
        elif not glue.classes:
            with contextlib.suppress(ValueError):
                label = float(found)
        if not label <= (len(glue.classes) or 5) or label < 0:
            rule = f"{', '.join(glue.labels[:-1])} or {glue.labels[-1]}" if glue.classes else "from 0 to 5"
            raise ValueError(
                f"`{path}` row {number}: expected a {glue.label} of {rule}, got {found!r}. Fix or remove that row."
            )
        examples.append((tuple(row[column] for column in glue.texts), label))
    return examples
