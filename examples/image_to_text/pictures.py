"""Pictures of two digits with their captions, and a drawing of images with generated captions."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.ndimage import affine_transform

from examples._images import Captioned, Labelled, digits, draw_grid

Parts = tuple[Callable[[int], Captioned], Captioned, Captioned]  # training data of an epoch, validation data, test data

NAMES = ("a zero", "a one", "a two", "a three", "a four", "a five", "a six", "a seven", "an eight", "a nine")
CELL = 10  # a picture has 2 x 2 cells of this size in pixels, two of which hold an 8 x 8 digit
RELATIONS = {(0, 1): "beside", (2, 3): "beside", (0, 2): "above", (1, 3): "above"}  # of two cells, numbered row by row


def compose(examples: Labelled, n: int, seed: Sequence[int], *, bend: float = 0.0) -> Captioned:
    """Composes `n` pictures of two of the digits, [1, 2 CELL, 2 CELL], and their captions.

    With `bend`, half of the digits are distorted by a matrix that differs from the identity by this much (rotation, scale,
    shear). The others stay sharp like those of validation and test pictures, because distortion also blurs.
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
    """Returns pictures of two digits, with new training pictures in each epoch. The digits of a picture come from the same
    part of the data."""
    train, validation, test = digits()
    held_out = compose(validation, n_held_out, (0, 1)), compose(test, n_held_out, (0, 2))
    return lambda epoch: compose(train, n_train, (seed, 0, epoch), bend=bend), *held_out


def draw(path: Path, examples: Captioned, captions: Sequence[str]) -> None:
    """Draws images with their captions as a grid. Wrong captions come first, in a red frame with the correct caption
    below."""
    wrong = [text.strip() != caption for (_, text), caption in zip(examples, captions, strict=True)]
    wrap = textwrap.TextWrapper(width=21).wrap
    images, titles = [], []
    for i in [*np.flatnonzero(wrong)[:8], *np.flatnonzero(~np.array(wrong))][:32]:
        image, text = examples[i]
        width = max(1, image.shape[1] // 20)
        frame = np.array([0.9, 0.1, 0.1] if wrong[i] else [0.1, 0.6, 0.2])[:, None, None]
        framed = np.broadcast_to(frame, (3, image.shape[1] + 2 * width, image.shape[2] + 2 * width)).copy()
        framed[:, width:-width, width:-width] = image  # a single channel is broadcast
        images.append(framed)
        titles.append("\n".join(wrap(captions[int(i)]) + (wrap(f"(it is: {text})") if wrong[i] else [])))
    draw_grid(path, images, titles)
