"""Bicubic interpolation of positions, for images of another size. It is that of torch, with and without antialiasing.

A resized row is a weighted mean of the old ones, so that the weights are one matrix for each dim.
"""

import numpy as np


def bicubic(old: int, new: int, *, antialias: bool) -> np.ndarray:
    """Returns the weights of the old places for each new one, float32 `[new, old]`.

    Source: Keys 1981, *Cubic Convolution Interpolation for Digital Image Processing*, with the coefficient -0.75, or -0.5
    with antialiasing. Without antialiasing places beyond the border have the value at the border; with it they have no
    weight, and the kernel widens if there are fewer places than before.
    """
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale - 0.5
    places, weights = np.arange(old), np.zeros((new, old))
    if antialias:
        width = max(scale, 1.0)
        weights = _kernel((places - centers[:, None]) / width, -0.5)
        return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    first = np.floor(centers).astype(int)
    for i in range(-1, 3):
        np.add.at(weights, (np.arange(new), np.clip(first + i, 0, old - 1)), _kernel(first + i - centers, -0.75))
    return weights.astype(np.float32)


def _kernel(x: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
