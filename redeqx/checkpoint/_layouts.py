"""How the processes of a run write the files of a checkpoint, and which way their file system allows.

In place: one file a tree, of which each process writes its own shards. That takes a folder that all of them see, and writes
at any position of a file. Where one of the two is missing, a file each: every array whole in the file of one process,
written from the first byte to the last, and an index of which array is where.
"""

import contextlib
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed import Peers
from ._reader import INDEX
from ._safetensors import Writer, file_size, tensors_size, write_tensors
from ._shards import gathered, own_blocks, owners

_SLOT = 16  # bytes of the probe a process


@dataclass(frozen=True)
class Ways:
    """What a folder allows.

    **Arguments:**

    - `is_shared`: whether all processes see the same.
    - `in_place`: whether they can write into one file, each at its own place.
    """

    is_shared: bool = True
    in_place: bool = True


def probe(path: Path, peers: Peers) -> Ways:
    """What the folder of a path allows: the processes try it together, with a file there that is removed again.

    Raises OSError where that cannot be written at all.
    """
    try:
        peers.together("probe made", lambda: path.write_bytes(bytes(_SLOT * peers.n)), alone=True)
        return _marked(path, peers)
    finally:
        if peers.index == 0:
            path.unlink(missing_ok=True)


def _marked(path: Path, peers: Peers) -> Ways:
    """What marks show that each process leaves in a file that process 0 has made."""
    is_shared = all(peers.gather("probe seen", path.exists()))
    if is_shared:
        with contextlib.suppress(OSError):  # what is not there in the end tells
            fd = os.open(path, os.O_WRONLY)
            try:
                os.pwrite(fd, _mark(peers.index), peers.index * _SLOT)
                os.fsync(fd)
            finally:
                os.close(fd)
    peers.gather("probe marked")
    marks = b"".join(map(_mark, range(peers.n)))
    in_place = is_shared and peers.index == 0 and path.read_bytes() == marks
    return Ways(is_shared, peers.gather("probe read", in_place)[0])


def _mark(index: int) -> bytes:
    return f"process {index}".encode().ljust(_SLOT)


class Layout(ABC):
    """The files of one checkpoint, and this process's part in writing them; all processes go through it together.

    **Arguments:**

    - `trees`: the arrays of each tree by name, and the dtype to which its floating arrays are cast.
    """

    size: int  # bytes that will be on the disk that this process sees

    @abstractmethod
    def copy(self) -> None:
        """Copy what this process writes to the host, so that the device's arrays may go."""

    @abstractmethod
    def create(self, folder: Path) -> None:
        """Prepare the files: before any `write`, and once a folder."""

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write this process's part, and fsync; returns what `finish` needs to know of it, as JSON."""

    @abstractmethod
    def finish(self, folder: Path, written: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """Complete the files, once a folder; returns `{"size": bytes, "crc32": checksum}` of each by its name.

        **Arguments:**

        - `written`: what each process's `write` returned.
        """


class InPlace(Layout):
    """One file a tree."""

    def __init__(self, trees: Mapping[str, tuple[Mapping[str, Any], Any]]):
        self._files = {f"{kind}.safetensors": Writer(leaves, dtype) for kind, (leaves, dtype) in trees.items()}
        self._blocks = {f"{kind}.safetensors": own_blocks(leaves) for kind, (leaves, _) in trees.items()}
        self.size = sum(file.size for file in self._files.values())

    def copy(self) -> None:
        self._blocks = {
            file: {name: [block.copied() for block in each] for name, each in by_name.items()}
            for file, by_name in self._blocks.items()
        }

    def create(self, folder: Path) -> None:
        for name, file in self._files.items():
            file.create(folder / name)

    def write(self, folder: Path) -> dict[str, int]:
        return {name: file.write(folder / name, self._blocks[name]) for name, file in self._files.items()}

    def finish(self, folder: Path, written: Sequence[Mapping[str, int]]) -> dict[str, dict[str, int]]:
        return {name: file.finish(folder / name, [each[name] for each in written]) for name, file in self._files.items()}


class FileEach(Layout):
    """A file a tree of each process, with an index a tree where there are several."""

    def __init__(self, trees: Mapping[str, tuple[Mapping[str, Any], Any]], index: int, is_shared: bool):
        self._trees, self._index = trees, index
        self._owners = {kind: owners(leaves) for kind, (leaves, _) in trees.items()}
        self._mine: dict[str, dict[str, Any]] = {}
        self.size = sum(
            file_size({name: leaf for name, leaf in leaves.items() if is_shared or self._owners[kind][name] == index}, dtype)
            for kind, (leaves, dtype) in trees.items()
        )

    def copy(self) -> None:
        for kind, (leaves, _) in self._trees.items():
            whole = {name: gathered(leaf, self._owners[kind][name]) for name, leaf in leaves.items()}
            self._mine[kind] = {name: values for name, values in whole.items() if values is not None}

    def create(self, folder: Path) -> None:
        del folder

    def write(self, folder: Path) -> dict[str, dict[str, int]]:
        return {
            (file := self._file(kind, self._index)): write_tensors(folder / file, self._mine[kind], dtype)
            for kind, (_, dtype) in self._trees.items()
            if self._index in self._writers(kind)
        }

    def finish(self, folder: Path, written: Sequence[Mapping[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
        sums = {file: each for by_file in written for file, each in by_file.items()}
        for kind, (leaves, dtype) in self._trees.items():
            if len(self._writers(kind)) == 1:
                continue
            where = {name: self._file(kind, owner) for name, owner in sorted(self._owners[kind].items())}
            fields = {"metadata": {"total_size": tensors_size(leaves, dtype)}, "weight_map": where}
            text = json.dumps(fields, indent=1).encode()
            with open(folder / f"{kind}{INDEX}", "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            sums[f"{kind}{INDEX}"] = {"size": len(text), "crc32": zlib.crc32(text)}
        return sums

    def _writers(self, kind: str) -> list[int]:
        """The processes that have a file of that tree."""
        return sorted(set(self._owners[kind].values())) or [0]

    def _file(self, kind: str, index: int) -> str:
        writers = self._writers(kind)
        n = len(writers)
        return f"{kind}.safetensors" if n == 1 else f"{kind}-{writers.index(index) + 1:05}-of-{n:05}.safetensors"
