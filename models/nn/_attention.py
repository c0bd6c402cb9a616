"""The attention layer of all model families.

This module owns the four projections, grouped key/value heads, masks and the segments of packed rows. The cache is in
`_cache.py`. Rotary positions, relative positions and the initialization of weights belong to the families' own files.

Dims: seq = queries, source = the attended positions, heads x size = width of the queries, groups x size = width of keys and
values (kv_heads).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx._rounding import at_least_float32
from redeqx.kernels import AttentionSetting, attend

from ._cache import Cache
from ._layers import linear, norm, soft_cap

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
    mask: Bool[Array, " seq"] | None, seq: int, cache: Cache | None = None, *, segments: Int[Array, " seq"] | None = None
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


def sinusoids(positions: Int[Array, " seq"], size: int) -> Float[Array, "seq size"]:
    """Returns sines, and then cosines, of angles whose periods grow from 2 pi positions to 10,000 times that."""
    half = size // 2
    angles = positions[:, None] * jnp.exp(-math.log(10000) / max(half - 1, 1) * jnp.arange(half))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles), jnp.zeros((len(positions), size % 2))], axis=1)


def distance_bias(
    mask: Bool[Array, " seq"] | None,
    seq: int,
    cache: Cache | None = None,
    *,
    segments: Int[Array, " seq"] | None = None,
    n_heads: int,
    largest: float = 8.0,
    scale: float | None = None,
) -> Float[Array, "heads 1 source"]:
    """Returns the biases of attention scores in place of positions (ALiBi): they fall with the distance, in each head with
    another slope. See `token_positions` for the arguments.

    A softmax does not change if the same number is added to all scores of a query. So the bias is the slope times the
    position of the key, and the same for all queries.

    **Arguments:**

    - `largest`: the slope of the last head is `2 ** -largest`, if their number is a power of two.
    - `scale`: a factor of the biases, which then are rounded to bfloat16 before, and so are slopes and positions, as in
        Falcon; None for neither.

    Source: Press et al. 2021, *Train Short, Test Long* (arXiv:2108.12409).
    """
    n = 2 ** math.ceil(math.log2(n_heads))
    slopes = 2.0 ** -(np.arange(1, n + 1) * largest / n)
    if n != n_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:n_heads]
    if cache is None:
        positions = token_positions(mask, seq, segments=segments)
    else:
        positions = jnp.maximum(jnp.cumsum(cache.mask) - 1, 0)
    slopes, positions = jnp.asarray(slopes, jnp.float32)[:, None, None], positions.astype(jnp.float32)
    if scale is None:
        return slopes * positions
    rounded = lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # noqa: E731
    return scale * rounded(rounded(slopes) * rounded(positions))


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


def near_mask(mask: Bool[Array, " seq"] | None, seq: int, *, window: int | None = None) -> Bool[Array, "seq seq"]:
    """Returns the mask of attention to both sides: to all tokens, or to those at most half a window away. Padding attends to
    itself, so that no softmax is empty."""
    positions = jnp.arange(seq)
    distances = jnp.abs(positions[:, None] - positions)
    attends = distances <= (seq if window is None else window // 2)
    return attends if mask is None else attends & mask | (distances == 0)


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
    key: eqx.nn.Linear | None  # None if keys and values are those of an earlier layer
    value: eqx.nn.Linear | None  # None if values are the keys, before their norm
    output: eqx.nn.Linear | None  # None if only others need the sequence, in a joint attention
    n_heads: int = eqx.field(static=True)
    n_kv_heads: int = eqx.field(static=True)
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.0)
    scale: float | None = eqx.field(static=True, default=None)  # multiplies the scores; None for size ** -0.5
    # Of each head's queries (`key_norm`: keys), or of all heads at once if it has their size; before rotary positions.
    query_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None = None
    key_norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None = None
    cap: float | None = eqx.field(static=True, default=None)  # scores are `cap * tanh(score / cap)`; None for no cap
    sinks: Float[Array, "*layers heads"] | None = None  # a score of each head that takes weight, and has no value
    gate: eqx.nn.Linear | None = None  # its sigmoid multiplies what heads return: each number, or each head
    value_norm: eqx.nn.RMSNorm | None = None  # of each head's values
    clip: float | None = eqx.field(static=True, default=None)  # the largest size of projected numbers; None for no limit
    rotates_first: bool = eqx.field(static=True, default=False)  # rotary positions come before norms

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
        bias: Float[Array, "heads #seq source"] | Callable[[Array, Array], Array] | None = None,
        rotary: Callable[[Array], Array] | None = None,
        factors: Float[Array, "seq 1 1"] | None = None,
        cache: Any = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq d"], Any]:
        """Returns the attention output for each row of `x`, and the cache with this layer's keys and values.

        **Arguments:**

        - `memory`: the sequence to attend to. If None, it is `x` itself; for the cache's memory, use `attend_memory`.
        - `mask`: the positions that are attended to; None for all.
        - `bias`: added to the scores before the softmax; or a function of queries and keys, `[seq, heads, size]` each, that
            returns it.
        - `rotary`: applied to queries and keys, `[seq, heads, size]` each.
        - `factors`: multiplied with the queries of each token.
        - `cache`: a `Cache`, to which keys and values are written, and `source` is its slots; or `LatestKeys`. An attention
            without keys reads those of an earlier layer from it.
        - `key`: for dropout of attention weights.
        """
        if self.key is None:
            queries = self._queries(x)
            queries = queries if rotary is None else rotary(queries)
            keys, values = cache.read()
            return self._attend(x, queries, keys, values, mask, bias, key, factors), cache
        keys, values = self._keys_and_values(x if memory is None else memory)
        queries = self._queries(x)
        bias = bias(queries, keys) if callable(bias) else bias
        if rotary is not None:
            queries, keys = rotary(queries), rotary(keys)
        if self.rotates_first:
            queries, keys = _normed(self.query_norm, queries), _normed(self.key_norm, keys)
        keys, values = (rearrange(array, "source groups size -> groups source size") for array in (keys, values))
        if cache is not None:
            cache, keys, values = cache.write(keys, values)
        return self._attend(x, queries, keys, values, mask, bias, key, factors), cache

    def attend_memory(
        self,
        x: Float[Array, "seq d"],
        memory: tuple[Float[Array, "groups source size"], Float[Array, "groups source size"]],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the attention output for each row of `x`, from keys and values that `project_memory` returned."""
        return self._attend(x, self._queries(x), *memory, mask, None, key)

    def _queries(self, x: Float[Array, "seq d"]) -> Float[Array, "seq heads size"]:
        layer = None if self.rotates_first else self.query_norm
        return _split_heads(self._clipped(linear(self.query, x)), self.n_heads, layer)

    def _keys_and_values(
        self, memory: Float[Array, "source d"]
    ) -> tuple[Float[Array, "source groups size"], Float[Array, "source groups size"]]:
        assert self.key is not None
        projected = self._clipped(linear(self.key, memory))
        keys = _split_heads(projected, self.n_kv_heads, None if self.rotates_first else self.key_norm)
        values = projected if self.value is None else self._clipped(linear(self.value, memory))
        return keys, _split_heads(values, self.n_kv_heads, self.value_norm)

    def _clipped(self, x: Float[Array, "seq width"]) -> Float[Array, "seq width"]:
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def _attend(self, x, queries, keys, values, mask, bias, key, factors=None) -> Float[Array, "seq d"]:
        queries = queries if factors is None else queries * factors.astype(queries.dtype)
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        mixed = mix_values(
            queries, keys, values, mask, scale, bias=bias, cap=self.cap, sinks=self.sinks, dropout=self.dropout, key=key
        )
        if self.gate is not None:
            gates = jax.nn.sigmoid(linear(self.gate, x))  # their size is 1 if each head has one
            mixed *= rearrange(gates, "seq (heads size) -> seq heads size", heads=self.n_heads)
        assert self.output is not None
        return linear(self.output, rearrange(mixed, "seq heads size -> seq (heads size)"))


def attend_jointly(
    layers: Sequence[Attention], sequences: Sequence[Float[Array, "_ _"]]
) -> list[Float[Array, "_ _"] | None]:
    """Returns the output of each sequence, if it has one, in an attention of all sequences to all of them. Each sequence has
    its own projections, with the same heads (Esser et al. 2024).

    **Arguments:**

    - `layers`: the projections of each sequence.
    - `sequences`: arrays `[seq, d]`.
    """

    def split(name: str) -> Float[Array, "source heads size"]:
        return jnp.concatenate(
            [
                _split_heads(linear(getattr(layer, name), x), layer.n_heads, getattr(layer, f"{name}_norm", None))
                for layer, x in zip(layers, sequences, strict=True)
            ]
        )

    queries, keys, values = split("query"), split("key"), split("value")
    keys, values = (rearrange(array, "source heads size -> heads source size") for array in (keys, values))
    mixed = mix_values(queries, keys, values, None, queries.shape[-1] ** -0.5, dropout=eqx.nn.Dropout(0.0), key=None)
    mixed = rearrange(mixed, "source heads size -> source (heads size)")
    ends = np.cumsum([len(x) for x in sequences])[:-1]
    return [
        None if layer.output is None else linear(layer.output, part)
        for layer, part in zip(layers, jnp.split(mixed, ends), strict=True)
    ]


def mix_values(
    queries: Float[Array, "seq heads size"],
    keys: Float[Array, "groups source size"],
    values: Float[Array, "groups source value_size"],
    mask: Mask | None,
    scale: float,
    *,
    bias: Float[Array, "heads #seq source"] | None = None,
    cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    dropout: eqx.nn.Dropout,
    key: PRNGKeyArray | None,
) -> Float[Array, "seq heads value_size"]:
    """Returns the values of each query's positions, weighted by the softmax of its scores. See `Attention`."""
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    array = mask.mask if isinstance(mask, SegmentMask) else mask
    array = None if array is None else array[None]
    drops = not dropout.inference and dropout.p > 0
    if drops and key is None:
        raise RuntimeError("Dropout requires a key: pass `key=`, or use `eqx.nn.inference_mode`.")  # as Equinox's own
    # No kernel has caps or sinks. For one query, as in decoding, a fused kernel does not pay, and would need a
    # transposed copy of the whole cache.
    is_special = cap is not None or sinks is not None
    if is_special or (queries.shape[0] == 1 and not drops):
        array = mask.dense()[None] if isinstance(mask, SegmentMask) else array
        return _mix_unfused(queries, keys, values, array, bias, scale, cap, sinks, dropout, key)
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
    return attend(queries, keys, values, given, AttentionSetting(scale, dropout=dropout.p if drops else 0.0))


def _mix_unfused(queries, keys, values, mask, bias, scale, cap, sinks, dropout, key) -> Float[Array, "seq heads value_size"]:
    """Computes the attention without a kernel. The softmax is in at least float32."""
    grouped = rearrange(queries, "seq (groups n) size -> seq groups n size", groups=len(keys))
    # The keys are the first operand of the product: otherwise XLA on CPU transposes the whole cache for each token.
    wide = at_least_float32(keys.dtype)
    scores = jnp.einsum("gks,qgns->gkqn", keys, grouped, preferred_element_type=wide) * scale
    scores = rearrange(scores, "groups source seq n -> (groups n) seq source")
    scores = soft_cap(scores, cap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        # Finite, as in `attend`: a fully masked row gets equal weights instead of NaN.
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    if sinks is not None:
        broadcast = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, broadcast.astype(scores.dtype)], axis=-1)
    weights = jax.nn.softmax(scores)
    weights = weights if sinks is None else weights[..., :-1]
    weights = dropout(weights, key=key).astype(values.dtype)
    weights = rearrange(weights, "(groups n) seq source -> groups n seq source", groups=len(keys))
    return rearrange(jnp.einsum("gnqk,gks->gnqs", weights, values), "groups n seq size -> seq (groups n) size")


def _split_heads(
    x: Float[Array, "seq width"], heads: int, layer: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
) -> Float[Array, "seq heads size"]:
    """Splits the features of each token into heads, normalized by `layer`."""
    if layer is not None and layer.shape == x.shape[1:]:
        x, layer = norm(layer, x), None
    split = rearrange(x, "seq (heads size) -> seq heads size", heads=heads)
    return _normed(layer, split)


def _normed(
    layer: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None, x: Float[Array, "seq heads size"]
) -> Float[Array, "seq heads size"]:
    return x if layer is None else jax.vmap(jax.vmap(layer))(x)
