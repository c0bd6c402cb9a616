"""Calls functions at the end of the process, in whichever way it ends, or of an object's life."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any


class AtEnd:
    """Calls a function, which must not refer to `owner`, once: when this object is called, `owner` is collected, or the
    process ends, also by `end_all`.

    The newest comes first, as `atexit` calls them. A forked child does not call it: what it ends is the parent's.
    """

    def __init__(self, act: Callable[[], object], owner: Any = None):
        self._act: Callable[[], object] | None = act
        self._process = os.getpid()
        self._busy = threading.Lock()
        if owner is not None:
            # The garbage collector runs in any thread that allocates, perhaps one that holds a lock, so another one calls.
            weakref.finalize(owner, lambda: threading.Thread(target=self, name="redeqx-end").start()).atexit = False
        _registered[id(self)] = self
        atexit.register(self)

    def __call__(self) -> None:
        if self._process == os.getpid() and (act := self.forget()) is not None:
            act()

    def forget(self) -> Callable[[], object] | None:
        """Returns the function, which is not called any more; None if it was called or forgotten before."""
        with self._busy:
            act, self._act = self._act, None
        if act is not None:
            _registered.pop(id(self), None)
            atexit.unregister(self)
        return act


_registered: dict[int, AtEnd] = {}


def end_all(seconds: float) -> None:
    """Calls all functions, as `atexit` would, for at most that many seconds. The newest comes first. The next one waits for
    it, but only for an equal share of the time, as it may hang."""
    until = time.monotonic() + seconds
    ends = list(_registered.values())[::-1]
    threads = [threading.Thread(target=end, name="redeqx-end", daemon=True) for end in ends]
    for i, thread in enumerate(threads):
        thread.start()
        thread.join(max(until - time.monotonic(), 0) / (len(threads) - i))
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
