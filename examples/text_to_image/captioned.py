"""Images with captions: digits, or those of a folder; and a judge of drawn digits."""

from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.svm import SVC

from .._images import digits, read_captions

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASES = ("{}", "the digit {}", "a handwritten {}", "the number {}")

Captioned = list[tuple[np.ndarray, str]]  # images [channels, height, width] in 0 to 1, or their latents, and captions


def captioned_digits() -> tuple[Captioned, Captioned, Captioned]:
    """The digits to train on, to choose by and to test on, each under every phrase."""
    train, validation, test = (
        [(image, phrase.format(WORDS[label])) for image, label in part for phrase in PHRASES] for part in digits()
    )
    return train, validation, test


def captioned_folder(folder: Path, size: int, n_channels: int) -> tuple[Captioned, Captioned, Captioned]:
    """The images of a folder: seven parts to train on, one to choose by, two to test on; always the same."""
    examples = read_captions(folder, size, n_channels)
    if len(examples) < 10:
        raise ValueError(f"`{folder}`: expected 10 images, to train, choose and test by, got {len(examples)}. Add some.")
    shuffled = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    n = len(examples) // 10
    return shuffled[3 * n :], shuffled[2 * n : 3 * n], shuffled[: 2 * n]


def whole_batches(examples: Captioned, batch_size: int) -> Captioned:
    """The examples, and some of them again, so that no batch is smaller: it would be compiled for itself."""
    return [examples[i % len(examples)] for i in range(-(-len(examples) // batch_size) * batch_size)]


def judge_digits(drawn: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """How often a support vector machine, trained on real digits, sees what was wanted in what was drawn.

    And how far drawings are from the nearest training digit, beside how far real test digits are: much less would mean
    that the model has its training images by heart.
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
