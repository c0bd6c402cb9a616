"""A connection between two processes: messages `[kind, value]`, each a line of JSON, over TCP."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


class PeerError(RuntimeError):
    """The other processes cannot do what this one asks of all."""


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
