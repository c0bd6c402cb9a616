"""Calls a function at the end of an object's life."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any


class AtEnd:
    """Calls a function once: when it is called itself, its owner is collected, or the process ends.

    The garbage collector runs in any thread that allocates, perhaps one that holds a lock, so a separate thread then makes
    the call.

    **Arguments:**

    - `owner`: the object whose end calls the function, which must not refer to it.
    """

    def __init__(self, owner: Any, act: Callable[[], None]):
        self._act: Callable[[], None] | None = act
        self._busy = threading.Lock()
        weakref.finalize(owner, lambda: threading.Thread(target=self, name="redeqx-end").start()).atexit = False
        atexit.register(self)

    def __call__(self) -> None:
        with self._busy:
            act, self._act = self._act, None
        if act is not None:
            atexit.unregister(self)
            act()
