"""Pictures with captions, in three parts: two digits in a picture and what a reader says of them, and folders of files."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.ndimage import affine_transform
from sklearn.model_selection import GroupShuffleSplit

from examples._images import Labelled, digits, draw_grid, read_captions

Captioned = list[tuple[np.ndarray, str]]  # images [channels, height, width], float32 in 0 to 1, and their captions
Parts = tuple[Callable[[int], Captioned], Captioned, Captioned]  # to train on in an epoch, to choose by, to test on

NAMES = ("a zero", "a one", "a two", "a three", "a four", "a five", "a six", "a seven", "an eight", "a nine")
CELL = 10  # a picture has 2 x 2 cells of so many pixels a side, and a digit of 8 x 8 somewhere in each of two
RELATIONS = {(0, 1): "beside", (2, 3): "beside", (0, 2): "above", (1, 3): "above"}  # of two cells, counted row by row


def compose(examples: Labelled, n: int, seed: Sequence[int], *, bend: float = 0.0) -> Captioned:
    """`n` pictures of two of the digits, [1, 2 CELL, 2 CELL], and their captions.

    With `bend` half of the digits are turned, stretched and slanted, by a matrix that is off the identity by so much. The
    others are left crisp, as those of held-out pictures are: what is bent is also blurred.
    """
    rng = np.random.default_rng(seed)
    pairs, center = list(RELATIONS), np.array([3.5, 3.5])
    pictures = []
    for _ in range(n):
        pair, picture, names = pairs[rng.integers(len(pairs))], np.zeros((1, 2 * CELL, 2 * CELL), np.float32), []
        for cell in pair:
            image, label = examples[rng.integers(len(examples))]
            matrix = np.eye(2) + bend * rng.integers(2) * rng.standard_normal((2, 2))
            about_center = np.column_stack([matrix, center - matrix @ center])
            y, x = np.array(divmod(cell, 2)) * CELL + rng.integers(CELL - 8 + 1, size=2)
            picture[0, y : y + 8, x : x + 8] = affine_transform(image[0], about_center, order=1)
            names.append(NAMES[label])
        pictures.append((picture, f"{names[0]} {RELATIONS[pair]} {names[1]}"))
    return pictures


def two_digits(n_train: int, n_held_out: int, *, bend: float, seed: int) -> Parts:
    """Others to train on in each epoch; the digits of a picture are all of one part."""
    train, validation, test = digits()
    held_out = compose(validation, n_held_out, (0, 1)), compose(test, n_held_out, (0, 2))
    return lambda epoch: compose(train, n_train, (seed, 0, epoch), bend=bend), *held_out


def of_folder(folder: Path, size: int, n_channels: int) -> Parts:
    """Seven parts to train, one to choose by, two to test, always the same; all captions of an image go the same way."""
    examples = read_captions(folder, size, n_channels)
    _, images = np.unique([image.tobytes() for image, _ in examples], return_inverse=True)
    if (n := images.max() + 1) < 10:
        raise ValueError(f"`{folder}`: expected at least 10 images that differ, got {n}. Add more, with their captions.")

    def split(rows: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
        first, second = next(GroupShuffleSplit(test_size=share, random_state=0).split(rows, groups=images[rows]))
        return rows[first], rows[second]

    rest, test = split(np.arange(len(examples)), 0.2)
    train, validation = split(rest, 0.125)
    parts = [[examples[i] for i in part] for part in (train, validation, test)]
    return lambda _: parts[0], parts[1], parts[2]


def draw(path: Path, examples: Captioned, captions: Sequence[str]) -> None:
    """A grid of images with their captions; wrong ones come first, in a red frame and with the right caption below."""
    wrong = [text.strip() != caption for (_, text), caption in zip(examples, captions, strict=True)]
    wrap = textwrap.TextWrapper(width=21).wrap
    images, titles = [], []
    for i in [*np.flatnonzero(wrong)[:8], *np.flatnonzero(~np.array(wrong))][:32]:
        image, text = examples[i]
        width = max(1, image.shape[1] // 20)
        frame = np.array([0.9, 0.1, 0.1] if wrong[i] else [0.1, 0.6, 0.2])[:, None, None]
        framed = np.broadcast_to(frame, (3, image.shape[1] + 2 * width, image.shape[2] + 2 * width)).copy()
        framed[:, width:-width, width:-width] = image  # one channel is repeated
        images.append(framed)
        titles.append("\n".join(wrap(captions[int(i)]) + (wrap(f"(it is: {text})") if wrong[i] else [])))
    draw_grid(path, images, titles)
