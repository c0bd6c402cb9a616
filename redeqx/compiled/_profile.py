"""Lists the costliest operations of a step, from a trace of the profiler and the step's HLO text.

The trace has the durations of instructions by name. The text has the operation and the line of code of each instruction.
"""

import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax

from ..monitor import aligned
from ._hlo import Instruction, Module, own_line, words_of

_TRAINING = f"{Path(__file__).parents[1] / 'training'}{os.sep}"
# Not counted: the instructions in their bodies are.
_CONTROL = {"while", "conditional", "call", "async-start", "async-done", "async-update"}
# A fusion is named after the first of these that it contains. They are ordered by cost.
_HEAVY = ("dot", "convolution", "custom-call", "sort", "scatter", "gather", "reduce")


@dataclass(frozen=True)
class Operation:
    """An instruction of the compiled step."""

    seconds: float  # the total time of its executions on one device in one step
    share: float  # of the step's time
    n: float  # the number of executions in a step
    kind: str  # the HLO operation: `fusion of dot`, `all-gather`, the target of a custom call
    op: str  # the JAX operation: `mlp/dot_general, backward`
    line: str  # of the user's code, `train.py:12`; empty if unknown


@dataclass(frozen=True)
class Profile:
    """A profile of some steps."""

    operations: tuple[Operation, ...]  # of a step, costliest first
    seconds: float  # the wall time of one step
    n_devices: int  # in the trace

    def text(self, n: int = 10) -> str:
        """Returns a table of the `n` costliest operations."""
        columns = ("time", "share", "times", "kind", "operation", "line")
        rows = [
            (f"{1e3 * each.seconds:.3f} ms", f"{each.share:.1%}", f"{each.n:.0f}", each.kind, each.op, each.line)
            for each in self.operations[:n]
        ]
        shown = sum(each.share for each in self.operations[:n])
        others = f", {len(self.operations) - n} others {sum(each.share for each in self.operations[n:]):.1%}"
        total = f"of {1e3 * self.seconds:.3f} ms a step: these {shown:.1%}" + (others if len(self.operations) > n else "")
        return "\n".join([*aligned([columns, *rows]), f"{total}; a device's mean over {self.n_devices}"])


def profile_of(trace: Path, text: str, n_steps: int) -> Profile | None:
    """Returns the profile of a step, or None if the trace has none of the step's instructions. The trace is the profiler's
    `*.xplane.pb`, of some complete steps; `text` is the optimised HLO, empty if the backend has none. Instructions with the
    same kind, JAX operation and line are added up."""
    if not text:
        return None
    module = Module.of(text)
    instructions = {each.name: each for lines in module.computations.values() for each in lines}
    name = re.match(r"HloModule ([\w.\-]+)", text)
    seconds: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    begin, end, devices = float("inf"), 0.0, set()
    for op, device, start, duration in _events(trace, name.group(1) if name else ""):
        if op not in instructions or instructions[op].opcode in _CONTROL:
            continue
        seconds[op] += duration
        times[op] += 1
        begin, end = min(begin, start), max(end, start + duration)
        devices.add(device)
    if not devices:
        return None
    n, step = n_steps * len(devices), (end - begin) / n_steps
    operations: dict[tuple[str, str, str], Operation] = {}
    for op, total in seconds.items():
        words = _names(instructions[op])
        old = operations.get(words, Operation(0.0, 0.0, 0.0, *words))
        took = old.seconds + total / n
        operations[words] = Operation(took, took / step, old.n + times[op] / n, *words)
    ordered = sorted(operations.values(), key=lambda each: each.seconds, reverse=True)
    return Profile(tuple(ordered), step, len(devices))


# --- the trace ---------------------------------------------------------------------------------------------------------


def _events(trace: Path, module: str) -> Iterator[tuple[str, Any, float, float]]:
    """Yields each execution of an instruction of a module: its name, device, start and duration in seconds.

    On CPUs and GPUs each event names its instruction and module. On TPUs one line of the trace has the instructions, and
    another has the modules, whose events enclose those of their instructions.
    """
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        lines = {line.name: line for line in plane.lines}
        spans = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for event in (lines["XLA Modules"].events if "XLA Modules" in lines else ())
            if event.name.split("(")[0] == module
        )
        for line in [lines["XLA Ops"]] if "XLA Ops" in lines else plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                op = stats.get("hlo_op")
                if op is None and line.name == "XLA Ops":
                    i = bisect_right(spans, (event.start_ns, float("inf"))) - 1
                    if i < 0 or event.start_ns >= spans[i][1]:
                        continue
                    op = event.name
                elif op is None or str(stats.get("hlo_module", module)).split("(")[0] != module:
                    continue
                found = re.match(r"%?([\w.\-]+)", str(op))
                device = (plane.name, stats.get("device_ordinal"))
                yield found.group(1) if found else "", device, event.start_ns / 1e9, event.duration_ns / 1e9


# --- the text ----------------------------------------------------------------------------------------------------------


def _names(instruction: Instruction) -> tuple[str, str, str]:
    """Returns the kind of an instruction, its JAX operation, and its line."""
    inner = instruction.fused
    heavy = next((each for opcode in _HEAVY for each in inner if each.opcode == opcode), None)
    main = heavy or instruction
    if not main.op_name:
        main = next((each for each in reversed(inner) if each.op_name), main)
    kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if heavy is not None:
        kind = f"fusion of {heavy.opcode}"
    elif target := re.search(r'custom_call_target="([^"]*)"', instruction.rest):
        kind = target.group(1)
    return kind, _jax_name(main.op_name) or instruction.name, _line(main.source)


def _jax_name(op_name: str) -> str:
    """Shortens `jit(step)/transpose(jvp(mlp))/while/body/dot_general` to `mlp/dot_general, backward`."""
    suffix = ", computed again" if "rematted_computation" in op_name else ", backward" if "transpose(" in op_name else ""
    words = words_of(op_name)
    return words + suffix if words else ""


def _line(source: Sequence[str]) -> str:
    """Returns the user's line among the frames of an operation, innermost first, or else that of the optimizer or step."""
    inside = [*takewhile(lambda line: not line.startswith(_TRAINING), source)]  # the frames above include the call of `fit`
    return own_line(inside or source[:1])
