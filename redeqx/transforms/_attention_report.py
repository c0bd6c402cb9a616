"""Reports which attentions of a traced function are fused, by which kernel, and why the others are not."""

from collections import Counter
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from ..dims import Inputs
from ..kernels import AttentionSetting, dense_bytes, kernel_of
from ..tracing import Body, all_inside, line_of, n_bytes, n_iterations, normal
from ._fuse_attention import FuseAttention, describe, drop_known_mask, find_attentions


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


def attentions(
    closed: Any, platform: str = "cpu", split: NamedSharding | None = None, inputs: Inputs | None = None
) -> Attentions:
    """Finds the attentions of a traced function.

    **Arguments:**

    - `platform`: the target platform.
    - `split`, `inputs`: as in `FuseAttention`.
    """
    found, closed = Attentions(Counter(), {}, {}), normal(closed)
    body, rule = Body(closed), FuseAttention(split, inputs=inputs).of(closed)

    def record_fused(setting: AttentionSetting, operands: list[Any], queries: Any, line: str, times: int) -> None:
        with_split = rule.with_split(setting, queries)
        found.fused[f"{describe(setting)}, {kernel_of(platform, with_split, operands)}"] += times
        record_dense(f"a mask or bias at {line}", dense_bytes(platform, with_split, operands))

    def record_dense(origin: str, size: int) -> None:
        if size := size // AttentionSetting(1.0, split=split).n_shards(0, 1, 2):
            found.dense[origin] = max(found.dense.get(origin, 0), size)

    def visit(closed: Any, times: int) -> None:
        fused: set[Any] = set()
        for eqn, attention in find_attentions(body, closed.jaxpr.eqns):
            if isinstance(attention, str):
                line = line_of(eqn)
                found.unfused[line] = attention
                record_dense(f"the weights at {line}", n_bytes(eqn.outvars[0]))
            else:
                record_fused(*attention.shapes(), attention.q.atom, line_of(attention.out[0]), times)
                fused.update(attention.eqns)
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name == "attention":
                setting, kept = drop_known_mask(body, eqn)
                record_fused(setting, [eqn.invars[i].aval for i in kept], eqn.invars[0], line_of(eqn), times)
            if eqn not in fused:
                inner_times = times * n_iterations(eqn)
                for inner in all_inside(eqn):
                    visit(inner, inner_times)

    visit(closed, 1)
    return found
