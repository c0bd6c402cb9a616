"""Memory at run time: chooses the least recomputation, and the fewest parts of a micro-batch, for which a step fits a
device.

Owns the levels of recomputation, the order of choices, and the search for the first that fits. The engine runs it before a
new program. The levels are implemented in `transforms`; settings that change the mesh are searched by the dry run.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..distributed import Peers
from ..machine import GIB, chip_of_kind
from ._compute import REMATS

_KEPT = {
    "none": "loops keep what their backward pass reads",
    "matmuls": "loops compute again all but matmuls, convolutions and attention",
    "full": "loops compute everything again",
    "offload": "loops compute everything again, from inputs in the memory of the host",
}


@dataclass(frozen=True)
class Memory:
    """The memory of one device, in bytes.

    **Arguments:**

    - `limit`: the memory that a program may use.
    - `in_use`: the memory in use before a step, including its arguments; None if the device does not report it.
    """

    limit: int
    in_use: int | None = None


def memory_of(mesh: Mesh) -> Memory | None:
    """Returns the memory of a device of this process; None if unknown, and for CPUs, which share their host's memory."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return None
    stats, chip = device.memory_stats() or {}, chip_of_kind(device.device_kind)
    limit = stats.get("bytes_limit") or (chip and chip.memory)
    return Memory(limit, stats.get("bytes_in_use")) if limit else None


def least_memory(memory: Memory | None, peers: Peers) -> Memory | None:
    """Returns the smallest memory of all processes, so that they choose the same; None if one does not know its own."""
    found = peers.gather("memory", None if memory is None else [memory.limit, memory.in_use])
    if None in found:
        return None
    limits, in_use = zip(*found, strict=True)
    return Memory(min(limits), None if None in in_use else max(in_use))


@dataclass(frozen=True)
class Choice:
    """The settings of a train step that save memory: the recomputation of its loops, the number of parts of each
    micro-batch, whether loops over small layers are unrolled (None if there are none), and whether the optimizer state is in
    host memory."""

    remat: str
    n_parts: int = 1
    unroll: bool | None = None
    offload_opt_state: bool = False

    def code(self) -> str:
        code = f'remat="{self.remat}"' + (", unroll=False" if self.unroll is False else "")
        code += ", offload_opt_state=True" if self.offload_opt_state else ""
        return code + (f" and micro-batches in {self.n_parts} parts" if self.n_parts > 1 else "")


@dataclass(frozen=True)
class Need:
    """Bytes that a device needs: in use before a step, and for the step itself; infinite if the compiler refused it."""

    before: float
    of_step: float

    @property
    def total(self) -> float:
        return self.before + self.of_step


def choices(first: Choice, platform: str, n_groups: int) -> list[Choice]:
    """Returns this choice and those that need less memory, in the order in which they are tried.

    First, unrolled loops are rolled up again. Two parts instead of one cost less than recomputing a whole loop, four about
    as much. The optimizer state is offloaded last, since a step waits for the bus.

    **Arguments:**

    - `n_groups`: the groups of rows of a micro-batch on a device, which are divided into parts of equal size.
    """
    if first.unroll:
        return [first, *choices(replace(first, unroll=False), platform, n_groups)]
    is_own_host = platform == "cpu"
    levels = REMATS[:-1] if is_own_host else REMATS
    levels = levels[levels.index(first.remat) :] if first.remat in levels else (first.remat,)
    halvings = [i for i in range(n_groups.bit_length()) if n_groups % (first.n_parts * 2**i) == 0] or [0]
    by_cost = sorted((1.5 * i + j, j, remat) for i, remat in enumerate(levels) for j in halvings)
    found = [replace(first, remat=remat, n_parts=first.n_parts * 2**j) for _, j, remat in by_cost]
    return found if is_own_host else [*found, *(replace(each, offload_opt_state=True) for each in found)]


def cannot_fit(choice: Choice, tried: Mapping[Choice, Need], memory: Memory) -> bool:
    """Returns whether a choice cannot fit, judged by one that differs only in the number of parts: the memory of a step
    shrinks at most in proportion to the size of its parts."""
    fitting = ((other, need) for other, need in tried.items() if need.total < math.inf)
    same = [(other, need) for other, need in fitting if replace(other, n_parts=choice.n_parts) == choice]
    return any(need.before + need.of_step * other.n_parts / choice.n_parts > memory.limit for other, need in same)


def first_that_fits(
    order: Iterable[Choice],
    memory: Memory,
    compiled: Callable[[Choice], jax.stages.Compiled],
    peers: Peers,
    opt_state: int = 0,
) -> dict[Choice, Need]:
    """Returns the need of each choice that had to be compiled, up to the first that fits; if none fits, of all.

    **Arguments:**

    - `memory`: the same in all processes.
    - `compiled`: returns the compiled train step of a choice.
    - `peers`: the processes, which compile the same choices. A compiler may choose different kernels in each of them, so the
        largest need counts.
    - `opt_state`: bytes of the optimizer state on a device.
    """
    tried: dict[Choice, Need] = {}
    for choice in order:
        if cannot_fit(choice, tried, memory):
            continue
        need = memory_need(lambda choice=choice: compiled(choice), memory, opt_state if choice.offload_opt_state else 0)
        before, of_step = zip(*peers.gather("memory of a step", [need.before, need.of_step]), strict=True)
        tried[choice] = Need(max(before), max(of_step))
        if tried[choice].total <= memory.limit:
            break
    return tried


def memory_need(compiled: Callable[[], jax.stages.Compiled], memory: Memory, moved: int = 0) -> Need:
    """Returns the memory of a compiled step. The TPU compiler refuses a step that does not fit.

    **Arguments:**

    - `moved`: bytes of the memory in use that have moved to the host.
    """
    try:
        found: Any = compiled().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if not re.search(r"RESOURCE_EXHAUSTED.*(exceeds available HBM|Exceeded hbm capacity)", str(error), re.DOTALL):
            raise
        return Need(0, math.inf)
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    before = found.argument_size_in_bytes if memory.in_use is None else memory.in_use - moved
    return Need(before, found.temp_size_in_bytes + outputs + found.generated_code_size_in_bytes)


def describe_choice(tried: Mapping[Choice, Need], memory: Memory) -> str:
    """Describes the choice, which is the last one tried, and the reason for it."""

    def size(n_bytes: float) -> str:
        return "more than there is" if n_bytes == math.inf else f"{n_bytes / GIB:,.2f} GiB"

    *others, (choice, need) = tried.items()
    text = f"memory: {_KEPT[choice.remat]} ({choice.code()}): {size(need.total)} of {size(memory.limit)} a device"
    text += "".join(f"; {other.code()} needs {size(needed.total)}" for other, needed in others)
    if need.total > memory.limit:
        text += (
            ". Nothing fits: expect the step to fail. Take more micro-batches (`accumulate_grad_batches`) or more shards; "
            "`python -m redeqx dry-run --fit` finds the fastest setting that fits"
        )
    return text
