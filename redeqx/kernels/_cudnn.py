"""cuDNN's fused attention, for NVIDIA GPUs: bfloat16 and float16.

JAX's public function returns log-sum-exps in the dtype of the output (JAX 0.10.2; 2026-11-25) and does not expose its
backward pass, so this module calls JAX's private functions. It raises `Unsupported` if this version of JAX lacks them or
their arguments are others, or if cuDNN has no kernel.

Source: the forward and the backward pass of `jax.nn.dot_product_attention(implementation="cudnn")`.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._dense import InBlocks
from ._offset import WithOffset
from ._setting import AttentionSetting, Unsupported
from ._shared import pad

try:
    from jax._src.cudnn.fused_attention_stablehlo import (
        AttentionLayout,
        MaskType,
        _dot_product_attention_bwd_impl as _computes_backward,
        _dot_product_attention_bwd_p_wrapper as backward_p,
        check_compute_capability,
        dot_product_attention,
        get_large_negative_number,
    )
    from jax._src.dispatch import prim_requires_devices_during_lowering as _requires_devices
except ImportError:  # pragma: no cover
    backward_p: Any = None
    check_compute_capability: Any = None
    _requires_devices: Any = set()
    _computes_backward: Any = None

# What the backward pass takes: operands and options, and since JAX 0.12 a change of scores, of which none is made here.
_OPERANDS = [
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"),
    *("activation", "fwd_output", "grad_output"),
]
_OPTIONS = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"]
_taken = [] if _computes_backward is None else list(inspect.signature(_computes_backward).parameters)
_IS_KNOWN = [name for name in _taken if name not in ("score_mod_args", "score_mod")] == [*_OPERANDS, *_OPTIONS]
_NO_SCORE_MOD = {"score_mod": None} if "score_mod" in _taken else {}


def register_lowered(*primitives: Any) -> None:
    """Registers primitives that are lowered to cuDNN's: their lowering requires the target devices."""
    _requires_devices.update(primitives)


def _forward(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[Any, Any]:
    operands, options = arguments(setting, q, k, v, extras)
    attend: Any = dot_product_attention
    try:
        out, log_sum = attend(*operands[:4], None, *operands[4:], **options, return_residual=True)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise Unsupported(str(error)) from error
    return out[:, : q.shape[1]], log_sum[:, :, : q.shape[1]].astype(jnp.float32)


def _backward(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any], out: Any, log_sum: Any, g: Any
) -> list[Any]:
    jax.eval_shape(partial(_forward, setting), q, k, v, extras)  # raises `Unsupported` if there is no kernel
    operands, options = arguments(setting, q, k, v, extras)
    none, has_bias, g = jnp.zeros(0, q.dtype), operands[3] is not None, g.astype(q.dtype)
    if has_bias:
        out, log_sum, g = pad(out, 1, 2), pad(log_sum, 2, 2), pad(g, 1, 2)
    d_operands = backward_p.bind(
        *(none if x is None else x for x in operands),
        *[none] * 4,
        log_sum,
        out,
        g,
        **options,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(has_bias, has_bias),
        layout=AttentionLayout.BTNH.value,
        **_NO_SCORE_MOD,
    )
    grads = [d_operands[0][:, : q.shape[1]], *(x[:, : k.shape[1]] for x in d_operands[1:3])]
    if "bias" in extras:
        d_bias = d_operands[3][:, :, : q.shape[1], : k.shape[1]]
        repeated = [dim for dim in (1, 2) if extras["bias"].shape[dim] == 1 != d_bias.shape[dim]]
        grads.append((d_bias.sum(repeated, keepdims=True) if repeated else d_bias).astype(extras["bias"].dtype))
    return grads


_with_offset = WithOffset(_forward, _backward)
_in_blocks = InBlocks(_with_offset.forward, _with_offset.backward)
forward, backward = _in_blocks.forward, _in_blocks.backward


def arguments(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the kernel's queries, keys, values, bias, and lengths of queries and keys, None for those absent; its options.

    A mask or segments become a bias in the dtype of the queries. cuDNN needs this bias for all queries and keys, and an
    even number of both.
    """
    q, k, v = _constrain_split(setting, q, k, v)
    if (bias := _dense_bias(q, k, extras)) is not None:
        q, k, v = (pad(x, 1, 2) for x in (q, k, v))
        if setting.split is not None and setting.split.mesh.size > 1:  # the segments may be split by positions
            spec = P(P.UNCONSTRAINED, P.UNCONSTRAINED, None, None)
            bias = jax.lax.with_sharding_constraint(bias, NamedSharding(setting.split.mesh, spec))
    query_lengths, lengths = None, extras.get("lengths")
    mask_type = MaskType.CAUSAL if setting.causal else MaskType.NO_MASK
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths.astype(jnp.int32), q.shape[:1])
        query_lengths = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
        mask_type = MaskType.PADDING_CAUSAL if setting.causal else MaskType.PADDING
    options = {"scale": setting.scale, "mask_type": mask_type, "sliding_window_length": setting.window}
    return [q, k, v, bias, query_lengths, lengths], options


def _dense_bias(q: Any, k: Any, extras: dict[str, Any]) -> Any | None:
    """Returns the bias made from a mask, segments and a bias, for an even number of queries and keys; None without these."""
    mask = extras.get("mask")
    if "query_segments" in extras:
        same_segment = (extras["query_segments"][:, :, None] == extras["key_segments"][:, None])[:, None]
        mask = same_segment if mask is None else mask & same_segment
    if mask is None and "bias" not in extras:
        return None
    low = get_large_negative_number(q.dtype)
    bias = jnp.zeros((), q.dtype) if "bias" not in extras else extras["bias"].astype(q.dtype)
    bias = bias if mask is None else jnp.where(mask, bias, low)
    heads = q.shape[2] if "bias" in extras else bias.shape[1]
    bias = jnp.broadcast_to(bias, (bias.shape[0], heads, q.shape[1], k.shape[1]))
    return pad(pad(bias, 2, 2), 3, 2, low)


def _constrain_split(setting: AttentionSetting, *operands: Any) -> list[Any]:
    """Constrains queries, keys and values to the same split over devices; the compiler fails if they differ."""
    if setting.split is None or setting.split.mesh.size == 1:
        return list(operands)
    rows, heads = setting.mesh_axes(*operands[:2])
    sharding = NamedSharding(setting.split.mesh, P(rows, None, heads, None))
    return [jax.lax.with_sharding_constraint(x, sharding) for x in operands]


def unsupported_reason(setting: AttentionSetting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> str | None:
    """Returns why no kernel supports operands of these shapes; None if one does. cuDNN itself may have further limits."""
    if not _IS_KNOWN:
        return "this version of JAX has no such private functions"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it supports bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8:
        return f"it needs equal head sizes that are multiples of 8, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[-1] > (max_size := 256 if check_compute_capability("9.0") else 128):
        return f"it needs a head size of at most {max_size}, not {q.shape[-1]}"
    if setting.dropout:
        return "its dropout takes no key"
    if setting.window is not None and not setting.causal:
        return "its window covers only keys before the query"
    if setting.window is not None and setting.in_ring and not {"bias", "mask", "query_segments"} & set(extras):
        return "in a ring its window would be a mask"
    if setting.splits_positions and setting.causal:
        n_queries, n = q.shape[1], 2 * setting.n_shards(1)
        if n_queries != k.shape[1] or n_queries % n:
            return (
                f"split by positions it needs as many keys as queries, a multiple of {n}, not {k.shape[1]} and {n_queries}"
            )
    bias = extras.get("bias")
    if bias is not None and (bias.shape[0] != 1 or "mask" in extras or "query_segments" in extras):
        return "it supports a bias only if all rows share it and there is no mask"
    return None
