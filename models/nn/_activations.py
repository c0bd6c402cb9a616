"""The activation functions of MLPs, by their names in `transformers`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _laplace(x: Array) -> Array:
    """Source: Ma et al. 2022, *Mega* (arXiv:2209.10655)."""
    return 0.5 * (1 + jax.scipy.special.erf((x - 0.707107) / (0.282095 * 2**0.5)))


# `prelu` and `xielu` are missing: they have parameters of their own.
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
