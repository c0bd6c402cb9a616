"""A path in an object store, with the methods of `pathlib.Path` that this library needs.

A store has no folders: a path counts as one if there are objects below it. `str` returns the address as it was written.
"""

import errno
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ..errors import brief_name, check_path
from . import _objects
from ._disk import disk_path

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Stat:
    """What is known about an object without reading it."""

    st_size: int


@dataclass(frozen=True, order=True)
class StorePath:
    """A path in an object store: `s3://bucket/key` or `gs://bucket/key`.

    **Arguments:**

    - `key`: without a slash at either end; empty for the bucket itself.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, other: str) -> "StorePath":
        return StorePath(self.scheme, self.bucket, "/".join(part for part in (self.key, other) if part))

    @property
    def name(self) -> str:
        """The last part; empty for a bucket."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> "StorePath":
        """The containing path; a bucket is its own parent."""
        return StorePath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "StorePath":
        """Returns the path of another name in the same parent."""
        return self.parent / name

    def relative_to(self, other: "StorePath") -> PurePosixPath:
        """Returns the path from `other` to this one, which must be below it."""
        return PurePosixPath(self.key).relative_to(other.key)

    def resolve(self) -> "StorePath":
        """Returns the path itself: a store has no links."""
        return self

    # --- reading -----------------------------------------------------------------------------------------------------

    def is_file(self) -> bool:
        """Returns whether it is an object."""
        return bool(self.key) and self._do(_objects.size) is not None

    def is_dir(self) -> bool:
        """Returns whether there are objects below it."""
        return self._do(_objects.has_any)

    def exists(self) -> bool:
        """Returns whether it is an object, or there are objects below it."""
        return self.is_file() or self.is_dir()

    def stat(self) -> Stat:
        """Returns the size of an object. Raises FileNotFoundError if there is none."""
        size = self._do(_objects.size)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return Stat(size)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each object below, at any depth, by its path from here."""
        return self._do(_objects.sizes)

    def iterdir(self) -> Iterator["StorePath"]:
        """Yields the paths directly below."""
        return (self / name for name in dict.fromkeys(key.partition("/")[0] for key in self.sizes()))

    def glob(self, pattern: str) -> Iterator["StorePath"]:
        """Yields the objects and folders below that match the pattern, of which each part matches one name."""
        depth = pattern.count("/") + 1
        below = dict.fromkeys("/".join(key.split("/")[:depth]) for key in self.sizes() if key.count("/") >= depth - 1)
        parts = pattern.split("/")
        return (self / key for key in below if all(map(fnmatch.fnmatchcase, key.split("/"), parts)))

    def read_bytes(self) -> bytes:
        """Returns an object's bytes."""
        return self._do(_objects.read)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes `[start, stop)` of an object."""
        return self._do(_objects.read, start, stop)

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes `[start, stop)` of an object in order, in pieces; a few are read concurrently."""
        places = [(at, min(at + _objects.PART, stop)) for at in range(start, stop, _objects.PART)]
        with ThreadPoolExecutor(_objects.CONCURRENT, "redeqx-read") as pool:
            pending = [pool.submit(self.read, *place) for place in places[: _objects.CONCURRENT]]
            later = iter(places[_objects.CONCURRENT :])
            while pending:
                yield pending.pop(0).result()
                pending += [pool.submit(self.read, *place) for place in [next(later, None)] if place is not None]

    def version(self) -> tuple[bytes, dict[str, str]]:
        """Returns an object's bytes, and their version, which `write_bytes` can replace."""
        return self._do(_objects.version)

    # --- writing -----------------------------------------------------------------------------------------------------

    def write_bytes(self, data: bytes, replacing: dict[str, str] | str | None = "any") -> dict[str, str] | None:
        """Writes an object; arguments and result as for `_objects.write`."""
        return self._do(_objects.write, data, replacing)

    def upload(self, content: Callable[[], Iterable[memoryview | bytes]], n_bytes: int) -> None:
        """Writes an object of `n_bytes`, in chunks from `content`, which is called again for a retry."""
        self._do(_objects.upload, content, n_bytes)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects below this path, by their paths from here."""
        _objects.delete(self.scheme, self.bucket, [(self / name).key for name in names])

    def unlink(self) -> None:
        """Deletes the object, if there is one."""
        _objects.delete(self.scheme, self.bucket, [self.key])

    def _do(self, act, *args):
        return act(self.scheme, self.bucket, self.key, *args)


Location: TypeAlias = Path | StorePath


def location(path: "str | Path | StorePath", name: str = "path") -> Location:
    """Returns a path, on a disk (as `disk_path`) or in an object store.

    **Arguments:**

    - `path`: `s3://bucket/key`, `gs://bucket/key`, or a path on a disk.
    - `name`: the name of the argument, for errors.

    Raises ValueError for another kind of address, ImportError for a store without `obstore`.
    """
    if isinstance(path, StorePath):
        return path
    check_path(path, name)
    if re.match(r"(s3|gs):/[^/]", os.fspath(path)):
        raise ValueError(
            f"`{name}`: expected the address of an object store as a string, got {path!r}, with one slash: `Path` removes "
            "the other. Pass the string with two."
        )
    match = _ADDRESS.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        return disk_path(path, name)
    scheme, bucket, key = match[1].lower(), match[2], (match[3] or "").strip("/")
    if scheme not in _objects.SCHEMES:
        known = ", ".join(f"{each}://" for each in _objects.SCHEMES)
        raise ValueError(
            f"`{name}`: expected a folder, or an address that begins with {known}, got {brief_name(str(path))}. Use one of "
            "them, or mount the store and pass the folder."
        )
    parts = key.split("/") if key else []
    if not bucket or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"`{name}`: expected `{scheme}://bucket/key`, got {brief_name(str(path))}. Pass a bucket, and a key without "
            "empty parts, `.` and `..`."
        )
    _objects.check_installed()
    return StorePath(scheme, bucket, key)


def fsync_folder(folder: Path) -> None:
    """Waits until the names in a folder on a disk survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exists(path: Location) -> bool:
    """Returns whether something exists at a path; on a disk a link counts even if it is broken."""
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()
