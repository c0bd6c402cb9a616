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
    n, arrivals = member.n, _Arrivals(member.n, token)
    with listen(member.host, member.port, member.bind) as listener:
        listener.settimeout(_POLL)
        problem = arrivals.wait(listener, time.monotonic() + timeout)
        if problem is None and (missing := [i for i in range(1, n) if i not in arrivals.links]):
            here = ", ".join(f"{i} ({link.host})" for i, link in sorted(arrivals.links.items())) or "none"
            problem = PeerError(
                f"`n_processes`: expected {n} processes at {member.host}:{member.port} within {timeout:g} s, got none of "
                f"number {', '.join(map(str, missing))}; here besides 0: {here}. Look at what those print, and "
                f"whether they reach this port.{alone}"
            )
        if problem is not None:  # processes that connect now receive it too
            arrivals.wait(listener, time.monotonic() + _LATE_ARRIVALS, has_failed=True)
    came_late = arrivals.close()
    problem = problem or came_late
    for link in arrivals.greeted:
        link.limit(_GREETING_TIMEOUT)
        with contextlib.suppress(OSError):  # closed again: `Peers` notices
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
        if problem is not None:
            link.close()
    if problem is not None:
        raise problem
    return arrivals.links


class _Arrivals:
    """The connections to process 0. A thread waits for each one's greeting, so that none delays another.

    `links` are the accepted ones by process index; `greeted` also has those that are to receive an error.
    """

    def __init__(self, n: int, token: str):
        self.links: dict[int, Link] = {}
        self.greeted: list[Link] = []
        self._n, self._token = n, token
        self._pending: list[Link] = []  # those without a greeting, the oldest first
        self._problem: ValueError | None = None
        self._lock = threading.Lock()

    def wait(self, listener: socket.socket, until: float, *, has_failed: bool = False) -> ValueError | None:
        """Waits for all processes, or until the deadline. Returns an error if a process that connects is misconfigured.

        If there is an error already, processes that connect are only collected, to receive it.
        """
        while (has_failed or self._problem is None) and not self._is_complete() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # nobody came, or the other end has closed the connection
                link = Link(listener.accept()[0])
                with self._lock:
                    self._pending.append(link)
                    if len(self._pending) > self._n + _MAX_PENDING:
                        self._pending.pop(0).end()
                threading.Thread(target=self._greet, args=(link,), name="redeqx-greet", daemon=True).start()
        return self._problem

    def close(self) -> ValueError | None:
        """Ends the connections without a greeting. Returns an error if a process has come since that is misconfigured."""
        with self._lock:
            for link in self._pending:
                link.end()
            self._pending.clear()
            return self._problem

    def _is_complete(self) -> bool:
        if len(self.greeted) < self._n - 1:
            return False
        with self._lock:  # a process may have ended since, and be restarted
            for link in [link for link in self.greeted if link.has_ended()]:
                self._forget(link)
            return len(self.greeted) >= self._n - 1

    def _forget(self, link: Link) -> None:
        self.greeted = [other for other in self.greeted if other is not link]
        self.links = {i: other for i, other in self.links.items() if other is not link}
        link.close()

    def _greet(self, link: Link) -> None:
        message = None
        with contextlib.suppress(OSError, ValueError):  # a port scan, another program, or a process that has ended
            message = link.receive(until=time.monotonic() + _GREETING_TIMEOUT, limit=_MAX_GREETING)
        with self._lock:
            is_pending = link in self._pending
            if is_pending:
                self._pending.remove(link)
            match message:
                case (kind, [int(index), int(n), str(host), str(token)]) if (
                    kind == _GREETING and type(index) is type(n) is int and is_pending
                ):
                    link.host = brief_name(host)
                    self._accept(link, index, n, token)
                case _:
                    link.close()

    def _accept(self, link: Link, index: int, n: int, token: str) -> None:
        """Accepts a connection that has sent its greeting, if that fits."""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode(errors="replace")):
            text = (
                f"`{TOKEN}`: expected the value of process 0 in the environment, got another at {link.host}. "
                "Set the same in every process."
            )
            with contextlib.suppress(OSError):
                link.send("start", ["ValueError", text])
            link.close()
            return
        link.limit(0.0)  # `has_ended` does not wait
        self.greeted.append(link)
        before = self.links.get(index)
        if n != self._n:
            rule, got, advice = f"`n_processes`: expected {self._n}, as in process 0", f"{n}", "Pass one number"
        elif not 0 < index < n:
            rule, got = f"`process_id`: expected 1 to {n - 1} beside process 0", f"{index}"
            advice = "Number them from 0"
        elif before is not None and not before.has_ended():
            rule, got = "`process_id`: expected each number once", f"{index} at {before.host} and"
            advice = "Number the processes from 0"
        else:
            if before is not None:  # restarted, after its first connection has ended
                self._forget(before)
            self.links[index] = link
            return
        self._problem = self._problem or ValueError(f"{rule}, got {got} at {link.host}. {advice}.")


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
