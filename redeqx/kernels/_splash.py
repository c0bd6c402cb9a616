"""Splash attention, for TPUs: a kernel that skips blocks of keys that a causal mask or a window masks.

The compiler cannot partition the kernel, so each device runs it on its own rows and heads under `jax.shard_map`. The
primitive stores the residuals, so the forward and the backward pass are called separately. Lengths are padded to multiples
of 128, and the padding is a segment of its own.

Source: the forward and the backward pass of `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ._setting import MASK_VALUE, AttentionSetting, numbers_of
from ._shared import LANES, is_default, on_each_device, pad

# The arguments of the backward pass, a private function, in the version of JAX that this module supports.
_ARGUMENTS = (
    "save_residuals, mask_value, is_mqa, block_sizes, residual_checkpoint_name, mask_function, attn_logits_soft_cap, "
    "interpret, res, do"
)


@cache
def _library() -> Any:
    """Imports Pallas's kernels and masks, lazily because it is slow; None for another version of JAX."""
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
            splash_attention_mask as masks,
        )

        if ", ".join(inspect.signature(kernels._splash_attention_bwd).parameters) == _ARGUMENTS:
            return kernels, masks
    except (ImportError, AttributeError):  # pragma: no cover
        pass
    return None


_MIN_LENGTH = 128  # of queries and keys; shorter ones would be mostly padding
_BLOCK_SIZES = (512, 256, 128)


def unsupported_reason(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> str | None:
    """Returns why no kernel supports operands of these shapes; None if one does."""
    if _library() is None:
        return "this version of JAX has another interface"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it supports bfloat16 and float32, not {q.dtype}"
    if q.dtype == jnp.float32 and not is_default(setting.precision):
        return f"it does not support precision {setting.precision.name}"
    if q.shape[-1] != v.shape[-1]:
        return f"it needs equal head sizes, not {q.shape[-1]} and {v.shape[-1]}"
    n_queries = -(-q.shape[1] // setting.n_shards(1))  # those of a device
    if min(n_queries, k.shape[1]) < _MIN_LENGTH:
        return f"it needs at least {_MIN_LENGTH} queries and keys, not {n_queries} and {k.shape[1]}"
    if setting.window is not None and q.shape[1] != k.shape[1]:
        return f"its window needs as many keys as queries, not {k.shape[1]} and {q.shape[1]}"
    for name, option in (("bias", "a bias"), ("key", "dropout")):
        if name in extras:
            return f"it does not support {option}"
    if "mask" in extras and extras["mask"].shape[1:3] != (1, 1):
        return "it does not support a mask that differs by query or head"
    return None


def forward(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any], interpret: bool = False
) -> tuple[Any, Any]:
    """Same as `_blockwise.forward`. `interpret` interprets the kernel, which works on any platform."""

    def on_device(q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
        out, (log_sum,) = jax.vmap(_kernel(setting, q, k, interpret))(*_prepare(setting, q, k, v), segments)
        if setting.in_ring and setting.window is not None:
            # Of a block of queries that see none of these keys, the kernel computes nothing: NaN, and the log of 0. A NaN
            # of the operands gives NaN for both, and stays.
            is_seen = ~jnp.isneginf(log_sum)
            out, log_sum = jnp.where(is_seen[..., None], out, 0), jnp.where(is_seen, log_sum, MASK_VALUE)
        n_queries = q.shape[1]
        return jnp.swapaxes(out, 1, 2)[:, :n_queries], log_sum[:, :, :n_queries]

    return _on_each_device(setting, on_device, q, k, v, _segments(q, k, extras))


def backward(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any], *results: Any, interpret: bool = False
) -> list[Any]:
    """Same as `_blockwise.backward`."""

    def on_device(q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, g: Any) -> tuple[Any, ...]:
        kernel = _kernel(setting, q, k, interpret)
        static = {**kernel.kwargs, "save_residuals": False}

        def row_backward(q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, g: Any) -> Any:
            residuals = q, k, v, segments, None, out, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info
            return _library()[0]._splash_attention_bwd(**static, res=residuals, do=g)[3:6]

        outputs = _heads_first(out), pad(numbers_of(log_sum), 2, LANES), _heads_first(g.astype(q.dtype))
        operands: Any = (*_prepare(setting, q, k, v), segments, *outputs)
        dq, dk, dv = jax.vmap(row_backward)(*operands)
        dq = dq.astype(jnp.float32) * setting.scale
        return tuple(jnp.swapaxes(dx, 1, 2)[:, : x.shape[1]].astype(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))

    return list(_on_each_device(setting, on_device, q, k, v, _segments(q, k, extras), *results))


# --- on one device ----------------------------------------------------------------------------------------------------


def _kernel(setting: AttentionSetting, q: Any, k: Any, interpret: bool) -> Any:
    """Builds the kernel for one row of these queries and keys; it also returns the log-sum-exps."""
    kernels, masks = _library()
    shape = tuple(-(-x.shape[1] // LANES) * LANES for x in (q, k))
    if setting.window is not None:
        sizes = setting.window - 1, 0 if setting.causal else setting.window - 1
        mask = masks.LocalMask(shape, sizes, setting.offset)
    else:
        mask = masks.CausalMask(shape, setting.offset) if setting.causal else masks.FullMask(shape)
    # With wide heads, the largest blocks do not fit into the memory of a core.
    fitting = _BLOCK_SIZES if q.dtype.itemsize * q.shape[-1] <= 512 else _BLOCK_SIZES[1:]
    block_q, block_kv = (next(block for block in fitting if n % block == 0) for n in shape)
    of_queries = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), block_q)
    of_keys = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
    blocks = kernels.BlockSizes(**of_queries, **dict.fromkeys(of_keys, block_kv))
    with jax.ensure_compile_time_eval():
        return kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=interpret,
        )


def _heads_first(x: Any) -> Any:
    return pad(jnp.swapaxes(x, 1, 2), 2, LANES)


def _prepare(setting: AttentionSetting, q: Any, k: Any, v: Any) -> list[Any]:
    """Returns queries, keys and values as the kernel takes them: padded, `[B, N, T, H]`, and the queries scaled."""
    q = (q.astype(jnp.float32) * setting.scale).astype(q.dtype)
    return [_heads_first(x) for x in (q, k, v)]


def _segments(q: Any, k: Any, extras: dict[str, Any]) -> Any:
    """Returns the segments of queries and keys, `[B, T]` and `[B, S]`, padded to multiples of 128, or None if all is one.

    The padding has its own segment, so that queries do not attend to it. So do keys beyond a row's length, and keys that a
    mask masks for all queries.
    """
    n_rows, n_queries, n_keys = q.shape[0], q.shape[1], k.shape[1]
    if n_keys % LANES == n_queries % LANES == 0 and not extras:
        return None
    padding = -1
    query_ids = extras.get("query_segments", jnp.zeros((1, n_queries), jnp.int32))
    key_ids = extras.get("key_segments", jnp.zeros((1, n_keys), jnp.int32))
    if "query_segments" in extras:  # the user's segment -1 is not the padding's
        query_ids, key_ids = (jnp.where(x == padding, jnp.iinfo(jnp.int32).min, x) for x in (query_ids, key_ids))
    if "lengths" in extras:
        key_ids = jnp.where(jnp.arange(n_keys) < extras["lengths"][:, None], key_ids, padding)
    if "mask" in extras:
        key_ids = jnp.where(extras["mask"][:, 0, 0], key_ids, padding)

    def pad_rows(x: Any) -> Any:
        x = pad(x.astype(jnp.int32), 1, LANES, padding)
        return jnp.broadcast_to(x, (n_rows, x.shape[1]))

    return _library()[0].SegmentIds(pad_rows(query_ids), pad_rows(key_ids))


# --- on several devices -----------------------------------------------------------------------------------------------


def _on_each_device(setting: AttentionSetting, fn: Callable[..., Any], q: Any, k: Any, *others: Any) -> Any:
    """Calls `fn` on each device, with its own rows and heads. Rows or heads that do not divide are replicated. The operands
    are queries, keys, values, segments and, in the backward pass, outputs, log-sum-exps and gradients."""
    if setting.split is None or setting.split.mesh.size == 1:
        return fn(q, k, *others)
    rows, heads = setting.mesh_axes(q, k)
    qkv_spec, log_sum_spec, segment_spec = P(rows, None, heads, None), P(rows, heads, None), P(rows, None)
    is_forward = len(others) == 2
    in_specs = (*(qkv_spec,) * 3, segment_spec, *(() if is_forward else (qkv_spec, log_sum_spec, qkv_spec)))
    out_specs = (qkv_spec, log_sum_spec) if is_forward else (qkv_spec,) * 3
    return on_each_device(setting.split.mesh, fn, in_specs, out_specs)(q, k, *others)
