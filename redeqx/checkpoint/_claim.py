"""Who may write into a folder: one run at a time, and of the trainers of a script one.

Other processes are kept out by a lock (`_lock`). Within a process a trainer may take a folder over, as when a script is run
again in a notebook, but not from one that is in a fit, nor back.
"""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..distributed import Peers
from ..storage import Location, StorePath
from ._lock import Lock, LockedError
from ._store_lock import StoreLock

# By the folder's real path, the claim of this process that holds it, or was the last to do so.
_holders: "weakref.WeakValueDictionary[str, Claim]" = weakref.WeakValueDictionary()


class Claim:
    """One trainer's claim to a folder.

    **Arguments:**

    - `peers`: the processes that write together; process 0 has the lock.
    - `run`: an object that all trainers of one run share.

    **Attributes:**

    - `is_kept`: whether a fit writes: then nobody may take the folder over.
    - `has_saved`: whether something was written.
    """

    def __init__(self, folder: Location, peers: Peers, run: Any, log: Callable[[str], None]):
        self.folder = folder
        self.is_kept = self.has_saved = False
        self._peers, self._run, self._log = peers, run, log
        self._lock: Lock | StoreLock | None = None  # of process 0
        self._is_held = False
        self._is_taken = False  # another claim has taken it over

    def hold(self) -> None:
        """Locks the folder for this run, until this object is collected or the process ends.

        Raises LockedError, in all processes, if another run or another trainer of this script writes into it.
        """
        if self._is_held:
            return
        key = os.path.realpath(self.folder) if isinstance(self.folder, Path) else str(self.folder)
        if _holders.get(key) not in (None, self):
            gc.collect()  # an unused trainer is collected only with its cycles
        before = _holders.get(key)

        def take() -> str | None:
            """Why the folder cannot be had; None where this run has it."""
            try:
                if before is not None and before is not self:
                    self._check_holder(before)
                    self._lock, before._lock = before._lock, None
                if self._lock is None:
                    folder, log = self.folder, self._log
                    self._lock = StoreLock(folder, log) if isinstance(folder, StorePath) else Lock(folder, log)
            except LockedError as error:
                return str(error)
            return None

        refusal = self._peers.together("claim", take, alone=True)[0]
        if refusal is not None:
            raise LockedError(refusal)
        if before is not None and before is not self:
            before._is_held, before._is_taken = False, True
        self._is_held, self._is_taken = True, False
        _holders[key] = self

    def check(self) -> None:
        """Raises OSError if another run has taken the folder over while this process was frozen."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Lets others write into the folder."""
        self._is_held = False
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _check_holder(self, other: "Claim") -> None:
        """Raises LockedError if this claim must not take the folder over from another one of this process.

        It may if the other one belongs to another run that is not in a fit, so that a script can be run again in a notebook;
        but the other run may not take the folder back.
        """
        is_one_run = other._run is not None and other._run is self._run
        if other.is_kept or (other.has_saved and (is_one_run or self._is_taken)):
            raise LockedError(
                f"`workdir`: expected a folder that no other trainer writes into, got {self.folder}, into which another "
                "Trainer of this script saves. Give each a workdir of its own: `Deployer(workdir=...)`."
            )
