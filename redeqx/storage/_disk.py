"""Files on a disk whose folder others may write into, such as a run's on a shared scratch: never through a link.

The folder that a user names, and its parents, may be links. Everything below it was created by this library, which creates
no links: one that is there was planted, and writing through it would overwrite a file elsewhere, with this user's rights.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from ..errors import brief_name, check_path


class StorageError(OSError):
    """A disk or an object store refuses something: an OSError whose text begins with the path, as that of other errors."""

    def __str__(self) -> str:
        return super().__str__() if self.filename is None else f"`{self.filename}`: {self.strerror}."


_MOST_TRIES = 100
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


def disk_path(path: str | Path, name: str = "path") -> Path:
    """Returns a user's path on a disk: absolute, since a script may change its current folder; `~` is the home folder.

    Raises TypeError for anything else than a path, ValueError for an empty one and for an address.
    """
    check_path(path, name)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ValueError(
            f"`{name}`: expected a path on a disk, got {brief_name(str(path))}, an address. Pass a folder, and copy "
            "its files from there or to there."
        )
    return Path(os.path.expanduser(path)).absolute()


def open_new(path: Path) -> IO[bytes]:
    """Creates an empty file in place of anything of that name, and returns it, open for writing."""
    for _ in range(_MOST_TRIES):
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666), "wb")
        except FileExistsError:
            path.unlink(missing_ok=True)
    raise FileExistsError(f"`{path}`: expected to create it, got another file at each attempt. Look who writes there.")


def open_old(path: Path, mode: Literal["rb", "wb", "ab"] = "rb") -> IO[bytes]:
    """Opens an existing file, and keeps its content. Raises OSError for a link, a pipe, a folder and a device."""
    flags = {"rb": os.O_RDONLY, "wb": os.O_WRONLY, "ab": os.O_WRONLY | os.O_APPEND}[mode]
    fd = os.open(path, flags | _NO_LINK | os.O_NONBLOCK)  # a pipe would block
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"`{path}`: expected a file, got {_kind(path)}. Remove it.")
    return os.fdopen(fd, mode)


def read_file(path: Path) -> bytes:
    """Returns the bytes of a file; raises as `open_old`."""
    with open_old(path) as file:
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside another, which becomes it at the end: a reader sees the old file or the new one. If the context
    raises, the old one stays."""
    beside = path.with_name(f".tmp_{secrets.token_hex(8)}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes a file, in place of anything of that name, and calls fsync."""
    with open_new(path) as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """As `write_new`, but a reader sees the old file or the new one."""
    with replacing(path) as beside:
        write_new(beside, [data])


@contextmanager
def explained(path: Path, rule: str = "a folder that can be written") -> Iterator[None]:
    """A context that raises an error of the system as a StorageError of this path, which says what was expected."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # one of the above, which says so itself
            raise
        why = f"expected {rule}, got {error.strerror!r}. {next_step(error)}"
        raise StorageError(error.errno, why, str(path)) from None


def next_step(error: OSError) -> str:
    """Returns what to do about an error of the system on writing a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room, or save elsewhere"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Change its permissions or mount, or save elsewhere"
    return "Look at the disk, or save elsewhere"


def check_writable(folder: Path, name: str) -> None:
    """Raises ValueError if files can surely not be written into a folder, or into the one in which it will be created."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"`{name}`: expected a folder that can be written, got {existing}, which cannot. Change its permissions or "
            "mount, or pass another one."
        )


def make_subfolder(folder: Path, root: Path) -> None:
    """Creates a folder below `root`, which may be a link. Raises OSError if a part below `root` is one."""
    root.mkdir(parents=True, exist_ok=True)
    for part in folder.relative_to(root).parts:
        root /= part
        try:
            root.mkdir()
        except OSError:  # also of a full disk, where the folder exists
            _check_no_other(root)
            if not root.is_dir():
                raise


def check_subfolder(folder: Path, root: Path) -> None:
    """Raises OSError if a part of a folder below `root`, which may be a link, is one, or a file."""
    for part in folder.relative_to(root).parts:
        root /= part
        _check_no_other(root)


def _check_no_other(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        raise OSError(
            f"`{folder}`: expected a folder, got {_kind(folder)}. Remove it; to write elsewhere, pass that path as the "
            "run's folder, or make that a link."
        ) from None


def remove_foreign(path: Path) -> str | None:
    """Removes a link, a pipe or a device from the place of a file; returns what it was, None if it was a file or nothing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    found = _kind(path)
    path.unlink()  # fails for a folder
    return found


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {os.readlink(path)!r}"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "a pipe, a socket or a device"
