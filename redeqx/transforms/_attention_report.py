"""Reports the attention in a traced function: which of it is fused, by which kernel, and why the rest is not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from ..compiled import line_of
from ..kernels import Setting, dense_bytes, kernel_of
from ..tracing import Body, inlined, insides, n_iterations, or_as_written, view
from ._fuse_attention import attention_of, attentions_in, described, without_known_mask
from ._scores import Scores, follow_scores, softmax_of


class Attentions(NamedTuple):
    """The attentions of a function.

    **Arguments:**

    - `fused`: how many the rule computes, by what they see and by which kernel.
    - `left`: the lines of code of those that it leaves as they are written, each with the reason.
    - `dense`: the bytes on a device of each `[queries, keys]` array that a step still makes, by what makes it.
    """

    fused: Counter[str]
    left: dict[str, str]
    dense: dict[str, int]


def attentions(closed: Any, platform: str = "cpu", split: NamedSharding | None = None) -> Attentions:
    """The attentions of a traced function.

    **Arguments:**

    - `platform`, `split`: what is compiled for.
    """
    found = Attentions(Counter(), {}, {})

    def count(setting: Setting, arrays: Sequence[Any], line: str, times: int) -> None:
        here = replace(setting, split=split)
        q, k, v, *extras = arrays
        operands = q, k, v, dict(zip(setting.names, extras, strict=True))
        found.fused[f"{described(setting)}, {kernel_of(platform, here, *operands)}"] += times
        note(f"a mask or bias at {line}", dense_bytes(platform, here, *operands), here)

    def note(what: str, n_bytes: int, setting: Setting) -> None:
        if n_bytes := n_bytes // (setting.row_shards * setting.head_shards):
            found.dense[what] = max(found.dense.get(what, 0), n_bytes)

    def look(body: Body, times: int) -> None:
        taken: set[int] = set()
        n_left, outer = len(found.left), list[Any]()
        for attention in attentions_in(body):
            if attention.group(body).is_closed_in(body):
                count(*attention.operands(), line_of(attention.out[0]), times)
                taken |= {id(eqn) for eqn in attention.eqns}
        for eqn in body.eqns:
            if eqn.primitive.name == "attention":
                setting, kept = without_known_mask(body, eqn)
                count(setting, [eqn.invars[i].aval for i in kept], line_of(eqn), times)
            elif id(eqn) not in taken and (reason := _why_left(body, eqn)) is not None:
                line, weights = line_of(eqn), eqn.outvars[0].aval
                found.left[line] = reason
                note(f"the weights at {line}", weights.size * weights.dtype.itemsize, Setting(1.0, split=split))
            if id(eqn) not in taken:
                outer += [eqn] * _is_outer(eqn)
                inner_times = times * n_iterations(eqn)
                for index, inner in enumerate(insides(eqn)):
                    if inner.role not in ("condition", "manual"):
                        look(body.inside(eqn, index), inner_times)
        for eqn in outer if len(found.left) == n_left else ():  # of what no softmax was found
            scores = eqn.outvars[0].aval
            note(f"the products at {line_of(eqn)}", scores.size * scores.dtype.itemsize, Setting(1.0, split=split))

    look(Body(inlined(closed), [None] * len(closed.jaxpr.invars)), 1)
    return found


def _is_outer(eqn: Any) -> bool:
    """Whether an equation is a product, a row at a time, of much more entries than what it multiplies, as scores are."""
    if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return False
    return eqn.outvars[0].aval.size > 4 * sum(operand.aval.size for operand in eqn.invars)


def _why_left(body: Body, eqn: Any) -> str | None:
    """Why a softmax between two products is left as it is; None where it is none."""
    return or_as_written(partial(_reason_of, body, eqn), None, "a softmax that is left")


def _reason_of(body: Body, eqn: Any) -> str | None:
    softmax = softmax_of(body, eqn)
    if softmax is None:
        return None
    source, _, _ = softmax
    scores = Scores()
    is_of_product = follow_scores(body, source, tuple(range(source.aval.ndim)), scores)
    readers = [reader for reader in body.readers(eqn.outvars[0]) if reader is not None]
    products = [product for reader in readers if (product := _product_from(body, reader)) is not None]
    if is_of_product and products:
        reasons = [reason for product in products if isinstance(reason := attention_of(body, product), str)]
        if reasons:
            return reasons[0]
        if all(attention_of(body, product) is None for product in products):
            return f"`{readers[0].primitive.name}` between the weights and the values"
        return "its scores or weights are also read elsewhere"
    if is_of_product and readers and _MAY_DROP & {reader.primitive.name for reader in readers}:
        return f"`{readers[0].primitive.name}` between the weights and the values, as of a dropout or a mask"
    if scores.stop is not None and products and scores.stop in _CAPS:
        return f"`{scores.stop}` between the scores and their softmax"
    return None


_MAY_DROP = {"mul", "select_n", "div"}
_CAPS = {"tanh", "mul", "div", "max", "min", "clamp", "logistic", "erf", "exp", "neg", "select_n", "stop_gradient"}


def _product_from(body: Body, eqn: Any) -> Any | None:
    """The product that reads what an equation makes, perhaps through views that it alone reads."""
    while eqn is not None and eqn.primitive.name != "dot_general":
        if view(eqn) is None or len(readers := body.readers(eqn.outvars[0])) != 1:
            return None
        eqn = readers[0]
    return eqn
