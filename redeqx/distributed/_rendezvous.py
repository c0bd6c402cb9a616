"""The rendezvous: all processes of a run connect, or each raises which process is missing, or what is wrong with which one.

The connections form a star: process 0, the coordinator, accepts one from each other process. `_cluster` detects the
coordinator's address and this process's index; `_peers` sends messages over the connections later.

The port is open to everybody who reaches it. A connection counts only once it has sent a greeting of a few bytes, within a
few seconds, while others are served too; any other connection is closed. With a token in the environment (`launch` sets
one) the greeting must contain it; without one, everybody who knows this format can join the run.
"""

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time
from typing import Any

from ..errors import brief_name
from ._links import Link, PeerError

START = 300.0  # seconds within which all processes must connect
TOKEN = "REDEQX_TOKEN"  # in the environment: a secret that all processes of a run share
_LAST_ARRIVALS = 1.0  # seconds in which other processes may still connect, to be told an error
_GREETING = "redeqx peers 2"
_GREETED = 5.0  # seconds within which a connection must have sent its greeting
_LATE = 5.0  # seconds after its own timeout that a joining process waits for the coordinator to report first
_MAX_GREETING = 2**12  # bytes
_MAX_HOST = 2**8  # characters of a host's name in a greeting
_MAX_START = 2**16  # bytes of the coordinator's reply
_MAX_STRANGERS = 64  # connections without a greeting, besides one for each process


def meet(n: int, index: int, host: str, port: int, *, bind: str, timeout: float) -> dict[int, Link]:
    """Wait for all processes; returns the connections of this one, by the index of the other end.

    **Arguments:**

    - `n`, `index`: the number of processes, and this one's.
    - `host`, `port`: of process 0.
    - `bind`: the address that process 0 listens on, `""` for all of its addresses.
    - `timeout`: seconds.

    Raises ValueError, the same in every process, if an index is used twice or out of range, the port is taken or the host
    unknown; PeerError, with their indices, if some processes do not connect in time.
    """
    token = os.environ.get(TOKEN, "")
    if index == 0:
        return _wait_for_all(n, host, port, bind, token, timeout)
    return {0: _join(n, index, host, port, token, timeout)}


def _wait_for_all(n: int, host: str, port: int, bind: str, token: str, timeout: float) -> dict[int, Link]:
    """At process 0."""
    with _listening(host, port, bind) as listener, selectors.DefaultSelector() as selector:
        arrivals = _Arrivals(n, token, listener, selector)
        problem = arrivals.wait(time.monotonic() + timeout)
        if problem is None and len(arrivals.links) < n - 1:
            here = ", ".join(f"{i} ({arrivals.links[i].host})" for i in sorted(arrivals.links)) or "none"
            missing = [i for i in range(1, n) if i not in arrivals.links]
            problem = PeerError(
                f"`n_processes`: expected {n} processes at {host}:{port} within {timeout:g} s, got none of "
                f"number {', '.join(map(str, missing))}; here besides 0: {here}. Look at what those print, and "
                "whether they reach this port."
            )
        if problem is not None:  # which processes that connect now are told too
            arrivals.wait(time.monotonic() + _LAST_ARRIVALS, is_over=True)
        arrivals.forget_strangers()
    for link in arrivals.greeted:
        link.limit(_GREETED)
        with contextlib.suppress(OSError):  # closed again: `Peers` notices
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
    if problem is not None:
        for link in arrivals.greeted:
            link.close()
        raise problem
    return arrivals.links


class _Arrivals:
    """At process 0: the connections so far, all served at once.

    `links` are the accepted ones by process index; `greeted` also has those that are to be told an error.
    """

    def __init__(self, n: int, token: str, listener: socket.socket, selector: selectors.BaseSelector):
        self.links: dict[int, Link] = {}
        self.greeted: list[Link] = []
        self._strangers: dict[Link, float] = {}  # connections without a greeting, and their deadlines
        self._n, self._token, self._listener, self._selector = n, token, listener, selector
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait(self, until: float, *, is_over: bool = False) -> ValueError | None:
        """Wait for all processes, or until the deadline; returns what is wrong with one that has connected.

        **Arguments:**

        - `is_over`: whether something is wrong already: processes that connect are only collected, to be told.
        """
        while len(self.greeted) < self._n - 1 and (now := time.monotonic()) < until:
            for link in [link for link, patience in self._strangers.items() if patience <= now]:
                self._forget(link)
            for key, _ in self._selector.select(min([until, *self._strangers.values()]) - now):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                assert isinstance(key.fileobj, Link)
                problem = self._read(key.fileobj, is_over)
                if problem is not None:
                    return problem
        return None

    def _accept(self) -> None:
        try:
            link = Link(self._listener.accept()[0])
        except OSError:  # closed again
            return
        link.limit(0.0)
        self._strangers[link] = time.monotonic() + _GREETED
        self._selector.register(link, selectors.EVENT_READ)
        if len(self._strangers) > self._n + _MAX_STRANGERS:
            self._forget(next(iter(self._strangers)))

    def _read(self, link: Link, is_over: bool) -> ValueError | None:
        if link.fileno() < 0:  # forgotten in this round
            return None
        try:
            link.fill()
            message = link.take(_MAX_GREETING)
        except BlockingIOError:
            return None
        except (OSError, ValueError):  # a port scan, another program, or a process that has ended and may be started again
            self._forget(link)
            return None
        if link not in self._strangers:  # after its greeting a process waits for the coordinator
            self._forget(link)
            return None
        return None if message is None else self._welcome(link, message, is_over)

    def _welcome(self, link: Link, message: tuple[str, Any], is_over: bool) -> ValueError | None:
        """Accept a connection that has sent its greeting; returns what is wrong with it."""
        match message:
            case (kind, [int(index), int(n), str(host), str(token)]) if kind == _GREETING and type(index) is type(n) is int:
                link.host = brief_name(host)
            case _:
                self._forget(link)
                return None
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode(errors="replace")):
            with contextlib.suppress(OSError):
                link.send("start", ["ValueError", _other_token(link.host)])
            self._forget(link)
            return None
        del self._strangers[link]
        self.greeted.append(link)
        if is_over:
            return None
        if n != self._n:
            return ValueError(
                f"`n_processes`: expected {self._n}, as in process 0, got {n} at {link.host}. Pass one number."
            )
        if not 0 < index < n:
            return ValueError(
                f"`process_id`: expected 1 to {n - 1} beside process 0, got {index} at {link.host}. Number them from 0."
            )
        if index in self.links and not self.links[index].has_ended():
            return ValueError(
                f"`process_id`: expected each number once, got {index} at {self.links[index].host} and at {link.host}. "
                "Number the processes from 0."
            )
        if index in self.links:  # started again, after its first connection has ended
            self._forget(self.links[index])
        self.links[index] = link
        return None

    def _forget(self, link: Link) -> None:
        self._selector.unregister(link)
        self._strangers.pop(link, None)
        self.greeted = [other for other in self.greeted if other is not link]
        self.links = {i: other for i, other in self.links.items() if other is not link}
        link.close()

    def forget_strangers(self) -> None:
        for link in list(self._strangers):
            self._forget(link)


def _other_token(host: str) -> str:
    return (
        f"`{TOKEN}`: expected in the environment what process 0 has there, got another at {host}. "
        "Set one everywhere, or none."
    )


def _listening(host: str, port: int, bind: str) -> socket.socket:
    """A socket that listens for connections to `host:port`, on the address `bind`, `""` for all.

    Raises ValueError if the port is taken or the address is not this host's.
    """
    try:
        found = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(
            f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). Pass its address."
        ) from error
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    # JAX's coordinator listens on the same port later, while these connections stay open.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE or "in use" in str(error):
            raise ValueError(
                f"`host0_port`: expected a free port, got {port}, which another program holds. Pass another everywhere."
            ) from error
        raise ValueError(
            f"`host0_address`: expected an address of process 0's own host, got {host!r} ({error.strerror}). "
            "Pass the one under which the others reach it."
        ) from error
    return listener


def _join(n: int, index: int, host: str, port: int, token: str, timeout: float) -> Link:
    """At the other processes."""
    until = time.monotonic() + timeout
    why = ""
    while time.monotonic() < until:
        link = None
        try:
            link = Link(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)))
            link.send(_GREETING, [index, n, socket.gethostname()[:_MAX_HOST], token])
            kind, problem = link.receive(until=until + _LATE, limit=_MAX_START)
            if kind != "start":  # an echo, say: while nobody listens, a connection may even reach itself
                raise ValueError("it is no process 0")
        except socket.gaierror as error:
            raise ValueError(
                f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). "
                "Pass its address."
            ) from error
        except (OSError, ValueError) as error:  # it does not listen yet, or the port is another run's coordinator
            why = str(error)
            if link is not None:
                link.close()
            time.sleep(min(0.2, max(until - time.monotonic(), 0)))
            continue
        match problem:
            case None:
                return link
            case ["ValueError", str(text)]:
                link.close()
                raise ValueError(text)
        link.close()
        raise PeerError(str(problem[-1]) if isinstance(problem, list) and problem else str(problem))
    raise PeerError(
        f"`host0_address`: expected process 0 at {host}:{port} within {timeout:g} s, got no answer ({why}). "
        "Look at what it prints, and whether this host reaches that port."
    )
