"""The memory of a device, what a compiled step needs of it, and `memory="auto"`: a strategy with which a step fits."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..distributed import Peers
from ..machine import GIB, chip_of_kind
from ._search import SearchSpace
from ._strategy import Strategy, Tried


@dataclass(frozen=True)
class Memory:
    """The bytes of one device that a program may use, and those in use before a step, including its arguments; None if the
    device does not report these."""

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


def choose(
    own: Strategy,
    mesh: Mesh,
    peers: Peers,
    compiled: Callable[[Strategy], jax.stages.Compiled],
    space: Callable[[int], SearchSpace],
    opt_state: int = 0,
) -> tuple[Sequence[Tried], str]:
    """Returns the strategies that had to be compiled, and a text about the last one: the first that fits. Returns none of
    them if the memory of a device is unknown. All processes compile the same.

    **Arguments:**

    - `own`: the strategy of the script.
    - `compiled`: returns the compiled train step of a strategy.
    - `space`: maps the bytes of a device to the strategies that make the same update; called if `own` does not fit.
    - `opt_state`: bytes of the optimizer state on a device, where it is not in host memory yet.
    """
    memory = least_memory(memory_of(mesh), peers)
    if memory is None:
        return [], ""

    def measure(strategy: Strategy) -> Tried:
        moved = opt_state if strategy.offload_opt_state else 0
        return try_step(strategy, lambda: compiled(strategy), memory, peers, moved)

    tried = [measure(own)]
    if not tried[0].fits:
        tried += space(memory.limit).search(tried[0], measure, to_fastest=False)
    return tried, _describe(tried, memory.limit)


def _describe(tried: Sequence[Tried], limit: int) -> str:
    def size(each: Tried) -> str:
        return ("at least " if each.is_refused else "") + f"{each.needs / GIB:,.2f} GiB"

    *others, chosen = tried
    text = f"memory: {size(chosen)} of {limit / GIB:,.2f} GiB a device with {chosen.strategy.code()}"
    text += "".join(f"; {each.strategy.code()} needs {size(each)}" for each in others)
    if not chosen.fits:
        text += (
            ". Nothing fits: expect the step to fail. Take more shards; `python -m redeqx dry-run --search fastest` finds "
            "the fastest strategy that fits"
        )
    return text


def try_step(
    strategy: Strategy, compiled: Callable[[], jax.stages.Compiled], memory: Memory, peers: Peers, moved: int = 0
) -> Tried:
    """Compiles the step of a strategy, and returns what it needs. A compiler may choose different kernels in each process,
    so the largest need counts. `moved` are bytes of the memory in use that this strategy moves to the host.
    """
    held, of_step, is_refused = 0 if memory.in_use is None else memory.in_use - moved, 0, False
    try:
        sizes = sizes_of(compiled())
        of_step = sum(sizes.values()) - sizes["arguments"]
        held = sizes["arguments"] if memory.in_use is None else held
    except jax.errors.JaxRuntimeError as error:
        needs = refused_bytes(error, memory.limit)
        if needs is None:
            raise
        of_step, is_refused = max(0, needs - held), True
    held, of_step, is_refused = map(max, zip(*peers.gather("memory of a step", [held, of_step, is_refused]), strict=True))
    needs = held + of_step
    return Tried(strategy, needs, held, fits=needs <= memory.limit and not is_refused, is_refused=is_refused)


def sizes_of(compiled: Any) -> dict[str, Any]:
    """Returns the bytes of a compiled step on a device, by what they are for. Outputs that replace arguments count there.

    libtpu's temporaries are those of the peak, by which it refuses programs. Their sum is more: a program for v5p whose sum
    is 101.3 GiB was accepted with a peak of 95.0, of 95.7, and refused with 95.9 (libtpu 0.0.50; 2026-11-30)."""
    memory = compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        "code": memory.generated_code_size_in_bytes,
    }
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    if peak and _platform(compiled) == "tpu":  # a CPU's leaves out temporaries, and a GPU's are one block
        at_peak = max(0, peak - sizes["arguments"] - sizes["outputs"])
        sizes["temporaries"] = min(sizes["temporaries"], at_peak)
    return sizes


def _platform(compiled: Any) -> str | None:
    devices = (device for sharding in jax.tree.leaves(compiled.input_shardings) for device in sharding.device_set)
    return next((device.platform for device in devices), None)


# The TPU compiler's two error messages: from before memory assignment, and from a failed assignment. What does not fit into
# the host's memory counts as too much for the device, which would have to keep it.
_OUT_OF_MEMORY = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM|Exceeded (?:hbm|host) capacity by ([\d.]+)([KMGT]?)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refused_bytes(error: Exception, limit: int | None) -> int | None:
    """Returns the bytes that a step needs at least, from a compiler's error about memory; None for any other error. `limit`
    is the bytes of a device; None if unknown.
    """
    found = _OUT_OF_MEMORY.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
        return None
    everything, unit, excess, unit_of_excess = found.groups()
    return int(float(everything or excess) * _UNITS[unit or unit_of_excess or ""]) + (0 if everything else limit or 0)
