"""Attention in plain XLA, one block of queries at a time, so that the scores of all queries never exist at once.

The backward pass recomputes the weights (FlashAttention, arXiv:2205.14135, with blocks of queries only). XLA partitions it
along rows and heads without help. All arrays have one leading dim, `B`; that of an optional operand may be 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from .._rounding import at_least_float32
from ._setting import MASK_VALUE, NO_WEIGHTS, AttentionSetting, make_mask
from ._shared import blocks_of, joined

BLOCK_SIZE = 256  # the largest number of queries in a block

Operands = dict[str, Any]


def forward(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, block_size: int = BLOCK_SIZE
) -> tuple[Any, Any]:
    """Returns the output `[B, T, N, H]` and the log-sum-exp of the scores, `[B, N, T]` of at least float32; in a ring as a
    pair, `[B, N, T, 2]`, see `_setting.AttentionSetting`. A block has at most `block_size` queries."""
    n_queries, groups, einsum = q.shape[1], k.shape[2], _einsum(setting)
    keys, values = _heads_first(k), _heads_first(v)

    def attend_block(sums: Operands, block: Operands) -> tuple[Operands, Operands]:
        scores = _scores(setting, block, keys)
        largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))  # the softmax does not depend on it
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, -1, keepdims=True)
        kept = _apply_dropout(setting, weights, block)
        out = einsum("bgrts,bgsh->bgrth", kept.astype(v.dtype), values)
        log_total = jnp.log(total)
        log_sum = jnp.concatenate([largest, log_total], -1) if setting.in_ring else (log_total + largest)[..., 0]
        return sums, {"out": (out / total).astype(q.dtype), "log_sum": log_sum}

    operands = {"q": _group_queries(q, groups), **_group_heads(extras, groups)}
    _, outs = _scan_blocks(attend_block, {}, block_size, n_queries, operands, setting.offset)
    return rearrange(outs["out"], "b g r t h -> b t (g r) h"), rearrange(outs["log_sum"], "b g r t ... -> b (g r) t ...")


def backward(
    setting: AttentionSetting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any
) -> list[Any]:
    """Returns the gradients of queries, keys, values and, if there is one, the bias, given the results of `forward`, and the
    gradient of the output."""
    n_queries, groups, einsum = q.shape[1], k.shape[2], _einsum(setting)
    keys, values = _heads_first(k), _heads_first(v)
    # The sum over keys of weights times their gradients; the derivative of a softmax subtracts it.
    mean = rearrange(einsum("btnh,btnh->bnt", out, g), "b (g r) t -> b g r t", g=groups)
    operands = {"q": _group_queries(q, groups), "g": _group_queries(g, groups), "mean": mean}
    if setting.in_ring:
        operands["log_sum"] = rearrange(log_sum, "b (g r) t pair -> b g r t pair", g=groups)
    operands |= _group_heads(extras, groups)
    bias = operands.get("bias")
    bias_is_shared = bias is not None and bias.shape[-2] == 1 != n_queries  # all blocks contribute to its gradient

    def differentiate_block(sums: Operands, block: Operands) -> tuple[Operands, Operands]:
        scores = _scores(setting, block, keys)
        mask = scores > MASK_VALUE / 2 if setting.may_mask_all_keys else None
        if setting.in_ring:
            largest, log_total = jnp.split(block["log_sum"], 2, -1)
            weights = jnp.exp(scores - largest - log_total)
        else:
            weights = jax.nn.softmax(scores)
        d_weights = einsum("bgrth,bgsh->bgrts", block["g"], values)
        d_scores = weights * (_apply_dropout(setting, d_weights, block) - block["mean"][..., None])
        if mask is not None:
            d_scores = jnp.where(mask, d_scores, 0.0)
        weights = _apply_dropout(setting, weights, block).astype(g.dtype)
        d_products = (d_scores * setting.scale).astype(q.dtype)
        new_sums = {
            "v": einsum("bgrts,bgrth->bgsh", weights, block["g"]),
            "k": einsum("bgrts,bgrth->bgsh", d_products, block["q"]),
        }
        outs = {"q": einsum("bgrts,bgsh->bgrth", d_products, keys).astype(q.dtype)}
        if bias is not None:
            d_bias = _sum_to_shape(d_scores, (*bias.shape[:3], *block["bias"].shape[3:]))
            (new_sums if bias_is_shared else outs)["bias"] = d_bias
        return {name: sums[name] + x for name, x in new_sums.items()}, outs

    zeros = {"k": jnp.zeros(keys.shape, at_least_float32(k.dtype)), "v": jnp.zeros(values.shape, at_least_float32(v.dtype))}
    if bias is not None and bias_is_shared:
        zeros["bias"] = jnp.zeros(bias.shape, at_least_float32(q.dtype))
    sums, outs = _scan_blocks(differentiate_block, zeros, BLOCK_SIZE, n_queries, operands, setting.offset)
    grads = [rearrange(outs["q"], "b g r t h -> b t (g r) h").astype(q.dtype)]
    grads += [rearrange(sums[name], "b g s h -> b s g h").astype(x.dtype) for name, x in (("k", k), ("v", v))]
    if bias is not None:
        d_bias = (sums if bias_is_shared else outs)["bias"]
        grads.append(rearrange(d_bias, "b g r t s -> b (g r) t s").astype(extras["bias"].dtype))
    return grads


def _einsum(setting: AttentionSetting) -> Callable[..., Any]:
    """Returns an `einsum` of two arrays that accumulates in float32, or in float64 for such arrays."""

    def einsum(dims: str, one: Any, two: Any) -> Any:
        dtype = at_least_float32(jnp.result_type(one, two))
        return jnp.einsum(dims, one, two, precision=setting.precision, preferred_element_type=dtype)

    return einsum


# --- layouts: heads before queries and keys, so that the batch dims of products come first ----------------------------


def _heads_first(x: Any) -> Any:
    return rearrange(x, "b s g h -> b g s h")


def _group_queries(x: Any, groups: int) -> Any:
    return rearrange(x, "b t (g r) h -> b g r t h", g=groups)


def _group_heads(extras: Operands, groups: int) -> Operands:
    """Returns the optional operands; those with a dim of heads become `[B, G or 1, R or 1, T, S]`."""
    split = {}
    for name in ("bias", "mask"):
        if (x := extras.get(name)) is not None:
            split[name] = x[:, None] if x.shape[1] == 1 else rearrange(x, "b (g r) t s -> b g r t s", g=groups)
    return {**extras, **split}


def _scores(setting: AttentionSetting, block: Operands, keys: Any) -> Any:
    """Returns the scores of a block of queries, `[B, G, R, t, S]`, in at least float32; masked keys have `MASK_VALUE`."""
    scores = _einsum(setting)("bgrth,bgsh->bgrts", block["q"], keys) * setting.scale
    if "bias" in block:
        # However low its bias is, an unmasked key weighs more than a masked one.
        scores = scores + jnp.maximum(block["bias"].astype(scores.dtype), MASK_VALUE / 4)
    mask = make_mask(setting, block["rows"], keys.shape[2], block)
    return scores if mask is None else jnp.where(mask, scores, MASK_VALUE)


def _apply_dropout(setting: AttentionSetting, weights: Any, block: Operands) -> Any:
    """Applies dropout to the weights `[B, G, R, t, S]`, or to their gradients."""
    if not setting.dropout:
        return weights
    groups, repeats, _, n_keys = weights.shape[1:]

    def keep(key: Any, row: Any) -> Any:  # depends on the query's position, not on its block
        return jax.random.bernoulli(jax.random.fold_in(key, row), 1 - setting.dropout, (groups, repeats, n_keys))

    kept = jax.vmap(jax.vmap(keep, (None, 0)), (0, None))(block["key"], block["rows"])
    return jnp.where(rearrange(kept, "b t g r s -> b g r t s"), weights / (1 - setting.dropout), 0.0)


def _sum_to_shape(x: Any, shape: Sequence[int]) -> Any:
    """Sums over the dims in which `shape` has size 1."""
    dims = [dim for dim, size in enumerate(shape) if size == 1 != x.shape[dim]]
    return jnp.sum(x, dims, keepdims=True) if dims else x


# --- blocks -----------------------------------------------------------------------------------------------------------

# The dim of the queries in each operand and output. If its size is 1, all blocks share the operand.
_QUERY_DIM = {"q": 3, "g": 3, "out": 3, "log_sum": 3, "mean": 3, "bias": 3, "mask": 3, "query_segments": 1}


def _scan_blocks(
    fn: Callable[[Operands, Operands], tuple[Operands, Operands]],
    sums: Operands,
    block_size: int,
    n_queries: int,
    operands: Operands,
    offset: int,
) -> tuple[Operands, Operands]:
    """Scans `fn(sums, block) -> sums, outputs` over blocks of at most `block_size` queries, and concatenates the outputs.
    `block["rows"]` holds the positions of the block's queries, the first of which is `offset`. The last block is padded."""
    n_blocks = max(1, -(-n_queries // block_size))
    if n_blocks == 1:
        return fn(sums, {**operands, "rows": _positions(offset, n_queries)})
    shared = {name: x for name, x in operands.items() if name not in _QUERY_DIM or x.shape[_QUERY_DIM[name]] == 1}
    size = -(-n_queries // n_blocks)
    blocks: Operands = {"rows": _positions(offset, n_blocks * size).reshape(n_blocks, size)}
    for name in (name for name in operands if name not in shared):  # in their order: all processes need the same program
        value = NO_WEIGHTS if name == "log_sum" else 0
        blocks[name] = blocks_of(operands[name], size, _QUERY_DIM[name], value)
    sums, outs = jax.lax.scan(lambda sums, block: fn(sums, {**shared, **block}), sums, blocks)
    return sums, {name: joined(x, n_queries, _QUERY_DIM[name]) for name, x in outs.items()}


def _positions(offset: int, n: int) -> Any:
    return jnp.arange(n) + offset if offset else jnp.arange(n)
