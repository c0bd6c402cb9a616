"""Attention whose positions are split over a mesh axis.

Owns where each head and each query is computed; the kernels know of it only the position of their first query. Two ways:

- *By heads*: an all-to-all gives each device all positions of some heads, and another one brings the output back
    (DeepSpeed-Ulysses, arXiv:2309.14509). Work is equal, no array is larger than before, and all options of a kernel work.
- *By positions*, if the heads do not divide, and where it takes less memory or sends less: each device computes its own
    queries, with the keys that it gathers (`_chunks.py` says which), or with a part of them after another, if all of them
    would take too much memory (`_ring.py`).

Lengths need not divide: by positions, queries are padded. Fewer queries than devices are computed as if not split.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._rounding import at_least_float32
from ..machine import axes_of
from ._chunks import Layout, halo, map_queries
from ._dense import is_in_blocks
from ._ring import Ring
from ._setting import NO_WEIGHTS, AttentionSetting, gradient_of_mean, lacks_keys
from ._shared import on_each_device, pad

Operands = dict[str, Any]
# More bytes of keys and values are not gathered, but sent round. Gathered ones need five times as many, with their gradients
# and copies: LLaMA 13B (40 heads), 262,144 tokens on 16 H100, as compiled: 33.1 GiB of a step of two layers, 7.5 in a ring.
RING_BYTES = 2 * 2**30


def resolve(setting: AttentionSetting, shapes: Sequence[Any], *, segments_are_dense: bool = False) -> AttentionSetting:
    """Returns the setting with the split that an attention of operands of these shapes is computed with. By positions, it is
    the same. By heads, positions are whole and the heads are split over their axis too. `segments_are_dense`: whether the
    kernel takes segments as a number per query and key."""
    if not setting.splits_positions:
        return setting
    n, n_queries, n_heads, n_keys = setting.n_shards(1), *shapes[0].shape[-3:-1], shapes[1].shape[-3]
    dense = segments_are_dense and "query_segments" in setting.names and not is_in_blocks(setting, shapes[0], shapes[1], n)
    for name, x in zip(setting.names, shapes[3:], strict=False):
        dense = dense or (name in ("bias", "mask") and x.shape[-3] == 1 < x.shape[-2])
    # A dense mask of all heads, if it is made at once, is split along queries, and a window reads few keys of other devices.
    by_positions = n_queries % n == 0 and (dense or halo(setting, n_queries // n, n_keys) is not None)
    # Fewer queries than devices are a step of decoding, for which all keys would be exchanged.
    if n_queries >= n and n_heads % setting.n_shards(1, 2) == 0 and not by_positions:
        return _with_spec(setting, is_by_heads=True)
    if n_queries < n:
        return whole(setting)
    # Which weights are dropped depends on all keys, and of a halo's most are not read.
    takes_ring = not setting.dropout and halo(setting, n_queries // n, n_keys) is None
    return replace(setting, in_ring=takes_ring and _gathered_bytes(setting, shapes) > RING_BYTES)


def _gathered_bytes(setting: AttentionSetting, shapes: Sequence[Any]) -> int:
    """Returns the bytes of all keys and values of a device's rows and heads."""
    q, k, v = shapes[:3]
    n_bytes = k.dtype.itemsize * math.prod(k.shape[:-1]) * (k.shape[-1] + v.shape[-1])
    n_bytes *= setting.n_repeats(q.shape[-2], k.shape[-2])
    if math.prod(q.shape[:-3]) % setting.n_shards(0) == 0:
        n_bytes //= setting.n_shards(0)
    return n_bytes // setting.n_shards(2) if q.shape[-2] % setting.n_shards(2) == 0 else n_bytes


def whole(setting: AttentionSetting) -> AttentionSetting:
    """Returns the setting for positions that are not split."""
    return _with_spec(setting) if setting.splits_positions else setting


def describe(setting: AttentionSetting, resolved: AttentionSetting) -> str:
    """Returns how positions are split, to append to the name of a kernel; empty if they are not asked to be."""
    if not setting.splits_positions:
        return ""
    if resolved.splits_positions:
        return " split by positions, in a ring" if resolved.in_ring else " split by positions"
    return " split by heads" if _is_by_heads(setting, resolved) else " without a split of positions"


def _with_spec(setting: AttentionSetting, *, is_by_heads: bool = False) -> AttentionSetting:
    assert setting.split is not None
    rows, positions, heads, *_ = setting.split.spec
    if is_by_heads:
        heads = (*axes_of(heads), *axes_of(positions))
    return replace(setting, split=NamedSharding(setting.split.mesh, P(rows, None, heads, None)))


def _is_by_heads(setting: AttentionSetting, resolved: AttentionSetting) -> bool:
    return resolved.n_shards(2) > setting.n_shards(2)


def forward(kernel: Any, setting: AttentionSetting, resolved: AttentionSetting, q: Any, *operands: Any) -> tuple[Any, Any]:
    """Same as `_blockwise.forward`, by any kernel, over the devices, given the setting as `resolve` returns it too."""
    if resolved.splits_positions:
        return forward_by_positions(kernel, resolved, q, *operands)
    if not _is_by_heads(setting, resolved):
        return kernel.forward(resolved, q, *operands)
    k, v, extras = operands
    q, k, v = (_exchange(setting, resolved, x) for x in (q, k, v))
    out, log_sum = kernel.forward(resolved, q, k, v, extras)
    return _constrain_heads(resolved, out), log_sum


def backward(kernel: Any, setting: AttentionSetting, resolved: AttentionSetting, *operands: Any) -> list[Any]:
    """Same as `_blockwise.backward`, by any kernel, over the devices."""
    if resolved.splits_positions:
        return backward_by_positions(kernel, resolved, *operands)
    if not _is_by_heads(setting, resolved):
        return kernel.backward(resolved, *operands)
    q, k, v, extras, out, log_sum, g = operands
    q, k, v, g = (_exchange(setting, resolved, x) for x in (q, k, v, g))
    grads = kernel.backward(resolved, q, k, v, extras, _constrain_heads(resolved, out), log_sum, g)
    return [*(_exchange(resolved, setting, grad) for grad in grads[:3]), *grads[3:]]


# --- by heads ---------------------------------------------------------------------------------------------------------


def _constrain_heads(by_heads: AttentionSetting, out: Any) -> Any:
    """Constrains an output to the split of heads, in which the backward pass takes it."""
    assert by_heads.split is not None
    rows = by_heads.split.spec[0] if out.shape[0] % by_heads.n_shards(0) == 0 else None
    return jax.lax.with_sharding_constraint(out, NamedSharding(by_heads.split.mesh, P(rows, *by_heads.split.spec[1:])))


def constrain_positions(setting: AttentionSetting, out: Any) -> Any:
    """Constrains an attention's output `[..., T, N, H]` to the split of positions, unless it does not divide. It is done
    outside of the primitive: the output is saved for the backward pass as it was computed, split by heads."""
    if setting.split is None or not setting.splits_positions or out.shape[-3] % setting.n_shards(1):
        return out
    free = P.UNCONSTRAINED
    spec = P(*[free] * (out.ndim - 3), setting.split.spec[1], free, free)
    return jax.lax.with_sharding_constraint(out, NamedSharding(setting.split.mesh, spec))


def _exchange(old: AttentionSetting, new: AttentionSetting, x: Any) -> Any:
    """Exchanges positions `[B, T, heads, size]` for heads, or back: a device has all of the one and some of the other.

    It is written out, since XLA merges equal exchanges in the forward and the backward pass only then. If positions do not
    divide, XLA chooses how to exchange them.
    """
    to_heads = old.splits_positions
    by_positions = old if to_heads else new
    assert old.split is not None and new.split is not None and by_positions.split is not None
    rows = old.split.spec[0] if x.shape[0] % old.n_shards(0) == 0 else None
    old_spec, new_spec = (P(rows, *split.spec[1:]) for split in (old.split, new.split))
    if x.shape[1] % by_positions.n_shards(1):
        spec = new_spec if to_heads else P(rows, None, *new_spec[2:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(new.split.mesh, spec))
    axis, (split_dim, joined_dim) = by_positions.split.spec[1], (2, 1) if to_heads else (1, 2)
    fn = partial(jax.lax.all_to_all, axis_name=axis, split_axis=split_dim, concat_axis=joined_dim, tiled=True)
    return on_each_device(new.split.mesh, fn, old_spec, new_spec)(x)


# --- by positions -----------------------------------------------------------------------------------------------------


def forward_by_positions(
    kernel: Any, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands
) -> tuple[Any, Any]:
    """Same as `_blockwise.forward`, by any kernel, over split positions."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    setting, q, k, v, extras = _padded(setting, q, k, v, extras)
    layout = Layout(setting, q, k, extras)

    def attend(q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        k, v = layout.fetch_keys(k), layout.fetch_keys(v)

        def attend_as(device: int, q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
            results = []
            for chunk in layout.chunks(device):
                operands = chunk.queries(q), chunk.keys(k), chunk.keys(v), chunk.extras(extras)
                results.append(kernel.forward(chunk.setting, *operands))
            outs, log_sums = zip(*results, strict=True)
            return jnp.concatenate(outs, 1), jnp.concatenate(log_sums, 2)

        return layout.on_each_device(attend_as, q, k, v, extras)

    def on_device(q: Any, k: Any, v: Any, extras: Operands) -> tuple[Any, Any]:
        run = Ring(kernel, layout).forward if setting.in_ring else attend
        keys, values = layout.exchange_keys(k, v)
        out, log_sum = run(layout.exchange(q, 1), keys, values, map_queries(extras, layout.exchange))
        out, log_sum = layout.exchange(out, 1, back=True), layout.exchange(log_sum, 2, back=True)
        if layout.may_lack_keys:
            mean = jnp.sum(v.astype(at_least_float32(v.dtype)), 1, keepdims=True)
            mean = (layout.sum_keys(mean) / n_keys).astype(out.dtype)
            out = jnp.where(lacks_keys(log_sum), jnp.repeat(mean, q.shape[2] // k.shape[2], 2), out)
        return out, log_sum

    in_specs = (layout.queries, layout.keys, layout.keys, layout.extras)
    out, log_sum = on_each_device(layout.mesh, on_device, in_specs, (layout.queries, layout.log_sums))(q, k, v, extras)
    return out[:, :n_queries], log_sum[:, :, :n_queries]


def backward_by_positions(
    kernel: Any, setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any
) -> list[Any]:
    """Same as `_blockwise.backward`, by any kernel, over split positions."""
    n_queries, n_keys, has_bias = q.shape[1], k.shape[1], "bias" in extras
    bias_is_shared = has_bias and extras["bias"].shape[2] == 1  # by all queries
    setting, q, k, v, extras = _padded(setting, q, k, v, extras)
    out, g = _pad_to(out, 1, q.shape[1]), _pad_to(g, 1, q.shape[1])
    log_sum = _pad_to(log_sum, 2, q.shape[1], NO_WEIGHTS)
    layout = Layout(setting, q, k, extras)

    def differentiate(q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> list[Any]:
        own_k, own_v = k, v
        k, v = layout.fetch_keys(k), layout.fetch_keys(v)

        def differentiate_as(device: int, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> Any:
            dqs, dk, dv, d_biases = [], jnp.zeros_like(k), jnp.zeros_like(v), []
            for chunk in layout.chunks(device):
                operands = chunk.queries(q), chunk.keys(k), chunk.keys(v), chunk.extras(extras)
                results = chunk.queries(out), chunk.queries(log_sum, 2), chunk.queries(g)
                dq, chunk_dk, chunk_dv, *d_bias = kernel.backward(chunk.setting, *operands, *results)
                dqs.append(dq)
                dk, dv = chunk.add_keys(dk, chunk_dk), chunk.add_keys(dv, chunk_dv)
                d_biases += [chunk.pad_columns(x, layout.n_keys) for x in d_bias]
            grads = [jnp.concatenate(dqs, 1), dk, dv]
            if has_bias:
                grads.append(sum(d_biases) if bias_is_shared else jnp.concatenate(d_biases, 2))
            return grads

        dq, dk, dv, *d_bias = layout.on_each_device(differentiate_as, q, k, v, extras, out, log_sum, g)
        return [dq, layout.return_keys(dk, own_k), layout.return_keys(dv, own_v), *d_bias]

    def on_device(q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> list[Any]:
        d_mean: Any = None
        if layout.may_lack_keys:
            lacking = lacks_keys(log_sum)
            d_mean, g = gradient_of_mean(lacking, g, k.shape[2]), jnp.where(lacking, 0, g)
        run = Ring(kernel, layout).backward if setting.in_ring else differentiate
        q, out, log_sum, g = (layout.exchange(x, dim) for x, dim in ((q, 1), (out, 1), (log_sum, 2), (g, 1)))
        k, v = layout.exchange_keys(k, v)
        dq, dk, dv, *d_bias = run(q, k, v, map_queries(extras, layout.exchange), out, log_sum, g)
        dq, (dk, dv) = layout.exchange(dq, 1, back=True), layout.exchange_keys(dk, dv, back=True)
        if has_bias:
            d_bias = [d_bias[0] if bias_is_shared else layout.exchange(d_bias[0], 2, back=True)]
            repeats = layout.axes_without(layout.extras["bias"])
            d_bias = [jax.lax.psum(x, repeats) if repeats else x for x in d_bias]
        if d_mean is not None:
            dv = dv + (jax.lax.psum(d_mean, layout.axis) / n_keys).astype(dv.dtype)
        return [dq, dk, dv, *d_bias]

    results = layout.queries, layout.log_sums, layout.queries
    in_specs = (layout.queries, layout.keys, layout.keys, layout.extras, *results)
    out_specs = [layout.queries, layout.keys, layout.keys, *([layout.extras["bias"]] if has_bias else [])]
    sharded = on_each_device(layout.mesh, on_device, in_specs, out_specs)
    dq, dk, dv, *d_bias = sharded(q, k, v, extras, out, log_sum, g)
    return [dq[:, :n_queries], dk[:, :n_keys], dv[:, :n_keys], *(x[:, :, :n_queries, :n_keys] for x in d_bias)]


def _padded(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands
) -> tuple[AttentionSetting, Any, Any, Any, Operands]:
    """Pads queries that do not divide, to an even number of them on each device, which cuDNN needs; in a ring also keys. If
    the distance of queries and keys matters, in a ring there are as many of both. Padded keys are behind the lengths."""
    n, n_queries, n_keys = setting.n_shards(1), q.shape[1], k.shape[1]
    if setting.in_ring and (setting.causal or setting.window is not None):
        n_queries = n_keys = max(n_queries, n_keys)
    n_queries, n_keys = (size if size % n == 0 else size + -size % (2 * n) for size in (n_queries, n_keys))
    extras = map_queries(extras, lambda x, dim: _pad_to(x, dim, n_queries))
    if setting.in_ring and n_keys > k.shape[1]:
        n_whole = k.shape[1]
        extras = {
            name: _pad_to(x, -1, n_keys) if name in ("bias", "mask", "key_segments") else x for name, x in extras.items()
        }
        extras["lengths"] = jnp.minimum(extras.get("lengths", jnp.full(1, n_whole)), n_whole)
        setting, k, v = replace(setting, names=tuple(extras)), _pad_to(k, 1, n_keys), _pad_to(v, 1, n_keys)
    return setting, _pad_to(q, 1, n_queries), k, v, extras


def _pad_to(x: Any, dim: int, n: int, value: float = 0) -> Any:
    """Appends entries to a dim, up to `n`. A mask gets True."""
    return pad(x, dim, n, True if x.dtype == jnp.bool_ else value)
