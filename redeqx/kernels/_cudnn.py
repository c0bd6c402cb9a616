"""cuDNN's fused attention, for NVIDIA GPUs: bfloat16 and float16.

JAX's public function returns log-sums in the dtype of the output, and has no backward pass of its own, so this calls what is
below it. Where a version of JAX has that elsewhere, or cuDNN has no kernel, `Refused` says why.

Source: `jax.nn.dot_product_attention(implementation="cudnn")`, of which this is the two halves.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._setting import Refused, Setting

try:
    from jax._src.cudnn.fused_attention_stablehlo import (
        AttentionLayout,
        MaskType,
        _dot_product_attention_bwd_p_wrapper as backward_p,
        check_compute_capability,
        dot_product_attention,
        get_large_negative_number,
    )
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needing_devices
except ImportError:  # pragma: no cover
    backward_p: Any = None
    check_compute_capability: Any = None
    _needing_devices: Any = set()


def lowers_for(*primitives: Any) -> None:
    """Say of primitives that they are lowered to cuDNN's, which ask for the devices that are compiled for."""
    _needing_devices.update(primitives)


def forward(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[Any, Any]:
    """As `_blockwise.forward`."""
    operands = _Operands(setting, q, k, v, extras)
    try:
        found: Any = dot_product_attention(
            operands.q,
            operands.k,
            operands.v,
            operands.bias,
            None,
            operands.query_lengths,
            operands.lengths,
            scale=setting.scale,
            mask_type=operands.mask_type,
            sliding_window_length=setting.window,
            return_residual=True,
        )
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise Refused(f"cuDNN: {error}") from error
    out, log_sum = found
    return out[:, : q.shape[1]], log_sum[:, :, : q.shape[1]].astype(jnp.float32)


def backward(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any], out: Any, log_sum: Any, g: Any) -> list[Any]:
    """As `_blockwise.backward`."""
    jax.eval_shape(partial(forward, setting), q, k, v, extras)  # refuses what it has no kernel for
    operands = _Operands(setting, q, k, v, extras)
    none = jnp.zeros(0, q.dtype)
    has_bias = operands.bias is not None
    found = backward_p.bind(
        operands.q,
        operands.k,
        operands.v,
        operands.bias if has_bias else none,
        none if operands.query_lengths is None else operands.query_lengths,
        none if operands.lengths is None else operands.lengths,
        none,
        none,
        none,
        none,
        operands.to_even(log_sum, 2),
        operands.to_even(out, 1),
        operands.to_even(g.astype(q.dtype), 1),
        scale=setting.scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(has_bias, has_bias),
        mask_type=operands.mask_type,
        layout=AttentionLayout.BTNH.value,
        sliding_window_length=setting.window,
    )
    grads = [found[0][:, : q.shape[1]], *(x[:, : k.shape[1]] for x in found[1:3])]
    if "bias" in extras:
        of_bias = found[3][:, :, : q.shape[1], : k.shape[1]]
        kept = [dim for dim in (1, 2) if extras["bias"].shape[dim] == 1 != of_bias.shape[dim]]
        grads.append((of_bias.sum(kept, keepdims=True) if kept else of_bias).astype(extras["bias"].dtype))
    return grads


class _Operands:
    """What cuDNN is given for an attention, or `Refused`.

    A mask or segments become a bias in the dtype of the queries, of which cuDNN wants all queries and keys, and an even
    number of both.
    """

    def __init__(self, setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]):
        if (reason := why_refused(setting, q, k, v, extras)) is not None:
            raise Refused(f"cuDNN: {reason}")
        q, k, v = _split_alike(setting, q, k, v)
        self.bias, self.lengths, self.query_lengths = None, None, None
        sees = extras.get("mask")
        if "query_segments" in extras:
            same = (extras["query_segments"][:, :, None] == extras["key_segments"][:, None])[:, None]
            sees = same if sees is None else sees & same
        if sees is not None or "bias" in extras:
            low = get_large_negative_number(q.dtype)
            bias = jnp.zeros((), q.dtype) if "bias" not in extras else extras["bias"].astype(q.dtype)
            bias = bias if sees is None else jnp.where(sees, bias, low)
            heads = q.shape[2] if "bias" in extras else bias.shape[1]
            bias = jnp.broadcast_to(bias, (bias.shape[0], heads, q.shape[1], k.shape[1]))
            of_padding = [(0, 0), (0, 0), (0, q.shape[1] % 2), (0, 0)]
            bias = jnp.pad(bias, of_padding)
            self.bias = jnp.pad(bias, [(0, 0), (0, 0), (0, 0), (0, k.shape[1] % 2)], constant_values=low)
            q, k, v = (self.to_even(x, 1) for x in (q, k, v))
        if "lengths" in extras:
            self.lengths = jnp.broadcast_to(extras["lengths"].astype(jnp.int32), q.shape[:1])
            self.query_lengths = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
        self.q, self.k, self.v = q, k, v
        kinds = MaskType
        has_lengths = self.lengths is not None
        by_causal = (kinds.NO_MASK, kinds.CAUSAL), (kinds.PADDING, kinds.PADDING_CAUSAL)
        self.mask_type = by_causal[has_lengths][setting.causal]

    def to_even(self, x: Any, dim: int) -> Any:
        """With one more entry along the positions where a bias needs an even number of them."""
        if self.bias is None or x.shape[dim] % 2 == 0:
            return x
        return jnp.pad(x, [(0, int(i == dim)) for i in range(x.ndim)])


def _split_alike(setting: Setting, *operands: Any) -> list[Any]:
    """Queries, keys and values split in the same way over the devices: another split of one is an error of the compiler."""
    if setting.split is None or setting.split.mesh.size == 1:
        return list(operands)
    rows, heads = setting.axes(*operands[:2])
    sharding = NamedSharding(setting.split.mesh, P(rows, None, heads, None))
    return [jax.lax.with_sharding_constraint(x, sharding) for x in operands]


def why_refused(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> str | None:
    """Why there is no kernel for operands of these shapes; None where there is one, but for what only cuDNN knows."""
    if backward_p is None:
        return "this version of JAX has it elsewhere"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not in {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8:
        return f"it needs heads of one size, a multiple of 8, not {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[-1] > (most := 256 if check_compute_capability("9.0") else 128):
        return f"it needs heads of a size of at most {most}, not {q.shape[-1]}"
    if setting.dropout:
        return "its dropout takes no key"
    if setting.window is not None and not setting.causal:
        return "its window is of the keys before a query only"
    bias = extras.get("bias")
    if bias is not None and (bias.shape[0] != 1 or "mask" in extras or "query_segments" in extras):
        return "it has the gradient of a bias that all rows share, and of no mask beside it"
    return None


def dense_bytes(setting: Setting, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> int:
    """The bytes of the bias that a mask, segments or a bias become; 0 where there is none, or no kernel."""
    if why_refused(setting, q, k, v, extras) is not None:
        return 0
    bias = jax.eval_shape(lambda *operands: _Operands(setting, *operands).bias, q, k, v, extras)
    return 0 if bias is None else bias.size * bias.dtype.itemsize
