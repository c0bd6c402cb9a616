"""Captioned images: digits, or those of a folder; and a classifier that judges drawn digits."""

from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.svm import SVC

from .._images import digits, read_captions

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASES = ("{}", "the digit {}", "a handwritten {}", "the number {}")

Captioned = list[tuple[np.ndarray, str]]  # images [channels, height, width] in [0, 1], or their latents, and captions


def captioned_digits() -> tuple[Captioned, Captioned, Captioned]:
    """Returns the digits for training, validation and testing, each with every caption template."""
    train, validation, test = (
        [(image, phrase.format(WORDS[label])) for image, label in part for phrase in PHRASES] for part in digits()
    )
    return train, validation, test


def captioned_folder(folder: Path, size: int, n_channels: int) -> tuple[Captioned, Captioned, Captioned]:
    """Splits a folder's images: 70 % for training, 10 % for validation, 20 % for testing, deterministically. All captions of
    an image are in the same part."""
    of_images: dict[bytes, Captioned] = {}
    for image, caption in read_captions(folder, size, n_channels):
        of_images.setdefault(image.tobytes(), []).append((image, caption))
    if len(of_images) < 10:
        raise ValueError(
            f"`{folder}`: expected at least 10 images that differ, got {len(of_images)}. Add more, with their captions."
        )
    groups = list(of_images.values())
    shuffled = [groups[i] for i in np.random.default_rng(0).permutation(len(groups))]
    n = len(groups) // 10
    train, validation, test = (
        [example for group in part for example in group]
        for part in (shuffled[3 * n :], shuffled[2 * n : 3 * n], shuffled[: 2 * n])
    )
    return train, validation, test


def whole_batches(examples: Captioned, batch_size: int) -> Captioned:
    """Repeats some examples so that the last batch is full. A smaller one would be compiled separately."""
    return [examples[i % len(examples)] for i in range(-(-len(examples) // batch_size) * batch_size)]


def judge_digits(drawn: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """Returns the share of drawings in which a support vector machine, trained on real digits, finds the requested digit.

    Also returns the mean distance from drawings to the nearest training digit, and from real test digits. If the former were
    much smaller, the model would have memorized its training images.
    """
    (train, labels), (test, test_labels) = (
        (np.stack([image.ravel() for image, _ in part]), np.array([label for _, label in part]))
        for part in (digits()[0], digits()[2])
    )
    drawn = drawn.reshape(len(drawn), -1)
    judge = SVC().fit(train, labels)
    return {
        "test_agreement": float((judge.predict(drawn) == wanted).mean()),
        "test_judge_accuracy": float(judge.score(test, test_labels)),
        "test_distance": float(cdist(drawn, train).min(1).mean()),
        "test_real_distance": float(cdist(test, train).min(1).mean()),
    }
