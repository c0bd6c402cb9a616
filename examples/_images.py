"""Reads, judges and draws images [channels, height, width] for several examples: digits, and folders of files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from examples._texts import read_table

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}

Labelled = list[tuple[np.ndarray, int]]  # images [channels, height, width], float32 in [0, 1], and their classes
Captioned = list[tuple[np.ndarray, str]]  # such images, and their captions
Norm = tuple[np.ndarray, np.ndarray]  # the mean and the standard deviation of pixels, [channels or 1, 1, 1]


def digits() -> tuple[Labelled, Labelled, Labelled]:
    """scikit-learn's 1797 handwritten digits, [1, 8, 8]: 1257 for training, 180 for validation, 360 for testing."""
    data: Any = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    return split(list(zip(images, data.target.tolist(), strict=True)))


def split(examples: Labelled) -> tuple[Labelled, Labelled, Labelled]:
    """Splits examples into training (70 %), validation (10 %) and test (20 %) sets, class by class and deterministically."""

    def cut(examples: Labelled, share: float) -> Any:
        labels = [label for _, label in examples]
        n = max(math.ceil(share * len(examples)), len(set(labels)))  # at least one of each class
        return train_test_split(examples, test_size=n, random_state=0, stratify=labels)

    rest, test = cut(examples, 0.2)
    train, validation = cut(rest, 0.125)
    return train, validation, test


def read_image(path: Path, size: int, n_channels: int) -> np.ndarray:
    """Reads an image file and resizes it to [n_channels, size, size], float32 in [0, 1]."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L" if n_channels == 1 else "RGB").resize((size, size)), np.float32) / 255
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"`{path}`: expected an image, got a file that Pillow cannot read. {error}.") from None
    return pixels[None] if n_channels == 1 else pixels.transpose(2, 0, 1)


def read_classes(folder: Path, size: int, n_channels: int = 1) -> tuple[Labelled, list[str]]:
    """Returns the images of a folder with one subfolder for each class, and the names of the classes."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    files = [sorted(f for f in (folder / name).rglob("*") if f.suffix.lower() in SUFFIXES) for name in names]
    for name, found in zip(names, files, strict=True):
        if len(found) < 5:
            raise ValueError(
                f"`{folder / name}`: expected at least 5 images, for training, validation and testing, got {len(found)}. "
                f"Put images ({', '.join(sorted(SUFFIXES))}) there, or remove the folder."
            )
    if len(names) < 2:
        raise ValueError(
            f"`{folder}`: expected two or more subfolders with images, one per class, got {len(names)}. "
            "Sort the images into subfolders; their names become the classes."
        )
    examples = [(read_image(f, size, n_channels), i) for i, found in enumerate(files) for f in found]
    return examples, names


def read_parts(folder: Path | None, size: int) -> tuple[tuple[Labelled, Labelled, Labelled], list[str]]:
    """Returns training, validation and test images, of a folder or scikit-learn's digits, and the names of the classes."""
    if folder is None:
        return digits(), [str(i) for i in range(10)]
    examples, names = read_classes(folder, size)
    return split(examples), names


def read_captions(folder: Path, size: int, n_channels: int = 3) -> tuple[Captioned, Captioned, Captioned]:
    """Returns the images of a folder with their captions: 70 % for training, 10 % for validation, 20 % for testing,
    deterministically. All captions of an image are in the same part.

    The captions are in `metadata.jsonl`, whose lines have `file_name` and `text`.
    """
    table = folder / "metadata.jsonl"
    if not table.is_file():
        found = f"{sum(f.suffix.lower() in SUFFIXES for f in folder.iterdir())} images" if folder.is_dir() else "no folder"
        raise ValueError(
            f"`{table}`: expected a line of `file_name` and `text` for each image, got {found} and no such file. Create it."
        )
    of_images: dict[bytes, Captioned] = {}
    for number, row in enumerate(read_table(table, ["file_name", "text"]), start=1):
        if not (folder / row["file_name"]).is_file():
            raise ValueError(f"`{table}` row {number}: expected the file {row['file_name']!r} next to it, got none. Add it.")
        image = read_image(folder / row["file_name"], size, n_channels)
        of_images.setdefault(image.tobytes(), []).append((image, row["text"]))
    groups, n = list(of_images.values()), len(of_images) // 10
    if n == 0:
        raise ValueError(
            f"`{folder}`: expected at least 10 images that differ, got {len(groups)}. Add more, with their captions."
        )
    order = np.random.default_rng(0).permutation(len(groups))
    test, validation, train = ([example for i in part for example in groups[i]] for part in np.split(order, [2 * n, 3 * n]))
    return train, validation, test


def read_norm(folder: Path | None) -> Norm:
    """Returns the normalization of pixels in a Hugging Face folder, or that of ViT, to [-1, 1], if it has none."""
    file = None if folder is None else folder / "preprocessor_config.json"
    found = json.loads(file.read_text("utf-8")) if file is not None and file.is_file() else {}
    if not found.get("do_normalize", True):
        return np.zeros((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    mean, std = (np.array(found.get(name, 0.5), np.float32).reshape(-1, 1, 1) for name in ("image_mean", "image_std"))
    return mean, std


def judge(drawn: np.ndarray, train: Labelled, test: Labelled) -> tuple[np.ndarray, dict[str, float]]:
    """Returns the class of each drawing, by a support vector machine that was trained on real images, and scores: its
    accuracy on real test images, and the mean distance to the nearest training image, of drawings and of real test images.
    If the former were much smaller, the model would have memorized its training images.

    **Arguments:**

    - `drawn`: [n, channels, height, width], in [0, 1].
    """
    (images, labels), (real, real_labels) = (
        (np.stack([image.ravel() for image, _ in part]), np.array([label for _, label in part])) for part in (train, test)
    )
    drawn, machine = drawn.reshape(len(drawn), -1), SVC().fit(images, labels)
    return machine.predict(drawn), {
        "test_judge_accuracy": float(machine.score(real, real_labels)),
        "test_distance": float(cdist(drawn, images).min(1).mean()),
        "test_real_distance": float(cdist(real, images).min(1).mean()),
    }


def accuracy(examples: Labelled, outputs: Sequence[Any]) -> dict[str, float]:
    """Returns the share of images whose class was predicted."""
    return {"accuracy": float(np.mean(np.equal([label for _, label in examples], outputs)))}


def draw_grid(
    path: Path, images: Sequence[np.ndarray], titles: Sequence[str], n_columns: int = 8, heading: str = ""
) -> None:
    """Draws images [channels, height, width] in [0, 1] as a grid with a title for each and a heading, to a PNG file."""
    n_rows = -(-len(images) // n_columns)
    figure = Figure(figsize=(1.5 * n_columns, 1.7 * n_rows), layout="constrained")
    for axes in (grid := figure.subplots(n_rows, n_columns, squeeze=False)).flat:
        axes.axis("off")
    for axes, image, title in zip(grid.flat, images, titles, strict=False):
        axes.imshow(np.clip(image.transpose(1, 2, 0), 0, 1), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8)
    if heading:
        figure.suptitle(heading, fontsize=9)
    figure.savefig(path, dpi=100)
