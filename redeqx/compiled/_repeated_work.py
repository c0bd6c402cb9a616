"""Checks that each device computes only its share of a step: compares the compiled program's products with the trace's.

XLA splits what it can. Where it cannot (a sort, a cumulative sum or a scatter over all rows of the batch), it gathers the
rows, and every device computes what follows for all of them, without a warning. So this module counts the FLOPs of matmuls
and convolutions in the compiled program by the line of code that they come from, and compares them with those of the traced
step.

Work that the plan repeats on purpose is allowed for: every device computes a product of parameters alone, and every shard of
the model axis computes a product that this axis does not split. Work outside the loss, such as an optimizer's matmuls, is
not checked.
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
from ..tracing import all_inside, n_iterations, product_flops
from ._hlo import Instruction, Module, arrays_of
from ._sources import frames_of, line_among, line_of, shortened

MAX_RATIO = 1.5  # of a device's work to its share of the step; more than that is reported
_N_LINES = 5


class _Count(NamedTuple):
    """FLOPs by line of code: of all executions, and with one iteration of each loop."""

    all: Counter[str]
    once: Counter[str]


def excess(traced: Any, module: Module, repeats: Mapping[str, float]) -> tuple[float, list[tuple[str, float]]] | None:
    """The ratio of each device's work to its share of a step, and the lines that cause it, the largest first, each with its
    own ratio. None if the ratio is at most `MAX_RATIO`.

    **Arguments:**

    - `traced`: the jaxpr of the step.
    - `module`: the program compiled from it, as one device runs it.
    - `repeats`: for each line of the loss with a product, the number of devices on which the plan repeats it.
    """
    unknown: set[str] = set()  # lines in `while` loops, whose length is not in the trace
    whole, done = _of_jaxpr(traced, unknown), _of_module(module)
    shares: dict[str, float] = {}
    works: dict[str, float] = {}
    for line in repeats.keys() & whole.all.keys():
        of_trace, of_program = (whole.once, done.once) if line in unknown else (whole.all, done.all)
        shares[line] = of_trace[line] * repeats[line] / module.n_devices
        works[line] = of_program[line]
    ratio = sum(works.values()) / max(1.0, sum(shares.values()))
    if ratio <= MAX_RATIO:
        return None
    lines = sorted(works, key=lambda line: shares[line] - works[line])
    lines = [line for line in lines if works[line] > MAX_RATIO * shares[line]]
    return ratio, [(line, works[line] / shares[line]) for line in lines[:_N_LINES]]


def message(ratio: float, lines: Iterable[tuple[str, float]], n_devices: int) -> str:
    """The text of the warning."""
    where = "; ".join(f"{shortened(line)} ({times:.1f} times)" for line, times in lines)
    return (
        f"`loss_fn`: expected each of {n_devices} devices to compute 1/{n_devices} of a step, got {ratio:.1f} times that: "
        f"what is computed at {where} is repeated on several devices. Products without rows of the batch, and what follows "
        "a sort, a running sum, a scatter or a lookup over all its rows, cannot be split: compute them for each example, "
        "under `jax.vmap`."
    )


# --- counts of a trace ---------------------------------------------------------------------------------------------------


def _of_jaxpr(jaxpr: Any, unknown: set[str]) -> _Count:
    count = _Count(Counter(), Counter())
    for eqn in jaxpr.eqns:
        if (flops := product_flops(eqn)) is not None:
            line = line_of(eqn)
            count.all[line] += flops
            count.once[line] += flops
            continue
        inner = [_of_jaxpr(found.jaxpr, unknown) for found in all_inside(eqn)]
        if eqn.primitive.name == "cond":
            inner = _longest(inner)
        times = n_iterations(eqn)
        for of in inner:
            if eqn.primitive.name == "while":
                unknown.update(of.all)
            _add(count, of, times)
    return count


def _longest(branches: list[_Count]) -> list[_Count]:
    return sorted(branches, key=lambda of: of.all.total())[-1:]


def _add(count: _Count, other: _Count, times: int) -> None:
    for line, flops in other.all.items():
        count.all[line] += flops * times
    count.once.update(other.once)


# --- counts of a compiled program --------------------------------------------------------------------------------------


def _of_module(module: Module) -> _Count:
    made: dict[str, _Count] = {}  # by computation

    def of(name: str) -> _Count:
        if name in made:
            return made[name]
        count = made[name] = _Count(Counter(), Counter())
        types = {instruction.name: instruction.type for instruction in module.computations[name]}
        for instruction in module.computations[name]:
            flops = _flops(instruction, types)
            if flops:
                line = line_among(frames_of(module.source(instruction)))
                count.all[line] += flops
                count.once[line] += flops
                continue
            called = [(role, inner) for role, inner in instruction.calls() if inner in module.computations]
            inner = [of(inner) for role, inner in called if role != "condition"]
            if instruction.opcode == "conditional":
                inner = _longest(inner)
            times = (module.trip_count(instruction) or 1) if instruction.opcode == "while" else 1
            for other in inner:
                _add(count, other, times)
        return count

    return of(module.entry)


def _flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """The FLOPs of a matmul or a convolution, also of a call to a library such as cuBLAS; 0 for other instructions."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    rest = instruction.rest
    shapes = [arrays_of(types.get(name, "")) for name in instruction.operands[:2]]
    if len(shapes) < 2 or not all(shapes) or not arrays_of(instruction.type):
        return 0
    (_, lhs), (_, rhs) = shapes[0][0], shapes[1][0]
    n_out = math.prod(arrays_of(instruction.type)[0][1])
    # In XLA's own syntax, and in the settings of a call to cuBLAS.
    if contracted := re.search(r'lhs_contracting_(?:dims=\{|dimensions":\[)([\d,"]*)', rest):
        return 2 * n_out * _product(lhs, (int(dim) for dim in re.findall(r"\d+", contracted.group(1))))
    if labels := re.search(r"dim_labels=\w+_(\w+)->", rest):
        return 2 * n_out * math.prod(rhs) // rhs[labels.group(1).index("o")]
    return 0


def _product(shape: tuple[int, ...], dims: Iterable[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


# --- the check of a run ------------------------------------------------------------------------------------------------


@contextmanager
def checked(step: Any, args: tuple[Any, ...], plan: Any, groups: PyTree[jax.Array]) -> Iterator[None]:
    """A context for the first call of a jitted training step. Warns, in process 0, if each device computes much more than
    its share.

    Nothing is traced, lowered or compiled twice: the call finds the trace and the lowered program in JAX's caches, and the
    check finds the compiled program there.

    **Arguments:**

    - `step`, `args`: the jitted step and the arguments of the call.
    - `plan`: of the model.
    - `groups`: the step's micro-batches, `[n, rows, ...]`. Where the rows do not divide over the batch shards, every device
        computes all of them, and nothing is checked.
    """
    is_split = all(x.shape[1] % n_batch_shards(plan.mesh) == 0 for x in jax.tree.leaves(groups))
    if plan.repeats is None or plan.mesh.size == 1 or not is_split or jax.process_index():
        yield
        return
    traced = step.trace(*args)
    lowered = traced.lower()
    yield
    module = Module.of(lowered.compile().as_text() or "")
    if (more := excess(traced.jaxpr.jaxpr, module, plan.repeats)) is not None:
        warn(message(*more, module.n_devices))
