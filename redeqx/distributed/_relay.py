"""A relay between JAX's client and its coordinator, which stays open when the coordinator is gone.

If its connection to process 0 breaks, JAX's client aborts the process at once (JAX 0.10.2, also with
`jax_enable_recoverability`; 2026-11-25): before the process can print which step is safe, and not with the code that
schedulers requeue on. So the client connects to a relay in its own process. The relay forwards bytes, and keeps the client's
connection open when process 0 is gone; `_peers` notices that. `tests/distributed/test_workarounds.py` tells when it can go.

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
    """Forwards connections to `relay.host:relay.port`, on this host, to another address.

    **Arguments:**

    - `host`, `port`: the other address.
    - `timeout`: seconds within which a program must listen there.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, timeout: float):
        self._address, self._timeout = (host, port), timeout
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = weakref.WeakSet([self._listener])
        _run(self._accept)

    def _accept(self) -> None:
        while True:
            client = self._listener.accept()[0]
            self._sockets.add(client)
            _run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """Forward one connection, until JAX's client closes it."""
        with client:
            server = self._connect()
            if server is None:
                return
            with server:
                _run(_forward, server, client)
                _forward(client, server)
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # ends the other direction too

    def forget(self) -> None:
        """In a forked child, where these threads do not run: close its copies of the sockets."""
        for each in list(self._sockets):
            each.close()

    def _connect(self) -> socket.socket | None:
        until = time.monotonic() + self._timeout
        while (left := until - time.monotonic()) > 0:
            try:
                server = socket.create_connection(self._address, timeout=left)
            except OSError:
                time.sleep(0.02)  # the coordinator starts after the rendezvous
            else:
                self._sockets.add(server)
                server.settimeout(None)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return server
        return None


def _run(act: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=act, args=args, name="redeqx-relay", daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source is closed; drop those that a broken target does not take."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            with contextlib.suppress(OSError):
                target.sendall(data)
