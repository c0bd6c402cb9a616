"""The tasks of this example: reading their data, their metrics, and plots of their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    PredictionErrorDisplay,
    accuracy_score,
    f1_score,
    matthews_corrcoef,
    r2_score,
)
from tokenizers import Tokenizer

from examples._images import digits, draw_grid, read_classes, split
from examples.classification_regression.glue import GLUE, read_glue

Name = Literal[
    "digits", "images", "diabetes", "cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"
]  # fmt: skip

# Inputs and target. Inputs are a dict of arrays, or texts before encoding. A target is a class (int), or a number (float)
# that is standardized by the mean and standard deviation of the training targets.
Examples = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Task:
    """The training, validation and test examples of a task, and their description."""

    name: Name
    train: Examples
    validation: Examples
    test: Examples
    classes: tuple[str, ...] = ()  # The names of the classes; empty for regression.
    mean: float = 0.0  # Mean and standard deviation of the training targets, to scale predictions back.
    deviation: float = 1.0


# The first metric of a task selects the checkpoint.
METRICS: dict[str, tuple[str, ...]] = {
    "digits": ("accuracy",), "images": ("accuracy",), "diabetes": ("r2", "pearson"),
    **{name: glue.metrics for name, glue in GLUE.items()},
}  # fmt: skip


# --- scores ----------------------------------------------------------------------------------------------------------


def _correlation(of: Callable[..., Any], targets: np.ndarray, predictions: np.ndarray) -> float:
    """Returns a correlation; 0 if one side is constant, where it is undefined."""
    return float(of(targets, predictions).statistic) if min(np.ptp(targets), np.ptp(predictions)) > 0 else 0.0


_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "matthews": matthews_corrcoef,
    "f1": partial(f1_score, zero_division=0.0),  # pyright: ignore[reportArgumentType]  # its default is a string
    "r2": r2_score,
    "pearson": partial(_correlation, pearsonr),
    "spearman": partial(_correlation, spearmanr),
}


def measure(task: Task, examples: Examples, outputs: Sequence[np.ndarray] | np.ndarray) -> dict[str, float]:
    """Returns the task's metrics for outputs: [classes] logits or [1] number for each example."""
    targets, predictions = np.array([target for _, target in examples]), np.asarray(outputs)
    predictions = predictions.argmax(1) if task.classes else predictions[:, 0]
    return {name: float(_SCORES[name](targets, predictions)) for name in METRICS[task.name]}


def ridge(task: Task) -> dict[str, float]:
    """Returns the test scores of a linear model. Its penalty is selected by cross-validation on the training set."""
    features, targets = zip(*[(inputs["x"], target) for inputs, target in task.train], strict=True)
    model = RidgeCV(np.logspace(-2, 4, 25)).fit(np.stack(features), targets)
    return measure(task, task.test, model.predict(np.stack([inputs["x"] for inputs, _ in task.test]))[:, None])


def draw(task: Task, outputs: np.ndarray, workdir: Path) -> list[Path]:
    """Writes `test.png`, predictions over targets; and for images `mistakes.png`, those with the lowest probability of the
    true class."""
    targets = np.array([target for _, target in task.test])
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes, paths = figure.subplots(), [workdir / "test.png"]
    if task.classes:
        named = {"labels": range(len(task.classes)), "display_labels": task.classes}
        rotation = "horizontal" if len(task.classes) <= 10 else "vertical"
        ConfusionMatrixDisplay.from_predictions(
            targets, outputs.argmax(1), **named, ax=axes, cmap="Blues", xticks_rotation=rotation
        )
    else:
        true, predicted = (task.mean + task.deviation * x for x in (targets, outputs[:, 0]))
        PredictionErrorDisplay.from_predictions(true, predicted, kind="actual_vs_predicted", ax=axes)
    figure.savefig(paths[0], dpi=120)
    if task.name in ("digits", "images"):
        given = softmax(outputs, axis=1)[np.arange(len(targets)), targets]
        worst: list[int] = np.argsort(given)[:24].tolist()
        titles = [f"{task.classes[targets[i]]} ({given[i]:.0%}) as {task.classes[outputs[i].argmax()]}" for i in worst]
        paths.append(workdir / "mistakes.png")
        draw_grid(paths[1], [task.test[i][0]["image"] for i in worst], titles)
    return paths


# --- examples --------------------------------------------------------------------------------------------------------


def read_task(name: Name, data: Path | None, image_size: int, n_channels: int) -> Task:
    """Returns the examples of a task, read from `data` if the task needs files.

    Raises ValueError with the flag, the file or the row, and what was expected.
    """
    if name not in get_args(Name):
        raise ValueError(f"`--task`: expected one of {', '.join(get_args(Name))}, got {name!r}. Pass one of them.")
    if name in ("digits", "diabetes"):
        if data is not None:
            raise ValueError(
                f"`--data`: expected none with `--task {name}`, whose data are scikit-learn's, got {data}. "
                "For your own images pass `--task images`."
            )
        return _diabetes() if name == "diabetes" else _images(name, *digits(), names=[str(i) for i in range(10)])
    if data is None:
        files = f"train.tsv and {GLUE[name].dev}, as GLUE has them" if name in GLUE else ""
        wanted = files or "subfolders of images, one per class"
        raise ValueError(f"`--data`: expected a folder for `--task {name}` with {wanted}, got none. Pass it.")
    if name == "images":
        examples, names = read_classes(data, image_size, n_channels)
        return _images(name, *split(examples), names=names)
    # GLUE does not publish the labels of test.tsv. dev.tsv is therefore the test set, and not used for selection.
    data = data / GLUE[name].folder if (data / GLUE[name].folder).is_dir() else data
    test = read_glue(name, data / GLUE[name].dev)
    rows = read_glue(name, data / "train.tsv")
    order = np.random.default_rng(0).permutation(len(rows))
    validation, train = ([rows[i] for i in part] for part in np.split(order, [-(-len(rows) // 10)]))
    task = Task(name, train, validation, test, GLUE[name].classes)
    return task if task.classes else _standardised(task)


def encode(task: Task, tokenizer: Tokenizer, max_tokens: int, pad_id: int) -> Task:
    """Returns the task with its texts as token ids, truncated, or padded on the right."""
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding(length=max_tokens, pad_id=pad_id)

    def encoded(examples: Examples) -> Examples:
        # The tokenizer takes a pair as a tuple, and a single text as a string.
        encodings = tokenizer.encode_batch([texts if len(texts) == 2 else texts[0] for texts, _ in examples])
        inputs = [
            {
                "ids": np.array(encoding.ids, np.int32),
                "token_types": np.array(encoding.type_ids, np.int32),
                "mask": np.array(encoding.attention_mask, bool),
            }
            for encoding in encodings
        ]
        return [(x, target) for x, (_, target) in zip(inputs, examples, strict=True)]

    return map_examples(task, encoded)


def _diabetes() -> Task:
    """442 patients with ten measurements each, split into 309, 44 and 89. The target is the progression of the disease after
    one year."""
    data: Any = load_diabetes(scaled=False)
    features, targets = data.data, data.target
    parts = np.split(np.random.default_rng(0).permutation(len(targets)), [309, 353])
    mean, deviation = features[parts[0]].mean(0), features[parts[0]].std(0)
    features = ((features - mean) / deviation).astype(np.float32)
    train, validation, test = ([({"x": features[i]}, targets[i]) for i in part] for part in parts)
    return _standardised(Task("diabetes", train, validation, test))


def _images(name: Name, *parts: list[tuple[np.ndarray, int]], names: Sequence[str]) -> Task:
    train, validation, test = ([({"image": image}, label) for image, label in part] for part in parts)
    return Task(name, train, validation, test, tuple(names))


def _standardised(task: Task) -> Task:
    """Returns the task with all targets standardized by the mean and standard deviation of its training targets."""
    targets = np.array([target for _, target in task.train])
    mean, deviation = float(targets.mean()), float(targets.std()) or 1.0
    task = map_examples(task, lambda examples: [(x, np.float32((target - mean) / deviation)) for x, target in examples])
    return replace(task, mean=mean, deviation=deviation)


def map_examples(task: Task, change: Callable[[Examples], Examples]) -> Task:
    parts = {name: change(getattr(task, name)) for name in ("train", "validation", "test")}
    return replace(task, **parts)
