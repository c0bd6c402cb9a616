"""A connection between two processes: messages `[kind, value]`, each a line of JSON, over TCP."""

import json
import socket
import threading
import time
from typing import Any

from ..errors import parse_json


class PeerError(RuntimeError):
    """A process of the run is missing, or has ended."""


class Link:
    """A connection that sends and receives messages."""

    def __init__(self, connection: socket.socket):
        self.host = ""
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._n_searched = 0  # bytes of `_received` that are known to contain no newline
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def limit(self, seconds: float) -> None:
        """Set the timeout for receiving bytes, and for sending them."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, value: Any = None) -> None:
        with self._sending:
            self._socket.sendall(json.dumps([kind, value]).encode() + b"\n")

    def receive(self, *, until: float | None = None, limit: int | None = None) -> tuple[str, Any]:
        """Wait for the next message and return it.

        **Arguments:**

        - `until`: the deadline for the whole message, by `time.monotonic`; None waits as long as bytes arrive.
        - `limit`: the maximum size in bytes.

        Raises OSError if none arrives, ValueError for bytes that are not a message.
        """
        while (message := self.take(limit)) is None:
            if until is not None:
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
            self.fill()
        return message

    def fill(self) -> None:
        """Wait for more bytes, which `take` parses."""
        received = self._socket.recv(2**16)
        if not received:
            raise ConnectionError("the connection was closed")
        self._received += received

    def take(self, limit: int | None = None) -> tuple[str, Any] | None:
        """Return a message from the bytes received so far; None if they contain no complete one."""
        end = self._received.find(b"\n", self._n_searched)
        if limit is not None and (len(self._received) if end < 0 else end) > limit:
            raise ValueError(f"expected a message of at most {limit} bytes")
        if end < 0:
            self._n_searched = len(self._received)
            return None
        line, self._n_searched = bytes(self._received[:end]), 0
        del self._received[: end + 1]
        match parse_json(line, unique=False):
            case [str(kind), value]:
                return kind, value
        raise ValueError("expected a kind and a value")

    def has_ended(self) -> bool:
        """Return whether the other end has closed the connection, as far as this end knows."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this process's copy of the socket. The connection ends with the last copy; a forked child has another."""
        self._socket.close()
