"""Mamba and Mamba-2: state space layers, as recurrences that add each token's value to the state. See `_recurrence.py`.

In the names of their papers, queries are C, keys B, values x, gates z, steps dt, rates A, and the skip D.

Sources: *Mamba* (arXiv:2312.00752); *Transformers are SSMs* (arXiv:2405.21060).

Dims: seq = tokens of one example, groups = heads of queries and keys, heads = heads of values, each = heads / groups, size,
value = width of a head's keys and values, rank = width of what steps are computed from, places = tokens of a chunk.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redeqx._rounding import at_least_float32

from ._layers import linear, norm
from ._recurrence import Recurrence, Tokens, by_chunks


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

    def _tokens(
        self, x: Float[Array, "seq d"], convolved: tuple[Array, ...], mask: Bool[Array, " seq"] | None
    ) -> tuple[Tokens, Float[Array, "seq groups each value"]]:
        queries, keys, values = convolved
        # The biases of the convolutions are also in padding, which must not change the state.
        values = values if mask is None else jnp.where(mask[:, None, None, None], values, 0)
        steps = jnp.clip(self.steps(x), *self.step_limits)
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


class Mamba1(Recurrence):
    """A layer in place of an attention, with the state space of the first Mamba. See `Recurrence`.

    It has one head. Each number of its matrix decays at a rate of its own, so that tokens of a chunk are not computed as in
    an attention, but by an associative scan. Queries, keys and steps are computed from values after their convolution.
    """

    decay_bias: Float[Array, "*layers value"]
    log_rate: Float[Array, "*layers value size"]
    low: eqx.nn.Linear  # to the vector that steps are computed from
    query_norm: eqx.nn.RMSNorm | None
    key_norm: eqx.nn.RMSNorm | None
    low_norm: eqx.nn.RMSNorm | None
    value_bias: Float[Array, "*layers value"] | None  # of the convolution
    skip: Float[Array, "*layers value"]  # the share of a value that is added to what the state returns

    def _tokens(
        self, x: Float[Array, "seq d"], convolved: tuple[Array, ...], mask: Bool[Array, " seq"] | None
    ) -> tuple[Tokens, Float[Array, "seq 1 1 value"]]:
        (values,) = convolved
        values = values if mask is None else jnp.where(mask[:, None, None, None], values, 0)
        rows = values[:, 0, 0].astype(x.dtype)

        def project(name: str) -> Float[Array, "seq n"]:
            return norm(getattr(self, f"{name}_norm"), linear(getattr(self, name), rows))

        queries, keys = (project(name)[:, None].astype(values.dtype) for name in ("query", "key"))
        steps = self.steps(project("low"))
        return Tokens(queries, keys, values * steps[:, None], steps), values * self.skip.astype(values.dtype)

    def _gated(
        self, mixed: Float[Array, "seq heads value"], gate: Float[Array, "seq heads value"]
    ) -> Float[Array, "seq heads value"]:
        return mixed * jax.nn.silu(gate)

    def rates(self) -> Float[Array, "size value"]:
        """The logarithms of the decay of each number of the matrix in a step of length 1."""
        return -jnp.exp(self.log_rate.astype(at_least_float32(self.log_rate.dtype))).T

    def _scanned(
        self, tokens: Tokens, memory: Float[Array, "1 1 size value"], begins: Bool[Array, " seq"] | None
    ) -> tuple[Float[Array, "seq 1 1 value"], Float[Array, "seq 1 1 size value"]]:
        """Returns what a few tokens read, and the memory after each of them. A token that begins a run reads no other."""
        decay = jnp.exp(tokens.decay * self.rates())
        decay = decay if begins is None else jnp.where(begins[:, None, None], 0, decay)
        added = tokens.keys[:, 0, :, None] * tokens.values[:, 0]

        def combine(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
            return one[0] * two[0], two[0] * one[1] + two[1]

        kept, sums = jax.lax.associative_scan(combine, (decay, added))
        sums = sums + kept * memory[0, 0]
        return jnp.einsum("ik,ikv->iv", tokens.queries[:, 0], sums)[:, None, None], sums[:, None, None]

    def _by_token(self, tokens: Tokens, memory: Array, runs: Int[Array, " seq"] | None) -> tuple[Array, Array]:
        assert runs is None  # a call with a cache has no segments
        return self._scanned(tokens, memory, None)

    def _in_chunks(self, tokens: Tokens, memory: Array, runs: Int[Array, " seq"] | None) -> tuple[Array, Array]:
        begins = None if runs is None else runs != jnp.concatenate([runs[:1], runs[:-1]])

        # The matrices of all tokens are not kept for the backward pass, only those between chunks.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(memory: Array, chunk: tuple[Tokens, Array | None]) -> tuple[Array, Array]:
            found, memories = self._scanned(chunk[0], memory, chunk[1])
            return memories[-1], found

        memory, found = jax.lax.scan(body, memory, by_chunks((tokens, begins), len(tokens.queries)))
        return rearrange(found, "chunks places ... -> (chunks places) ...")[: len(tokens.queries)], memory[None]
