"""Lists the collectives of a compiled step.

Owns the notations of replica groups that XLA prints.

*Bytes* are those of the unsharded array along the collective's axes: the operand of an all-reduce, the result of an
all-gather, the operand of a reduce-scatter. *Moved* is the number of bytes that one device sends in a ring of n: 2(n-1)/n of
the bytes for an all-reduce, (n-1)/n for an all-gather, a reduce-scatter or an all-to-all, all of them for a permute.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from ..tracing import is_rare
from ._hlo import Instruction, Module, integers

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclass(frozen=True)
class Collective:
    """One array that a collective moves. A collective that XLA combined from several moves several arrays. `shape`, `dtype`
    and `bytes` are those of the unsharded array (see above)."""

    kind: str  # "all-reduce", "all-gather", ..., without "-start"
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    group: tuple[int, ...]  # the devices of the first group; the other groups have the same form
    n_executions: int  # in a step: the product of the trip counts of the enclosing loops
    exact: bool = True  # not in a loop of unknown trip count (counted once) or a conditional (each branch is counted)
    op_name: str = ""  # the JAX operation that needs it, `jit(step)/transpose(jvp())/while/body/...`
    instruction: str = ""  # the HLO name, the same for all arrays of a combined collective
    source: tuple[str, ...] = ()  # its Python source lines, `file.py:12`, innermost first
    hidden: float | None = None  # the share of its bytes that is sent behind matmuls (`with_overlap`); None if unknown
    pairs: tuple[tuple[int, ...], ...] = ()  # of a permute: from which device to which; `group` is the first of them

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices of all forms: the pairs of a permute, or else the first group."""
        return self.pairs or (self.group,)

    @property
    def group_size(self) -> int:
        """The number of devices in one group."""
        return len(self.group)

    @property
    def moved(self) -> float:
        """The bytes that one device sends in a step, in all executions."""
        n = self.group_size
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.n_executions * self.bytes * share.get(self.kind, (n - 1) / n)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes that the groups span, for a program on this mesh."""
        coordinates = np.stack([np.unravel_index(group, tuple(mesh.shape.values())) for group in self.groups])
        varying = (coordinates != coordinates[:, :, :1]).any(axis=(0, 2))
        return tuple(axis for axis, varies in zip(mesh.shape, varying, strict=True) if varies)

    @property
    def is_backward(self) -> bool:
        """Whether the collective is in the backward pass, including rematerialisation."""
        return "transpose(" in self.op_name or "rematted_computation" in self.op_name


def collectives(module: Module) -> list[Collective]:
    """Returns the collectives that the entry computation reaches, for one device, in the order of the text, without those of
    choices that are made in the context `rarely`.

    Raises ValueError for a replica group in an unknown notation.
    """
    found: dict[tuple[Instruction, int], Collective] = {}
    for key, each in _collectives_in(module, module.entry, 1, True, {}, None):
        before = found.setdefault(key, each)
        if before is not each:  # in a computation with several callers
            n, exact = before.n_executions + each.n_executions, before.exact and each.exact
            found[key] = replace(before, n_executions=n, exact=exact)
    return list(found.values())


def _collectives_in(
    module: Module, name: str, times: int, exact: bool, channels: dict[str, str], caller: Instruction | None
) -> Iterator[tuple[tuple[Instruction, int], Collective]]:
    """Yields the collectives of each call of a computation, by their instruction and the number of their array in it."""
    for line in module.computations[name]:
        kind = line.opcode.removesuffix("-start")
        if kind in KINDS:
            # The TPU compiler repeats an asynchronous collective in each fusion that advances it, with the same channel.
            channel = CHANNEL.search(line.rest)
            if channel and channels.setdefault(f"{kind} {channel.group(1)}", name) != name:
                continue
            if name.startswith("all-reduce-scatter"):  # a fusion of an all-reduce and a slice
                kind = "reduce-scatter"
            pairs = _pairs(line.rest)
            group = pairs[0] if pairs else _group(line.rest, module.n_devices)
            origin = line if line.op_name or caller is None else caller  # libtpu names the fusion or call around it
            for number, array in enumerate(line.results):
                if line.opcode.startswith("reduce-scatter"):
                    array = array._replace(shape=_unscattered(array.shape, len(group), line.rest))
                each = Collective(
                    kind=kind,
                    shape=array.shape,
                    dtype=array.dtype,
                    bytes=array.bytes,
                    group=group,
                    n_executions=times,
                    exact=exact,
                    op_name=origin.op_name,
                    instruction=line.name,
                    source=origin.source,
                    pairs=pairs,
                )
                yield (line, number), each
            continue  # its `to_apply` is the sum, and the `calls` of an asynchronous one is the same collective
        if line.opcode == "conditional" and is_rare(line.op_name):
            continue
        for role, called in line.calls:
            if line.opcode == "while":  # the condition runs once more than the body; no collectives were seen there
                n = line.trip_count
                yield from _collectives_in(module, called, times * (n or 1), exact and n is not None, {}, None)
            else:
                branch = role.endswith(("true_computation", "false_computation", "branch_computations"))
                # All collectives of `jax.shard_map` have the same channel, so it identifies one only among fusions.
                seen = channels if line.opcode == "fusion" else {}
                yield from _collectives_in(module, called, times, exact and not branch, seen, line)


def _unscattered(shape: tuple[int, ...], group_size: int, rest: str) -> tuple[int, ...]:
    dimension = re.search(r"\bdimensions=\{(\d+)\}", rest)
    dim = int(dimension.group(1)) if dimension else 0
    return tuple(size * group_size if i == dim else size for i, size in enumerate(shape))


def _pairs(rest: str) -> tuple[tuple[int, ...], ...]:
    """Returns the pairs of a permute of two different devices, or its first one if there are none."""
    if (found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest)) is None:
        return ()
    pairs = [integers(pair) for pair in re.findall(r"\{([\d, ]*)\}", found.group(1))]
    return tuple(pair for pair in pairs if len({*pair}) > 1) or (pairs[0],)


def _group(rest: str, n_devices: int) -> tuple[int, ...]:
    """Returns the devices of the first group, from `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['a'=4,'b'=2] {'a'}`."""
    if listed := re.search(r"replica_groups=\{\{([\d, ]*)\}", rest):
        return integers(listed.group(1))
    if re.search(r"replica_groups=\{\}", rest):
        return tuple(range(n_devices))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S*)", rest):
        return tuple(_iota(iota.group(2)).reshape(integers(iota.group(1)))[0].tolist())
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"([^,=\s]+)=(\d+)", named.group(1))}
        order = named.group(2) or ""
        n_ids = math.prod(sizes.values())
        ids = _iota(order) if "T(" in order else np.array(integers(order) or range(n_ids))
        # A group may extend over a factor of an axis: `'a':(2)4` is the factor 4 of axis a, after a factor of 2.
        taken = {axis: (pre, size) for axis, pre, size in re.findall(r"([^,\s:]+)(?::\((\d+)\)(\d+))?", named.group(3))}
        shape, in_group = [], []
        for axis, whole in sizes.items():
            pre, size = (int(n) for n in taken[axis]) if taken.get(axis, ("", ""))[1] else (1, whole)
            shape += [pre, size, whole // (pre * size)]
            in_group += [False, axis in taken, False]
        index = tuple(slice(None) if is_in else 0 for is_in in in_group)
        return tuple(ids.reshape(shape)[index].ravel().tolist())
    notation = re.search(r"replica_groups=\S*", rest)
    raise ValueError(
        f"`replica_groups`: expected a list, an iota or a mesh, got `{notation.group(0) if notation else rest}`. "
        "Please report it as a bug."
    )


def _iota(text: str) -> np.ndarray:
    """Returns the integers of `[2,4]T(1,0)`: counted from 0, reshaped, transposed if there is a T, and flattened."""
    dims, _, order = text.partition("T(")
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    return ids.transpose(integers(order.split(")")[0]) or range(ids.ndim)).ravel()
