"""Equinox's layers applied to whole arrays, and their initialization.

`eqx.nn` layers take one vector and must be vmapped. Over `[..., in]`, a vmapped `Linear` computes `weight @ x`, whose output
is `[out, ...]` and is transposed at each layer. Applied as `x @ weight.T`, the same leaves need no transpose.
"""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from redeqx._rounding import at_least_float32


def linear(layer: eqx.nn.Linear, x: Float[Array, "*dims in"]) -> Float[Array, "*dims out"]:
    """Applies `layer` along the last dim of `x`. A replacement of a `Linear`, such as an adapted layer, is called on `x`."""
    if type(layer) is not eqx.nn.Linear:
        return layer(x)
    out = x @ layer.weight.T
    return out if layer.bias is None else out + layer.bias


def norm(layer: eqx.nn.LayerNorm | eqx.nn.RMSNorm | None, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    """Applies `layer` to each row of `x`; without a layer, returns `x`. Means and variances have at least float32."""
    return x if layer is None else jax.vmap(layer)(x)


def finite(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Replaces infinities of float16 by large numbers, as transformers does; other dtypes have the range of float32."""
    if x.dtype != jnp.float16:
        return x
    return jnp.where(jnp.isinf(x), jnp.copysign(jnp.finfo(x.dtype).max - 1000, x), x)


class OffsetRMSNorm(eqx.nn.RMSNorm):
    """An RMSNorm whose leaf is its scale minus one, as in Gemma. It is computed in at least float32, and then rounded."""

    def __init__(self, shape: int, eps: float = 1e-6):
        super().__init__(shape, eps=eps, use_bias=False)
        self.weight = jnp.zeros(self.shape)

    def __call__(self, x: Float[Array, " size"], *args: Any, **kwargs: Any) -> Any:
        return eqx.nn.RMSNorm.__call__(_raised(self, x.dtype), x, *args, **kwargs)


class GroupRMSNorm(eqx.nn.RMSNorm):
    """An RMSNorm of groups of features, each by itself. It is computed in at least float32, and then rounded."""

    n_groups: int = eqx.field(static=True)

    def __init__(self, shape: int, n_groups: int, eps: float = 1e-6):
        super().__init__(shape, eps=eps, use_bias=False)
        self.n_groups = n_groups

    def __call__(self, x: Float[Array, " size"], *args: Any, **kwargs: Any) -> Any:
        del args, kwargs  # for interchangeability with other layers of Equinox
        assert self.weight is not None
        wide = x.astype(at_least_float32(x.dtype))
        groups = rearrange(wide, "(groups n) -> groups n", groups=self.n_groups)
        groups = groups * jax.lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + self.eps)
        return (rearrange(groups, "groups n -> (groups n)") * self.weight.astype(wide.dtype)).astype(x.dtype)


class OffsetLayerNorm(eqx.nn.LayerNorm):
    """A LayerNorm whose weight is its scale minus one, as in Nemotron."""

    def __init__(self, shape: int, eps: float = 1e-5):
        super().__init__(shape, eps=eps)
        self.weight = jnp.zeros(self.shape)

    def __call__(self, x: Float[Array, " size"], *args: Any, **kwargs: Any) -> Any:
        return eqx.nn.LayerNorm.__call__(_raised(self, x.dtype), x, *args, **kwargs)


def _raised(layer: Any, dtype: Any) -> Any:
    """Returns a norm with the scale as its weight, in at least float32."""
    return eqx.tree_at(lambda layer: layer.weight, layer, 1 + layer.weight.astype(at_least_float32(dtype)))


def soft_cap(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """Returns numbers in (-cap, cap), `cap * tanh(x / cap)`; `x` itself if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def times(x: Float[Array, "*dims"], factor: float) -> Float[Array, "*dims"]:
    """Returns the product, rounded once; `x` itself for a factor of 1. In `x * factor`, JAX rounds the factor, too, to the
    dtype of `x`; torch does not."""
    return x if factor == 1 else (x.astype(at_least_float32(x.dtype)) * factor).astype(x.dtype)


def embed(layer: eqx.nn.Embedding, ids: Int[Array, " seq"]) -> Float[Array, "seq d"]:
    """Returns the rows of `layer.weight` at `ids`.

    A replacement of an `Embedding`, such as an adapted one, is called on each id. An id outside the vocabulary gives NaN,
    which a training run detects. JAX's own indexing would use another row: the last one, or for a negative id one counted
    from the end.
    """
    if type(layer) is not eqx.nn.Embedding:
        return jax.vmap(layer)(ids)
    return layer.weight.at[ids].get(mode="fill", wrap_negative_indices=False)


def normal_linear(in_size: int, out_size: int, *, std: float, use_bias: bool = True, key: PRNGKeyArray) -> eqx.nn.Linear:
    """Returns a `Linear` whose weight is drawn from N(0, `std`²) and whose bias is zero."""
    layer = _shapes_of_linear(in_size, out_size, use_bias)
    weight = std * jax.random.normal(key, (out_size, in_size))
    if not use_bias:
        return eqx.tree_at(lambda l: l.weight, layer, weight)
    return eqx.tree_at(lambda l: (l.weight, l.bias), layer, (weight, jnp.zeros(out_size)))


@cache
def _shapes_of_linear(in_size: int, out_size: int, use_bias: bool) -> eqx.nn.Linear:
    """Returns a `Linear` without arrays. Drawing Equinox's own, to replace them, would take most of a model's creation."""
    return eqx.filter_eval_shape(lambda: eqx.nn.Linear(in_size, out_size, use_bias=use_bias, key=jax.random.key(0)))


def normal_embedding(n_rows: int, size: int, *, std: float, zero: int | None = None, key: PRNGKeyArray) -> eqx.nn.Embedding:
    """Returns an `Embedding` whose weight is drawn from N(0, `std`²), except for the row `zero`, that of padding."""
    weight = std * jax.random.normal(key, (n_rows, size))
    has_zero = zero is not None and 0 <= zero < n_rows
    return eqx.nn.Embedding(weight=weight.at[zero].set(0) if has_zero else weight)
