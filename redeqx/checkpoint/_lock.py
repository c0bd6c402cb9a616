"""The lock of a folder, into which one run at a time writes: a file beside it names the process.

    workdir/ckpts.lock        {"host": "a", "pid": 71, "started": "1712", "machine": "...", "since": "2026-01-31 12:00:00"}

The owner creates the file exclusively, touches it every few seconds, and deletes it at the end. An abandoned file is taken
over: at once on the same machine, where processes can be looked up; elsewhere after `STALE` seconds without a touch. These
are measured only by this host's clock, so clocks need not agree. NFS supports all three operations. An owner that was frozen
for longer finds the lock taken over, and stops writing.

If the file system refuses the file, there is no lock: writing a checkpoint then reports the problem. `_store_lock`
has the lock of a folder in an object store.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import brief_name
from ..storage import Location, remove_foreign

BEAT = 5.0  # seconds between two touches
STALE = 30.0  # seconds without a touch after which an owner on another machine counts as gone
GRACE = 2.0  # seconds to wait for an owner on this machine to end
_MOST = 4096  # the most bytes read from a lock
_MOST_TRIES = 5


class LockedError(ValueError):
    """Another run writes into the folder."""


class Lock:
    """Reserves a folder of checkpoints for this process, until `release` or the end of the process."""

    def __init__(self, folder: Path, log: Callable[[str], None] = lambda text: None):
        """Raises LockedError if another process holds the lock. It may wait up to `STALE` seconds, and logs that it does."""
        self.path = folder.with_name(f"{folder.name}.lock")
        self._folder, self._log = folder, log
        self._me = this_process()
        self._fd: int | None = None  # -1 if the file system refuses the file
        self._finalizer: Callable[[], Any] | None = None
        ended = threading.Event()
        for _ in range(_MOST_TRIES):
            try:
                self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                break
            except FileExistsError:
                self._take_over()
            except OSError:
                self._fd = -1
                return
        else:
            found = _read(self.path)
            raise locked_error(self._folder, {} if found is None else found[0], self.path)
        try:
            os.write(self._fd, json.dumps(self._me).encode())
        except OSError:  # a full disk
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            self._fd = -1
            return
        threading.Thread(target=_beat, args=(self._fd, ended), name="redeqx-lock", daemon=True).start()
        self._finalizer = weakref.finalize(self, _release, self.path, self._fd, self._me, ended)

    def release(self) -> None:
        """Lets other runs write into the folder."""
        if self._finalizer is not None:
            self._finalizer()

    def check(self) -> None:
        """Raises OSError if another run took over the lock while this process was frozen."""
        if self._fd is None or self._fd == -1:
            return
        owner = _read(self.path)
        if (owner is not None and owner[0] != self._me) or _is_deleted(self._fd):
            raise lock_lost_error(self._folder, {} if owner is None else owner[0])

    def _take_over(self) -> None:
        """Removes the lock of a process that has ended. Raises LockedError if it has not."""
        with contextlib.suppress(OSError):
            remove_foreign(self.path)  # a lock is a file
        found = _read(self.path)
        read = lambda: _read(self.path)  # noqa: E731
        if found is None or not is_abandoned(found, read, self._me, self._folder, self.path, self._log, STALE):
            return
        # Renamed first, so that only one of several processes succeeds. One that renamed a newer lock restores it.
        aside = self.path.with_name(f"{self.path.name}.{self._me['pid']}.{time.time_ns()}")
        with contextlib.suppress(OSError):
            os.rename(self.path, aside)
            if _read(aside) not in (None, found):
                with contextlib.suppress(OSError):
                    os.link(aside, self.path)
            os.unlink(aside)


def is_abandoned(
    found: tuple[dict[str, Any], Any],
    read: Callable[[], tuple[dict[str, Any], Any] | None],
    me: dict[str, Any],
    folder: Location,
    path: Location,
    log: Callable[[str], None],
    stale: float,
) -> bool:
    """Returns whether a lock exists whose owner has ended; waits to find out. Raises LockedError if the owner is alive.

    **Arguments:**

    - `found`: the owner, and a value that changes with each touch.
    - `read`: reads the current values of `found`, None if there is no lock.
    - `me`: this process.
    - `path`: the lock of `folder`.
    - `stale`: seconds without a touch after which an owner on another machine counts as gone.
    """
    owner = found[0]
    if owner.get("machine") == me["machine"]:
        until = time.monotonic() + GRACE
        while _is_alive(owner) and not is_same(owner, me):
            if time.monotonic() > until:
                raise locked_error(folder, owner, path)
            time.sleep(0.1)
            if read() is None:
                return False
    else:
        log(f"{folder}: {_describe_owner(owner)} wrote here; waiting up to {stale:g} s to see whether it still does")
        until = time.monotonic() + stale
        while time.monotonic() < until:
            time.sleep(min(0.5, stale / 10))
            if (now := read()) is None:
                return False
            if now != found:
                raise locked_error(folder, now[0], path)
    return True


def locked_error(folder: Location, owner: dict[str, Any], path: Location) -> LockedError:
    """Returns the error for a folder that another run writes into."""
    return LockedError(
        f"`workdir`: expected a folder that no other run writes into, got {folder}, which {_describe_owner(owner)} does. "
        f"Wait for its end, or choose another workdir; if it is gone, delete {path}."
    )


def lock_lost_error(folder: Location, owner: dict[str, Any]) -> OSError:
    """Returns the error for a run whose lock was taken over by another one."""
    why = f"expected a folder that is this run's own, got one that {_describe_owner(owner)} has taken over since. Leave it"
    return OSError(errno.EBUSY, why, str(folder))


def _describe_owner(owner: dict[str, Any]) -> str:
    """Describes the owner, for a message."""
    if not owner:
        return "another process"
    shown = {name: brief_name(str(owner.get(name, "unknown"))) for name in ("pid", "host", "since")}
    return f"process {shown['pid']} on {shown['host']} (since {shown['since']} UTC)"


def _release(path: Path, fd: int, me: dict[str, Any], ended: threading.Event) -> None:
    ended.set()
    if is_same(this_process(), me):  # not in a forked child
        owner = _read(path)
        with contextlib.suppress(OSError):
            if owner is not None and owner[0] == me:
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(fd)


def _is_deleted(fd: int) -> bool:
    """Returns whether a lock was removed while this process held it: a run that took it over has ended already."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError as error:
        return error.errno == errno.ESTALE  # the NFS server no longer has the file


def _beat(fd: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(fd)


def _read(path: Path) -> tuple[dict[str, Any], int] | None:
    """Returns the owner in a lock, and its last touch by the file server's clock; None if there is no lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening it makes NFS ask its server
    except OSError:
        return None
    touched, owner = 0, {}
    try:
        touched = os.fstat(fd).st_mtime_ns
        owner = json.loads(os.read(fd, _MOST))  # empty while it is being created
    except (OSError, ValueError, RecursionError):
        pass
    finally:
        os.close(fd)
    return (owner if isinstance(owner, dict) else {}), touched


def this_process() -> dict[str, Any]:
    """Returns the description of this process for a lock file."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "machine": _machine(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _machine() -> str:
    """Identifies the processes that can look each other up: the same boot of a machine, and the same container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """Returns the start time of a process in kernel ticks, to distinguish it from a later process with the same id. None if
    it has ended, empty if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended


def _is_alive(owner: dict[str, Any]) -> bool:
    pid = owner.get("pid")
    if type(pid) is not int or pid <= 0:
        return False
    started = _started(pid)
    if started:
        return started == owner.get("started")
    if started is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_same(owner: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two owners are the same process."""
    return all(owner.get(name) == other[name] for name in ("pid", "started", "machine"))
