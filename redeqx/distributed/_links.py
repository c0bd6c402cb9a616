"""The connections between the processes of a run: messages `[kind, value]`, each a line of JSON, over TCP.

`meet` makes them at the start: all processes connect, or each raises an error that names the missing or misconfigured one.
They form a star: process 0, the coordinator, accepts a connection from each other process. `_launchers` finds the
coordinator's address and this process's index; `_peers` sends messages over the connections later.

Any host that reaches the port can connect. A connection is accepted only if it sends a short greeting within a few seconds,
during which others are served too; any other connection is closed. If the processes share a token (`REDEQX_TOKEN`), the
greeting must contain it; without one, anybody who knows this format can join.
"""

import contextlib
import hmac
import json
import os
import queue
import socket
import threading
import time
from typing import Any

from ..errors import brief_name, parse_json
from ._addresses import Member, listen, unknown_host

START = 300.0  # seconds within which all processes must connect
TOKEN = "REDEQX_TOKEN"  # environment variable: a secret that all processes of a run share
_LATE_ARRIVALS = 1.0  # seconds after an error in which other processes may still connect, to receive it
_GREETING = "redeqx peers 3"
_GREETING_TIMEOUT = 5.0  # seconds within which a connection must send its greeting
_LATE = 5.0  # seconds after its own timeout that a joining process waits for the coordinator to report first
_POLL = 0.02  # seconds after which the coordinator looks whether all have come
_MAX_GREETING = 2**12  # bytes
_MAX_HOST = 2**8  # characters of the host name in a greeting
_MAX_START = 2**16  # bytes of the coordinator's reply
_MAX_PENDING = 64  # connections without a greeting, in addition to one for each process


class PeerError(RuntimeError):
    """A process of the run is missing, or has ended."""


class Link:
    """A connection that sends and receives messages."""

    def __init__(self, connection: socket.socket):
        self.host = ""
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._sending = threading.Lock()

    def limit(self, seconds: float) -> None:
        """Sets the timeout for receiving bytes, and for sending them."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, value: Any = None) -> None:
        with self._sending:
            self._socket.sendall(json.dumps([kind, value]).encode() + b"\n")

    def receive(self, *, until: float | None = None, limit: int | None = None) -> tuple[str, Any]:
        """Waits for the next message, of at most `limit` bytes, and returns it; without a deadline as long as bytes arrive.

        Raises OSError if none arrives, ValueError for bytes that are not a message.
        """
        n_searched = 0  # bytes that are known to contain no newline
        while (end := self._received.find(b"\n", n_searched)) < 0:
            n_searched = len(self._received)
            if limit is not None and n_searched > limit:
                break
            if until is not None:
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
            more = self._socket.recv(2**16)
            if not more:
                raise ConnectionError("the connection was closed")
            self._received += more
        if limit is not None and not 0 <= end <= limit:
            raise ValueError(f"expected a message of at most {limit} bytes")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        match parse_json(line, unique=False):
            case [str(kind), value]:
                return kind, value
        raise ValueError("expected a kind and a value")

    def has_ended(self) -> bool:
        """Returns whether the other end has closed the connection, as far as this end knows."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end(self) -> None:
        """Ends the connection, even for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this process's copy of the socket. The connection ends with the last copy; a forked child has another."""
        self._socket.close()


def meet(member: Member, timeout: float) -> dict[int, Link]:
    """Waits for all processes; returns the connections of this one, by the index of the other end. A token in the
    environment replaces the member's.

    Raises ValueError, the same in every process, if an index is used twice or out of range, the port is in use or the host
    unknown; PeerError, with their indices, if some processes do not connect in time.
    """
    token, source = os.environ.get(TOKEN) or member.token, member.source
    # A launcher's variables may not be those of this process, as in a shell inside a job.
    alone = f" If {source} did not start this process, set REDEQX_PROCESSES=1 to run it alone." if source else ""
    if member.index:
        return {0: _join(member, token, timeout, alone)}
    with listen(member.host, member.port, member.bind) as listener:
        links, refused, problem = _arrivals(listener, member, token, timeout, alone)
    for link in (*links.values(), *refused):
        link.limit(_GREETING_TIMEOUT)
        with contextlib.suppress(OSError):  # closed again: `Peers` notices
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
        if problem is not None:
            link.close()
    if problem is not None:
        raise problem
    return links


def _arrivals(
    listener: socket.socket, member: Member, token: str, timeout: float, alone: str
) -> tuple[dict[int, Link], list[Link], Exception | None]:
    """Accepts the other processes at process 0. Returns their connections by process index, and those of misconfigured
    ones, with the error for all of them if there is one."""
    n, until = member.n, time.monotonic() + timeout
    links: dict[int, Link] = {}
    refused: list[Link] = []
    problem: Exception | None = None
    pending: list[Link] = []  # those without a greeting, the oldest first
    greetings: queue.SimpleQueue[tuple[Link, Any]] = queue.SimpleQueue()
    listener.settimeout(_POLL)
    while True:
        if len(links) + len(refused) >= n - 1:
            for i in [i for i, link in links.items() if link.has_ended()]:  # and may be restarted
                links.pop(i).close()
            if len(links) + len(refused) >= n - 1:
                break
        if time.monotonic() >= until:
            if problem is not None:
                break
            missing = ", ".join(str(i) for i in range(1, n) if i not in links)
            here = ", ".join(f"{i} ({link.host})" for i, link in sorted(links.items())) or "none"
            problem = PeerError(
                f"`n_processes`: expected {n} processes at {member.host}:{member.port} within {timeout:g} s, got none of "
                f"number {missing}; here besides 0: {here}. Look at what those print, and whether they reach this port."
                f"{alone}"
            )
            until += _LATE_ARRIVALS
        with contextlib.suppress(OSError):  # nobody came, or the other end has closed the connection
            link = Link(listener.accept()[0])
            pending.append(link)
            if len(pending) > n + _MAX_PENDING:
                pending[0].end()
            # A thread for each, so that none delays another.
            threading.Thread(target=_greet, args=(link, greetings), name="redeqx-greet", daemon=True).start()
        while not greetings.empty():
            link, message = greetings.get()
            pending.remove(link)
            if message is None:
                continue
            index, n_there, link.host, given = message
            wrong = _refusal(link, index, n_there, n, links.get(index))
            if not hmac.compare_digest(given.encode(errors="replace"), token.encode(errors="replace")):
                text = f"`{TOKEN}`: expected the value of process 0 in the environment, got another at {link.host}. "
                with contextlib.suppress(OSError):
                    link.send("start", ["ValueError", f"{text}Set the same in every process."])
                link.close()
            elif wrong is not None:
                refused.append(link)
                if problem is None:
                    problem, until = ValueError(wrong), time.monotonic() + _LATE_ARRIVALS
            else:
                if index in links:
                    links[index].close()
                links[index] = link
                link.limit(0.0)  # `has_ended` does not wait
    for link in pending:
        link.end()
    return links, refused, problem


def _greet(link: Link, greetings: queue.SimpleQueue[tuple[Link, Any]]) -> None:
    """Waits for the greeting of a connection, and passes on what it says; None if it sends something else."""
    said = None
    with contextlib.suppress(OSError, ValueError):  # a port scan, another program, or a process that has ended
        match link.receive(until=time.monotonic() + _GREETING_TIMEOUT, limit=_MAX_GREETING):
            case (kind, [int(index), int(n), str(host), str(token)]) if kind == _GREETING and type(index) is type(n) is int:
                said = index, n, brief_name(host), token
    if said is None:
        link.close()
    greetings.put((link, said))


def _refusal(link: Link, index: int, n_there: int, n: int, before: Link | None) -> str | None:
    """Returns why a process cannot join; None if it can."""
    if n_there != n:
        return f"`n_processes`: expected {n}, as in process 0, got {n_there} at {link.host}. Pass one number."
    if not 0 < index < n:
        return f"`process_id`: expected 1 to {n - 1} beside process 0, got {index} at {link.host}. Number them from 0."
    if before is not None and not before.has_ended():
        rule, got = "`process_id`: expected each number once", f"{index} at {before.host} and at {link.host}"
        return f"{rule}, got {got}. Number the processes from 0."
    return None


def _join(member: Member, token: str, timeout: float, alone: str) -> Link:
    """The rendezvous at the other processes."""
    host, port, until = member.host, member.port, time.monotonic() + timeout
    why = ""
    while time.monotonic() < until:
        link = None
        try:
            link = Link(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)))
            link.send(_GREETING, [member.index, member.n, socket.gethostname()[:_MAX_HOST], token])
            kind, problem = link.receive(until=until + _LATE, limit=_MAX_START)
            if kind != "start":  # for example an echo: while nobody listens, a connection may even reach itself
                raise ValueError("it is not process 0")
        except socket.gaierror as error:
            raise unknown_host(host, error) from error
        except (OSError, ValueError) as error:  # it does not listen yet, or the port is another run's coordinator
            why = str(error)
            if link is not None:
                link.close()
            time.sleep(min(0.2, max(until - time.monotonic(), 0)))
            continue
        if problem is None:
            return link
        link.close()
        match problem:
            case ["ValueError", str(text)]:
                raise ValueError(text)
        raise PeerError(str(problem[-1]) if isinstance(problem, list) and problem else str(problem))
    raise PeerError(
        f"`host0_address`: expected process 0 at {host}:{port} within {timeout:g} s, got no answer ({why}). "
        f"Look at what it prints, and whether this host reaches that port.{alone}"
    )
