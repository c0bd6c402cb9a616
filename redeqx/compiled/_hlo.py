"""Parses the HLO text of a compiled step, and lists its collectives.

Owns the grammar: computations, instructions, types, layouts, trip counts, source lines, and replica groups in each notation
that XLA prints. Other modules interpret the numbers.

*Bytes* are those of the unsharded array along the collective's axes: the operand of an all-reduce, the result of an
all-gather, the operand of a reduce-scatter. *Moved* is the number of bytes that one device sends in a ring of n: 2(n-1)/n of
the bytes for an all-reduce, (n-1)/n for an all-gather, a reduce-scatter or an all-to-all, all of them for a permute.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from ..tracing import Entered, fold

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"%?([\w.\-]+), %?([\w.\-]+)\), direction=LT")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective moves. A collective that XLA combined from several moves several arrays.

    **Arguments:**

    - `kind`: `"all-reduce"`, `"all-gather"`, ..., without `-start`.
    - `shape`, `dtype`, `bytes`: those of the unsharded array (see above).
    - `group`: the devices of the first group. The other groups have the same form.
    - `n_executions`: the number of executions in a step: the product of the trip counts of the enclosing loops.
    - `exact`: whether `n_executions` is exact. False inside a loop of unknown trip count (counted once) or a conditional
        (each branch is counted).
    - `op_name`: the JAX operation that needs it, `jit(step)/transpose(jvp())/while/body/...`. May be empty.
    - `instruction`: the HLO name, the same for all arrays of a combined collective.
    - `source`: its Python source lines, `file.py:12`, innermost first.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    group: tuple[int, ...]
    n_executions: int
    exact: bool = True
    op_name: str = ""
    instruction: str = ""
    source: tuple[str, ...] = ()

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
        coordinates = np.array(np.unravel_index(self.group, tuple(mesh.shape.values())))
        varying = (coordinates != coordinates[:, :1]).any(axis=1)
        return tuple(axis for axis, varies in zip(mesh.shape, varying, strict=True) if varies)

    @property
    def is_backward(self) -> bool:
        """Whether the collective is in the backward pass, including rematerialisation."""
        return "transpose(" in self.op_name or "rematted_computation" in self.op_name


def collectives(hlo_text: str) -> list[Collective]:
    """Returns the collectives that the entry computation reaches, for one device, in the order of the text.

    **Arguments:**

    - `hlo_text`: an optimised module, as returned by `compiled.as_text()`.

    Raises ValueError if the text has no entry computation, or a replica group in an unknown notation.
    """
    module = Module.of(hlo_text)
    return list(_collectives_in(module, module.entry, 1, True, {}))


def _collectives_in(module: "Module", name: str, times: int, exact: bool, channels: dict[str, str]) -> Iterator[Collective]:
    for instruction in module.computations[name]:
        result, opcode, rest = instruction.type, instruction.opcode, instruction.rest
        kind = opcode.removesuffix("-start")
        if kind in _KINDS:
            # The TPU compiler repeats an asynchronous collective in each fusion that advances it, with the same channel.
            channel = _CHANNEL.search(rest)
            if channel and channels.setdefault(f"{kind} {channel.group(1)}", name) != name:
                continue
            if name.startswith("all-reduce-scatter"):  # a fusion of an all-reduce and a slice
                kind = "reduce-scatter"
            group = _group(rest, module.n_devices)
            for dtype, shape in arrays_of(result_type(result, opcode)):
                if opcode.startswith("reduce-scatter"):
                    shape = _unscattered(shape, len(group), rest)
                yield Collective(
                    kind=kind,
                    shape=shape,
                    dtype=dtype,
                    bytes=n_bytes(dtype, shape),
                    group=group,
                    n_executions=times,
                    exact=exact,
                    op_name=instruction.op_name,
                    instruction=instruction.name,
                    source=module.source(instruction),
                )
            continue  # its `to_apply` is the sum, and the `calls` of an asynchronous one is the same collective
        for role, called in instruction.calls():
            if called not in module.computations:
                continue
            if opcode == "while":  # the condition runs once more than the body; no collectives were seen there
                n = module.trip_count(instruction)
                yield from _collectives_in(module, called, times * (n or 1), exact and n is not None, channels)
            else:
                branch = role.endswith(("true_computation", "false_computation", "branch_computations"))
                yield from _collectives_in(module, called, times, exact and not branch, channels)


# --- the grammar -------------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """An instruction, parsed from the line `%name = type opcode(rest`. `types` are those of its computation, by name."""

    name: str
    type: str
    opcode: str
    rest: str
    types: Mapping[str, str]

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        depth = 1
        for i, char in enumerate(self.rest):
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.rest[:i])
        return []

    @property
    def operand_types(self) -> list[str]:
        """The types of the operands; empty strings for unknown ones."""
        return [self.types.get(name, "") for name in self.operands]

    @property
    def op_name(self) -> str:
        """The JAX operation that needs the instruction. May be empty."""
        found = _OP_NAME.search(self.rest)
        return found.group(1) if found else ""

    def calls(self) -> list[tuple[str, str]]:
        """Returns the roles and names of the computations that it calls."""
        found = _CALLED.findall(self.rest)
        return [(role, called) for role, many, one in found for called in re.findall(r"[\w.\-]+", many or one)]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    **Arguments:**

    - `computations`: the instructions of each computation, in the order of the schedule.
    - `entry`: the name of the entry computation.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    head: str
    sources: "_Sources"

    @classmethod
    def of(cls, text: str) -> "Module":
        """Parses an HLO text. Raises ValueError if it has no entry computation."""
        computations: dict[str, list[Instruction]] = {}
        entry = current = None
        types: dict[str, str] = {}
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header:
                current = header.group(2)
                computations[current], types = [], {}
                entry = current if header.group(1) else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (instruction := _INSTRUCTION.match(line)):
                name, rest = instruction.groups()
                result, rest = _split_type(rest)
                opcode, _, rest = rest.strip().partition("(")
                computations[current].append(Instruction(name, result, opcode, rest, types))
                types[name] = result
        if entry is None:
            raise ValueError("`hlo_text`: expected an ENTRY computation, got none. Pass `compiled.as_text()`.")
        return cls(computations, entry, text.split("\n", 1)[0], _Sources(text))

    @property
    def n_devices(self) -> int:
        return math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", self.head))

    def source(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the Python source lines of an instruction, `file.py:12`, innermost first."""
        return self.sources.of(instruction.rest)

    def total(
        self, count: Callable[[Instruction], Mapping[Any, float] | None], *, conditions: bool = True, once: bool = False
    ) -> Counter[Any]:
        """Returns the sums of numbers, by key, over the instructions of a step.

        **Arguments:**

        - `count`: takes an instruction and returns its numbers, or None to count the computations that it calls.
        - `conditions`: whether the conditions of loops count.
        - `once`: whether each loop counts as one iteration.
        """

        def enter(line: Instruction) -> Entered:
            called = [
                each for role, each in line.calls() if each in self.computations and (conditions or role != "condition")
            ]
            times = 1 if once or line.opcode != "while" else self.trip_count(line) or 1
            return Entered(called, times, line.opcode == "conditional")

        return fold(self.entry, count, enter, self.computations.__getitem__)

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns the trip count of a while loop, or None if it is unknown.

        It is the compiler's count, or else, as for a scan, the constant with which the condition compares a counter from 0.
        A condition of any other form has no known count.
        """
        if known := _TRIP_COUNT.search(loop.rest):
            return int(known.group(1))
        condition = next((called for role, called in loop.calls() if role == "condition"), "")
        lines = {line.name: line for line in self.computations.get(condition, [])}
        root = next(reversed(lines.values()), None)
        compared = _COMPARED.match(root.rest) if root and root.opcode == "compare" else None
        if compared is None:
            return None
        counter, limit = (lines.get(name) for name in compared.groups())
        is_counter = counter is not None and counter.opcode == "get-tuple-element" and counter.type.startswith(("s", "u"))
        return int(limit.rest.split(")")[0]) if is_counter and limit and limit.opcode == "constant" else None


class _Sources:
    """The Python source lines of instructions, from the tables in the text's head."""

    def __init__(self, text: str):
        head = text[: text.find("\n\n\n") + 1] if "\nStackFrames\n" in text else ""
        self._files = {int(i): name for i, name in re.findall(r'^(\d+) "(.*)"$', _section(head, "FileNames"), re.M)}
        self._lines = {
            int(i): (int(file), int(line))
            for i, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _section(head, "FileLocations"), re.M
            )
        }
        self._frames = {
            int(i): (int(location), int(parent or 0))
            for i, location, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _section(head, "StackFrames"), re.M
            )
        }

    def of(self, rest: str) -> tuple[str, ...]:
        """Returns `file.py:12` for each frame, innermost first. `rest` is an instruction's text after its opcode."""
        if named := re.search(r'source_file="([^"]*)" source_line=(\d+)', rest):
            return (f"{named.group(1)}:{named.group(2)}",)
        found: list[str] = []
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        i = int(frame.group(1)) if frame else 0
        while i in self._frames:
            location, parent = self._frames[i]
            file, line = self._lines[location]
            found.append(f"{self._files[file]}:{line}")
            # Parents count from 1, and the first frame is its own parent.
            i = parent - 1 if parent - 1 < i else 0
        return tuple(found)


def _section(head: str, title: str) -> str:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", head, re.M)
    return found.group(1) if found else ""


def _split_type(text: str) -> tuple[str, str]:
    """Splits text after a type: `(f32[2]{0}, u32[]) while(...)` before `while`. TPU layouts nest brackets."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[:i], text[i:]
    return text, ""


def elements_of(result: str) -> list[str]:
    """Returns the top-level elements of a tuple type. Another type is its only element."""
    if not result.startswith("("):
        return [result]
    elements, depth = [""], 0
    for char in re.sub(r"/\*.*?\*/", "", result[1:-1]):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return [element.strip() for element in elements]


def result_type(result: str, opcode: str) -> str:
    """Returns the result's part of an instruction's type. The type of a `-start` may also have operands and a context."""
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return result
    return elements_of(result)[0 if opcode == "copy-start" else 1]


def arrays_of(result: str) -> list[tuple[str, tuple[int, ...]]]:
    found = re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", result)
    return [(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)) for dtype, dims in found]


def n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
    return math.ceil(math.prod(shape) * bits / 8)


def _unscattered(shape: tuple[int, ...], group_size: int, rest: str) -> tuple[int, ...]:
    dimension = re.search(r"\bdimensions=\{(\d+)\}", rest)
    dim = int(dimension.group(1)) if dimension else 0
    return tuple(size * group_size if i == dim else size for i, size in enumerate(shape))


def _group(rest: str, n_devices: int) -> tuple[int, ...]:
    """Returns the devices of the first group, from `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['a'=4,'b'=2] {'a'}`.

    For a permute, returns the first pair of two different devices.
    """
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest):
        each = [_integers(pair) for pair in re.findall(r"\{([\d, ]*)\}", pairs.group(1))]
        return next((pair for pair in each if len({*pair}) > 1), each[0])
    if listed := re.search(r"replica_groups=\{\{([\d, ]*)\}", rest):
        return _integers(listed.group(1))
    if re.search(r"replica_groups=\{\}", rest):
        return tuple(range(n_devices))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S*)", rest):
        return tuple(_iota(iota.group(2)).reshape(_integers(iota.group(1)))[0].tolist())
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"([^,=\s]+)=(\d+)", named.group(1))}
        order = named.group(2) or ""
        n_ids = math.prod(sizes.values())
        ids = _iota(order) if "T(" in order else np.array(_integers(order) or range(n_ids))
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
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return ids.transpose(_integers(order.split(")")[0]) or range(ids.ndim)).ravel()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
