"""Checks that programs and initial values are the same in all processes, once, before they are used.

Every process compiles the same program and contributes its shards. If one has another learning rate, loss or initial
value, nothing fails by itself: parameters that should be equal drift apart, and a checkpoint mixes them.
"""

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from .._tree import is_key
from ._peers import Peers

_ADVICE = (
    "Every process must run the same script with the same arguments: look for what depends on the process, the host, the "
    "time, or the order of a set."
)
_LARGE = 2**20  # the most elements of a constant whose values are compared
_SHOWN = 160  # characters of a line of a program
_THREADS = 4


def agree_on_program(peers: Peers, what: str, lowered: Any) -> None:
    """Check that a program is the same in all processes; waits for all of them.

    Raises ValueError, the same in every process, with the first line that differs. Constants, such as a learning rate, are
    part of the program.
    """
    if peers.n == 1:
        return
    # The text excludes source locations, which differ if a process has the script in another folder.
    text: str = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=_LARGE)
    found: list[int] = peers.gather(f"program of {what}", zlib.crc32(text.encode()))
    if all(each == found[0] for each in found):
        return
    lines = text.splitlines()
    sums = peers.gather(f"lines of {what}", [zlib.crc32(line.encode()) for line in lines])
    other = next(i for i, each in enumerate(found) if each != found[0])
    n = next(n for n, (crc32, there) in enumerate(zip_longest(sums[0], sums[other])) if crc32 != there)
    shown = peers.gather(f"line of {what}", lines[n].strip()[:_SHOWN] if n < len(lines) else "its end")
    raise ValueError(
        f"`{what}`: expected the same program in all processes, got in line {n + 1} `{shown[0]}` in process 0, "
        f"`{shown[other]}` in process {other}. {_ADVICE}"
    )


def agree_on_values(peers: Peers, what: str, leaves: Mapping[str, Any]) -> None:
    """Check that array shards which several processes hold have the same bits in all of them.

    **Arguments:**

    - `leaves`: NumPy or JAX arrays by name; a JAX array may be on the devices of this process or of all.

    Raises ValueError, the same in every process, with the name of the first array that differs.
    """
    if peers.n == 1:
        return
    with ThreadPoolExecutor(_THREADS, "redeqx-compare") as pool:
        sums = {name: pool.submit(_crc32, part) for leaf in leaves for name, part in _shared_parts(leaf, leaves[leaf])}
        mine = {name: future.result() for name, future in sums.items()}
    found: list[dict[str, int]] = peers.gather(f"values of {what}", mine)
    first: dict[str, tuple[int, int]] = {}
    for index, sums_there in enumerate(found):
        for name, crc32 in sums_there.items():
            holder, expected = first.setdefault(name, (index, crc32))
            if crc32 != expected:
                raise ValueError(
                    f"`{what}`: expected `{name}` to have the same values in all processes, got crc32 {expected:08x} in "
                    f"process {holder}, {crc32:08x} in process {index}. {_ADVICE}"
                )


def _shared_parts(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yield the shards of an array that another process holds too, with names that are the same in all processes."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        yield name, leaf
        return
    holders: dict[str, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(str(index), set()).add(device.process_index)
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for index, part in parts.items():
        if len(holders[index]) > 1:
            yield name if part.shape == leaf.shape else f"{name}{index}", part


def _crc32(part: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
