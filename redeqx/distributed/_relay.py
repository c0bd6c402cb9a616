"""A relay between JAX's client and its coordinator, which stays open when the coordinator is gone.

If its connection to process 0 breaks, JAX's client ends the process at once, with exit code 1: before the process could
print which step is safe, and not with the code that schedulers requeue on. So the client connects to a relay in its own
process, which passes the bytes on, and stays silent once no more come. `_peers` notices that process 0 is gone.

The relay's threads need the interpreter, which JAX's client releases whenever it waits.
"""

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any


class Relay:
    """A port of this host, `relay.host:relay.port`, whose connections are forwarded to another address.

    **Arguments:**

    - `host`, `port`: of that address.
    - `timeout`: seconds within which something must listen there.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, timeout: float):
        self._far, self._timeout = (host, port), timeout
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = weakref.WeakSet([self._listener])
        _run(self._accept)

    def _accept(self) -> None:
        while True:
            near = self._listener.accept()[0]
            self._sockets.add(near)
            _run(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        """One connection, until JAX's client closes it."""
        with near:
            far = self._connected()
            if far is None:
                return
            with far:
                _run(_pass_on, far, near)
                _pass_on(near, far)
                with contextlib.suppress(OSError):
                    far.shutdown(socket.SHUT_RDWR)  # ends the other direction too

    def forget(self) -> None:
        """In a forked child, which lacks the threads: close its copies of the sockets."""
        for each in list(self._sockets):
            each.close()

    def _connected(self) -> socket.socket | None:
        until = time.monotonic() + self._timeout
        while (left := until - time.monotonic()) > 0:
            try:
                far = socket.create_connection(self._far, timeout=left)
            except OSError:
                time.sleep(0.02)  # the coordinator starts after the rendezvous
            else:
                self._sockets.add(far)
                far.settimeout(None)
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return far
        return None


def _run(act: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=act, args=args, name="redeqx-relay", daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source is closed; drop those that a broken target does not take."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            with contextlib.suppress(OSError):
                target.sendall(data)
