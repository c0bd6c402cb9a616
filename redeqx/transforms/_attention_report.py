"""Reports which attentions of a traced function are fused, by which kernel, and why the others are not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from ..kernels import Setting, dense_bytes, kernel_of
from ..tracing import Body, inlined, insides, line_of, n_iterations, or_as_written, view
from ._fuse_attention import describe, drop_known_mask, find_attentions, match_attention
from ._scores import Scores, match_softmax, trace_scores


class Attentions(NamedTuple):
    """The attentions of a function.

    **Arguments:**

    - `fused`: the number of fused attentions, by a description of their mask and kernel.
    - `unfused`: the reason why an attention is not fused, by its line of code.
    - `dense`: the bytes per device of each `[queries, keys]` array that a step still materializes, by its origin.
    """

    fused: Counter[str]
    unfused: dict[str, str]
    dense: dict[str, int]


def attentions(closed: Any, platform: str = "cpu", split: NamedSharding | None = None) -> Attentions:
    """Finds the attentions of a traced function.

    **Arguments:**

    - `platform`, `split`: the target platform, and the split of queries as in `FuseAttention`.
    """
    found = Attentions(Counter(), {}, {})

    def record_fused(setting: Setting, arrays: Sequence[Any], line: str, times: int) -> None:
        with_split = replace(setting, split=split)
        q, k, v, *extras = arrays
        operands = q, k, v, dict(zip(setting.names, extras, strict=True))
        found.fused[f"{describe(setting)}, {kernel_of(platform, with_split, *operands)}"] += times
        record_dense(f"a mask or bias at {line}", dense_bytes(platform, with_split, *operands), with_split)

    def record_dense(origin: str, n_bytes: int, setting: Setting) -> None:
        if n_bytes := n_bytes // (setting.row_shards * setting.head_shards):
            found.dense[origin] = max(found.dense.get(origin, 0), n_bytes)

    def visit(body: Body, times: int) -> None:
        fused_ids: set[int] = set()
        score_like, has_unfused = list[Any](), False
        for attention in find_attentions(body):
            if attention.group(body).is_closed_in(body):
                record_fused(*attention.operands(), line_of(attention.out[0]), times)
                fused_ids |= {id(eqn) for eqn in attention.eqns}
        for eqn in body.eqns:
            if eqn.primitive.name == "attention":
                setting, kept = drop_known_mask(body, eqn)
                record_fused(setting, [eqn.invars[i].aval for i in kept], line_of(eqn), times)
            elif id(eqn) not in fused_ids and (reason := _why_unfused(body, eqn)) is not None:
                line, weights = line_of(eqn), eqn.outvars[0].aval
                found.unfused[line], has_unfused = reason, True
                record_dense(f"the weights at {line}", weights.size * weights.dtype.itemsize, Setting(1.0, split=split))
            if id(eqn) not in fused_ids:
                if _is_score_like(eqn):
                    score_like.append(eqn)
                inner_times = times * n_iterations(eqn)
                for index, inner in enumerate(insides(eqn)):
                    if inner.role not in ("condition", "manual"):
                        visit(body.inside(eqn, index), inner_times)
        if has_unfused:  # a softmax of this body explains the products
            return
        for eqn in score_like:
            scores = eqn.outvars[0].aval
            record_dense(f"the products at {line_of(eqn)}", scores.size * scores.dtype.itemsize, Setting(1.0, split=split))

    visit(Body(inlined(closed), [None] * len(closed.jaxpr.invars)), 1)
    return found


def _is_score_like(eqn: Any) -> bool:
    """Whether an equation is a batched product whose output is much larger than its operands, as scores are."""
    if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return False
    return eqn.outvars[0].aval.size > 4 * sum(operand.aval.size for operand in eqn.invars)


def _why_unfused(body: Body, eqn: Any) -> str | None:
    """Returns why the softmax that an equation computes is not fused; None if it is no softmax between two products."""
    return or_as_written(partial(_find_reason, body, eqn), lambda: None, "the search for a softmax that is not fused")


def _find_reason(body: Body, eqn: Any) -> str | None:
    softmax = match_softmax(body, eqn)
    if softmax is None:
        return None
    source, _, _ = softmax
    scores = Scores()
    is_of_product = trace_scores(body, source, tuple(range(source.aval.ndim)), scores)
    readers = [reader for reader in body.readers(eqn.outvars[0]) if reader is not None]
    products = [product for reader in readers if (product := _following_product(body, reader)) is not None]
    if is_of_product and products:
        matches = [match_attention(body, product) for product in products]
        if reason := next((match for match in matches if isinstance(match, str)), None):
            return reason
        if all(match is None for match in matches):
            return f"`{readers[0].primitive.name}` between the weights and the values"
        return "its scores or weights are also used elsewhere"
    if is_of_product and readers and _DROPOUT & {reader.primitive.name for reader in readers}:
        return f"`{readers[0].primitive.name}` between the weights and the values, such as dropout or a mask"
    if scores.stopped_at is not None and products and scores.stopped_at in _SCORE_CHANGES:
        return f"`{scores.stopped_at}` between the scores and their softmax"
    return None


# Primitives that apply dropout or a mask to weights, and primitives that change scores, as a softcap does.
_DROPOUT = {"mul", "select_n", "div"}
_SCORE_CHANGES = {"tanh", "mul", "div", "max", "min", "clamp", "logistic", "erf", "exp", "neg", "select_n", "stop_gradient"}


def _following_product(body: Body, eqn: Any) -> Any | None:
    """Follows an equation forward through views with one reader; returns the product at their end, or None."""
    while eqn is not None and eqn.primitive.name != "dot_general":
        if view(eqn) is None or len(readers := body.readers(eqn.outvars[0])) != 1:
            return None
        eqn = readers[0]
    return eqn
