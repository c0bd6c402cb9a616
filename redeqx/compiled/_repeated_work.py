"""Checks that each device computes only its share of a step: compares the compiled program's products with the trace's.

XLA cannot split some operations, such as a sort, a cumulative sum or a scatter over all rows of the batch. It gathers the
rows instead, and every device computes the following operations for all rows, without a warning. (A rule of `transforms`
splits the matmuls among them, where a dim divides.) So this module counts the FLOPs of matmuls and convolutions in the
compiled program by their line of code, and compares them with those of the traced step.

The check allows for work that the plan repeats on purpose: every device computes the products of parameters only, and every
shard of the model axis computes the products that this axis does not split. Work outside the loss, such as an optimizer's
matmuls, is not checked. Neither is a line with a product of rows in groups: its cost depends on the sizes of the groups, and
on the platform, which may multiply all rows with all groups.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ..errors import warn
from ..machine import n_batch_shards
from ..tracing import GROUPED, Entered, entered, fold, line_among, line_of, n_iterations, product_flops, shortened
from ._hlo import Instruction, Module, integers

MAX_RATIO = 1.5  # of a device's work to its share of the step; larger ratios are reported
_N_LINES = 5


class _Count(NamedTuple):
    """FLOPs by line of code: of all iterations of loops (infinite if unknown), and of one iteration of each loop."""

    all: Counter[str]
    once: Counter[str]


def excess(
    traced: Any, module: Module, repeats: Mapping[str, float], gathered: Mapping[str, float] | None = None
) -> tuple[float, list[tuple[str, float]]] | None:
    """Returns the ratio of each device's work to its share of a step, and the lines that cause it, with their own ratios.

    The lines with the most excess work come first. Returns None if the ratio is at most `MAX_RATIO`. `repeats` has, for each
    line of the loss with a product, the number of devices on which the plan repeats it, and `gathered` for lines where rows
    are gathered. Products without a line are checked only if there are any of these.
    """
    total, per_device = _of_jaxpr(traced), flops_by_line(module)
    if gathered:
        # The program names a caller's line where the trace has none, as inside loops and for code without a file.
        repeats = {**gathered, **repeats}
        for counts in per_device:
            counts[""] = sum(flops for line, flops in counts.items() if line not in total.all or not line)
    else:
        repeats = {line: n for line, n in repeats.items() if line}
    shares: dict[str, float] = {}
    works: dict[str, float] = {}
    for line in repeats.keys() & total.all.keys() - _lines_by_group(traced):
        is_unknown = not math.isfinite(total.all[line])  # in a `while` loop, whose length is not in the trace
        of_trace, of_program = (total.once, per_device.once) if is_unknown else (total.all, per_device.all)
        shares[line] = of_trace[line] * repeats[line] / module.n_devices
        works[line] = of_program[line]
    ratio = sum(works.values()) / max(1.0, sum(shares.values()))
    if ratio <= MAX_RATIO:
        return None
    lines = sorted(works, key=lambda line: shares[line] - works[line])
    lines = [line for line in lines if works[line] > MAX_RATIO * shares[line]]
    return ratio, [(line, works[line] / shares[line]) for line in lines[:_N_LINES]]


def message(
    ratio: float, lines: Iterable[tuple[str, float]], n_devices: int, gathers: Iterable[tuple[str, str]] = ()
) -> str:
    """Returns the text of the warning. `gathers` are pairs of a line where rows are gathered, and why."""
    where = "; ".join(f"{shortened(line) or 'an unknown line'} ({times:.1f} times)" for line, times in lines)
    found = "; ".join(f"at {shortened(line) or 'an unknown line'}, as {why}" for line, why in list(gathers)[:_N_LINES])
    because = f"Rows are gathered {found}. " if found else ""
    return (
        f"`loss_fn`: expected each of {n_devices} devices to compute 1/{n_devices} of a step, got {ratio:.1f} times that: "
        f"the work of {where} is repeated on several devices. {because}Work without rows of the batch, as after a sort, "
        "cumulative sum, scatter or lookup over all rows, is split only in matmuls, along a dim that divides over the "
        "devices. Pad that dim, or compute the work for each example, under `jax.vmap`."
    )


# --- counts ------------------------------------------------------------------------------------------------------------


def _of_jaxpr(jaxpr: Any) -> _Count:
    def count(eqn: Any) -> dict[str, int] | None:
        flops = product_flops(eqn)
        return None if flops is None else {line_of(eqn): flops}

    def enter(eqn: Any) -> Entered:
        return entered(eqn)._replace(times=math.inf) if eqn.primitive.name == "while" else entered(eqn)

    def once(eqn: Any) -> Entered:
        return entered(eqn)._replace(times=entered(eqn).times / n_iterations(eqn))

    return _Count(fold(jaxpr, count, enter), fold(jaxpr, count, once))


def _lines_by_group(jaxpr: Any) -> set[str]:
    """Returns the lines with a product of rows in groups."""

    def count(eqn: Any) -> dict[str, int] | None:
        return {line_of(eqn): 1} if eqn.primitive.name in GROUPED else None

    return set(fold(jaxpr, count))


def flops_by_line(module: Module) -> _Count:
    """Returns the FLOPs of a program's matmuls and convolutions by line of code, as one device runs it."""

    def count(line: Instruction) -> dict[str, int] | None:
        flops = flops_of(line)
        return {line_among(line.source): flops} if flops else None

    return _Count(*(module.total(count, once=once) for once in (False, True)))


def flops_of(instruction: Instruction) -> int:
    """Counts the FLOPs of a matmul or a convolution, which may be a call to cuBLAS. Returns 0 for all others."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands = [operand.arrays for operand in instruction.operands[:2]]
    if len(operands) < 2 or not all(operands) or not instruction.arrays:
        return 0
    lhs, rhs = (arrays[0].shape for arrays in operands)
    n_out = math.prod(instruction.arrays[0].shape)
    # In XLA's own syntax, and in the settings of a call to cuBLAS.
    if contracted := re.search(r'lhs_contracting_(?:dims=\{|dimensions":\[)([\d,"]*)', instruction.rest):
        return 2 * n_out * math.prod(lhs[dim] for dim in integers(contracted.group(1)))
    if labels := re.search(r"dim_labels=\w+_(\w+)->", instruction.rest):
        # The input may have zeros in between, as in the gradient of one with strides. A TPU's compiler makes convolutions of
        # matmuls too: a batch dim becomes a window over zeros and the one entry it needs.
        zeros = re.search(r"lhs_dilate=([\dx]+)", instruction.rest)
        n_zeros = math.prod(integers(zeros.group(1))) if zeros else 1
        kernel = rhs
        # cuDNN's gradients have the labels of the convolution itself, whose output's gradient is one of their operands.
        if "__cudnn$convBackwardInput" in instruction.rest:
            n_out = math.prod(lhs)
        elif "__cudnn$convBackwardFilter" in instruction.rest:
            n_out, kernel = math.prod(rhs), instruction.arrays[0].shape
        return 2 * n_out * math.prod(kernel) // kernel[labels.group(1).index("o")] // n_zeros
    return 0


# --- the check of a run ------------------------------------------------------------------------------------------------


@contextmanager
def checked(step: Any, args: tuple[Any, ...], plan: Any, groups: PyTree[jax.Array]) -> Iterator[None]:
    """A context for the first call of a jitted training step. Process 0 warns if devices compute much more than their share.

    Nothing is traced, lowered or compiled twice: the call finds the trace and the lowered program in JAX's caches, and the
    check finds the compiled program there.

    `groups` are the step's micro-batches, `[n, rows, ...]`. If the rows do not divide over the batch shards, every device
    computes all of them, and nothing is checked.
    """
    is_split = all(x.shape[1] % n_batch_shards(plan.mesh) == 0 for x in jax.tree.leaves(groups))
    if plan.repeats is None or plan.mesh.size == 1 or not is_split or jax.process_index():
        yield
        return
    traced = step.trace(*args)
    lowered = traced.lower()
    yield
    if not (text := lowered.compile().as_text()):  # a backend without HLO text
        return
    module = Module.of(text)
    # Products that the plan does not know may be repeated over the model axis.
    gathers = plan.row_use.gathers
    gathered = dict.fromkeys((line for line, _ in gathers), module.n_devices / n_batch_shards(plan.mesh))
    if (more := excess(traced.jaxpr.jaxpr, module, plan.repeats, gathered)) is not None:
        warn(message(*more, module.n_devices, gathers))
