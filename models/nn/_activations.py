"""The activation functions of MLPs, by their names in `transformers`."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _laplace(x: Array) -> Array:
    """Source: Ma et al. 2022, *Mega* (arXiv:2209.10655)."""
    return 0.5 * (1 + jax.scipy.special.erf((x - 0.707107) / (0.282095 * 2**0.5)))


class Xielu(eqx.Module):
    """An activation with a slope for positive inputs that grows with them, and an exponential for negative ones.

    `beta` and `eps` are not trained. Source: Huang and Schlag 2024, *Deriving Activation Functions Using Integration*
    (arXiv:2411.13010).
    """

    alpha_p: Float[Array, "*layers 1"]
    alpha_n: Float[Array, "*layers 1"]
    beta: Float[Array, "*layers"]
    eps: Float[Array, "*layers"]

    def __init__(self) -> None:
        inverse = lambda alpha: jnp.full(1, math.log(math.expm1(alpha)))  # noqa: E731  # of the softplus
        self.alpha_p, self.alpha_n = inverse(0.8), inverse(0.3)
        self.beta, self.eps = jnp.array(0.5), jnp.array(-1e-6)

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        beta, eps = (jax.lax.stop_gradient(number).astype(x.dtype) for number in (self.beta, self.eps))
        positive, negative = (jax.nn.softplus(alpha).astype(x.dtype) for alpha in (self.alpha_p, self.alpha_n))
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + negative)
        return jnp.where(x > 0, positive * x * x, below) + beta * x


# `prelu` is missing: it has a parameter of its own. `Xielu` has two, and is not one of these functions.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": _gelu,
        "gelu_10": lambda x: jnp.clip(_gelu(x), -10, 10),
        "gelu_accurate": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_new": _gelu_tanh,
        "gelu_python": _gelu,
        "gelu_python_tanh": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "hardswish": jax.nn.hard_swish,
        "laplace": _laplace,
        "leaky_relu": jax.nn.leaky_relu,
        "linear": lambda x: x,
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "relu": jax.nn.relu,
        "relu2": lambda x: jax.nn.relu(x) ** 2,
        "relu6": jax.nn.relu6,
        "sigmoid": jax.nn.sigmoid,
        "silu": jax.nn.silu,
        "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
        "swish": jax.nn.silu,
        "tanh": jnp.tanh,
    }
)
