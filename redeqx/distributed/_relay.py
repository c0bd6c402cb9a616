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
from collections.abc import Callable
from typing import Any

HOST = "127.0.0.1"


def start_relay(host: str, port: int, timeout: float) -> int:
    """Forwards connections to a port of `HOST`, which is returned, to another address: a program must listen there within
    `timeout` seconds."""
    listener = socket.create_server((HOST, 0))

    def accept() -> None:
        while True:
            _run(_serve, listener.accept()[0], (host, port), timeout)

    _run(accept)
    return listener.getsockname()[1]


def _serve(client: socket.socket, address: tuple[str, int], timeout: float) -> None:
    """Forwards one connection, until JAX's client closes it."""
    until = time.monotonic() + timeout
    server = None
    with client:
        while server is None:
            try:
                server = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01))
            except OSError:
                if time.monotonic() >= until:
                    return
                time.sleep(0.02)  # the coordinator starts after the rendezvous
        with server:
            server.settimeout(None)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _run(_forward, server, client)
            _forward(client, server)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # ends the other direction too


def _run(act: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=act, args=args, name="redeqx-relay", daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forwards bytes until the source is closed; drops those that a broken target does not take."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            with contextlib.suppress(OSError):
                target.sendall(data)
