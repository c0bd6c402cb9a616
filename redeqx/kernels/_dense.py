"""Attention to segments by a kernel that takes a dense mask, a block of queries and a block of keys at a time.

A number for each query and key of a long row would not fit: 128 GiB for a packed row of 262,144 tokens. Blocks without a
common segment are not computed, nor those that a causal mask or a window leaves out. The log-sum-exps merge the blocks of
keys; in the backward pass each takes the output and the log-sum-exps of the whole.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from .._rounding import at_least_float32
from ._offset import merge
from ._setting import MASK_VALUE, AttentionSetting, gradient_of_mean, lacks_keys, make_mask
from ._shared import blocks_of, joined

Operands = dict[str, Any]
# The bytes of a mask that is made at once, and of one of a block; a backward pass may return as many again. With the whole
# mask of 262,144 packed tokens, two layers of LLaMA 3 8B took 126 GiB of each of 8 H100, as compiled (30 November 2026).
AT_ONCE, OF_BLOCK, LARGEST_BLOCK = 2 * 2**30, 2**29, 16384


def is_in_blocks(setting: AttentionSetting, q: Any, k: Any, n_devices: int = 1) -> bool:
    """Whether the mask of segments is made a block at a time, given the shapes of queries and keys, and over how many
    devices the queries are split."""
    takes_segments = "query_segments" in setting.names and not {"bias", "mask", "key"} & set(setting.names)
    return takes_segments and _n_bytes(setting, q, q.shape[-3] // n_devices, k.shape[-3]) > AT_ONCE


def _n_bytes(setting: AttentionSetting, q: Any, n_queries: int, n_keys: int) -> int:
    """Returns the bytes of the mask of a device's rows."""
    n_rows = math.prod(q.shape[:-3])
    n_rows //= setting.n_shards(0) if n_rows % setting.n_shards(0) == 0 else 1
    return n_rows * n_queries * n_keys * q.dtype.itemsize


def _block_size(setting: AttentionSetting, q: Any) -> int:
    size = LARGEST_BLOCK
    while _n_bytes(setting, q, size, size) > OF_BLOCK and size > 2:
        size //= 2
    return size


def span(segments: Any) -> tuple[Any, Any]:
    """Returns the least and the largest segment of each block `[..., t]`."""
    return jnp.min(segments, -1), jnp.max(segments, -1)


def may_meet(one: tuple[Any, Any], two: tuple[Any, Any]) -> Any:
    """Whether any row of two blocks may have a common segment, given their spans `[..., B or 1]`."""
    return jnp.any((one[0] <= two[1]) & (two[0] <= one[1]), -1)


@dataclass(frozen=True)
class InBlocks:
    """A kernel of which a large mask of segments is made a block at a time, given the forward and the backward pass of one
    that takes a dense mask, as in `_blockwise`."""

    attend: Callable[..., tuple[Any, Any]]
    differentiate: Callable[..., list[Any]]

    def forward(self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        """Same as `_blockwise.forward`."""
        if not is_in_blocks(setting, q, k):
            return self.attend(setting, q, k, v, extras)
        blocks, dtype = _Blocks(setting, q, k, extras), at_least_float32(q.dtype)
        queries, *keys = (blocks_of(x, blocks.size) for x in (q, k, v))

        def add(done: Any, mask: Any, q: Any, k: Any, v: Any) -> Any:
            out, log_sum = self.attend(blocks.setting, q, k, v, {"mask": mask})
            has_keys = jnp.any(mask, -1)  # [B, 1, t]
            out = jnp.where(jnp.swapaxes(has_keys, 1, 2)[..., None], out.astype(dtype), 0)
            return merge([done, (out, jnp.where(has_keys, log_sum, MASK_VALUE))])

        def step(done: Any, pair: Any) -> tuple[Any, None]:
            i, j, _ = pair
            return _put(done, i, blocks.if_seen(pair, add, _take(done, i), _take(queries, i), *_take(keys, j))), None

        n, rows, size, heads, _ = queries.shape
        out, log_sum = (
            jnp.zeros((n, rows, size, heads, v.shape[-1]), dtype),
            jnp.full((n, rows, heads, size), MASK_VALUE, dtype),
        )
        out, log_sum = jax.lax.scan(step, (out, log_sum), blocks.pairs)[0]
        out, log_sum = joined(out, q.shape[1]), joined(log_sum, q.shape[1], 2)
        mean = jnp.repeat(jnp.mean(v.astype(dtype), 1, keepdims=True), heads // v.shape[2], 2)
        return jnp.where(lacks_keys(log_sum), mean, out).astype(q.dtype), log_sum

    def backward(
        self, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any
    ) -> list[Any]:
        """Same as `_blockwise.backward`."""
        if not is_in_blocks(setting, q, k):
            return self.differentiate(setting, q, k, v, extras, out, log_sum, g)
        blocks, dtype = _Blocks(setting, q, k, extras), at_least_float32(q.dtype)
        d_mean = gradient_of_mean(lacks_keys(log_sum), g, k.shape[2]) / k.shape[1]
        log_sum = jnp.where(log_sum <= MASK_VALUE / 2, 0, log_sum)  # of a query without keys: all its weights are then 0
        keys = [blocks_of(x, blocks.size) for x in (k, v)]
        of_queries = [blocks_of(x, blocks.size, dim) for x, dim in ((q, 1), (out, 1), (log_sum, 2), (g, 1))]

        def add(done: Any, mask: Any, k: Any, v: Any, q: Any, *results: Any) -> Any:
            grads = self.differentiate(blocks.setting, q, k, v, {"mask": mask}, *results)
            return [total + x.astype(dtype) for total, x in zip(done, grads, strict=True)]

        def step(done: Any, pair: Any) -> tuple[Any, None]:
            i, j, _ = pair
            of_pair = [_take(x, at) for x, at in zip(done, (i, j, j), strict=True)]
            new = blocks.if_seen(pair, add, of_pair, *_take(keys, j), *_take(of_queries, i))
            return [_put(x, at, of) for x, at, of in zip(done, (i, j, j), new, strict=True)], None

        zeros = [jnp.zeros(x.shape, dtype) for x in (of_queries[0], *keys)]
        grads, _ = jax.lax.scan(step, zeros, blocks.pairs)
        dq, dk, dv = (joined(x, like.shape[1]) for x, like in zip(grads, (q, k, v), strict=True))
        return [x.astype(like.dtype) for x, like in zip((dq, dk, dv + d_mean), (q, k, v), strict=True)]


class _Blocks:
    """Blocks of queries and of keys."""

    def __init__(self, setting: AttentionSetting, q: Any, k: Any, extras: Operands):
        self.whole, n_queries, n_keys = setting, q.shape[1], k.shape[1]
        # Of a pair of blocks, whose mask says which keys are attended to.
        self.setting = replace(setting, causal=False, window=None, offset=0, names=("mask",))
        self.size = size = _block_size(setting, q)  # the number of queries, and of keys, of a block
        # The number of keys that are attended to.
        self.lengths = jnp.minimum(extras["lengths"], n_keys)[:, None, None, None] if "lengths" in extras else n_keys
        pairs = []  # all but those that the causal mask and the window leave
        for i, j in np.ndindex(-(-n_queries // size), -(-n_keys // size)):
            start = setting.offset + i * size  # of the queries among the keys
            is_after = setting.causal and j * size >= start + size
            if setting.window is not None:
                is_after = is_after or j * size >= start + size - 1 + setting.window
                is_after = is_after or (j + 1) * size <= start - setting.window + 1
            if not is_after:
                pairs.append((i, j))
        # The segments of the blocks of queries, and of keys, `[n, B or 1, size]`.
        self.segments = [blocks_of(_whole(setting, extras[name]), size) for name in ("query_segments", "key_segments")]
        i, j = np.array(pairs, np.int32).reshape(-1, 2).T
        meet = may_meet(*(tuple(each[at] for each in span(x)) for x, at in zip(self.segments, (i, j), strict=True)))
        self.pairs = i, j, meet  # a block of queries, a block of keys, and whether they may have a common segment

    def if_seen(self, pair: tuple[Any, Any, Any], fn: Callable[..., Any], done: Any, *operands: Any) -> Any:
        """Returns `fn(done, mask, *operands)`, or `done` if the blocks of a pair have no common segment."""
        i, j, meet = pair
        of_queries, of_keys = _take(self.segments[0], i), _take(self.segments[1], j)

        def compute(done: Any, *operands: Any) -> Any:
            queries = self.whole.offset + (i - j) * self.size + jnp.arange(self.size)  # from the first of these keys
            mask: Any = make_mask(replace(self.whole, names=()), queries, self.size, {})
            mask = True if mask is None else mask[:, 0]
            mask = mask & (j * self.size + jnp.arange(self.size) < self.lengths)
            return fn(done, mask & (of_queries[:, :, None] == of_keys[:, None])[:, None], *operands)

        return jax.lax.cond(meet, compute, lambda done, *_: done, done, *operands)


def _whole(setting: AttentionSetting, segments: Any) -> Any:
    """Gathers segments that are split by positions, once for all blocks."""
    if setting.split is None or setting.split.mesh.size == 1:
        return segments
    return jax.lax.with_sharding_constraint(segments, NamedSharding(setting.split.mesh, P(P.UNCONSTRAINED, None)))


def _take(blocks: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), blocks)


def _put(blocks: Any, i: Any, block: Any) -> Any:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), blocks, block)
