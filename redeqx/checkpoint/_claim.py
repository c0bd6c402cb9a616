"""Claims on a folder: only one run writes into it at a time, and only one trainer of a script.

A lock excludes other processes (`_lock`). Within a process a trainer may take over a folder, as when a script runs again in
a notebook, but not from a trainer that is in a fit, and the former trainer may not take it back.
"""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..distributed import Peers
from ..storage import Location
from ._lock import Lock, LockedError

# By the folder's real path: the claim of this process that holds it or was the last to hold it.
_holders: "weakref.WeakValueDictionary[str, Claim]" = weakref.WeakValueDictionary()


class Claim:
    """One trainer's claim on a folder.

    **Arguments:**

    - `peers`: the processes that write together; process 0 holds the lock.
    - `run`: an object that all trainers of one run share.
    - `make_lock`: locks the folder.

    **Attributes:**

    - `is_kept`: whether a fit is writing: nobody may then take over the folder.
    - `has_saved`: whether something was written.
    """

    def __init__(self, folder: Location, peers: Peers, run: Any, make_lock: Callable[[], Lock]):
        self.is_kept = self.has_saved = False
        self._folder, self._peers, self._run, self._make_lock = folder, peers, run, make_lock
        self._key = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
        self._lock: Lock | None = None  # of process 0
        self._is_held = False
        self._is_taken = False  # another claim has taken over the folder

    def hold(self) -> None:
        """Locks the folder for this run, until this object is collected or the process ends.

        Raises LockedError, in all processes, if another run or another trainer of this script writes into it.
        """
        if self._is_held:
            return
        if _holders.get(self._key) not in (None, self):
            gc.collect()  # an unused trainer is collected only with its cycles
        before = _holders.get(self._key)
        before = None if before is self else before

        def take() -> str | None:
            """Returns why the folder is not available; None if this run holds it."""
            try:
                if before is not None:
                    self._check_holder(before)
                    self._lock, before._lock = before._lock, None
                self._lock = self._lock or self._make_lock()
            except LockedError as error:
                return str(error)
            return None

        refusal = self._peers.together("claim", take, alone=True)[0]
        if refusal is not None:
            raise LockedError(refusal)
        if before is not None:
            before._is_held, before._is_taken = False, True
        self._is_held, self._is_taken = True, False
        _holders[self._key] = self

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

    def _check_holder(self, other: "Claim") -> None:
        """Raises LockedError if this claim must not take over the folder from another claim of this process.

        It may if the other claim belongs to another run that is not in a fit, so that a script can be run again in a
        notebook; but that other run may not take the folder back.
        """
        is_one_run = other._run is not None and other._run is self._run
        if other.is_kept or (other.has_saved and (is_one_run or self._is_taken)):
            raise LockedError(
                f"`workdir`: expected a folder that no other trainer writes into, got {self._folder}, into which another "
                "Trainer of this script saves. Give each a name: `Trainer(name=...)`."
            )
