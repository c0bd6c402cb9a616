"""The attention layer of all model families, and the key-value cache for decoding.

This module owns the four projections, grouped key/value heads, masks, the segments of packed rows and the cache. Rotary
positions, relative positions and the initialization of weights belong to the families' own files.

Dims: seq = queries, source = the attended positions, heads x size = width of the queries, groups x size = width of keys and
values (kv_heads), length = slots of a cache.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx import register_attention
from redeqx.kernels import AttentionSetting, attend

from ._layers import linear, norm, soft_cap


class Cache(eqx.Module):
    """The keys and values of one example's tokens so far, for all layers of a decoder, with one slot for each token.

    Each call writes its tokens at the same slots in every row of a batch. Under `jax.vmap` (with `in_axes=axes()`) a write
    therefore remains one `dynamic_update_slice`. A decoder passes the cache from block to block. Each block writes its layer
    and advances to the next.
    """

    keys: Float[Array, "*layers groups length size"]
    values: Float[Array, "*layers groups length size"]
    mask: Bool[Array, "*length"]  # True for slots that hold a token, not padding
    index: Int[Array, ""]  # the first slot of the current tokens, which is the number of slots filled before
    layer: Int[Array, ""]  # the layer that writes next
    memory: tuple[Array, Array] | None = None  # keys and values of a cross-attention, [layers groups source size] each
    memory_mask: Bool[Array, " source"] | None = None  # True for source positions that are attended to; None for all

    @classmethod
    def empty(
        cls,
        n_layers: int,
        length: int,
        n_kv_heads: int,
        size: int,
        dtype: Any,
        *,
        memory: tuple[Array, Array] | None = None,
        memory_mask: Bool[Array, " source"] | None = None,
    ) -> "Cache":
        """Returns a cache of `length` empty slots, with or without a memory."""
        keys, zero = jnp.zeros((n_layers, n_kv_heads, length, size), dtype), jnp.zeros((), jnp.int32)
        return cls(keys, jnp.zeros_like(keys), jnp.zeros(length, bool), zero, zero, memory, memory_mask)

    def begin(self, mask: Bool[Array, " seq"]) -> "Cache":
        """Reserves slots for `seq` more tokens, before any layer writes their keys and values.

        **Arguments:**

        - `mask`: True for tokens, False for padding.
        """
        mask = jax.lax.dynamic_update_slice(self.mask, mask, (self.index,))
        return eqx.tree_at(lambda c: (c.mask, c.layer), self, (mask, jnp.zeros_like(self.layer)))

    def end(self, seq: int) -> "Cache":
        """Ends a call, after all layers have written `seq` tokens."""
        return eqx.tree_at(lambda c: (c.index, c.layer), self, (self.index + seq, jnp.zeros_like(self.layer)))

    def write(
        self, keys: Float[Array, "groups seq size"], values: Float[Array, "groups seq size"]
    ) -> tuple["Cache", Float[Array, "groups length size"], Float[Array, "groups length size"]]:
        """Writes the current tokens' keys and values for the next layer. Returns the cache, and all keys and values of that
        layer."""
        zero = jnp.zeros_like(self.layer)  # of the same dtype as the counters: in 64-bit mode a Python 0 is an int64
        start = (self.layer, zero, self.index, zero)
        all_keys = jax.lax.dynamic_update_slice(self.keys, keys[None].astype(self.keys.dtype), start)
        all_values = jax.lax.dynamic_update_slice(self.values, values[None].astype(self.values.dtype), start)
        cache = eqx.tree_at(lambda c: (c.keys, c.values, c.layer), self, (all_keys, all_values, self.layer + 1))
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)  # noqa: E731
        return cache, pick(all_keys), pick(all_values)

    def read_memory(self) -> tuple[Float[Array, "groups source size"], Float[Array, "groups source size"]]:
        """Returns the cross-attention's keys and values of the layer that wrote last: its self-attention runs first."""
        assert self.memory is not None
        keys, values = self.memory
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, self.layer - 1, keepdims=False)  # noqa: E731
        return pick(keys), pick(values)

    def axes(self, *, shares_memory: bool = False) -> "Cache":
        """Returns `in_axes` and `out_axes` for `jax.vmap` over rows. Counters are shared; everything else is batched.

        **Arguments:**

        - `shares_memory`: whether all rows attend to the same memory, as the beams of one example do.
        """
        batched = jax.tree.map(lambda _: 0, self)
        shared = (lambda c: (c.index, c.layer, c.memory, c.memory_mask)) if shares_memory else lambda c: (c.index, c.layer)
        return eqx.tree_at(shared, batched, replace_fn=lambda _: None, is_leaf=lambda x: x is None)


# --- positions and masks --------------------------------------------------------------------------------------------


class SegmentMask(eqx.Module):
    """A mask for packed rows: a query attends to the positions of its own segment, and of these to those that `mask` allows.

    Kernels get the segments themselves, which take less memory than an array of queries x positions.
    """

    mask: Bool[Array, "#seq source"] | None  # None for all
    query_segments: Int[Array, " seq"]
    segments: Int[Array, " source"]

    def dense(self) -> Bool[Array, "seq source"]:
        """Returns the mask as one array."""
        same_segment = self.query_segments[:, None] == self.segments
        return same_segment if self.mask is None else self.mask & same_segment


# True for positions that are attended to: `[queries, sources]`, or `[1, sources]` for the same ones in all queries.
Mask = Bool[Array, "_ _"] | SegmentMask


def token_positions(
    mask: Bool[Array, " seq"] | None,
    seq: int,
    cache: Cache | None = None,
    *,
    segments: Int[Array, " seq"] | None = None,
) -> Int[Array, " seq"]:
    """Returns the position of each token, counting tokens only. Padding before the first token has position 0.

    **Arguments:**

    - `mask`: True for tokens, False for padding; None if all are tokens. With a cache, the mask that was passed to
        `cache.begin`.
    - `cache`: the cache after `begin`. Its tokens come before these.
    - `segments`: the segments of a packed row, in each of which positions start at 0.
    """
    if segments is not None:
        places = jnp.arange(seq)
        return places - jax.lax.cummax(jnp.where(segments != jnp.roll(segments, 1), places, 0))
    if cache is not None:
        counted = jnp.maximum(jnp.cumsum(cache.mask) - 1, 0)
        return jax.lax.dynamic_slice(counted, (cache.index,), (seq,))
    if mask is None:
        return jnp.arange(seq)
    return jnp.maximum(jnp.cumsum(mask) - 1, 0)


def learned_positions(
    table: Float[Array, "rows d"],
    mask: Bool[Array, " seq"] | None,
    seq: int,
    cache: Cache | None = None,
    *,
    offset: int = 0,
    segments: Int[Array, " seq"] | None = None,
) -> Float[Array, "seq d"]:
    """Returns the rows of a table of learned positions, at the positions that `token_positions` returns. If a segment is
    longer than the table, the tokens after it get NaN.

    **Arguments:**

    - `offset`: the row of position 0.
    """
    if segments is not None:
        return table.at[offset + token_positions(None, seq, segments=segments)].get(mode="fill")
    if mask is None and cache is None:
        return table[offset : offset + seq]  # a lookup would need the whole table on every device
    return table[offset + token_positions(mask, seq, cache)]


def causal_mask(
    mask: Bool[Array, " seq"] | None,
    seq: int,
    cache: Cache | None = None,
    *,
    window: int | None = None,
    segments: Int[Array, " seq"] | None = None,
) -> Mask:
    """Returns the mask of causal attention: each token attends to tokens up to itself, or to the last `window` of them, and
    with `segments` only to those of its own segment.

    Padding attends to itself, so that no softmax is empty. `source` is `seq`, or the number of slots of the cache.
    """
    start, length = (0, seq) if cache is None else (cache.index, cache.mask.shape[0])
    queries, sources = (start + jnp.arange(seq))[:, None], jnp.arange(length)
    attends = sources <= queries
    if window is not None:
        attends &= queries - sources < window
    if segments is not None:
        return SegmentMask(attends, segments, segments)
    is_token = mask if cache is None else cache.mask
    return attends if is_token is None else attends & is_token | (sources == queries)


def token_mask(
    mask: Bool[Array, " source"] | None,
    *,
    segments: Int[Array, " source"] | None = None,
    query_segments: Int[Array, " seq"] | None = None,
) -> Mask | None:
    """Returns the mask of attention to all tokens: of the sequence, or of a query's own segment.

    **Arguments:**

    - `query_segments`: the segments of the queries; None if queries and sources are the same tokens.
    """
    if segments is not None:
        return SegmentMask(None, segments if query_segments is None else query_segments, segments)
    return None if mask is None else mask[None]


# --- the attention --------------------------------------------------------------------------------------------------


class Attention(eqx.Module):
    """Multi-head attention of a sequence to itself or to another. The model family creates its four projections.

    If `n_kv_heads` is below `n_heads`, queries are grouped: each key/value head serves `n_heads / n_kv_heads` query heads.
    """

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)
    n_kv_heads: int = eqx.field(static=True)
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.0)
    scale: float | None = eqx.field(static=True, default=None)  # multiplies the scores; None for size ** -0.5
    # Of each head's queries (`key_norm`: keys), or of all heads at once if it has their size; before rotary positions.
    query_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None = None
    key_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None = None
    cap: float | None = eqx.field(static=True, default=None)  # scores are `cap * tanh(score / cap)`; None for no cap
    sinks: Float[Array, "*layers heads"] | None = None  # a score of each head that takes weight, and has no value

    def project_memory(
        self, memory: Float[Array, "source d"]
    ) -> tuple[Float[Array, "groups source size"], Float[Array, "groups source size"]]:
        """Returns the keys and values of a memory, by head. A cross-attention computes them once for all tokens."""
        keys, values = (rearrange(a, "source groups size -> groups source size") for a in self._keys_and_values(memory))
        return keys, values

    def __call__(
        self,
        x: Float[Array, "seq d"],
        *,
        memory: Float[Array, "source width"] | None = None,
        mask: Mask | None = None,
        bias: Float[Array, "heads seq source"] | None = None,
        rotary: Callable[[Array], Array] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq d"], Cache | None]:
        """Returns the attention output for each row of `x`, and the cache with this layer's keys and values.

        **Arguments:**

        - `memory`: the sequence to attend to. If None, it is `x` itself; for the cache's memory, use `attend_memory`.
        - `mask`: the positions that are attended to; None for all.
        - `bias`: added to the scores before the softmax.
        - `rotary`: applied to queries and keys, `[seq, heads, size]` each.
        - `cache`: if given, keys and values are written to it, and `source` is its slots.
        - `key`: for dropout of attention weights.
        """
        keys, values = self._keys_and_values(x if memory is None else memory)
        queries = self._queries(x)
        if rotary is not None:
            queries, keys = rotary(queries), rotary(keys)
        keys, values = (rearrange(array, "source groups size -> groups source size") for array in (keys, values))
        if cache is not None:
            cache, keys, values = cache.write(keys, values)
        return self._attend(queries, keys, values, mask, bias, key), cache

    def attend_memory(
        self,
        x: Float[Array, "seq d"],
        memory: tuple[Float[Array, "groups source size"], Float[Array, "groups source size"]],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the attention output for each row of `x`, from keys and values that `project_memory` returned."""
        return self._attend(self._queries(x), *memory, mask, None, key)

    def _queries(self, x: Float[Array, "seq d"]) -> Float[Array, "seq heads size"]:
        return _split_heads(linear(self.query, x), self.n_heads, self.query_norm)

    def _keys_and_values(
        self, memory: Float[Array, "source d"]
    ) -> tuple[Float[Array, "source groups size"], Float[Array, "source groups size"]]:
        keys = _split_heads(linear(self.key, memory), self.n_kv_heads, self.key_norm)
        return keys, _split_heads(linear(self.value, memory), self.n_kv_heads, None)

    def _attend(self, queries, keys, values, mask, bias, key) -> Float[Array, "seq d"]:
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
        array = mask.mask if isinstance(mask, SegmentMask) else mask
        array = None if array is None else array[None]
        drops = not self.dropout.inference and self.dropout.p > 0
        if drops and key is None:
            raise RuntimeError("Dropout requires a key: pass `key=`, or use `eqx.nn.inference_mode`.")  # as Equinox's own
        # No kernel has caps or sinks. For one query, as in decoding, a fused kernel does not pay, and would need a
        # transposed copy of the whole cache.
        is_special = self.cap is not None or self.sinks is not None
        if is_special or (queries.shape[0] == 1 and not drops):
            array = mask.dense()[None] if isinstance(mask, SegmentMask) else array
            mixed = self._attend_unfused(queries, keys, values, array, bias, scale, key)
        else:
            keys, values = (rearrange(array, "groups source size -> source groups size") for array in (keys, values))
            segments = mask if isinstance(mask, SegmentMask) else None
            given = {
                "mask": array,
                "query_segments": None if segments is None else segments.query_segments,
                "key_segments": None if segments is None else segments.segments,
                "bias": bias,
                "key": key if drops else None,
            }
            given = {name: value for name, value in given.items() if value is not None}
            setting = AttentionSetting(scale, dropout=self.dropout.p if drops else 0.0)
            mixed = attend(queries, keys, values, given, setting)
        return linear(self.output, rearrange(mixed, "seq heads size -> seq (heads size)"))

    def _attend_unfused(self, queries, keys, values, mask, bias, scale, key) -> Float[Array, "seq heads size"]:
        """Computes the attention without a kernel. The softmax is in float32."""
        n_queries, groups = queries.shape[0], self.n_kv_heads
        grouped = rearrange(queries, "seq (groups n) size -> groups size (n seq)", groups=groups)
        # The keys are the first operand of the matmuls: otherwise XLA on CPU transposes the whole cache for each token.
        scores = jnp.matmul(keys, grouped, preferred_element_type=jnp.float32) * scale
        scores = rearrange(scores, "groups source (n seq) -> (groups n) seq source", seq=n_queries)
        scores = soft_cap(scores, self.cap)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            # Finite, as in `attend`: a fully masked row gets equal weights instead of NaN.
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = jnp.broadcast_to(self.sinks[:, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sinks.astype(scores.dtype)], axis=-1)
        weights = jax.nn.softmax(scores)
        weights = weights if self.sinks is None else weights[..., :-1]
        weights = self.dropout(weights, key=key).astype(values.dtype)
        weights = rearrange(weights, "(groups n) seq source -> groups (n seq) source", groups=groups)
        return rearrange(jnp.matmul(weights, values), "groups (n seq) size -> seq (groups n) size", seq=n_queries)


def _split_heads(
    x: Float[Array, "seq width"], heads: int, layer: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
) -> Float[Array, "seq heads size"]:
    """Splits the features of each token into heads, normalized by `layer`."""
    if layer is not None and layer.shape == x.shape[1:]:
        x, layer = norm(layer, x), None
    split = rearrange(x, "seq (heads size) -> seq heads size", heads=heads)
    return split if layer is None else jax.vmap(jax.vmap(layer))(split)


register_attention(
    Attention, query="query", key="key", value="value", output="output", heads="n_heads", kv_heads="n_kv_heads"
)
