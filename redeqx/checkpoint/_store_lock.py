"""The lock of a folder in an object store: as `_lock`, with conditional writes.

The owner creates the object if there is none, and replaces it every few seconds if it is still the version that it wrote. An
abandoned lock is replaced in the same way: of several processes that try, one succeeds. S3 and Google Cloud Storage support
such writes. If a store does not, there is no lock, which is logged.
"""

import contextlib
import errno
import json
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..storage import AtEnd, StoreError, StorePath
from ._lock import is_abandoned, is_same, lock_lost_error, locked_error, this_process

BEAT = 10.0  # seconds between two touches; each is a request, which costs money
STALE = 60.0  # seconds without a touch after which an owner on another machine counts as gone
_MOST_TRIES = 5


class StoreLock:
    """Reserves a folder of checkpoints for this process, until `release` or the end of the process."""

    def __init__(self, folder: StorePath, log: Callable[[str], None] = lambda text: None):
        """Raises LockedError if another process holds the lock, StoreError if the store does not answer. It may wait up to
        `STALE` seconds, and logs that it does."""
        self.path = folder.with_name(f"{folder.name}.lock")
        self._folder = folder
        self._me = {**this_process(), "token": secrets.token_hex(8)}
        self._end: AtEnd | None = None
        try:
            version = self._acquire(log)
        except StoreError as error:
            if error.errno != errno.ENOTSUP:
                raise
            version = None
        if version is None:
            log(f"{folder}: this store cannot write on a condition, so nothing keeps another run out")
            return
        ended = threading.Event()
        threading.Thread(target=_beat, args=(self.path, self._me, version, ended), name="redeqx-lock", daemon=True).start()
        self._end = AtEnd(self, partial(_release, self.path, self._me, ended))

    def release(self) -> None:
        """Lets other runs write into the folder."""
        if self._end is not None:
            self._end()

    def check(self) -> None:
        """Raises OSError if another run took over the lock meanwhile, or if the store does not answer."""
        if self._end is None:
            return
        found = _read(self.path)
        if found is None or not _is_mine(found[0], self._me):
            raise lock_lost_error(self._folder, {} if found is None else found[0])

    def _acquire(self, log: Callable[[str], None]) -> dict[str, str] | None:
        """Acquires the lock and returns its version; None if the store does not support conditional writes."""
        content = json.dumps(self._me).encode()
        found = None
        for _ in range(_MOST_TRIES):
            version = self.path.write_bytes(content, replacing=None)
            if version is not None:
                return None if self.path.write_bytes(content, replacing=None) is not None else version
            found = _read(self.path)
            if found is None:
                continue
            if _is_mine(found[0], self._me):  # the answer was lost, and the request was repeated
                return found[1]
            if not is_abandoned(found, lambda: _read(self.path), self._me, self._folder, self.path, log, STALE):
                continue
            version = self.path.write_bytes(content, replacing=found[1])
            if version is not None:
                return version
        raise locked_error(self._folder, {} if found is None else found[0], self.path)


def _is_mine(owner: dict[str, Any], me: dict[str, Any]) -> bool:
    return owner.get("token") == me["token"]


def _read(path: StorePath) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Returns the owner in a lock, and the lock's version; None if there is no lock."""
    try:
        content, version = path.version()
    except FileNotFoundError:
        return None
    try:
        owner = json.loads(content)
    except (ValueError, RecursionError):
        owner = {}
    return (owner if isinstance(owner, dict) else {}), version


def _beat(path: StorePath, me: dict[str, Any], version: dict[str, str], ended: threading.Event) -> None:
    n = 0
    while not ended.wait(BEAT):
        n += 1  # so that each version differs
        with contextlib.suppress(OSError):
            written = path.write_bytes(json.dumps({**me, "beat": n}).encode(), replacing=version)
            if written is None:
                found = _read(path)
                if found is None or not _is_mine(found[0], me):
                    return  # taken over: `check` finds it
                written = found[1]
            version = written


def _release(path: StorePath, me: dict[str, Any], ended: threading.Event) -> None:
    ended.set()
    if is_same(this_process(), me):  # not in a forked child
        with contextlib.suppress(OSError):
            found = _read(path)
            if found is not None and _is_mine(found[0], me):
                path.unlink()
