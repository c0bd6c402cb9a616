"""A path in an object store, with the methods of `pathlib.Path` that this library needs.

A store has no folders: a path counts as one if there are objects below it. `str` returns the address as it was written.
"""

import errno
import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import brief_name, check_path
from ._disk import StorageError, disk_path
from ._requests import SCHEMES, check_installed, limits, request

T = TypeVar("T")
_MOST_PARTS = 9_000  # S3 allows 10,000
_CHUNK = 2**24  # bytes per read from a disk
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)(?:/(.*))?", re.DOTALL)


class Stat(NamedTuple):
    """What is known about an object without reading it."""

    st_size: int


@dataclass(frozen=True, order=True)
class StorePath:
    """A path in an object store: `s3://bucket/key` or `gs://bucket/key`. The key has no slash at either end, and is empty
    for the bucket."""

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
        try:
            return bool(self.key) and self.stat() is not None
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Returns whether there are objects below it."""
        return self._request(lambda ob, store: any(ob.list(store, self.key or None, chunk_size=1)), is_list=True)

    def exists(self) -> bool:
        """Returns whether it is an object, or there are objects below it."""
        return self.is_file() or self.is_dir()

    def stat(self) -> Stat:
        """Returns the size of an object. Raises FileNotFoundError if there is none."""
        return Stat(self._request(lambda ob, store: ob.head(store, self.key)["size"]))

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each object below, at any depth, by its path from here."""
        found = self._request(lambda ob, store: ob.list(store, self.key or None).collect(), is_list=True)
        return {each["path"][len(self.key) :].lstrip("/"): each["size"] for each in found}

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
        return self._request(lambda ob, store: bytes(ob.get(store, self.key).bytes()))

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes `[start, stop)` of an object."""
        if start == stop:
            return b""
        found = self._request(lambda ob, store: bytes(ob.get_range(store, self.key, start=start, end=stop)))
        if len(found) != stop - start:
            text = f"expected {stop - start} bytes from {start} on, got {len(found)}. The object is truncated: load another"
            raise StorageError(errno.EIO, text, str(self))
        return found

    def version(self) -> tuple[bytes, dict[str, str]]:
        """Returns an object's bytes, and their version, which `write_bytes` can replace."""

        def get(ob: Any, store: Any) -> tuple[bytes, dict[str, str]]:
            found = ob.get(store, self.key)
            return bytes(found.bytes()), _version(found.meta)

        return self._request(get)

    # --- writing -----------------------------------------------------------------------------------------------------

    def write_bytes(self, data: bytes, replacing: dict[str, str] | str | None = "any") -> dict[str, str] | None:
        """Writes an object in one request, whatever is there (`"any"`), only if there is none (None), or only in place of a
        version; returns its version. Returns None if something else is there, and nothing was written; also if the object
        was written but the answer was lost: callers that pass a condition then read the object."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "overwrite" if replacing == "any" else replacing or "create"
        try:
            return _version(
                self._request(
                    lambda ob, store: ob.put(store, self.key, data, mode=mode, use_multipart=False),
                    on_condition=replacing != "any",
                )
            )
        except OSError as error:
            is_missing = replacing != "any" and isinstance(error.__cause__, FileNotFoundError)
            if is_missing or isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                return None
            raise

    def upload(self, content: Callable[[], Iterable[memoryview | bytes]], n_bytes: int) -> None:
        """Writes an object of `n_bytes`, in chunks from `content`, a few of them in memory. It appears when it is complete,
        or never. `content` is called again for a retry.

        If the answer to the last request of an upload is lost, the request is retried, but S3 no longer knows the upload.
        """
        if n_bytes <= limits.part:
            self.write_bytes(b"".join(content()))
            return
        options = {"chunk_size": max(limits.part, math.ceil(n_bytes / _MOST_PARTS)), "max_concurrency": limits.concurrent}
        self._request(lambda ob, store: ob.put(store, self.key, iter(content()), **options), also=FileNotFoundError)

    def unlink(self) -> None:
        """Deletes the object, if there is one."""
        self.parent.delete([self.name])

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects below this path, by their paths from here. Missing ones count as deleted."""
        keys = [(self / name).key for name in names]
        try:
            if keys:
                self._request(lambda ob, store: ob.delete(store, keys))
        except FileNotFoundError:  # Google's store reports a missing object, and then some others may not be deleted
            for key in keys:
                with suppress(FileNotFoundError):
                    self._request(lambda ob, store, key=key: ob.delete(store, key))

    def _request(self, act: Callable[[Any, Any], T], **options: Any) -> T:
        return request(self.scheme, self.bucket, self.key, act, **options)


def _version(found: Any) -> dict[str, str]:
    return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}


Location: TypeAlias = Path | StorePath


def location(path: "str | Path | StorePath", name: str = "path") -> Location:
    """Returns a path, on a disk (as `disk_path`) or in an object store: `s3://bucket/key`, `gs://bucket/key`.

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
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ValueError(
            f"`{name}`: expected a folder, or an address that begins with {known}, got {brief_name(str(path))}. Use one of "
            "them, or mount the store and pass the folder."
        )
    parts = key.split("/") if key else []
    is_key = not re.search(r"[\x00-\x1f\x7f]", key) and not any(part in ("", ".", "..") for part in parts)
    if not is_key or not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):  # `obstore` prints a crash for a bucket with a space
        raise ValueError(
            f"`{name}`: expected `{scheme}://bucket/key`, got {brief_name(str(path))}. Pass the name of a bucket, and a key "
            "without control characters, empty parts, `.` and `..`."
        )
    check_installed()
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


def read_chunks(path: Location, start: int, stop: int) -> Iterator[bytes]:
    """Yields the bytes `[start, stop)` of a file in order, in pieces; from a store, a few are read concurrently."""
    if isinstance(path, Path):
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(_CHUNK, stop - start))):
                yield chunk
                start += len(chunk)
        return
    places = [(at, min(at + limits.part, stop)) for at in range(start, stop, limits.part)]
    with ThreadPoolExecutor(limits.concurrent, "redeqx-read") as pool:
        pending = [pool.submit(path.read, *place) for place in places[: limits.concurrent]]
        later = iter(places[limits.concurrent :])
        while pending:
            yield pending.pop(0).result()
            pending += [pool.submit(path.read, *place) for place in [next(later, None)] if place is not None]
