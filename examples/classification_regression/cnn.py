"""The network for images: a CNN with BatchNorm, whose state the Trainer carries."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Shift(eqx.Module):
    """Shifts an image randomly by up to `distance` pixels in each direction, filling with zeros. No effect in inference."""

    distance: int = eqx.field(static=True)
    inference: bool = False  # set by `eqx.nn.inference_mode`, as for dropout

    def __call__(self, image: jax.Array, *, key: jax.Array) -> jax.Array:
        if self.inference:
            return image
        low = jax.random.randint(key, (2,), 0, 2 * self.distance + 1)
        padded = jnp.pad(image, ((0, 0), *2 * ((self.distance, self.distance),)))
        return jax.lax.dynamic_slice(padded, (0, low[0], low[1]), image.shape)


class CNN(eqx.Module):
    """Blocks of two normalized convolutions and a pooling, down to at most 4 x 4 pixels; then a convolution and a linear
    layer."""

    shift: Shift
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, n_channels: int, size: int, width: int, n_classes: int, *, key: jax.Array):
        self.shift, widths = Shift(max(1, size // 16)), [n_channels]
        while size > 4:
            widths, width, size = [*widths, width, width], 2 * width, size // 2
        widths.append(width)
        *keys, head_key = jax.random.split(key, len(widths))
        pairs = zip(widths[:-1], widths[1:], keys, strict=True)
        self.convs = [eqx.nn.Conv2d(a, b, 3, padding=1, use_bias=False, key=k) for a, b, k in pairs]
        self.norms = [eqx.nn.BatchNorm(n, "batch", momentum=0.9, mode="batch") for n in widths[1:]]
        self.head = eqx.nn.Linear(width, n_classes, key=head_key)

    def __call__(self, image: jax.Array, state: eqx.nn.State, key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
        x = self.shift(image, key=key)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x, state = norm(conv(x), state)
            x = jax.nn.relu(x)
            if i % 2:
                x = eqx.nn.MaxPool2d(2, 2)(x)
        return self.head(jnp.mean(x, (1, 2))), state
