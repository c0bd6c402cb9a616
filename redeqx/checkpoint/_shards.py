"""Assigns the shards of arrays, or complete arrays, to the processes that write them, and locates their bytes in a file.

One device's copy of each shard is written, by the device's process. All processes compute the same assignment from the
arrays' shardings. It balances the bytes that they write.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from .._tree import is_key

_IMBALANCE = 8  # a process may write up to 1/8 of its share more than another


@dataclass(frozen=True)
class Block:
    """A box of an array, with its values."""

    start: tuple[int, ...]  # its first index in each dim of the array
    shape: tuple[int, ...]
    shards: Sequence[tuple[tuple[int, ...], Any]]  # its pieces: the first index, and an array on one device or on the host

    def values(self) -> np.ndarray:
        """Returns the block on the host, in C order."""
        if len(self.shards) == 1:
            return np.asarray(_on_host(self.shards[0][1]), order="C")
        whole = np.empty(self.shape, self.shards[0][1].dtype)
        for start, shard in self.shards:
            index = (slice(a - b, a - b + n) for a, b, n in zip(start, self.start, shard.shape, strict=True))
            whole[tuple(index)] = _on_host(shard)
        return whole

    def copied(self) -> "Block":
        """Returns a copy of the block in host memory, independent of the original arrays."""
        values = self.values()
        is_own = values.flags.owndata and values is not self.shards[0][1]
        return Block(self.start, self.shape, [(self.start, values if is_own else values.copy())])

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields the contiguous runs in an array of that shape, in order: `(offset there, offset in the block, length)`."""
        # The last dim that the block covers only partly: all dims after it are contiguous.
        cut = max((dim for dim, n in enumerate(self.shape) if n != shape[dim]), default=0)
        n_items = math.prod(self.shape[cut:])
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(a * stride for a, stride in zip(self.start, strides, strict=True))
        for i, outer in enumerate(itertools.product(*map(range, self.shape[:cut]))):
            yield first + sum(a * stride for a, stride in zip(outer, strides, strict=False)), i * n_items, n_items


def as_stored(leaf: Any) -> Any:
    """Returns a leaf as it is stored in a file: typed PRNG keys as their data."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def shape_in_file(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a leaf in a file."""
    leaf = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return tuple(leaf.shape), leaf.dtype


def own_blocks(leaves: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Returns the blocks that this process writes, for each array by name. Every process passes the same arrays. Process 0
    writes the leaves that are not JAX arrays."""
    me = jax.process_index()
    load: Counter[int] = Counter()  # bytes of each process
    # For contiguous writes, a process continues an array that it has begun until it is this many bytes ahead.
    ahead = sum(map(_n_bytes, leaves.values())) // (_IMBALANCE * jax.process_count())
    blocks: dict[str, list[Block]] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            shape = tuple(leaf.shape)
            blocks[name] = [Block((0,) * len(shape), shape, [((0,) * len(shape), leaf)])] if me == 0 else []
            load[0] += _n_bytes(leaf)
            continue
        stored = as_stored(leaf)
        here = {shard.device: shard.data for shard in stored.addressable_shards}
        shards, owner = [], None
        for box, devices in _shard_devices(stored).items():
            least = min(devices, key=lambda device: (load[device.process_index], device.id))
            same = next((device for device in devices if owner and device.process_index == owner.process_index), least)
            owner = same if load[same.process_index] - load[least.process_index] < ahead else least
            load[owner.process_index] += math.prod(b - a for a, b in box) * stored.dtype.itemsize
            if owner.process_index == me:
                shards.append((tuple(a for a, _ in box), here[owner]))
        blocks[name] = _merge_shards(shards)
    return blocks


def owners(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns the process that writes each array completely, by the array's name; a process with a complete copy if there is
    one. Process 0 writes the leaves that are not JAX arrays."""
    load: Counter[int] = Counter()
    found: dict[str, int] = {}
    for name, leaf in sorted(leaves.items(), key=lambda item: -_n_bytes(item[1])):  # the largest first, for balance
        holders = {0}
        if isinstance(leaf, jax.Array):
            stored = as_stored(leaf)
            holders = _processes_with_copy(stored) or {device.process_index for device in stored.sharding.device_set}
        found[name] = min(holders, key=lambda process: (load[process], process))
        load[found[name]] += _n_bytes(leaf)
    return found


def gathered(leaf: Any, owner: int) -> np.ndarray | None:
    """Returns the complete array in its owner's host memory, None in the other processes. All processes must call it."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf) if owner == jax.process_index() else None
    stored = as_stored(leaf)
    if owner not in _processes_with_copy(stored):
        assert isinstance(stored.sharding, NamedSharding)
        stored = _replicate(NamedSharding(stored.sharding.mesh, P()))(stored)
    if owner != jax.process_index():
        return None
    return held(stored).copied().values()


@cache
def _replicate(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns the jitted identity with this sharding, always the same one: a new one would compile at each save."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def held(stored: jax.Array) -> Block:
    """Returns the block that this process's shards fill together."""
    parts = {
        tuple(part.indices(size)[0] for part, size in zip(shard.index, stored.shape, strict=True)): shard.data
        for shard in stored.addressable_shards
    }
    (block,) = _merge_shards(list(parts.items()))
    return block


def _n_bytes(leaf: Any) -> int:
    """Returns the bytes of an array in a file."""
    shape, dtype = shape_in_file(leaf)
    return math.prod(shape) * dtype.itemsize


def _shard_devices(stored: Any) -> dict[tuple[tuple[int, int], ...], list[Any]]:
    """Returns the devices that hold each shard of an array, by the shard's `(start, stop)` in each dim."""
    boxes: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in stored.sharding.devices_indices_map(stored.shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True))
        boxes.setdefault(box, []).append(device)
    return boxes


def _processes_with_copy(stored: Any) -> set[int]:
    """Returns the processes that have a complete copy of an array."""
    return set.intersection(*({device.process_index for device in devices} for devices in _shard_devices(stored).values()))


def _merge_shards(shards: list[tuple[tuple[int, ...], Any]]) -> list[Block]:
    """Returns one block if the shards fill a box, so that contiguous bytes are written together; else one per shard."""
    if not shards:
        return []
    start = tuple(map(min, zip(*(start for start, _ in shards), strict=True)))
    stops = [tuple(a + n for a, n in zip(start, shard.shape, strict=True)) for start, shard in shards]
    shape = tuple(max(stop) - a for a, stop in zip(start, zip(*stops, strict=True), strict=True))
    if sum(shard.size for _, shard in shards) == math.prod(shape):
        return [Block(start, shape, shards)]
    return [Block(start, shard.shape, [(start, shard)]) for start, shard in shards]


def _on_host(shard: Any) -> np.ndarray:
    if not isinstance(shard, jax.Array):
        return np.asarray(shard)
    # Through a new array over the same shard: JAX caches the host copy in the converted array, and caching it in
    # the tree's own arrays would keep a second model on the host.
    return np.asarray(jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard]))
