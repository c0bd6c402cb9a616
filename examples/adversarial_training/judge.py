"""Scores drawings: their distance to training images, and whether every class is drawn."""

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.svm import SVC

from .._images import Labelled


def judge(drawn: np.ndarray, train: Labelled, test: Labelled) -> dict[str, float]:
    """Returns the mean distance to the nearest training image, of drawings and of real test images; and the share of the
    rarest class among drawings, as classified by a support vector machine, and an even share.

    **Arguments:**

    - `drawn`: [n, channels, height, width], in [0, 1].
    """
    images, labels = np.stack([image.ravel() for image, _ in train]), np.array([label for _, label in train])
    real = np.stack([image.ravel() for image, _ in test])
    drawn = drawn.reshape(len(drawn), -1)
    counts = np.bincount(SVC().fit(images, labels).predict(drawn), minlength=labels.max() + 1)
    return {
        "test_distance": float(cdist(drawn, images).min(1).mean()),
        "test_real_distance": float(cdist(real, images).min(1).mean()),
        "test_rarest_share": float(counts.min() / len(drawn)),
        "test_even_share": float(1 / len(counts)),
    }
