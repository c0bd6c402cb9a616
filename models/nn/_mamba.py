"""Mamba-2: a state space layer, as a recurrence that adds each token's value to the state. See `_recurrence.py`.

In the names of its paper, queries are C, keys B, values x, gates z, steps dt, rates A, and the skip D.

Source: *Transformers are SSMs* (arXiv:2405.21060).

Dims: seq = tokens of one example, groups = heads of queries and keys, heads = heads of values, each = heads / groups, size,
value = width of a head's keys and values.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from ._layers import norm
from ._recurrence import Recurrence, Tokens


class Mamba2(Recurrence):
    """A layer in place of an attention, or beside one, with a state space. See `Recurrence`.

    Its norm, if any, is over all heads of a group.
    """

    query_bias: Float[Array, "*layers d_key"] | None  # of the convolutions
    key_bias: Float[Array, "*layers d_key"] | None
    value_bias: Float[Array, "*layers d_value"] | None
    skip: Float[Array, "*layers heads"]  # the share of a value that is added to what its head returns
    step_limits: tuple[float, float] = eqx.field(static=True)
    gates_first: bool = eqx.field(static=True)  # whether the gate is multiplied before the norm

    def _conv_biases(self) -> tuple[Float[Array, " width"] | None, ...]:
        return self.query_bias, self.key_bias, self.value_bias

    def _tokens(
        self,
        x: Float[Array, "seq d"],
        convolved: tuple[Array, Array, Array],
        steps: Float[Array, "seq groups each"],
        mask: Bool[Array, " seq"] | None,
    ) -> tuple[Tokens, Float[Array, "seq groups each value"]]:
        queries, keys, values = convolved
        # The biases of the convolutions are also in padding, which must not change the state.
        values = values if mask is None else jnp.where(mask[:, None, None, None], values, 0)
        steps = jnp.clip(steps, *self.step_limits)
        skip = self.by_group(self.skip.astype(values.dtype))
        return Tokens(queries, keys, values * steps[..., None], self.rates() * steps), values * skip[..., None]

    def _gated(
        self, mixed: Float[Array, "seq heads value"], gate: Float[Array, "seq heads value"]
    ) -> Float[Array, "seq heads value"]:
        gate = jax.nn.silu(gate)
        mixed = mixed * gate if self.gates_first else mixed
        if self.norm is not None:
            rows = norm(self.norm, rearrange(mixed, "seq heads value -> seq (heads value)"))
            mixed = rearrange(rows, "seq (heads value) -> seq heads value", heads=self.n_heads)
        return mixed if self.gates_first else mixed * gate
