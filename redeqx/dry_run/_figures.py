"""The numbers of a compiled step: its bytes, FLOPs and collectives, and bounds on its time at published rates.

Owns only the arithmetic: `_forecast` compiles a step and reads its numbers, and `_report` prints them.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from jax.sharding import Mesh

from ..compiled import Buffer, Collective
from ..machine import Chip
from ..memory import matmul_seconds

_T = TypeVar("_T")


def attempt(what: str, make: Callable[[], _T], default: _T, failed: dict[str, str]) -> _T:
    """Returns `make()`. If it raises, returns `default` and adds the reason to `failed`. An evaluation or another strategy
    that does not compile must not prevent the verdict."""
    try:
        return make()
    except Exception as error:
        failed[what] = reason(error)
        return default


def reason(error: BaseException) -> str:
    """Describes an error in one line, with the line of code that raised it."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


@dataclass(frozen=True)
class Step:
    """A compiled step, with bytes for one device, and FLOPs for all together."""

    needs: int  # in memory at the peak, including state of the run that is not an argument of the step
    compile_seconds: float
    # Whether the compiler raised an out-of-memory error. Then `needs` is from its message, or the sum of the arrays that
    # stay in memory if these do not fit, and the sizes below are unknown.
    is_refused: bool = False
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0  # without those that replace arguments
    code: int = 0
    allowance: int = 0  # an estimate of cuDNN's workspaces, which the compiler does not know without a GPU
    largest: tuple[Buffer, ...] = ()  # the temporaries of at least 1 KiB in memory at the peak
    collectives: tuple[Collective, ...] = ()
    flops: Mapping[str, int] = field(default_factory=dict)  # of matmuls and convolutions, with recomputation, by dtype
    kinds: Mapping[str, int] = field(default_factory=dict)  # the same by `kind_of_product`
    bytes_moved: int = 0  # read from and written to memory
    host_bytes: int = 0  # copied to and from host memory
    host_hidden: float | None = None  # the share of them behind matmuls in the compiled order; None if it is unknown
    unread: str = ""  # why the compiled program could not be read: then all but its sizes and FLOPs is unknown
    is_estimate: bool = False  # of the temporaries, from the trace: nothing was compiled

    def offloaded(self, state: int, other_bytes: int) -> "Step":
        """Estimates a step that copies the optimizer's state, of `state` bytes, from the host, from this one with the state
        on the devices. It assumes that all of it is copied at once, when the gradients are complete: with `other_bytes` of
        parameters, gradients and the rest of the run's state in memory."""
        needs = max(self.needs - state, other_bytes + state)
        host_bytes = self.host_bytes + 2 * state
        return replace(self, needs=needs, arguments=self.arguments - state, host_bytes=host_bytes, host_hidden=None)


@dataclass(frozen=True)
class Estimate:
    """A roofline estimate: bounds on the time of a step at the published rates of its devices, in seconds. It is no
    forecast, because a real step reaches none of these rates."""

    compute: float  # of matmuls
    memory: float  # of reads and writes
    communication: float  # of collectives
    host: float  # of copies to and from host memory
    step: float  # with perfect overlap: the largest of these
    serial: float  # without overlap: their sum
    # The FLOPs without recomputation over those that the devices could compute in these two times.
    mfu: float
    serial_mfu: float


def sent_per_second(collective: Collective, chip: Chip, mesh: Mesh) -> float:
    """Returns the bytes/s at which a device sends a collective: over its link, or between hosts.

    Of a ring over several hosts only one hop in each host leaves it. With as many rings as a host has devices of the group,
    each of which leaves by the network of another device, a device sends at the rate of all of these networks. A permute
    ends with its slowest pair: one between hosts has the networks of its two devices.
    """
    if chip.network is None:
        return chip.link
    devices = list(mesh.devices.flat)
    hosts = [Counter(devices[i].process_index for i in group) for group in collective.groups]
    return min([chip.link, *(chip.network * min(of.values()) for of in hosts if len(of) > 1)])


def hidden_share(found: Iterable[Collective]) -> float | None:
    """Returns the share of the collectives' bytes that is sent behind matmuls, or None if it is unknown."""
    known = [(each.moved, each.moved * each.hidden) for each in found if each.hidden is not None]
    moved, hidden = (sum(column) for column in zip(*known, strict=True)) if known else (0.0, 0.0)
    return hidden / moved if moved else None


def estimate(step: Step, model_flops: Mapping[str, int], chip: Chip, mesh: Mesh) -> Estimate:
    """Estimates the time of a compiled step on devices with these figures. `model_flops` are those without recomputation, by
    dtype, for all devices together."""
    communication = sum((each.moved / sent_per_second(each, chip, mesh) for each in step.collectives), 0.0)
    compute = matmul_seconds(step.flops, chip, mesh.size)
    parts = (compute, step.bytes_moved / chip.bandwidth, communication, step.host_bytes / chip.host)
    ideal = matmul_seconds(model_flops, chip, mesh.size)
    at_best, serial = max(parts), sum(parts)
    return Estimate(*parts, at_best, serial, *(ideal / seconds if seconds else 0.0 for seconds in (at_best, serial)))
