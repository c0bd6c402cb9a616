"""Attention in plain XLA, a block of queries at a time: the scores of all queries never exist at once.

The forward pass keeps the output and the log of each softmax's sum, and the backward pass computes the weights again from
those (FlashAttention, arXiv:2205.14135, with blocks of queries only). XLA partitions it by itself, along rows and heads.
All arrays have their leading dims as one, `B`; an optional operand may have 1 in its place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from ._setting import MASKED, Setting, seen

BLOCK = 256  # queries of a block, at most

Operands = dict[str, Any]


def forward(setting: Setting, q: Any, k: Any, v: Any, extras: Operands, most: int = BLOCK) -> tuple[Any, Any]:
    """The output `[B, T, N, H]` and the log of the softmaxes' sums, float32 `[B, N, T]`.

    **Arguments:**

    - `most`: queries of a block.
    """
    n_queries, groups, einsum = q.shape[1], k.shape[2], _einsum(setting)
    keys, values = _heads_first(k), _heads_first(v)

    def of_block(sums: Operands, block: Operands) -> tuple[Operands, Operands]:
        scores = _scores(setting, block, keys)
        most = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))  # a softmax does not depend on it
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, -1, keepdims=True)
        kept = _dropped(setting, weights, block)
        out = einsum("bgrts,bgsh->bgrth", kept.astype(v.dtype), values)
        log_sum = jnp.log(total) + most
        return sums, {"out": (out / total).astype(q.dtype), "log_sum": log_sum[..., 0]}

    _, outs = _by_block(of_block, {}, most, n_queries, {"q": _queries_first(q, groups), **_by_head(extras, groups)})
    return rearrange(outs["out"], "b g r t h -> b t (g r) h"), rearrange(outs["log_sum"], "b g r t -> b (g r) t")


def backward(setting: Setting, q: Any, k: Any, v: Any, extras: Operands, out: Any, log_sum: Any, g: Any) -> list[Any]:
    """The gradients of queries, keys, values and, where there is one, the bias.

    **Arguments:**

    - `out`, `log_sum`: what `forward` returned.
    - `g`: the gradient of the output.
    """
    n_queries, groups, einsum = q.shape[1], k.shape[2], _einsum(setting)
    keys, values = _heads_first(k), _heads_first(v)
    # The sum over keys of weights times their gradients, which the derivative of a softmax subtracts.
    mean = einsum("btnh,btnh->bnt", out, g)
    of_rows = {name: rearrange(x, "b (g r) t -> b g r t", g=groups) for name, x in (("log_sum", log_sum), ("mean", mean))}
    operands = {"q": _queries_first(q, groups), "g": _queries_first(g, groups), **of_rows, **_by_head(extras, groups)}
    bias = operands.get("bias")
    is_shared = bias is not None and bias.shape[-2] == 1 != n_queries  # all blocks add to its gradient

    def of_block(sums: Operands, block: Operands) -> tuple[Operands, Operands]:
        scores = _scores(setting, block, keys)
        is_seen = scores > MASKED / 2 if setting.may_see_nothing else None
        # Not by `log_sum`: where scores are large, in float32 their maximum swallows the log of the sum.
        weights = jax.nn.softmax(scores)
        of_weights = einsum("bgrth,bgsh->bgrts", block["g"], values)
        of_scores = weights * (_dropped(setting, of_weights, block) - block["mean"][..., None])
        if is_seen is not None:
            of_scores = jnp.where(is_seen, of_scores, 0.0)
        weights = _dropped(setting, weights, block).astype(g.dtype)
        given = (of_scores * setting.scale).astype(q.dtype)
        added = {
            "v": einsum("bgrts,bgrth->bgsh", weights, block["g"]),
            "k": einsum("bgrts,bgrth->bgsh", given, block["q"]),
        }
        outs = {"q": einsum("bgrts,bgsh->bgrth", given, keys).astype(q.dtype)}
        if bias is not None:
            of_bias = _summed_to(of_scores, (*bias.shape[:3], *block["bias"].shape[3:]))
            (added if is_shared else outs)["bias"] = of_bias
        return {name: sums[name] + x for name, x in added.items()}, outs

    zeros = {"k": jnp.zeros(keys.shape, jnp.float32), "v": jnp.zeros(values.shape, jnp.float32)}
    if bias is not None and is_shared:
        zeros["bias"] = jnp.zeros(bias.shape, jnp.float32)
    sums, outs = _by_block(of_block, zeros, BLOCK, n_queries, operands)
    found = [rearrange(outs["q"], "b g r t h -> b t (g r) h").astype(q.dtype)]
    found += [rearrange(sums[name], "b g s h -> b s g h").astype(x.dtype) for name, x in (("k", k), ("v", v))]
    if bias is not None:
        of_bias = (sums if is_shared else outs)["bias"]
        found.append(rearrange(of_bias, "b g r t s -> b (g r) t s").astype(extras["bias"].dtype))
    return found


def _einsum(setting: Setting) -> Callable[..., Any]:
    """Products with sums in float32."""
    return partial(jnp.einsum, precision=setting.precision, preferred_element_type=jnp.float32)


# --- heads before queries and keys, so that products have their batch dims first --------------------------------------


def _heads_first(x: Any) -> Any:
    return rearrange(x, "b s g h -> b g s h")


def _queries_first(x: Any, groups: int) -> Any:
    return rearrange(x, "b t (g r) h -> b g r t h", g=groups)


def _by_head(extras: Operands, groups: int) -> Operands:
    """The optional operands, those with a dim of heads as `[B, G or 1, R or 1, T, S]`."""
    split = {}
    for name in ("bias", "mask"):
        if (x := extras.get(name)) is not None:
            split[name] = x[:, None] if x.shape[1] == 1 else rearrange(x, "b (g r) t s -> b g r t s", g=groups)
    return {**extras, **split}


def _scores(setting: Setting, block: Operands, keys: Any) -> Any:
    """The scores of a block of queries, float32 `[B, G, R, t, S]`, `MASKED` where a key is not seen."""
    scores = _einsum(setting)("bgrth,bgsh->bgrts", block["q"], keys) * setting.scale
    if "bias" in block:
        # Low as it may be, a key that is seen weighs more than one that is not.
        scores = scores + jnp.maximum(block["bias"].astype(jnp.float32), MASKED / 4)
    sees = seen(setting, block["rows"], keys.shape[2], block)
    return scores if sees is None else jnp.where(sees, scores, MASKED)


def _dropped(setting: Setting, weights: Any, block: Operands) -> Any:
    """Weights `[B, G, R, t, S]`, or what is multiplied by them, with some set to zero and the others enlarged."""
    if not setting.dropout:
        return weights
    groups, shared, _, n_keys = weights.shape[1:]

    def of_query(key: Any, row: Any) -> Any:  # whatever block it is in
        return jax.random.bernoulli(jax.random.fold_in(key, row), 1 - setting.dropout, (groups, shared, n_keys))

    kept = jax.vmap(jax.vmap(of_query, (None, 0)), (0, None))(block["key"], block["rows"])
    return jnp.where(rearrange(kept, "b t g r s -> b g r t s"), weights / (1 - setting.dropout), 0.0)


def _summed_to(x: Any, shape: Sequence[int]) -> Any:
    """The sum over the dims along which a shape has 1."""
    dims = [dim for dim, size in enumerate(shape) if size == 1 != x.shape[dim]]
    return jnp.sum(x, dims, keepdims=True) if dims else x


# --- blocks -----------------------------------------------------------------------------------------------------------

# The dim of the queries in each operand and output; where its size is 1, all blocks share the operand.
_QUERIES = {"q": 3, "g": 3, "out": 3, "log_sum": 3, "mean": 3, "bias": 3, "mask": 3, "query_segments": 1}


def _by_block(
    fn: Callable[[Operands, Operands], tuple[Operands, Operands]],
    sums: Operands,
    most: int,
    n_queries: int,
    operands: Operands,
) -> tuple[Operands, Operands]:
    """`fn(sums, block) -> sums, outputs` for one block of at most `most` queries after another; their outputs are joined.

    Each block is given the positions of its queries as `rows`. The last one is padded.
    """
    n = max(1, -(-n_queries // most))
    shared = {name: x for name, x in operands.items() if name not in _QUERIES or x.shape[_QUERIES[name]] == 1 != n_queries}
    if n == 1:
        return fn(sums, {**operands, "rows": jnp.arange(n_queries)})
    size = -(-n_queries // n)
    blocks: Operands = {"rows": jnp.arange(n * size).reshape(n, size)}
    for name in operands.keys() - shared.keys():
        x, dim = operands[name], _QUERIES[name]
        if n * size != n_queries:
            x = jnp.pad(x, [(0, n * size - n_queries if i == dim else 0) for i in range(x.ndim)])
        blocks[name] = jnp.moveaxis(x.reshape(*x.shape[:dim], n, size, *x.shape[dim + 1 :]), dim, 0)
    sums, outs = jax.lax.scan(lambda sums, block: fn(sums, {**shared, **block}), sums, blocks)
    joined = {}
    for name, x in outs.items():
        dim = _QUERIES[name]
        x = jnp.moveaxis(x, 0, dim)
        x = x.reshape(*x.shape[:dim], n * size, *x.shape[dim + 2 :])
        joined[name] = jax.lax.slice_in_dim(x, 0, n_queries, axis=dim)
    return sums, joined
