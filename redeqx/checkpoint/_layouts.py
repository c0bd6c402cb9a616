"""Layouts: the files of a checkpoint, how the processes of a run write them, and which layout their file system supports.

In place: one file for each tree, into which each process writes its own shards. This needs a folder shared by all processes,
and writes at any position of a file. Otherwise, a file per process: one process writes each array completely, into its own
file, from the first byte to the last; an index maps arrays to files.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..distributed import Peers
from ..storage import Location, open_old, read_file, write_new
from ._manifest import write_json
from ._reader import INDEX
from ._safetensors import Writer, file_size, incomplete, tensors_size, write_tensors
from ._shards import gathered, own_blocks, owners

_SLOT = 16  # bytes per process in the probe file


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a folder's file system.

    **Arguments:**

    - `is_shared`: whether all processes see the same folder.
    - `in_place`: whether they can write into one file, each at its own positions.
    """

    is_shared: bool = True
    in_place: bool = True


def probe(path: Path, peers: Peers) -> Capabilities:
    """Tests the folder of a path: the processes write a file at that path together, and remove it.

    Raises OSError if it cannot be written at all.
    """
    try:
        peers.together("probe made", lambda: write_new(path, bytes(_SLOT * peers.n)), alone=True)
        return _marked(path, peers)
    finally:
        if peers.index == 0:
            path.unlink(missing_ok=True)


def _marked(path: Path, peers: Peers) -> Capabilities:
    """Returns the capabilities, found by having each process write its mark into a file that process 0 has created."""
    is_shared = all(peers.gather("probe seen", path.exists()))
    if is_shared:
        with contextlib.suppress(OSError):  # its mark is then missing
            fd = open_old(path, os.O_WRONLY)
            try:
                os.pwrite(fd, _mark(peers.index), peers.index * _SLOT)
                os.fsync(fd)
            finally:
                os.close(fd)
    peers.gather("probe marked")
    marks = b"".join(map(_mark, range(peers.n)))
    in_place = is_shared and peers.index == 0 and read_file(path) == marks
    return Capabilities(is_shared, peers.gather("probe read", in_place)[0])


def _mark(index: int) -> bytes:
    return f"process {index}".encode().ljust(_SLOT)


class Layout(ABC):
    """The files of one checkpoint, and how this process helps to write them. All processes make the same calls.

    **Arguments:**

    - `trees`: the arrays of each tree by name, and the dtype to which its floating arrays are cast.
    """

    size: int  # bytes on the disk of this process
    needs_copy = False  # whether `copy` must be called before `write`

    @abstractmethod
    def copy(self) -> None:
        """Copies what this process writes to the host, so that the arrays on the device may be deleted."""

    @abstractmethod
    def create(self, folder: Location) -> None:
        """Prepares the files: once for each folder, before any `write`."""

    @abstractmethod
    def write(self, folder: Location) -> dict[str, Any]:
        """Writes this process's arrays, and calls fsync; returns what `finish` needs, as JSON."""

    @abstractmethod
    def finish(self, folder: Location, written: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """Completes the files, once for each folder; returns `{"size": bytes, "crc32": checksum}` by file name.

        **Arguments:**

        - `written`: the result of each process's `write`.
        """


class InPlace(Layout):
    """One file for each tree, on a disk."""

    def __init__(self, trees: Mapping[str, tuple[Mapping[str, Any], Any]]):
        self._files = {f"{kind}.safetensors": Writer(leaves, dtype) for kind, (leaves, dtype) in trees.items()}
        self._blocks = {f"{kind}.safetensors": own_blocks(leaves) for kind, (leaves, _) in trees.items()}
        self.size = sum(file.size for file in self._files.values())

    def copy(self) -> None:
        self._blocks = {
            file: {name: [block.copied() for block in each] for name, each in by_name.items()}
            for file, by_name in self._blocks.items()
        }

    def create(self, folder: Any) -> None:
        for name, file in self._files.items():
            file.create(folder / name)

    def write(self, folder: Any) -> dict[str, Any]:
        return {name: file.write(folder / name, self._blocks[name]) for name, file in self._files.items()}

    def finish(self, folder: Any, written: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        return {name: file.finish(folder / name, [each[name] for each in written]) for name, file in self._files.items()}


class FilePerProcess(Layout):
    """A file for each tree and process; an index for each tree with several files.

    With several processes, each copies the arrays of its files to the host before writing: all processes gather an array
    together, but write at their own pace.
    """

    def __init__(self, trees: Mapping[str, tuple[Mapping[str, Any], Any]], index: int, is_shared: bool):
        self._trees, self._index = trees, index
        self.needs_copy = jax.process_count() > 1
        self._owners = {kind: owners(leaves) for kind, (leaves, _) in trees.items()}
        self._mine: dict[str, Mapping[str, Any]] = {kind: leaves for kind, (leaves, _) in trees.items()}
        self.size = sum(
            file_size({name: leaf for name, leaf in leaves.items() if is_shared or self._owners[kind][name] == index}, dtype)
            for kind, (leaves, dtype) in trees.items()
        )

    def copy(self) -> None:
        for kind, (leaves, _) in self._trees.items():
            whole = {name: gathered(leaf, self._owners[kind][name]) for name, leaf in leaves.items()}
            self._mine[kind] = {name: values for name, values in whole.items() if values is not None}

    def create(self, folder: Location) -> None:
        del folder

    def write(self, folder: Location) -> dict[str, dict[str, int]]:
        for kind, owners_of in self._owners.items():
            mine = [name for name, owner in owners_of.items() if owner == self._index]
            if lacking := [name for name in mine if name not in self._mine[kind]]:
                raise incomplete(folder, f"`{lacking[0]}` in process {self._index}", f"{len(self._mine[kind])} other arrays")
        return {
            (file := self._file(kind, self._index)): write_tensors(folder / file, self._mine[kind], dtype)
            for kind, (_, dtype) in self._trees.items()
            if self._index in self._writers(kind)
        }

    def finish(self, folder: Location, written: Sequence[Mapping[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
        sums = {file: each for by_file in written for file, each in by_file.items()}
        for kind, (leaves, dtype) in self._trees.items():
            files = [self._file(kind, index) for index in self._writers(kind)]
            if lacking := [file for file in files if file not in sums]:
                raise incomplete(folder / lacking[0], "the file of another process", f"files of {len(written)} process(es)")
            if len(self._writers(kind)) == 1:
                continue
            where = {name: self._file(kind, owner) for name, owner in sorted(self._owners[kind].items())}
            fields = {"metadata": {"total_size": tensors_size(leaves, dtype)}, "weight_map": where}
            sums[f"{kind}{INDEX}"] = write_json(folder / f"{kind}{INDEX}", fields)
        return sums

    def _writers(self, kind: str) -> list[int]:
        """Returns the processes that write a file of that tree."""
        return sorted(set(self._owners[kind].values())) or [0]

    def _file(self, kind: str, index: int) -> str:
        writers = self._writers(kind)
        n = len(writers)
        return f"{kind}.safetensors" if n == 1 else f"{kind}-{writers.index(index) + 1:05}-of-{n:05}.safetensors"
