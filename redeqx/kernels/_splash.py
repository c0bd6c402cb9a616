"""Splash attention, for TPUs: a kernel that skips blocks of keys which a causal mask or a window hides.

It cannot be partitioned by the compiler, so each device runs it on its own rows and heads, by `jax.shard_map`. The forward
and the backward pass are called apart, since what the forward pass returns is kept by the primitive. Lengths that are not
multiples of 128 are padded, and padding is a segment of its own.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`, of which this is the two halves.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ._setting import Refused, Setting

# The places of what the backward pass is given, by their names in the version this is written for.
_STATIC = (
    "save_residuals",
    "mask_value",
    "is_mqa",
    "block_sizes",
    "residual_checkpoint_name",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
)


class _Library(NamedTuple):
    """Pallas's kernels, their masks, and their backward pass."""

    kernels: Any
    masks: Any
    backward: Any


@cache
def _library() -> _Library | None:
    """What is imported only where it is needed, as Pallas takes long; None where JAX has it elsewhere."""
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
            splash_attention_mask as masks,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
            _splash_attention_bwd as backward,
        )
    except ImportError:  # pragma: no cover
        return None
    known = tuple(inspect.signature(backward).parameters)
    return _Library(kernels, masks, backward) if known == (*_STATIC, "res", "do") else None


def _loaded() -> _Library:
    """The library where it is known to be there."""
    found = _library()
    assert found is not None
    return found


_LANES = 128
_FEWEST = 128  # queries and keys; fewer are padded for the most part
_BLOCKS = (512, 256, 128)


def why_refused(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> str | None:
    """Why there is no kernel for operands of these shapes; None where there is one."""
    if _library() is None:
        return "this version of JAX has it elsewhere"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it computes in bfloat16 or float32, not in {q.dtype}"
    if q.dtype == jnp.float32 and setting.precision not in (None, jax.lax.Precision.DEFAULT):
        return f"its products have no precision {setting.precision.name}"
    if q.shape[-1] != v.shape[-1]:
        return f"it needs heads of one size, not {q.shape[-1]} and {v.shape[-1]}"
    if min(q.shape[1], k.shape[1]) < _FEWEST:
        return f"{q.shape[1]} queries and {k.shape[1]} keys are fewer than its blocks of {_FEWEST}"
    if setting.window is not None and q.shape[1] != k.shape[1]:
        return f"its window is of as many keys as queries, not {k.shape[1]} and {q.shape[1]}"
    for name, what in (("bias", "a bias"), ("key", "dropout")):
        if name in extras:
            return f"it has none with {what}"
    if "mask" in extras and extras["mask"].shape[1:3] != (1, 1):
        return "it has none with a mask that differs by query or head"
    return None


def forward(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any], interpret: bool = False) -> tuple[Any, Any]:
    """As `_blockwise.forward`.

    **Arguments:**

    - `interpret`: whether the kernel is interpreted, which any platform can.
    """
    _check(setting, q, k, v, extras)
    here = partial(_forward_here, setting, interpret)
    out, log_sum = _on_each_device(setting, here, 2)(q, k, v, _segments(q, k, extras))
    return out, log_sum


def backward(
    setting: Setting,
    q: Any,
    k: Any,
    v: Any,
    extras: dict[str, Any],
    out: Any,
    log_sum: Any,
    g: Any,
    interpret: bool = False,
) -> list[Any]:
    """As `_blockwise.backward`."""
    _check(setting, q, k, v, extras)
    here = partial(_backward_here, setting, interpret)
    return list(_on_each_device(setting, here, 3)(q, k, v, _segments(q, k, extras), out, log_sum, g))


def _check(setting: Setting, *operands: Any) -> None:
    if (reason := why_refused(setting, *operands)) is not None:
        raise Refused(f"splash attention: {reason}")


# --- on one device ----------------------------------------------------------------------------------------------------


def _forward_here(setting: Setting, interpret: bool, q: Any, k: Any, v: Any, segments: Any) -> Any:
    out, (log_sum,) = jax.vmap(_kernel(setting, q, k, interpret))(*_padded_heads(setting, q, k, v), segments)
    n_queries = q.shape[1]
    return jnp.swapaxes(out, 1, 2)[:, :n_queries], log_sum[:, :, :n_queries]


def _backward_here(
    setting: Setting, interpret: bool, q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, g: Any
) -> Any:
    kernel = _kernel(setting, q, k, interpret)
    static = [{**kernel.kwargs, "save_residuals": False}[name] for name in _STATIC]

    def of_row(q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, g: Any) -> Any:
        kept = q, k, v, segments, None, out, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info
        return _loaded().backward(*static, kept, g)[3:6]

    of_outputs = _heads_first(out), _to_blocks(log_sum, 2), _heads_first(g.astype(q.dtype))
    operands: Any = (*_padded_heads(setting, q, k, v), segments, *of_outputs)
    dq, dk, dv = jax.vmap(of_row)(*operands)
    dq = dq.astype(jnp.float32) * setting.scale
    return tuple(jnp.swapaxes(x, 1, 2)[:, : of.shape[1]].astype(of.dtype) for x, of in ((dq, q), (dk, k), (dv, v)))


def _kernel(setting: Setting, q: Any, k: Any, interpret: bool) -> Any:
    """The kernel for one row of these queries and keys, whose log-sums it returns too."""
    kernels, masks, _ = _loaded()
    shape = _rounded(q.shape[1]), _rounded(k.shape[1])
    if setting.window is not None:
        mask = masks.LocalMask(shape, (setting.window - 1, 0 if setting.causal else setting.window - 1), 0)
    else:
        mask = masks.CausalMask(shape) if setting.causal else masks.FullMask(shape)
    # Of wide heads the largest blocks do not fit into the memory of a core.
    fitting = _BLOCKS if q.dtype.itemsize * q.shape[-1] <= 512 else _BLOCKS[1:]
    of_queries, of_keys = (next(block for block in fitting if n % block == 0) for n in shape)
    sizes = kernels.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_kv_compute=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    with jax.ensure_compile_time_eval():
        return kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=interpret,
        )


def _rounded(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _to_blocks(x: Any, dim: int) -> Any:
    """Padded along a dim to a multiple of 128."""
    missing = _rounded(x.shape[dim]) - x.shape[dim]
    return jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)]) if missing else x


def _heads_first(x: Any) -> Any:
    return _to_blocks(jnp.swapaxes(x, 1, 2), 2)


def _padded_heads(setting: Setting, q: Any, k: Any, v: Any) -> list[Any]:
    """Queries, which the kernel does not scale, keys and values as it wants them: `[B, N, T, H]`."""
    q = (q.astype(jnp.float32) * setting.scale).astype(q.dtype)
    return [_heads_first(x) for x in (q, k, v)]


def _segments(q: Any, k: Any, extras: dict[str, Any]) -> Any:
    """The segments of queries and keys, `[B, T]` and `[B, S]`, padded to multiples of 128; None where all is one segment.

    Padding at the end of the keys would be seen by queries but for that; keys after a row's length, and those that a mask
    hides from all queries, are such padding.
    """
    n_rows, n_queries, n_keys = q.shape[0], q.shape[1], k.shape[1]
    if _rounded(n_keys) == n_keys and _rounded(n_queries) == n_queries and not extras:
        return None
    padding = -1
    of_queries = extras.get("query_segments", jnp.zeros((1, n_queries), jnp.int32))
    of_keys = extras.get("key_segments", jnp.zeros((1, n_keys), jnp.int32))
    if "query_segments" in extras:  # one that a user gave to padding is not that of ours
        of_queries, of_keys = (jnp.where(x == padding, jnp.iinfo(jnp.int32).min, x) for x in (of_queries, of_keys))
    if "lengths" in extras:
        of_keys = jnp.where(jnp.arange(n_keys) < extras["lengths"][:, None], of_keys, padding)
    if "mask" in extras:
        of_keys = jnp.where(extras["mask"][:, 0, 0], of_keys, padding)

    def ready(x: Any) -> Any:
        missing = _rounded(x.shape[1]) - x.shape[1]
        x = jnp.pad(x.astype(jnp.int32), [(0, 0), (0, missing)], constant_values=padding)
        return jnp.broadcast_to(x, (n_rows, x.shape[1]))

    return _loaded().kernels.SegmentIds(ready(of_queries), ready(of_keys))


# --- on many ----------------------------------------------------------------------------------------------------------


def _on_each_device(setting: Setting, fn: Callable[..., Any], n_outputs: int) -> Callable[..., Any]:
    """`fn` of queries, keys, values, segments and then, in the backward pass, outputs, log-sums and gradients, on the rows
    and heads of each device. Each has all rows, or all heads, where those do not divide."""
    if setting.split is None or setting.split.mesh.size == 1:
        return fn
    mesh = setting.split.mesh

    def mapped_fn(q: Any, k: Any, v: Any, segments: Any, *others: Any) -> Any:
        rows, heads = setting.axes(q, k)
        of_heads, of_sums, of_rows = P(rows, None, heads, None), P(rows, heads, None), P(rows, None)
        ins = (of_heads, of_heads, of_heads, of_rows, of_heads, of_sums, of_heads)[: 4 + len(others)]
        outs = (of_heads, of_sums) if n_outputs == 2 else (of_heads,) * 3
        return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(q, k, v, segments, *others)

    return mapped_fn
