"""Which share of the bytes of collectives and of copies to the host moves behind matmuls, in the order of a compiled step.

A compiler starts a collective early and waits for it late. What is between the two is in the schedule of the program; how
long it takes is not. So this module replays the schedule at given rates: matmuls, and kernels of attention and of grouped
matmuls, advance the clock by their FLOPs, and in that time the link sends the bytes of the collectives that have started,
first come first served. When a collective is awaited, the rest of its bytes is sent while nothing computes. Copies to and
from the host are replayed in the same way, with a link of their own. Work other than matmuls takes no time here, so the
shares are lower bounds of the overlap with all work.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..tracing import is_rare
from ._buffers import copied_bytes, host_copies
from ._collectives import CHANNEL, KINDS, Collective
from ._hlo import Instruction, Module
from ._repeated_work import flops_of

_ATTENTION = {"__cudnn$fmha": (2, 5), "splash_m": (2, 5)}  # products of a kernel, forward and backward


def with_overlap(
    found: list[Collective], module: Module, flops_per_second: float, bytes_per_second: Callable[[Collective], float]
) -> list[Collective]:
    """Returns the collectives of a module, each with the share of its bytes that is hidden, given the rate of matmuls and
    that at which a device sends the bytes of a collective."""
    seconds: dict[str, float] = {}  # of one execution of each instruction, all of its arrays together
    for each in found:
        took = each.moved / each.n_executions / bytes_per_second(each)
        seconds[each.instruction] = seconds.get(each.instruction, 0.0) + took
    replay = _Replay(module, flops_per_second, seconds)
    shares = {name: 1 - left / seconds[name] for name, left in replay.exposed.items() if seconds[name]}
    return [replace(each, hidden=shares.get(each.instruction, 0.0)) for each in found]


def hidden_host_share(module: Module, flops_per_second: float, bytes_per_second: float) -> float | None:
    """Returns the share of the bytes copied to and from host memory that is copied behind matmuls, given the rates of these
    and of the bus; None if none are."""
    if not (copied := host_copies(module)):
        return None
    seconds = {line.name: copied_bytes(line) / bytes_per_second for line in copied}  # of one execution
    exposed = _Replay(module, flops_per_second, seconds).exposed
    waited = sum(n * exposed[line.name] / seconds[line.name] for line, n in copied.items())
    return 1 - waited / copied.total()


@dataclass
class _Sent:
    """A collective or a copy between its start and its end, and the seconds that the link still needs for it."""

    name: str
    left: float


class _Replay:
    """The seconds in which nothing computes while a collective is sent, by the name of its instruction."""

    def __init__(self, module: Module, rate: float, seconds: dict[str, float]):
        self._module, self._rate, self._seconds = module, rate, seconds
        self._of_channel = {}
        self.exposed: dict[str, float] = {}
        self._flops = cache(self._flops_inside)
        for schedule in module.computations.values():
            for line in schedule:
                if line.name in seconds and (channel := CHANNEL.search(line.rest)):
                    self._of_channel[channel.group(1)] = line.name
        for name in self._scheduled(module.entry, set()):
            self._run(module.computations[name])

    def _scheduled(self, name: str, seen: set[str]) -> Iterator[str]:
        """Yields the computations that run line by line: not those of fusions and sums."""
        if name in seen:
            return
        seen.add(name)
        yield name
        for line in self._module.computations[name]:
            if line.opcode in ("while", "conditional", "call"):
                for _, called in line.calls:
                    yield from self._scheduled(called, seen)

    def _run(self, schedule: list[Instruction]) -> None:
        """Replays one execution of a computation."""
        queue: list[_Sent] = []  # in the order of their starts
        starts: dict[str, str] = {}  # the collective of each line that starts one
        owns = list(map(self._collective_of, schedule))
        taking_part = Counter(owns)
        for line, own in zip(schedule, owns, strict=True):
            is_start, is_done = (line.opcode.endswith(end) or end in line.name for end in ("-start", "-done"))
            if line.opcode == "call-start" and not line.operands:
                continue  # the SparseCores get ready: they send when a `call-update` has the operands
            if own is not None and not is_done and all(each.name != own for each in queue) and own not in self.exposed:
                queue.append(_Sent(own, self._seconds[own]))
                # A fusion that alone has the collective sends all of it before it ends, as libtpu's sums of gradients.
                if not is_start and taking_part[own] == 1:
                    self._await(own, queue)
                    continue
            if own is not None and not is_done:
                starts[line.name] = own
            self._compute(self._flops(line) / self._rate, queue)
            if is_done:
                names = {starts[each.name] for each in line.operands if each.name in starts} or {own}
                for name in names:
                    self._await(name, queue)
        if queue:
            self._await(queue[-1].name, queue)

    def _collective_of(self, line: Instruction) -> str | None:
        """Returns the name of the collective that a line starts, advances or ends."""
        if line.name in self._seconds:
            return line.name
        if line.opcode in ("call-update", "call-done"):
            return next((own for each in line.operands if (own := self._collective_of(each))), None)
        for inner in self._inside(line):
            if inner.name in self._seconds:
                return inner.name
            if inner.opcode.removesuffix("-start") in KINDS and (channel := CHANNEL.search(inner.rest)):
                return self._of_channel.get(channel.group(1))
        return None

    def _inside(self, line: Instruction) -> Iterator[Instruction]:
        if line.opcode == "fusion" or line.opcode.startswith(("async-", "call-")):  # `call-start` on SparseCores
            for _, called in line.calls:
                for inner in self._module.computations[called]:
                    yield inner
                    yield from self._inside(inner)

    def _flops_inside(self, line: Instruction) -> float:
        """Counts the FLOPs of a line's matmuls and of those inside. A loop counts as often as it runs."""
        if line.opcode in ("dot", "convolution", "custom-call"):
            return flops_of(line) or _attention_flops(line) or _grouped_flops(line)
        inner = [sum(map(self._flops, self._module.computations[called])) for _, called in line.calls]
        if line.opcode == "conditional":
            return (min if is_rare(line.op_name) else max)(inner, default=0.0)
        return sum(inner) * (line.n_iterations if line.opcode == "while" else 1)

    def _compute(self, seconds: float, queue: list[_Sent]) -> None:
        for each in queue:
            sent = min(seconds, each.left)
            each.left, seconds = each.left - sent, seconds - sent

    def _await(self, name: str | None, queue: list[_Sent]) -> None:
        """Sends what is left of a collective, and of those that started before it."""
        if name is None or all(each.name != name for each in queue):
            return
        while queue:
            each = queue.pop(0)
            self.exposed[each.name] = each.left
            if each.name == name:
                return


def _attention_flops(line: Instruction) -> float:
    """Counts the FLOPs of a kernel of attention: of cuDNN from its settings; of a TPU's kernel from its operands, of which a
    causal mask leaves half of the pairs."""
    kernel = next((kernel for kernel in _ATTENTION if kernel in line.rest or kernel in line.name), None)
    if kernel is None or not line.arrays:
        return 0.0
    is_backward = "Backward" in line.rest or "dkv" in line.name or "dq" in line.name
    n_products = _ATTENTION[kernel][is_backward]
    if kernel.startswith("__cudnn"):
        pairs = re.search(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([\d", ]*)\]', line.rest)
        if pairs is None:
            return 0.0
        n_pairs = math.prod(int(n) for n in re.findall(r"\d+", pairs.group(1)))
        share = 0.5 if '"CAUSAL"' in line.rest else 1.0
        return share * n_products * 2 * n_pairs * line.arrays[0].shape[-1]
    shapes = [array.shape for each in line.operands for array in each.arrays if len(array.shape) in (3, 4)]
    heads = max(shapes, key=math.prod, default=())
    return 0.5 * n_products * 2 * math.prod(heads) * heads[-2] if heads else 0.0


def _grouped_flops(line: Instruction) -> float:
    """Counts the FLOPs of a kernel of Megablox from its first matrix, whose rows are each multiplied for one group."""
    if re.match(r"t?gmm\b", line.name) is None or not line.arrays:
        return 0.0
    rows = next((array.shape for each in line.operands for array in each.arrays if len(array.shape) == 2), ())
    return 2.0 * math.prod(rows) * line.arrays[0].shape[-1] if rows else 0.0
