"""Reports which attentions of a traced function are fused, by which kernel, and why the others are not."""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding

from ..dims import Inputs
from ..kernels import AttentionSetting, kernel_of
from ..machine import SEQUENCE, split_heads
from ..partition import inputs_of
from ..tracing import Body, Trace, all_inside, line_of, n_iterations, normal, or_as_written, shortened
from ._fuse_attention import FuseAttention, describe, drop_known_mask, find_attentions


class Attentions(NamedTuple):
    """The attentions of a function: how many are fused, by a description of their mask and kernel, and why others are not,
    by their line."""

    fused: Counter[str]
    unfused: dict[str, str]


def describe_attention(trace: Trace, mesh: Mesh) -> tuple[str, ...]:
    """Returns how a traced loss computes attention on a mesh: a text for each kind that is fused, and for each line that is
    not."""
    inputs = inputs_of(trace) if mesh.shape[SEQUENCE] > 1 else None
    search = partial(attentions, trace.closed, mesh.devices.flat[0].platform, split_heads(mesh), inputs)
    fused, left = or_as_written(search, lambda: Attentions(Counter(), {}), "the description of attention")
    notes = [f"{n} fused ({what})" for what, n in fused.items()]
    return (*notes, *(f"as written at {shortened(line) or 'an unknown line'}: {reason}" for line, reason in left.items()))


def attentions(
    closed: Any, platform: str = "cpu", split: NamedSharding | None = None, inputs: Inputs | None = None
) -> Attentions:
    """Finds the attentions of a traced function on a platform; `split` and `inputs` are as in `FuseAttention`."""
    found, closed = Attentions(Counter(), {}), normal(closed)
    body, rule = Body(closed), FuseAttention(split, inputs=inputs).of(closed)

    def record_fused(setting: AttentionSetting, operands: list[Any], queries: Any, times: int) -> None:
        kernel = kernel_of(platform, rule.with_split(setting, queries), operands)
        found.fused[f"{describe(setting)}, {kernel}"] += times

    def visit(closed: Any, times: int) -> None:
        fused: set[Any] = set()
        for eqn, attention in find_attentions(body, closed.jaxpr.eqns):
            if isinstance(attention, str):
                found.unfused[line_of(eqn)] = attention
            else:
                record_fused(*attention.shapes(), attention.q.atom, times)
                fused.update(attention.eqns)
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name == "attention":
                setting, kept = drop_known_mask(body, eqn)
                record_fused(setting, [eqn.invars[i].aval for i in kept], eqn.invars[0], times)
            if eqn not in fused:
                inner_times = times * n_iterations(eqn)
                for inner in all_inside(eqn):
                    visit(inner, inner_times)

    visit(closed, 1)
    return found
