"""The lock of a folder, into which one run at a time writes: a file or an object beside it names the process.

    workdir/ckpts.lock        {"host": "a", "pid": 71, "started": "1712", "machine": "...", "token": "...", "since": "..."}

The owner creates it if there is none, touches it every few seconds, and deletes it at the end. An abandoned one is taken
over: at once on the same machine, where processes can be looked up; elsewhere after some time without a touch. This is
measured only by this host's clock, so clocks need not agree. NFS supports all of it, and so do S3 and Google Cloud Storage,
which write on a condition. An owner that was frozen for longer finds the lock taken over, and stops writing.

If the file system refuses the file, or the store the condition, there is no lock. Within a process, a `Claim` decides which
trainer writes.
"""

import contextlib
import errno
import gc
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .._at_end import AtEnd
from ..distributed import Peers
from ..errors import brief_name, parse_json
from ..storage import Location, StorageError, StoreError, StorePath, open_old, remove_foreign

_MOST = 4096  # the most bytes read from a lock
_MOST_TRIES = 5

# By the folder's real path: the claim of this process that holds it or was the last to hold it.
_holders: "weakref.WeakValueDictionary[str, Claim]" = weakref.WeakValueDictionary()
# By the path of a lock in a store, which a thread releases while another trainer of this process may take it over: the new
# one would be deleted.
_turns: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)


class LockedError(ValueError):
    """Another run writes into the folder."""


class Claim:
    """One trainer's claim on a folder. A trainer may take over a folder from another one of this process, as when a script
    runs again in a notebook, but not from one that is in a fit, and the former trainer may not take it back.

    Process 0 of the peers holds the lock. `run` is an object that all trainers of one run share.
    """

    def __init__(self, folder: Location, peers: Peers, run: Any, make_lock: "Callable[[], Lock]"):
        self.is_kept = False  # while a fit is writing: nobody may then take over the folder
        self.has_saved = False
        self._folder, self._peers, self._run, self._make_lock = folder, peers, run, make_lock
        self._key = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
        self._lock: Lock | None = None  # of process 0
        self._is_held = self._was_held = False

    def hold(self) -> None:
        """Locks the folder for this run, until this object is collected or the process ends.

        Raises LockedError, in all processes, if another run or another trainer of this script writes into it.
        """
        if self._is_held:
            return
        if _holders.get(self._key) not in (None, self):
            gc.collect()  # an unused trainer is collected only with its cycles
        other = _holders.get(self._key)
        other = None if other is self else other

        def take() -> None:
            if other is not None and not self._may_take_over(other):
                raise LockedError(
                    f"`workdir`: expected a folder that no other trainer writes into, got {self._folder}, into which "
                    "another Trainer of this script saves. Give each a name: `Trainer(name=...)`."
                )
            self._lock = self._make_lock()  # takes over the lock of this process

        self._peers.together("claim", take, alone=True, kinds=(LockedError, StoreError, OSError))
        if other is not None:
            other.release()
        self._is_held = self._was_held = True
        _holders[self._key] = self

    def _may_take_over(self, other: "Claim") -> bool:
        is_one_run = self._run is not None and other._run is self._run
        return not other.is_kept and not (other.has_saved and (is_one_run or self._was_held))

    def check(self) -> None:
        """Raises OSError if another run took over the folder while this process was frozen."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Lets others write into the folder."""
        self._is_held = False
        if self._lock is not None:
            self._lock.release()
        self._lock = None


class _Found(NamedTuple):
    """What is known about a lock: its owner, empty if unreadable, and a value that differs after each touch."""

    owner: dict[str, Any]
    version: Any


class Lock:
    """Reserves a folder of checkpoints for this process, until `release` or the end of the process."""

    grace = 2.0  # seconds to wait for an owner on this machine to end
    beat = 5.0  # seconds between two touches; twice as many in a store, where each is two requests, which cost money
    stale = 30.0  # seconds without a touch after which an owner on another machine counts as gone; in a store twice as many

    def __init__(self, folder: Location, log: Callable[[str], None] = lambda text: None):
        """Raises LockedError if another process holds the lock, StoreError if a store does not answer. It may wait for
        `stale` seconds, and logs that it does."""
        self.path = folder.with_name(f"{folder.name}.lock")
        self._folder, self._log = folder, log
        self._me = {**this_process(), "token": secrets.token_hex(8)}
        self._file = _ObjectLock(self.path) if isinstance(self.path, StorePath) else _FileLock(self.path)
        in_store = isinstance(self._file, _ObjectLock)
        self.stale *= 1 + in_store
        self._end: Callable[[], Any] | None = None  # None if there is no lock
        turn = _turns[str(self.path)] if in_store else contextlib.nullcontext()
        with turn:
            if not self._acquire():
                return
        ended = threading.Event()
        beat = partial(_beat, self._file, self._me, self.beat * (1 + in_store), ended)
        threading.Thread(target=beat, name="redeqx-lock", daemon=True).start()
        release = partial(_release, self._file, self._me, ended, turn)
        # A request must not be sent by the garbage collector, which runs in any thread.
        self._end = AtEnd(release, self) if in_store else weakref.finalize(self, release)

    def release(self) -> None:
        """Lets other runs write into the folder."""
        if self._end is not None:
            self._end()

    def check(self) -> None:
        """Raises OSError if another run took over the lock while this process was frozen, or if it is gone."""
        if self._end is None or _is_mine(found := self._file.read(), self._me):
            return
        got = f"one that {_describe_owner(found)} has taken over since. Leave it"
        if found is None:  # nothing tells whether another run took it over and ended
            got = f"one whose lock {self.path.name} is gone: it was deleted, or another run took the folder over and ended. "
            got += "Start this run again: it continues from the newest checkpoint"
        raise StorageError(errno.EBUSY, f"expected a folder that is this run's own, got {got}", str(self._folder))

    def _acquire(self) -> bool:
        """Acquires the lock. Returns False if there can be none."""
        found = None
        for _ in range(_MOST_TRIES):
            try:
                if self._file.create(self._me):
                    return True
            except OSError as error:
                if isinstance(error, StoreError) and error.errno != errno.ENOTSUP:
                    raise
                self._log(f"{self._folder}: no lock can be kept there, so nothing keeps another run out ({error.strerror})")
                return False
            found = self._file.read()
            if _is_mine(found, self._me):
                return True
            if found is not None and self._is_abandoned(found) and self._file.replace(self._me, found):
                return True
        raise self._locked_error(found)

    def _is_abandoned(self, found: _Found) -> bool:
        """Returns whether a lock exists whose owner has ended; waits to find out. Raises LockedError if the owner lives."""
        owner, is_here = found.owner, found.owner.get("machine") == self._me["machine"]
        if not is_here:
            who = _describe_owner(found)
            self._log(f"{self._folder}: {who} wrote here; waiting up to {self.stale:g} s to see whether it still does")
        until = time.monotonic() + (self.grace if is_here else self.stale)
        while not is_here or (_is_alive(owner) and not _is_same(owner, self._me)):
            if time.monotonic() >= until:
                if is_here:
                    raise self._locked_error(found)
                break
            time.sleep(0.1)
            if (now := self._file.read()) is None:
                return False
            if not is_here and now != found:
                raise self._locked_error(now)
        return True

    def _locked_error(self, found: _Found | None) -> LockedError:
        return LockedError(
            f"`workdir`: expected a folder that no other run writes into, got {self._folder}, which "
            f"{_describe_owner(found)} does. Wait for its end, or choose another workdir; if it is gone, delete {self.path}."
        )


class _FileLock:
    """A lock on a disk."""

    def __init__(self, path: Path):
        self.path = path

    def create(self, owner: dict[str, Any]) -> bool:
        """Creates the lock if there is none; returns whether it did. Raises OSError if there can be none."""
        with contextlib.suppress(FileNotFoundError):
            remove_foreign(self.path)
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(fd, json.dumps(owner).encode())
        except OSError:  # a full disk
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return True

    def read(self) -> _Found | None:
        """Returns the owner and its last touch by the file server's clock; None if there is no lock."""
        try:
            file = open_old(self.path)  # opening it makes NFS ask its server
        except OSError:
            return None
        with file:
            return _Found(_owner_in(file.read(_MOST)), os.fstat(file.fileno()).st_mtime_ns)

    def touch(self, found: _Found) -> None:
        """Shows that the owner of the lock that was found is alive."""
        del found
        os.utime(self.path)

    def replace(self, owner: dict[str, Any], found: _Found) -> bool:
        """Replaces the lock that was found; returns whether it did."""
        # Renamed first, so that only one of several processes succeeds. One that renamed a newer lock restores it.
        aside = _FileLock(self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}"))
        with contextlib.suppress(OSError):
            os.rename(self.path, aside.path)
            if aside.read() not in (None, found):
                with contextlib.suppress(OSError):
                    os.link(aside.path, self.path)
            aside.path.unlink()
        return self.create(owner)

    def delete(self) -> None:
        """Deletes the lock."""
        self.path.unlink()


class _ObjectLock:
    """A lock in an object store; its methods are those of `_FileLock`."""

    def __init__(self, path: StorePath):
        self.path = path

    def create(self, owner: dict[str, Any]) -> bool:
        content = json.dumps(owner).encode()
        if self.path.write_bytes(content, replacing=None) is None:
            return False
        if self.path.write_bytes(content, replacing=None) is not None:
            raise StoreError(errno.ENOTSUP, "the store does not write on a condition")
        return True

    def read(self) -> _Found | None:
        try:
            content, version = self.path.version()
        except FileNotFoundError:
            return None
        return _Found(_owner_in(content), version)

    def touch(self, found: _Found) -> None:
        self.replace({**found.owner, "beat": time.time_ns()}, found)  # so that each version differs

    def replace(self, owner: dict[str, Any], found: _Found) -> bool:
        return self.path.write_bytes(json.dumps(owner).encode(), replacing=found.version) is not None

    def delete(self) -> None:
        self.path.unlink()


def _beat(file: _FileLock | _ObjectLock, me: dict[str, Any], seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds):
        with contextlib.suppress(OSError):
            found = file.read()
            if found is not None and _is_mine(found, me):  # else it was taken over, which `check` reports
                file.touch(found)


def _release(
    file: _FileLock | _ObjectLock, me: dict[str, Any], ended: threading.Event, turn: contextlib.AbstractContextManager[Any]
) -> None:
    ended.set()
    with contextlib.suppress(OSError):
        if not _is_same(this_process(), me):  # a forked child, in which nobody may ever give the turn back
            return
        with turn:
            if _is_mine(file.read(), me):
                file.delete()


def _owner_in(content: bytes) -> dict[str, Any]:
    """Returns the owner that a lock names; an empty one if it cannot be read, as while it is being created."""
    with contextlib.suppress(ValueError):
        if isinstance(owner := parse_json(content, unique=False), dict):
            return owner
    return {}


def _is_mine(found: _Found | None, me: dict[str, Any]) -> bool:
    return found is not None and found.owner.get("token") == me["token"]


def _describe_owner(found: _Found | None) -> str:
    """Describes the owner, for a message."""
    if found is None or not found.owner:
        return "another process"
    pid, host, since = (brief_name(str(found.owner.get(name, "unknown"))) for name in ("pid", "host", "since"))
    return f"process {pid} on {host} (since {since} UTC)"


# --- processes -------------------------------------------------------------------------------------------------------


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
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # a zombie has ended
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:  # the process of another user
        pass
    return ""


def _is_alive(owner: dict[str, Any]) -> bool:
    pid = owner.get("pid")
    started = _started(pid) if type(pid) is int and pid > 0 else None
    return started is not None and started in ("", owner.get("started"))


def _is_same(owner: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two owners are the same process."""
    return all(owner.get(name) == other[name] for name in ("pid", "started", "machine"))
