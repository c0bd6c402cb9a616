"""Finds a compiled step's largest temporaries at its memory peak, and the bytes that it reads and writes.

Compilers report the total size of temporaries, but not the arrays. A scheduled HLO module shows when each array is created
and last used, so this module repeats that part of the compiler's buffer assignment. The sums are close to the compiler's
(the tests check how close). Use them to name large arrays, and the compiler's own number for the memory of a step.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ._hlo import Instruction, Module, arrays_of, elements_of, n_bytes, result_type
from ._workspaces import workspace

# Operations that create no array.
_VIEWS = {"bitcast", "optimization-barrier", "add-dependency", "after-all", "domain"}
_NOTHING = {"parameter", "constant", "partition-id", "replica-id", "get-tuple-element", "tuple", *_VIEWS}
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")


@dataclass(frozen=True)
class Buffer:
    """An array in a device's memory.

    **Arguments:**

    - `bytes`: its size, with the padding of its layout.
    - `op_name`, `source`: the JAX operation that creates it, and its Python source lines, innermost first.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    op_name: str
    source: tuple[str, ...]


def temporaries(module: Module) -> list[Buffer]:
    """Returns the arrays in memory at the step's peak, largest first, except arguments and outputs that replace them."""
    outputs = _donated_outputs(module)
    return sorted(_Peaks(module).of(module.entry, outputs).buffers, key=lambda buffer: -buffer.bytes)


def _donated_outputs(module: Module) -> set[int]:
    """Returns the indices of the outputs that reuse the memory of a donated argument."""
    found = re.search(r"input_output_alias=\{ (.*?) \}, \w", module.head)
    return {int(out or 0) for out, _, _ in _ALIASED.findall(found.group(1))} if found else set()


# A value: the index of the buffer of each of its arrays. Two kinds of arrays are not counted: the computation's arguments,
# with the indices -1, -2, ..., and constants and arrays in a TPU's on-chip memory, with None.
_Value = tuple[int | None, ...]


@dataclass(frozen=True)
class _Peak:
    """The memory peak of a computation.

    **Arguments:**

    - `bytes`, `buffers`: the total size at the peak, and the arrays.
    - `writers`: for each argument that the computation updates, the operation that computes the update.
    """

    bytes: int = 0
    buffers: tuple[Buffer, ...] = ()
    writers: Mapping[int, Buffer] = field(default_factory=dict)


class _Peaks:
    """Computes the memory peaks of a module's computations, each once."""

    def __init__(self, module: Module):
        self._module = module
        self._found: dict[str, _Peak] = {}

    def of(self, name: str, donated_outputs: Iterable[int] = ()) -> _Peak:
        """Returns the peak of a computation, without its arguments."""
        if name not in self._found:
            self._found[name] = self._simulate(self._module.computations[name], set(donated_outputs))
        return self._found[name]

    def _simulate(self, lines: Sequence[Instruction], donated_outputs: set[int]) -> _Peak:
        by_name = {line.name: line for line in lines}
        buffers: list[Buffer] = []
        writers: dict[int, Buffer] = {}
        values: dict[str, _Value] = {}
        created: list[range] = []
        for line in lines:
            n_before = len(buffers)
            values[line.name] = self._value(line, values, by_name, buffers)
            created.append(range(n_before, len(buffers)))
            for i, part in self._writes(line, values, by_name):
                if i < 0:
                    writers[i] = part
                elif part.op_name:  # an array that a loop fills is named after the loop's operation, not its initial zeros
                    buffers[i] = replace(buffers[i], op_name=part.op_name, source=part.source)
        last_use: dict[int, int] = {}
        for at, line in enumerate(lines):
            if line.opcode == "get-tuple-element":
                continue  # it does not use the tuple's other elements, and uses of its result count as uses of this one
            last_use.update((i, at) for name in line.operands for i in values.get(name, ()) if i is not None)
        outs = values[lines[-1].name]
        last_use.update((i, len(lines)) for i in outs if i is not None)
        # An output that reuses an argument's memory is not counted.
        last_use.update((i, -1) for number in donated_outputs if number < len(outs) and (i := outs[number]) is not None)
        freed: dict[int, list[int]] = defaultdict(list)
        for i, at in last_use.items():
            freed[at].append(i)

        live: set[int] = set()
        total, peak, at_peak = 0, 0, ()
        for at, line in enumerate(lines):
            new = [i for i in created[at] if last_use.get(i, at) >= at]
            # An elementwise operation reuses the memory of an operand that is not used again.
            reused = {buffers[i].bytes for i in freed[at] if i in live} if _is_elementwise(line) else set()
            live.update(new)
            total += sum(buffers[i].bytes for i in new)
            inside = self._inside(line)
            now = total + inside.bytes - sum(buffers[i].bytes for i in new if buffers[i].bytes in reused)
            if now > peak:
                peak, at_peak = now, (*(buffers[i] for i in live), *inside.buffers)
            for i in {*freed[at], *(i for i in new if i not in last_use)} & live:
                live.remove(i)
                total -= buffers[i].bytes
        return _Peak(peak, at_peak, writers)

    def _inside(self, line: Instruction) -> _Peak:
        if line.opcode not in ("while", "conditional", "call"):
            return _Peak()
        bodies = [called for _, called in line.calls() if called in self._module.computations]
        return max(map(self.of, bodies), key=lambda peak: peak.bytes, default=_Peak())

    def _value(
        self, line: Instruction, values: Mapping[str, _Value], by_name: Mapping[str, Instruction], buffers: list[Buffer]
    ) -> _Value:
        """Returns the value of an instruction, and adds the arrays that it creates to `buffers`."""
        operands = [values.get(name, ()) for name in line.operands]
        n_arrays = len(arrays_of(line.type))
        if line.opcode == "parameter":  # the only one of a loop's body
            return tuple(range(-1, -1 - n_arrays, -1))
        if line.opcode in ("constant", "partition-id", "replica-id"):
            return (None,) * n_arrays
        if line.opcode == "tuple":
            return tuple(i for operand in operands for i in operand)
        if line.opcode == "get-tuple-element":
            counts = [len(arrays_of(element)) for element in elements_of(by_name[line.operands[0]].type)]
            index = re.search(r"\bindex=(\d+)", line.rest)
            start = sum(counts[: int(index.group(1))]) if index else 0
            return operands[0][start : start + n_arrays]
        if line.opcode == "while" or line.opcode in _VIEWS or line.opcode.endswith("-done"):
            return operands[0][:n_arrays] if operands else ()
        in_place = {number: operands[i] for number, i in self._in_place(line).items() if i < len(operands)}
        value: list[int | None] = []
        for number, (dtype, shape, size) in enumerate(_typed(result_type(line.type, line.opcode))):
            target = in_place.get(number, ())
            if len(target) == 1:
                value.append(target[0])
            elif size == 0:
                value.append(None)
            else:
                value.append(len(buffers))
                buffers.append(Buffer(size, dtype, shape, line.op_name, self._module.source(line)))
        return tuple(value)

    def _in_place(self, line: Instruction) -> dict[int, int]:
        """Maps each output that is written into an operand to the operand's index."""
        if line.opcode in _UPDATES:
            return {number: number for number in range(len(arrays_of(line.type)))}
        if aliased := re.search(r"output_to_operand_aliasing=\{(.*?)\)\}", line.rest):
            return {int(out or 0): int(operand) for out, operand, _ in _ALIASED.findall(aliased.group(1) + ")")}
        found = {}
        for number, update in enumerate(self._roots(line)):
            if update.opcode == "dynamic-update-slice":
                target = _origin(self._inner(line)[update.operands[0]], self._inner(line))
                if target.opcode == "parameter":
                    found[number] = int(target.rest.split(")")[0])
        return found

    def _inner(self, line: Instruction) -> dict[str, Instruction]:
        """Returns the instructions of a fusion by name, or none for other operations."""
        return {each.name: each for each in self._module.computations.get(_body(line), ())}

    def _roots(self, line: Instruction) -> list[Instruction]:
        """Returns the instruction that computes each output of a fusion."""
        inner = self._inner(line)
        if not inner:
            return []
        root = list(inner.values())[-1]
        return [_origin(each, inner) for each in ([inner[n] for n in root.operands] if root.opcode == "tuple" else [root])]

    def _writes(
        self, line: Instruction, values: Mapping[str, _Value], by_name: Mapping[str, Instruction]
    ) -> Iterator[tuple[int, Buffer]]:
        """Yields the arrays that an instruction updates, each with the operation that computes the update."""
        if line.opcode == "while":
            body = next(called for role, called in line.calls() if role == "body")
            for i, part in self.of(body).writers.items():
                if (target := values[line.name][-1 - i]) is not None:
                    yield target, part
        for number, operand in self._in_place(line).items():
            target = values.get(line.operands[operand], ()) if operand < len(line.operands) else ()
            if len(target) == 1 and target[0] is not None and (update := self._update_of(line, number, by_name)) is not None:
                yield target[0], Buffer(0, "", (), update.op_name, self._module.source(update))

    def _update_of(self, line: Instruction, number: int, by_name: Mapping[str, Instruction]) -> Instruction | None:
        """Returns the instruction that computes the update of an array."""
        inner = self._inner(line)
        if not inner:
            return _origin(by_name[_update(line, number)], by_name) if line.opcode in _UPDATES else None
        root = self._roots(line)[number]
        if root.opcode == "parameter":  # passed through, as in a collective's fusion
            return None
        part = _origin(inner[_update(root, number)], inner) if root.opcode in _UPDATES else root
        if part.opcode == "parameter":
            return _origin(by_name[line.operands[int(part.rest.split(")")[0])]], by_name)
        return part


# Operations that update a part of their first operands: `(array, update, indices...)`, `(arrays..., indices, updates...)`.
_UPDATES = ("dynamic-update-slice", "scatter")


def _update(line: Instruction, number: int) -> str:
    """Returns the operand with the new values for output `number` of an update."""
    n_arrays = len(arrays_of(line.type))
    return line.operands[1 if line.opcode == "dynamic-update-slice" else n_arrays + 1 + number % n_arrays]


def _origin(line: Instruction, by_name: Mapping[str, Instruction]) -> Instruction:
    """Returns the instruction that this one is a view or a copy of, or itself."""
    while line.opcode in ("bitcast", "copy", "convert", "reshape", "transpose") and line.operands[0] in by_name:
        line = by_name[line.operands[0]]
    return line


def _is_elementwise(line: Instruction) -> bool:
    return "kind=kLoop" in line.rest if line.opcode == "fusion" else line.opcode not in ("dot", "convolution", "custom-call")


def _typed(result: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns dtype, shape and padded bytes of each array of a type. Arrays in on-chip or host memory have 0 bytes."""
    found = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?", result):
        shape = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        order, _, tiling = layout.partition(":")
        padded = list(shape)
        if tile := re.match(r"T\(([\d,]+)\)", tiling):
            minor = [int(d) for d in order.split(",") if d]
            for dim, size in zip(minor, reversed([int(t) for t in tile.group(1).split(",")]), strict=False):
                padded[dim] = math.ceil(padded[dim] / size) * size
        elsewhere = _HOST in tiling or ("T(" in tiling and re.search(r"S\([1-9]\)", tiling))
        found.append((dtype, shape, 0 if elsewhere else n_bytes(dtype, tuple(padded))))
    return found


# --- bytes read and written ----------------------------------------------------------------------------------------------


def bytes_moved(module: Module) -> int:
    """Counts the bytes that one device reads from and writes to its memory in a step, as operands and results of operations.

    If a fusion slices or updates an operand, only the slice counts. The body of a loop counts once for each iteration.
    Workspaces of cuBLAS and cuDNN do not count, because it is unknown how much of them a call touches.
    """
    return _total(module, _device_bytes)


def host_bytes(module: Module) -> int:
    """Counts the bytes that one device copies to and from host memory in a step. Loop bodies count once per iteration."""
    return _total(module, _copied_bytes)


def _total(module: Module, count: Callable[[Module, Instruction], int]) -> int:
    """Sums `count` over the operations of a step."""

    def counted(line: Instruction) -> dict[str, int] | None:
        if line.opcode in ("while", "conditional", "call"):
            return None
        is_nothing = line.opcode in _NOTHING or line.opcode.endswith("-done")
        return {} if is_nothing else {line.opcode: count(module, line)}

    return module.total(counted).total()


def _device_bytes(module: Module, line: Instruction) -> int:
    """Counts the bytes that one operation reads and writes."""
    sizes = list(map(_size, line.operand_types))
    if line.opcode in _SLICES:
        return 2 * _size(line.type)
    if line.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(sizes[1:])
    body = _body(line)
    if body not in module.computations:
        return sum(sizes) + _size(line.type) - _size(workspace(line))
    return sum(_read(module, body, i, size) for i, size in enumerate(sizes)) + _written(module, body, _size(line.type))


def _copied_bytes(module: Module, line: Instruction) -> int:
    """Counts the bytes that one operation copies between host and device memory."""
    del module
    types_text = " ".join([line.type, *line.operand_types])
    if _HOST not in types_text or "AllocateBuffer" in line.rest:
        return 0
    # Measured by the arrays on the device: an operation may copy only a slice of an array in host memory.
    arrays = re.findall(r"\b([a-z]\w*\[[^\]]*\])(?:\{([^}]*)\})?", types_text)
    on_device = [arrays_of(array)[0] for array, layout in arrays if _HOST not in layout]
    return max((n_bytes(*array) for array in on_device), default=0)


_SLICES = ("dynamic-slice", "slice", "gather")
_HOST = "S(5)"  # host memory, in a layout


def _size(result: str) -> int:
    return sum(size for *_, size in _typed(result))


def _body(line: Instruction) -> str:
    """Returns the computation of a fusion, or an empty string for other operations."""
    return next((called for role, called in line.calls() if role == "calls"), "") if line.opcode == "fusion" else ""


def _read(module: Module, body: str, number: int, whole: int) -> int:
    """Counts the bytes that a fusion reads of one of its operands: only the slices if it only slices it."""
    seen: set[str] = set()
    total = 0
    for line in module.computations[body]:
        if line.opcode == "parameter":
            seen |= {line.name} if int(line.rest.split(")")[0]) == number else set()
            continue
        for position, name in enumerate(line.operands):
            if name not in seen:
                continue
            if line.opcode in _VIEWS:
                seen.add(line.name)
            elif line.opcode in _SLICES and position == 0:
                total += _size(line.type)
            elif line.opcode == "fusion":
                total += _read(module, _body(line), position, whole)
            elif line.opcode != "dynamic-update-slice" or position > 0:
                return whole
    return min(total, whole)


def _written(module: Module, body: str, whole: int) -> int:
    """Counts the bytes that a fusion writes: only the update if its result is an updated operand."""
    by_name = {line.name: line for line in module.computations[body]}
    root = _origin(module.computations[body][-1], by_name)
    if root.opcode == "dynamic-update-slice":
        return _size(by_name[root.operands[1]].type)
    return _written(module, _body(root), whole) if root.opcode == "fusion" else whole
