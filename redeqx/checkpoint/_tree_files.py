"""The files of a checkpoint's trees, and how the processes of a run write them.

In place: one file for each tree, into which each process writes its own shards. This needs a folder shared by all processes,
and writes at any position of a file. Otherwise, a file per process: one process writes each array completely, into its own
file, from the first byte to the last; an index maps arrays to files. All processes make the same calls.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from ..storage import Location
from ._manifest import write_json
from ._reader import INDEX
from ._safetensors import Writer, file_size, incomplete, tensors_size, write_tensors
from ._shards import gathered, own_blocks, owners

# By kind: the arrays of each tree by name, and the dtype to which its floating arrays are cast.
Trees: TypeAlias = Mapping[str, tuple[Mapping[str, Any], Any]]


class InPlace:
    """One file for each tree, on a disk.

    **Attributes:**

    - `size`: bytes on the disk of this process.
    - `needs_copy`: whether `copy` must be called before `write`.
    """

    needs_copy = False

    def __init__(self, trees: Trees):
        self._files = {f"{kind}.safetensors": Writer(leaves, dtype) for kind, (leaves, dtype) in trees.items()}
        self._blocks = {f"{kind}.safetensors": own_blocks(leaves) for kind, (leaves, _) in trees.items()}
        self.size = sum(file.size for file in self._files.values())

    def copy(self) -> None:
        """Copies what this process writes to the host, so that the arrays on the device may be deleted."""
        for blocks in self._blocks.values():
            for name, each in blocks.items():
                blocks[name] = [block.copied() for block in each]

    def create(self, folder: Path) -> None:
        """Prepares the files: once for each folder, before any `write`."""
        folder.mkdir()
        for name, file in self._files.items():
            file.create(folder / name)

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes this process's arrays, and calls fsync; returns what `finish` needs, as JSON."""
        return {name: file.write(folder / name, self._blocks[name]) for name, file in self._files.items()}

    def finish(self, folder: Path, written: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """Completes the files, once for each folder; returns `{"size": bytes, "crc32": checksum}` by file name.

        **Arguments:**

        - `written`: the result of each process's `write`.
        """
        return {name: file.finish(folder / name, [each[name] for each in written]) for name, file in self._files.items()}


class FilePerProcess:
    """A file for each tree and process; an index for each tree with several files. The methods are those of `InPlace`.

    With several processes, each copies the arrays of its files to the host before writing: all processes gather an array
    together, but write at their own pace.
    """

    def __init__(self, trees: Trees, index: int, is_shared: bool):
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
        if isinstance(folder, Path):
            folder.mkdir()

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
            if len(files) > 1:
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
