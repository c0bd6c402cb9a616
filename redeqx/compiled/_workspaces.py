"""The workspaces of cuBLAS and cuDNN: scratch memory of calls to these libraries.

A call returns its workspace as the last element of its result. The program states the size of cuBLAS workspaces. cuDNN
chooses the plan of a call on the GPU, so a program that was compiled without a GPU has empty cuDNN workspaces.
"""

import math
import re

from ._hlo import Instruction, Module, arrays_of, elements_of

_CALL = re.compile(r'custom_call_target="__cu(blas|dnn)\$')


def workspace(line: Instruction) -> str:
    """Returns the type of the workspace of a call to cuBLAS or cuDNN, or an empty string for other operations."""
    if line.opcode != "custom-call" or not line.type.startswith("(") or not _CALL.search(line.rest):
        return ""
    last = elements_of(line.type)[-1]
    return last if re.match(r"[su]8\[\d*\]", last) else ""


def workspace_allowance(module: Module) -> int:
    """Estimates the bytes of the largest workspace that cuDNN has not chosen yet. Returns 0 if it has chosen all.

    The estimate is, for each array of a call's result, a float32 array as large as the largest of them. The reason is that
    the gradient of attention sums the queries' gradient in float32, and those of grouped keys and values for each query
    head.
    """
    sizes = [0]
    for line in (line for lines in module.computations.values() for line in lines):
        if workspace(line).partition("{")[0] in ("u8[0]", "s8[0]"):
            *results, _ = (math.prod(shape) for _, shape in arrays_of(line.type))
            sizes.append(4 * len(results) * max(results, default=0))
    return max(sizes)
