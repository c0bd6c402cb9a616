"""Parses the HLO text of a compiled step.

Owns the grammar: computations, instructions, types, layouts and trip counts, and the JAX name and the lines of code of each
instruction. Other modules interpret them.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..tracing import Entered, expected_length, fold, is_rare, line_among, shortened

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Parts of operation names that name JAX's transformations, not the operation.
_TRANSFORMATIONS = {
    *("jit", "pjit", "jvp", "transpose", "vmap", "while", "body", "cond", "closed_call", "eval_jaxpr", "custom_vjp_call"),
    *("custom_jvp_call", "checkpoint", "remat2", "rematted_computation", "shard_map", "step_fn"),
}
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class Array(NamedTuple):
    """An array in the type of an instruction. Its layout has the order of its dims, its tiles and its memory."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Its bytes without padding."""
        return self._bytes_of(self.shape)

    @property
    def device_bytes(self) -> int:
        """Its bytes in the device's memory, with the padding of its tiles. In on-chip or host memory these are 0."""
        order, _, tiling = self.layout.partition(":")
        if self.is_on_host or ("T(" in tiling and re.search(r"S\([1-9]\)", tiling)):
            return 0
        padded = list(self.shape)
        if tile := re.match(r"T\(([\d,]+)\)", tiling):
            for dim, size in zip(integers(order), reversed(integers(tile.group(1))), strict=False):
                padded[dim] = math.ceil(padded[dim] / size) * size
        return self._bytes_of(padded)

    @property
    def is_on_host(self) -> bool:
        return "S(5)" in self.layout

    def _bytes_of(self, shape: Sequence[int]) -> int:
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.ceil(math.prod(shape) * bits / 8)


def arrays_of(result: str) -> list[Array]:
    """Returns the arrays of a type, from the text `(f32[2,3]{1,0}, u32[])`."""
    found = _ARRAY.findall(result)
    return [Array(dtype, integers(dims), layout) for dtype, dims, layout in found]


@dataclass(eq=False)
class Instruction:
    """An instruction, parsed from the line `%name = type opcode(rest`."""

    name: str
    type: str
    opcode: str
    rest: str
    module: "Module" = field(repr=False)
    siblings: Mapping[str, "Instruction"] = field(repr=False)  # the instructions of its computation, by name

    @cached_property
    def operands(self) -> list["Instruction"]:
        """The operands. Those that the text lacks have empty types."""
        names = re.findall(r"%([\w.\-]+)", _cut(self.rest, ")")[0])
        return [self.siblings.get(name) or Instruction(name, "", "", "", self.module, {}) for name in names]

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its type."""
        return arrays_of(self.type)

    @property
    def results(self) -> list[Array]:
        """The arrays of its result. The type of a `-start` or a `call-update` may also have operands and a context."""
        if not self.opcode.endswith(("-start", "call-update")) or self.opcode == "all-reduce-start":
            return self.arrays
        return arrays_of(elements_of(self.type)[0 if self.opcode == "copy-start" else 1])

    @property
    def number(self) -> int:
        """The number of a parameter, or the value of a constant."""
        return int(self.rest.split(")")[0])

    @property
    def op_name(self) -> str:
        """The JAX operation that needs the instruction. May be empty."""
        found = _OP_NAME.search(self.rest)
        return found.group(1) if found else ""

    @property
    def source(self) -> tuple[str, ...]:
        """Its Python source lines, `file.py:12`, innermost first."""
        if named := re.search(r'source_file="([^"]*)" source_line=(\d+)', self.rest):
            return (f"{named.group(1)}:{named.group(2)}",)
        frame = re.search(r"stack_frame_id=(\d+)", self.rest)
        return self.module.frames.get(int(frame.group(1)), ()) if frame else ()

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The roles and names of the computations that it calls."""
        found = [(role, re.findall(r"[\w.\-]+", many or one)) for role, many, one in _CALLED.findall(self.rest)]
        return [(role, name) for role, names in found for name in names if name in self.module.computations]

    @property
    def fused(self) -> list["Instruction"]:
        """The instructions of a fusion; none for other operations."""
        called = [name for role, name in self.calls if role == "calls"] if self.opcode == "fusion" else []
        return self.module.computations[called[0]] if called else []

    @property
    def trip_count(self) -> int | None:
        """The trip count of a while loop, or None if it is unknown.

        It is the compiler's count, or else, as for a scan, the constant with which the condition compares a counter, less
        where the counter starts: at 0, or at 1 if libtpu computes the first iteration before the loop. A condition of any
        other form has no known count.
        """
        if known := _TRIP_COUNT.search(self.rest):
            return int(known.group(1))
        condition = next((name for role, name in self.calls if role == "condition"), None)
        root = self.module.computations[condition][-1] if condition else self
        operands = root.operands
        if root.fused:  # of GPUs since JAX 0.12, for loops whose collectives XLA moves from one iteration to another
            root = root.fused[-1]
            operands = [operands[each.number] if each.opcode == "parameter" else each for each in root.operands]
        if root.opcode != "compare" or not re.search(r"\bdirection=LT\b", root.rest):
            return None
        counter, limit = operands
        is_counter = counter.opcode == "get-tuple-element" and counter.type.startswith(("s", "u"))
        if not is_counter or limit.opcode != "constant":
            return None
        start, index = self.operands[0], re.search(r"\bindex=(\d+)", counter.rest)
        if start.opcode == "tuple" and index:
            start = start.operands[int(index.group(1))]
        while start.opcode in ("copy", "bitcast"):
            start = start.operands[0]
        return limit.number - (start.number if start.opcode == "constant" else 0)

    @property
    def n_iterations(self) -> int:
        """How often a while loop runs: its trip count, or as often as is expected (`redeqx.tracing.about`), or once."""
        return self.trip_count or expected_length(self.op_name) or 1


@dataclass(eq=False)
class Module:
    """A parsed HLO module."""

    head: str  # the first line of the text
    frames: dict[int, tuple[str, ...]]  # the source lines of each stack frame, innermost first
    computations: dict[str, list[Instruction]] = field(default_factory=dict)  # in the order of the schedule
    entry: str = ""  # the name of the entry computation

    @classmethod
    def of(cls, text: str) -> "Module":
        """Parses an HLO text. Raises ValueError if it has no entry computation."""
        module = cls(text.split("\n", 1)[0], _frames_of(text))
        instructions, siblings = [], None
        # A TPU kernel's attributes span lines, the last of which would look like the end of the computation.
        for line in text.replace('{\n"', '{"').replace("\n}}", "}}").splitlines():
            if header := _COMPUTATION.match(line):
                is_entry, name = header.groups()
                instructions, siblings = [], {}
                module.computations[name] = instructions
                module.entry = name if is_entry else module.entry
            elif line.startswith("}"):
                siblings = None
            elif siblings is not None and (instruction := _INSTRUCTION.match(line)):
                name, rest = instruction.groups()
                result, rest = _cut(rest, " ")
                opcode, _, rest = rest.strip().partition("(")
                if opcode == "fusion-start":  # of GPUs since JAX 0.12: it counts as a fusion where it starts
                    opcode, result = "fusion", elements_of(result)[1]
                opcode = "bitcast" if opcode == "fusion-done" else opcode
                siblings[name] = Instruction(name, result, opcode, rest, module, siblings)
                instructions.append(siblings[name])
        if not module.entry:
            raise ValueError("`hlo_text`: expected an ENTRY computation, got none. Pass `compiled.as_text()`.")
        return module

    @property
    def n_devices(self) -> int:
        return math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", self.head))

    def total(self, count: Callable[[Instruction], Mapping[Any, float] | None], *, once: bool = False) -> Counter[Any]:
        """Returns the sums of numbers, by key, over the instructions of a step. `count` takes an instruction and returns its
        numbers, or None to count the computations that it calls. With `once`, each loop counts as one iteration."""

        def enter(line: Instruction) -> Entered:
            times = 1 if once or line.opcode != "while" else line.n_iterations
            is_choice = line.opcode == "conditional"
            return Entered([name for _, name in line.calls], times, is_choice, is_choice and is_rare(line.op_name))

        return fold(self.entry, count, enter, self.computations.__getitem__)


def _frames_of(text: str) -> dict[int, tuple[str, ...]]:
    """Returns the source lines of each stack frame, `file.py:12`, innermost first, from the tables in the text's head."""
    head = text[: text.find("\n\n\n") + 1] if "\nStackFrames\n" in text else ""

    def table(title: str, row: str) -> list[Any]:
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", head, re.M)
        return re.findall(rf"^(\d+) {row}", found.group(1), re.M) if found else []

    files = dict(table("FileNames", r'"(.*)"$'))
    lines = {i: f"{files[file]}:{line}" for i, file, line in table("FileLocations", r"\{file_name_id=(\d+) .*?\bline=(\d+)")}
    frames: dict[int, tuple[str, ...]] = {}
    for i, location, parent in table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"):
        # Parents count from 1, and the first frame is its own parent.
        frames[int(i)] = (lines[location], *frames.get(int(parent or 0) - 1, ()))
    return frames


def _cut(text: str, mark: str) -> tuple[str, str]:
    """Splits text at the first mark outside of brackets, which TPU layouts nest. Without one, the second part is empty."""
    depth = start = 0
    while (end := text.find(mark, start)) >= 0:
        depth += sum(text.count(bracket, start, end) for bracket in "([{")
        depth -= sum(text.count(bracket, start, end) for bracket in ")]}")
        if depth == 0:
            return text[:end], text[end + 1 :]
        depth -= mark in ")]}"
        start = end + 1
    return text, ""


def elements_of(result: str) -> list[str]:
    """Returns the top-level elements of a tuple type. Another type is its only element."""
    if not result.startswith("("):
        return [result]
    elements, rest = [], re.sub(r"/\*.*?\*/", "", result[1:-1])
    while rest:
        element, rest = _cut(rest, ",")
        elements.append(element.strip())
    return elements


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


# --- the origin of an operation ------------------------------------------------------------------------------------------


def own_line(source: Sequence[str]) -> str:
    """Returns the innermost line of the script or of a model, shortened, or else the innermost line of all. `source` has the
    lines of an operation, `file.py:12` each, innermost first."""
    return shortened(line_among(source, "optax") or next(iter(source), ""))


def split_name(op_name: str) -> list[str]:
    """Splits the JAX name of an operation: `jit(step)/jvp(mlp)/dot_general` into `jit`, `step`, `jvp` and so on."""
    return [part for part in re.split(r"[/()\s;:]+", op_name) if part]


def words_of(op_name: str) -> str:
    """Shortens the JAX name of an operation to its last two parts without transformations: `mlp/dot_general`."""
    return "/".join([part for part in split_name(op_name) if part not in _TRANSFORMATIONS][-2:])
