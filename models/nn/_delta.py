"""The gated delta rule: a token's value replaces, in part, what the state holds for its key. See `_recurrence.py`.

Source: *Gated Delta Networks* (arXiv:2412.06464).

Dims: seq = tokens of one example, groups = heads of queries and keys, heads = heads of values, each = heads / groups, size,
value = width of a head's keys and values.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._layers import linear, norm
from ._recurrence import Recurrence, Tokens


class GatedDelta(Recurrence):
    """A layer in place of an attention, with the gated delta rule. See `Recurrence`."""

    strength: eqx.nn.Linear  # the share of a value that is replaced, before the sigmoid

    def _tokens(
        self, x: Float[Array, "seq d"], convolved: tuple[Array, ...], mask: Bool[Array, " seq"] | None
    ) -> tuple[Tokens, None]:
        del mask  # without biases, values of padding are zero
        queries, keys, values = convolved
        strength = self.by_group(jax.nn.sigmoid(linear(self.strength, x)).astype(values.dtype))
        queries = _unit(queries) * queries.shape[-1] ** -0.5
        return Tokens(queries, _unit(keys), values, self.rates() * self.steps(x), strength), None

    def _gated(
        self, mixed: Float[Array, "seq heads value"], gate: Float[Array, "seq heads value"]
    ) -> Float[Array, "seq heads value"]:
        layer = self.norm
        assert layer is not None
        return jax.vmap(lambda heads: norm(layer, heads))(mixed) * jax.nn.silu(gate)


def _unit(x: Float[Array, "seq groups size"]) -> Float[Array, "seq groups size"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
