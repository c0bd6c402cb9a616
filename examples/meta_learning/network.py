"""The network for characters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import PRNGKeyArray


class ConvNet(eqx.Module):
    """Four blocks of convolution, normalization and ReLU, each of which halves the image; then a linear layer on the
    means."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    head: eqx.nn.Linear

    def __init__(self, width: int, n_classes: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        self.convs = [eqx.nn.Conv2d(width if i else 1, width, 3, use_bias=False, key=keys[i]) for i in range(4)]
        self.norms = [eqx.nn.GroupNorm(1, width) for _ in range(4)]
        self.head = eqx.nn.Linear(width, n_classes, key=keys[4])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(convolve(conv, x)))
        return self.head(x.mean((1, 2)))


def convolve(conv: eqx.nn.Conv2d, x: jax.Array) -> jax.Array:
    """Computes a 3x3 convolution with stride 2 and padding 1 as a matmul: each task has its own weights, and such
    convolutions are slow on CPU."""
    _, h, w = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1)))
    shifts = jnp.stack([padded[:, i : i + h : 2, j : j + w : 2] for i in range(3) for j in range(3)], axis=1)
    patches, weight = rearrange(shifts, "c k h w -> (c k) h w"), rearrange(conv.weight, "o c i j -> o (c i j)")
    return jnp.einsum("op,phw->ohw", weight, patches)
