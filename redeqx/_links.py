"""A connection between two processes: messages `[kind, value]`, each a line of JSON, over TCP."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


def listening(host: str, port: int, bind: str) -> socket.socket:
    """A socket that connections to `host:port` may come to, on the interface of the address `bind`, `""` for all.

    Raises ValueError where the port is taken or the address is not this host's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except socket.gaierror as error:
        raise ValueError(
            f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). Pass its address."
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    # JAX's coordinator takes the port while these connections stay.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == 98 or "in use" in str(error):
            raise ValueError(
                f"`host0_port`: expected a free port, got {port}, which another program holds. Pass another everywhere."
            ) from error
        raise ValueError(
            f"`host0_address`: expected an address of process 0's own host, got {host!r} ({error.strerror}). "
            "Pass the one under which the others reach it."
        ) from error
    return listener


class Link:
    """One connection: a line of JSON `[kind, value]` a message."""

    def __init__(self, connection: socket.socket):
        self.host = ""
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._read()
        self._sending = threading.Lock()

    def limit(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, kind: str, value: Any = None) -> None:
        with self._sending:
            self._socket.sendall(json.dumps([kind, value]).encode() + b"\n")

    def receive(self) -> tuple[str, Any]:
        match json.loads(next(self._lines)):
            case [str(kind), value]:
                return kind, value
        raise ValueError("expected a kind and a value")

    def _read(self) -> Iterator[bytes]:
        rest = b""
        while True:
            while b"\n" in rest:
                line, rest = rest.split(b"\n", 1)
                yield line
            received = self._socket.recv(2**16)
            if not received:
                raise ConnectionError("the connection was closed")
            rest += received

    def close(self) -> None:
        self._socket.close()
