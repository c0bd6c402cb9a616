"""The files of a tree in a checkpoint, and how the processes of a run write them together.

In place: one file, into which each process writes its own shards. This needs a folder shared by all processes, and writes at
any position of a file. Otherwise, a file per process: one process writes each array completely, into its own file, from the
first byte to the last; an index maps arrays to files. All processes make the same calls.
"""

import errno
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ..storage import Location, StorageError, open_new, open_old
from ._crc32 import Crc32, crc32_of
from ._manifest import write_json
from ._reader import INDEX
from ._safetensors import Tensor, chunks_of, file_size, header_of, write_tensors
from ._shards import Block, gathered, own_blocks, owners

_LARGE = 2**20  # from this many bytes on, another thread writes
_WRITERS = 3  # threads: two write and one flushes; more are no faster


class InPlace:
    """One file on a disk, from one process or from several, each with its own shards. Its name begins with `kind`, such as
    `"model"`; `leaves` and `float_dtype` are as for `write_tensors`. Its `size` is in bytes on the disk of this process."""

    needs_copy = False  # whether `copy` must be called before `write`

    def __init__(self, kind: str, leaves: Mapping[str, Any], float_dtype: Any):
        self._name = f"{kind}.safetensors"
        self._header, self._tensors, self.size = header_of(leaves, float_dtype)
        self._blocks = own_blocks(leaves)

    def copy(self) -> None:
        """Copies what this process writes to the host, so that the arrays on the device may be deleted."""
        for name, blocks in self._blocks.items():
            self._blocks[name] = [block.copied() for block in blocks]

    def create(self, folder: Path) -> None:
        """Creates the file with its full size: once for each folder, before any `write`."""
        with open_new(folder / self._name) as file:
            os.posix_fallocate(file.fileno(), 0, self.size)  # raises if the disk is full, before any work

    def write(self, folder: Path) -> tuple[int, list[int]]:
        """Writes this process's blocks, and calls fsync; returns what `finish` needs, as JSON: their contribution to the
        file's crc32, and how many items of each tensor were written."""
        contribution, n_items = 0, []
        with open_old(folder / self._name, "wb") as file:
            fd = file.fileno()
            # Threads write and flush while this one casts the next bytes and updates the checksum.
            with ThreadPoolExecutor(_WRITERS, "redeqx-write") as pool:
                flush = _submit(pool, os.fdatasync, fd)
                for name, tensor in self._tensors.items():
                    n_items.append(sum(math.prod(block.shape) for block in self._blocks[name]))
                    for block in self._blocks[name]:
                        contribution ^= self._write_block(fd, tensor, block, pool)
                        if flush.done():
                            flush.result()
                            flush = _submit(pool, os.fdatasync, fd)
                flush.result()
            os.fsync(fd)
        return contribution, n_items

    def _write_block(self, fd: int, tensor: Tensor, block: Block, pool: ThreadPoolExecutor) -> int:
        """Writes a block of a tensor; returns its contribution to the file's crc32."""
        crc32, begin = Crc32(), len(self._header) + tensor.start
        flat = block.values().reshape(-1)
        written: deque[Future[None]] = deque()
        for there, at, n in block.runs(tensor.shape):
            offset = begin + there * tensor.dtype.itemsize
            for chunk in chunks_of(flat[at : at + n], tensor.dtype):
                if len(chunk) >= _LARGE:
                    if len(written) == _WRITERS - 1:  # bounds the queue of cast chunks on a slow disk
                        written.popleft().result()
                    written.append(_submit(pool, _pwrite, fd, chunk, offset))
                else:
                    _pwrite(fd, chunk, offset)
                crc32.add(chunk, offset)
                offset += len(chunk)
        for future in written:
            future.result()
        return crc32.contribution(self.size)

    def finish(self, folder: Path, written: Sequence[tuple[int, Sequence[int]]]) -> dict[str, dict[str, int]]:
        """Writes the header, and calls fsync: once for each folder. Returns `{"size": bytes, "crc32": checksum}` by file,
        given the result of each process's `write`. Raises OSError if they did not write every item of every tensor."""
        path = folder / self._name
        for i, (name, tensor) in enumerate(self._tensors.items()):
            expected, found = math.prod(tensor.shape), sum(n_items[i] for _, n_items in written)
            if found != expected:
                raise _incomplete(path, f"all {expected} numbers of `{name}`", f"{found} from {len(written)} process(es)")
        crc32 = Crc32()
        crc32.add(self._header, 0)
        with open_old(path, "wb") as file:
            _pwrite(file.fileno(), memoryview(self._header)[8:], 8)
            # The header's length is written last: until then it is 0, and every reader refuses the file.
            _pwrite(file.fileno(), memoryview(self._header)[:8], 0)
            os.fsync(file.fileno())
        contributions = [crc32.contribution(self.size), *(each for each, _ in written)]
        return {self._name: {"size": self.size, "crc32": crc32_of(contributions, self.size)}}


class FilePerProcess:
    """A file for each process, and an index file if there are several. The methods are those of `InPlace`. `index` is the
    number of this process. `is_shared`: whether the processes write into the same folder.

    With several processes, each copies the arrays of its files to the host before writing: all processes gather an array
    together, but write at their own pace.
    """

    def __init__(self, kind: str, leaves: Mapping[str, Any], float_dtype: Any, index: int, is_shared: bool):
        self._kind, self._leaves, self._float_dtype, self._index = kind, leaves, float_dtype, index
        self.needs_copy = jax.process_count() > 1
        self._owners = owners(leaves)
        writers = sorted(set(self._owners.values())) or [0]
        n = len(writers)
        suffixes = [""] if n == 1 else [f"-{i:05}-of-{n:05}" for i in range(1, n + 1)]
        self._files = {writer: f"{kind}{suffix}.safetensors" for writer, suffix in zip(writers, suffixes, strict=True)}
        self._mine = leaves
        here = {name: leaf for name, leaf in leaves.items() if is_shared or self._owners[name] == index}
        self.size = file_size(here, float_dtype)

    def copy(self) -> None:
        whole = {name: gathered(leaf, self._owners[name]) for name, leaf in self._leaves.items()}
        self._mine = {name: values for name, values in whole.items() if values is not None}

    def create(self, folder: Location) -> None:
        """Does nothing: `write` creates a file."""

    def write(self, folder: Location) -> dict[str, dict[str, int]]:
        lacking = [name for name, owner in self._owners.items() if owner == self._index and name not in self._mine]
        if lacking:
            raise _incomplete(folder, f"`{lacking[0]}` in process {self._index}", f"{len(self._mine)} other arrays")
        file = self._files.get(self._index)
        return {} if file is None else {file: write_tensors(folder / file, self._mine, self._float_dtype)}

    def finish(self, folder: Location, written: Sequence[Mapping[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
        sums = {file: each for by_file in written for file, each in by_file.items()}
        if lacking := [file for file in self._files.values() if file not in sums]:
            raise _incomplete(folder / lacking[0], "the file of another process", f"files of {len(written)} process(es)")
        if len(self._files) > 1:
            header, _, size = header_of(self._leaves, self._float_dtype)
            where = {name: self._files[owner] for name, owner in sorted(self._owners.items())}
            fields = {"metadata": {"total_size": size - len(header)}, "weight_map": where}
            sums[f"{self._kind}{INDEX}"] = write_json(folder / f"{self._kind}{INDEX}", fields)
        return sums


def _incomplete(path: Location, rule: str, got: str) -> StorageError:
    """Returns the error for a save in which some process did not take part."""
    why = f"expected {rule}, got {got}: JAX has {jax.process_count()}, and some hold the rest"
    text = f"{why}. Let redeqx start all of them: `Deployer(n_processes=, host0_address=)`"
    return StorageError(errno.ENODATA, text, str(path))


def _submit(pool: ThreadPoolExecutor, act: Callable[..., None], *args: Any) -> Future[None]:
    """As `pool.submit`, but calls `act` itself when the main thread has ended: no pool of Python takes work from then on."""
    try:
        return pool.submit(act, *args)
    except RuntimeError:
        act(*args)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
