"""Finds a compiled step's largest temporaries at its memory peak, and the bytes that it reads and writes.

Compilers report the total size of temporaries, but not the arrays. A scheduled HLO module shows when each array is created
and last used, so this module repeats that part of the compiler's buffer assignment. The sums are close to the compiler's
(the tests check how close). Use them to name large arrays, and the compiler's own number for the memory of a step.

Calls of cuBLAS and cuDNN return their workspace, which is scratch memory, as the last element of their result. The program
states the size of cuBLAS workspaces. cuDNN chooses the plan of a call on the GPU, so a program that was compiled without a
GPU has empty cuDNN workspaces.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ._hlo import Array, Instruction, Module, arrays_of, elements_of

# Operations that create no array.
_VIEWS = {"bitcast", "optimization-barrier", "add-dependency", "after-all", "domain"}
_NOTHING = {"parameter", "constant", "partition-id", "replica-id", "get-tuple-element", "tuple", *_VIEWS}
_SLICES = ("dynamic-slice", "slice", "gather")
# Operations that update a part of their first operands: `(array, update, indices...)`, `(arrays..., indices, updates...)`.
_UPDATES = ("dynamic-update-slice", "scatter")
_CALLS = ("while", "conditional", "call")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
_LIBRARY_CALL = re.compile(r'custom_call_target="__cu(blas|dnn)\$')


@dataclass(frozen=True)
class Buffer:
    """An array in a device's memory."""

    bytes: int  # with the padding of its layout
    dtype: str
    shape: tuple[int, ...]
    op_name: str  # the JAX operation that creates it
    source: tuple[str, ...]  # its Python source lines, innermost first


def temporaries(module: Module) -> list[Buffer]:
    """Returns the arrays in memory at the step's peak, largest first, except arguments and outputs that replace them."""

    @cache
    def peak_of(name: str) -> _Peak:
        donated = _donated_outputs(module) if name == module.entry else set()
        return _simulate(module.computations[name], peak_of, donated)

    return sorted(peak_of(module.entry).buffers, key=lambda buffer: -buffer.bytes)


def _donated_outputs(module: Module) -> set[int]:
    """Returns the indices of the outputs that reuse the memory of a donated argument."""
    found = re.search(r"input_output_alias=\{ (.*?) \}, \w", module.head)
    return {int(out or 0) for out, _, _ in _ALIASED.findall(found.group(1))} if found else set()


# A value: the index of the buffer of each of its arrays. Two kinds of arrays are not counted: the computation's arguments,
# with the indices -1, -2, ..., and constants and arrays in a TPU's on-chip memory, with None.
_Value = tuple[int | None, ...]


@dataclass(frozen=True)
class _Peak:
    """The memory peak of a computation, without its arguments."""

    bytes: int = 0
    buffers: tuple[Buffer, ...] = ()
    writers: Mapping[int, Instruction] = field(default_factory=dict)  # what updates an argument, by its index


def _simulate(lines: Sequence[Instruction], peak_of: Callable[[str], _Peak], donated_outputs: set[int]) -> _Peak:
    """Returns the peak of a computation. `peak_of` returns that of another one, by its name."""
    buffers: list[Buffer] = []
    writers: dict[int, Instruction] = {}
    values: dict[Instruction, _Value] = {}
    created: list[range] = []
    for line in lines:
        n_before = len(buffers)
        values[line] = _value(line, values, buffers)
        created.append(range(n_before, len(buffers)))
        for i, update in _writes(line, values, peak_of):
            if i < 0:
                writers[i] = update
            elif update.op_name:  # an array that a loop fills is named after the loop's operation, not its initial zeros
                buffers[i] = replace(buffers[i], op_name=update.op_name, source=update.source)
    last_use: dict[int, int] = {}
    for at, line in enumerate(lines):
        if line.opcode == "get-tuple-element":
            continue  # it does not use the tuple's other elements, and uses of its result count as uses of this one
        last_use.update((i, at) for operand in line.operands for i in values.get(operand, ()) if i is not None)
    outs = values[lines[-1]]
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
        called = [peak_of(name) for _, name in line.calls] if line.opcode in _CALLS else []
        inside = max(called, key=lambda peak: peak.bytes, default=_Peak())
        # What a call or a choice returns was made by the computation that it calls, and is counted once.
        returned = {*new} if 0 < sum(buffers[i].bytes for i in new) <= inside.bytes else set()
        inside = _Peak() if new and not returned else inside
        now = total + inside.bytes - sum(buffers[i].bytes for i in new if i in returned or buffers[i].bytes in reused)
        if now > peak:
            peak, at_peak = now, (*(buffers[i] for i in live - returned), *inside.buffers)
        for i in {*freed[at], *(i for i in new if i not in last_use)} & live:
            live.remove(i)
            total -= buffers[i].bytes
    return _Peak(peak, at_peak, writers)


def _value(line: Instruction, values: Mapping[Instruction, _Value], buffers: list[Buffer]) -> _Value:
    """Returns the value of an instruction, and adds the arrays that it creates to `buffers`."""
    operands = [values.get(operand, ()) for operand in line.operands]
    n_arrays = len(line.arrays)
    if line.opcode == "parameter":  # the only one of a loop's body
        return tuple(range(-1, -1 - n_arrays, -1))
    if line.opcode in ("constant", "partition-id", "replica-id"):
        return (None,) * n_arrays
    if line.opcode == "tuple":
        return tuple(i for operand in operands for i in operand)
    if line.opcode == "get-tuple-element":
        counts = [len(arrays_of(element)) for element in elements_of(line.operands[0].type)]
        index = re.search(r"\bindex=(\d+)", line.rest)
        start = sum(counts[: int(index.group(1))]) if index else 0
        return operands[0][start : start + n_arrays]
    if line.opcode == "while" or line.opcode in _VIEWS or line.opcode.endswith("-done"):
        return operands[0][:n_arrays] if operands else ()
    in_place = {number: operands[i] for number, i in _in_place(line).items() if i < len(operands)}
    value: list[int | None] = []
    for number, array in enumerate(line.results):
        target = in_place.get(number, ())
        if len(target) == 1:
            value.append(target[0])
        elif array.device_bytes == 0:
            value.append(None)
        else:
            value.append(len(buffers))
            buffers.append(Buffer(array.device_bytes, array.dtype, array.shape, line.op_name, line.source))
    return tuple(value)


def _in_place(line: Instruction) -> dict[int, int]:
    """Maps each output that is written into an operand to the operand's index."""
    if line.opcode in _UPDATES:
        return {number: number for number in range(len(line.arrays))}
    if aliased := re.search(r"output_to_operand_aliasing=\{(.*?)\)\}", line.rest):
        return {int(out or 0): int(operand) for out, operand, _ in _ALIASED.findall(aliased.group(1) + ")")}
    found = {}
    for number, update in enumerate(_outputs(line)):
        if update.opcode == "dynamic-update-slice":
            target = _origin(update.operands[0])
            if target.opcode == "parameter":
                found[number] = target.number
    return found


def _outputs(line: Instruction) -> list[Instruction]:
    """Returns the instruction that computes each output of a fusion; none for other operations."""
    roots = line.fused[-1:]
    return [_origin(each) for root in roots for each in (root.operands if root.opcode == "tuple" else roots)]


def _writes(
    line: Instruction, values: Mapping[Instruction, _Value], peak_of: Callable[[str], _Peak]
) -> Iterator[tuple[int, Instruction]]:
    """Yields the arrays that an instruction updates, each with the operation that computes the update."""
    if line.opcode == "while":
        body = next(name for role, name in line.calls if role == "body")
        for i, update in peak_of(body).writers.items():
            if (target := values[line][-1 - i]) is not None:
                yield target, update
    for number, operand in _in_place(line).items():
        target = values.get(line.operands[operand], ()) if operand < len(line.operands) else ()
        if len(target) == 1 and target[0] is not None and (update := _update_of(line, number)) is not None:
            yield target[0], update


def _update_of(line: Instruction, number: int) -> Instruction | None:
    """Returns the instruction that computes the new values of output `number`, which is written into an operand."""
    if line.opcode in _UPDATES:
        return _new_values(line, number)
    outputs = _outputs(line)
    if not outputs or outputs[number].opcode == "parameter":  # passed through, as in a collective's fusion
        return None
    update = outputs[number]
    if update.opcode in _UPDATES:
        update = _new_values(update, number)
    return _origin(line.operands[update.number]) if update.opcode == "parameter" else update


def _new_values(update: Instruction, number: int) -> Instruction:
    """Returns the operand with the new values for output `number` of an update."""
    n_arrays = len(update.arrays)
    return _origin(update.operands[1 if update.opcode == "dynamic-update-slice" else n_arrays + 1 + number % n_arrays])


def _origin(line: Instruction) -> Instruction:
    """Returns the instruction that this one is a view or a copy of, or itself."""
    while line.opcode in ("bitcast", "copy", "convert", "reshape", "transpose") and line.operands[0].type:
        line = line.operands[0]
    return line


def _is_elementwise(line: Instruction) -> bool:
    return "kind=kLoop" in line.rest if line.opcode == "fusion" else line.opcode not in ("dot", "convolution", "custom-call")


# --- workspaces ----------------------------------------------------------------------------------------------------------


def _workspace(line: Instruction) -> Array | None:
    """Returns the workspace of a call to cuBLAS or cuDNN, or None for other operations."""
    if line.opcode != "custom-call" or not line.type.startswith("(") or not _LIBRARY_CALL.search(line.rest):
        return None
    last = line.arrays[-1]
    return last if last.dtype in ("s8", "u8") and len(last.shape) == 1 else None


def workspace_allowance(module: Module) -> int:
    """Estimates the bytes of the largest workspace that cuDNN has not chosen yet. Returns 0 if it has chosen all.

    The estimate is, for each array of a call's result, a float32 array as large as the largest of them. The reason is that
    the gradient of attention sums the queries' gradient in float32, and those of grouped keys and values for each query
    head.
    """
    sizes = [0]
    for line in (line for lines in module.computations.values() for line in lines):
        if (own := _workspace(line)) is not None and own.bytes == 0:
            results = [math.prod(array.shape) for array in line.arrays[:-1]]
            sizes.append(4 * len(results) * max(results, default=0))
    return max(sizes)


# --- bytes read and written ----------------------------------------------------------------------------------------------


def bytes_moved(module: Module) -> int:
    """Counts the bytes that one device reads from and writes to its memory in a step, as operands and results of operations.

    If a fusion slices or updates an operand, only the slice counts. The body of a loop counts once for each iteration.
    Workspaces of cuBLAS and cuDNN do not count, because it is unknown how much of them a call touches.
    """
    return _total(module, _device_bytes).total()


def host_copies(module: Module) -> Counter[Instruction]:
    """Counts the bytes that one device copies to and from host memory in a step, by the operation that copies or begins to.
    Loop bodies count once per iteration."""
    return +_total(module, copied_bytes)


def _total(module: Module, count: Callable[[Instruction], int]) -> Counter[Instruction]:
    """Sums `count` over the operations of a step, by operation."""

    def counted(line: Instruction) -> dict[Instruction, int] | None:
        if line.opcode in _CALLS:
            return None
        is_nothing = line.opcode in _NOTHING or line.opcode.endswith("-done")
        return {} if is_nothing else {line: count(line)}

    return module.total(counted)


def _device_bytes(line: Instruction) -> int:
    """Counts the bytes that one operation reads and writes. One that runs beside others counts where it starts."""
    sizes = list(map(_size, line.operands))
    if line.opcode.removesuffix("-start") in _SLICES:
        return min(_part(line), sizes[0]) + _size(line)
    if line.opcode in _UPDATES:
        return 2 * sum(sizes[1:])
    if line.fused:
        return sum(_read(line.fused, i, size) for i, size in enumerate(sizes)) + _written(line)
    own = _workspace(line)
    return sum(sizes) + _size(line) - (0 if own is None else own.device_bytes)


def copied_bytes(line: Instruction) -> int:
    """Counts the bytes that one operation copies between host and device memory."""
    arrays = [array for each in (line, *line.operands) for array in each.arrays]
    if "AllocateBuffer" in line.rest or not any(array.is_on_host for array in arrays):
        return 0
    # Measured by the arrays on the device: an operation may copy only a slice of an array in host memory.
    return max((array.bytes for array in arrays if not array.is_on_host), default=0)


def _size(line: Instruction) -> int:
    return sum(array.device_bytes for array in line.results)


def _part(line: Instruction) -> int:
    """Counts the bytes of a slice or an update in the larger array, which may be in another memory."""
    return sum(array._replace(layout=re.sub(r"S\(\d\)", "", array.layout)).device_bytes for array in line.results)


def _read(fused: Sequence[Instruction], number: int, whole: int) -> int:
    """Counts the bytes that a fusion reads of one of its operands: only the slices if it only slices it."""
    seen: set[Instruction] = set()
    total = 0
    for line in fused:
        if line.opcode == "parameter":
            seen |= {line} if line.number == number else set()
            continue
        for position, operand in enumerate(line.operands):
            if operand not in seen:
                continue
            if line.opcode in _VIEWS or _retiles(line):
                seen.add(line)
            elif line.opcode in _SLICES and position == 0:
                total += _part(line)
            elif line.opcode == "fusion":
                total += _read(line.fused, position, whole)
            elif line.opcode != "dynamic-update-slice" or position > 0:
                return whole
    return min(total, whole)


def _retiles(line: Instruction) -> bool:
    """Whether a fusion inside another reads an array by other tiles, where it is, as libtpu's do before a slice."""
    return bool(line.fused) and line.fused[-1].opcode == "copy" and _in_place(line) == {0: 0}


def _written(fusion: Instruction) -> int:
    """Counts the bytes that a fusion writes: of an output that is an updated operand, only the update."""
    outputs, sizes, total = _outputs(fusion), [array.device_bytes for array in fusion.results], 0
    for output, whole in zip(outputs, sizes if len(outputs) == len(sizes) else [sum(sizes)], strict=True):
        is_update, is_fusion = output.opcode == "dynamic-update-slice", output.opcode == "fusion"
        total += min(whole, _part(output.operands[1]) if is_update else _written(output) if is_fusion else whole)
    return total
