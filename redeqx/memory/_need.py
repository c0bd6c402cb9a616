"""The memory of a device, and what a compiled step needs of it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..distributed import Peers
from ..machine import chip_of_kind
from ._strategy import Strategy


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
class Tried:
    """A strategy whose train step was compiled.

    **Arguments:**

    - `needs`: bytes on each device at the step's peak. A lower bound if the compiler refused the step (`is_refused`).
    - `held`: the part of these bytes that is in memory between steps.
    - `seconds`: bounds on the time of a step at published rates, with perfect overlap and without any; None if unknown.
    """

    strategy: Strategy
    needs: int
    held: int
    fits: bool
    is_refused: bool = False
    seconds: tuple[float, float] | None = None

    @property
    def cost(self) -> float:
        """The time by which strategies are compared: that of a step without overlap, or infinity if unknown."""
        return float("inf") if self.seconds is None else self.seconds[1]


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """Returns the fastest strategy that fits (the first of equally fast ones), or None if none fits."""
    return min((each for each in tried if each.fits), key=lambda each: each.cost, default=None)


def try_step(
    strategy: Strategy, compiled: Callable[[], jax.stages.Compiled], memory: Memory, peers: Peers, moved: int = 0
) -> Tried:
    """Compiles the step of a strategy, and returns what it needs. A compiler may choose different kernels in each process,
    so the largest need counts.

    **Arguments:**

    - `memory`: the same in all processes.
    - `moved`: bytes of the memory in use that this strategy moves to the host.
    """
    held, of_step, is_refused = 0 if memory.in_use is None else memory.in_use - moved, 0, False
    try:
        found: Any = compiled().memory_analysis()
        if memory.in_use is None:
            held = found.argument_size_in_bytes
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        of_step = found.temp_size_in_bytes + outputs + found.generated_code_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        needs = refused_bytes(error, memory.limit)
        if needs is None:
            raise
        of_step, is_refused = max(0, needs - held), True
    held, of_step, is_refused = map(max, zip(*peers.gather("memory of a step", [held, of_step, is_refused]), strict=True))
    needs = held + of_step
    return Tried(strategy, needs, held, fits=needs <= memory.limit and not is_refused, is_refused=is_refused)


# The TPU compiler's two error messages: from before memory assignment, and from a failed assignment.
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM|Exceeded hbm capacity by ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refused_bytes(error: Exception, limit: int | None) -> int | None:
    """Returns the bytes that a step needs at least, from a compiler's error about memory; None for any other error.

    **Arguments:**

    - `limit`: bytes of a device; None if unknown.
    """
    found = _OUT_OF_MEMORY.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
        return None
    everything, unit, excess, unit_of_excess = found.groups()
    return int(float(everything or excess) * _UNITS[unit or unit_of_excess or ""]) + (0 if everything else limit or 0)
