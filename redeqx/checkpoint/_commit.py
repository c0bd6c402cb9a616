"""How a checkpoint appears in a folder and disappears: by a rename on a disk, by its manifest in an object store.

A checkpoint is written to `target(name)`, the manifest last, and exists after `commit`. A kill at any moment leaves the
committed checkpoints, and remains that `sweep` removes. `_manager` decides what is written, kept and removed, and when.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..distributed import Peers
from ..storage import (
    StorageError,
    StorePath,
    check_subfolder,
    explained,
    fsync_folder,
    make_subfolder,
    open_old,
    read_file,
    replacing,
    write_new,
)
from ._folder import INDEX_FILE, order
from ._lock import Lock
from ._manifest import MANIFEST, TMP, write_json

_SLOT = 16  # bytes per process in the probe file


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a folder's file system."""

    is_shared: bool = True  # whether all processes see the same folder
    in_place: bool = True  # whether they can write into one file, each at its own positions


class Disk:
    """A folder in a file system, below the folder that the user named, its root."""

    def __init__(self, folder: Path, root: Path):
        self.folder, self._root = folder, root
        self._has_root = root.is_dir()  # if so, every save needs it
        self._is_made = False

    def check_root(self) -> None:
        """Raises OSError if the run's folder existed at the start of the run, and is gone."""
        if self._has_root and not self._root.is_dir():
            why = "expected the run's folder, which existed at its start, got none. Mount it again, or save elsewhere"
            raise StorageError(errno.ENOENT, why, str(self._root)) from None

    def lock(self, log: Callable[[str], None]) -> Lock:
        """Locks the folder, which need not exist. Raises OSError if it is something else than a folder."""
        self.check_root()
        check_subfolder(self.folder, self._root)  # now, not at the first save
        if self._root.is_dir():
            make_subfolder(self.folder.parent, self._root)
        return Lock(self.folder, log)

    def create(self) -> None:
        """Creates the folder."""
        self.check_root()
        if self._is_made and self.folder.is_dir():
            return  # the steps wait for this, and flushing the folders above takes as long as copying a small model
        with explained(self.folder):
            make_subfolder(self.folder, self._root)
            above = self.folder
            while above != self._root:
                above = above.parent
                fsync_folder(above)
        self._is_made = True

    def capabilities(self, peers: Peers, log: Callable[[str], None]) -> Capabilities:
        """Tests the file system: all processes write a file together. Raises OSError if it cannot be written."""
        with explained(self.folder):
            found = _probe(self.folder / f"{TMP}probe", peers)
        if not found.is_shared:
            log(
                f"{self.folder}: not shared by all {peers.n} processes, so each keeps its part of every checkpoint on "
                "its own disk. Resuming needs all of the parts: a `workdir` that every host mounts is better"
            )
        elif not found.in_place and peers.n > 1:
            log(f"{self.folder}: several processes cannot write one file there, so each writes its own")
        return found

    def check_space(self, name: str, n_bytes: int) -> int:
        """Returns the free bytes. Raises OSError if a checkpoint does not fit."""
        free = shutil.disk_usage(self.folder).free
        if n_bytes > free:
            why = f"expected {n_bytes} bytes free, got {free}. Make room, or save elsewhere"
            raise StorageError(errno.ENOSPC, why, str(self.folder / name))
        return free

    def target(self, name: str) -> Path:
        """Returns where the files of a new checkpoint are written."""
        return self.folder / f"{TMP}{name}"

    def commit(self, name: str) -> None:
        """Turns the files at `target(name)` into a checkpoint."""
        fsync_folder(self.target(name))
        os.rename(self.target(name), self.folder / name)
        fsync_folder(self.folder)

    def write_index(self, index: Mapping[str, str]) -> None:
        """Replaces the index."""
        with replacing(self.folder / INDEX_FILE) as beside:
            write_json(beside, index)
        fsync_folder(self.folder)

    def sweep(self) -> None:
        """Removes the remains of unfinished saves and removals."""
        for path in self.folder.glob(f"{TMP}*"):
            _delete(path)

    def remove(self, name: str) -> None:
        """Removes a checkpoint."""
        # Renamed first, so that a kill leaves no partial folder that looks like a checkpoint.
        os.rename(self.folder / name, self.target(name))
        _delete(self.target(name))


class Store:
    """A prefix in an object store, where nothing can be renamed, and an object appears when it is complete. The methods are
    those of `Disk`.

    A checkpoint's files are written to their final place; without a manifest they are the remains of a killed save.
    """

    def __init__(self, folder: StorePath):
        self.folder = folder

    def check_root(self) -> None:
        """Does nothing: a store has no folders that could be missing, or must be made."""

    create = check_root

    def lock(self, log: Callable[[str], None]) -> Lock:
        return Lock(self.folder, log)

    def capabilities(self, peers: Peers, log: Callable[[str], None]) -> Capabilities:
        del peers, log
        # The shards of several processes are strided runs of a tensor, but the parts of an object are contiguous, at least
        # 5 MiB large, and must be sent by one client in most libraries. So each process writes its own files.
        return Capabilities(is_shared=True, in_place=False)

    def check_space(self, name: str, n_bytes: int) -> int:
        return 0  # a store does not report it, and has enough

    def target(self, name: str) -> StorePath:
        return self.folder / name

    def commit(self, name: str) -> None:
        """Does nothing: a folder with a manifest is a checkpoint."""

    def write_index(self, index: Mapping[str, str]) -> None:
        write_json(self.folder / INDEX_FILE, index)

    def sweep(self) -> None:
        keys = self.folder.sizes()
        complete = {key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")}
        folders = {key: key.partition("/")[0] for key in keys if "/" in key}
        self.folder.delete(key for key, name in folders.items() if order(name)[0] >= 0 and name not in complete)

    def remove(self, name: str) -> None:
        path = self.folder / name
        (path / MANIFEST).unlink()  # first, so that a kill leaves no partial checkpoint
        path.delete(path.sizes())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _probe(path: Path, peers: Peers) -> Capabilities:
    """Tests the folder of a path: each process writes its mark into a file that process 0 creates and removes."""
    marks = [f"process {index}".encode().ljust(_SLOT) for index in range(peers.n)]
    try:
        peers.together("probe made", lambda: write_new(path, [bytes(_SLOT * peers.n)]), alone=True)
        is_shared = all(peers.gather("probe seen", path.exists()))
        if is_shared:
            with contextlib.suppress(OSError), open_old(path, "wb") as file:  # its mark is then missing
                os.pwrite(file.fileno(), marks[peers.index], peers.index * _SLOT)
                os.fsync(file.fileno())
        peers.gather("probe marked")
        in_place = is_shared and peers.index == 0 and read_file(path) == b"".join(marks)
        return Capabilities(is_shared, peers.gather("probe read", in_place)[0])
    finally:
        if peers.index == 0:
            path.unlink(missing_ok=True)
