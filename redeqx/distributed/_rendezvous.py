"""The rendezvous: all processes of a run connect, or each raises an error that names the missing or misconfigured one.

The connections form a star: process 0, the coordinator, accepts one from each other process. `_cluster` detects the
coordinator's address and this process's index; `_peers` sends messages over the connections later.

Any host that reaches the port can connect. A connection is accepted only if it sends a short greeting within a few seconds,
during which others are served too; any other connection is closed. If the processes share a token (`REDEQX_TOKEN`, or one
that their launcher lets them derive), the greeting must contain it; without one, anybody who knows this format can join.
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
from ._addresses import unknown_host
from ._links import Link, PeerError

START = 300.0  # seconds within which all processes must connect
TOKEN = "REDEQX_TOKEN"  # environment variable: a secret that all processes of a run share
_LATE_ARRIVALS = 1.0  # seconds after an error in which other processes may still connect, to receive it
_GREETING = "redeqx peers 3"
_GREETING_TIMEOUT = 5.0  # seconds within which a connection must send its greeting
_LATE = 5.0  # seconds after its own timeout that a joining process waits for the coordinator to report first
_MAX_GREETING = 2**12  # bytes
_MAX_HOST = 2**8  # characters of the host name in a greeting
_MAX_START = 2**16  # bytes of the coordinator's reply
_MAX_PENDING = 64  # connections without a greeting, in addition to one for each process


def meet(
    n: int, index: int, host: str, port: int, *, bind: str, timeout: float, token: str = "", source: str = ""
) -> dict[int, Link]:
    """Wait for all processes; returns the connections of this one, by the index of the other end.

    **Arguments:**

    - `n`, `index`: the number of processes, and the index of this one.
    - `host`, `port`: the address of process 0.
    - `bind`: the address that process 0 listens on; `""` for all of its addresses.
    - `timeout`: seconds.
    - `token`: the secret that all processes share, unless the environment has another; `""` for none.
    - `source`: the launcher that gave these numbers, for errors; `""` for arguments.

    Raises ValueError, the same in every process, if an index is used twice or out of range, the port is in use or the host
    unknown; PeerError, with their indices, if some processes do not connect in time.
    """
    token = os.environ.get(TOKEN) or token
    if index == 0:
        return _wait_for_all(n, host, port, bind, token, timeout, source)
    return {0: _join(n, index, host, port, token, timeout, source)}


def _wait_for_all(n: int, host: str, port: int, bind: str, token: str, timeout: float, source: str) -> dict[int, Link]:
    """The rendezvous at process 0."""
    with _listening(host, port, bind) as listener, selectors.DefaultSelector() as selector:
        arrivals = _Arrivals(n, token, listener, selector)
        problem = arrivals.wait(time.monotonic() + timeout)
        if problem is None and len(arrivals.links) < n - 1:
            here = ", ".join(f"{i} ({arrivals.links[i].host})" for i in sorted(arrivals.links)) or "none"
            missing = [i for i in range(1, n) if i not in arrivals.links]
            problem = PeerError(
                f"`n_processes`: expected {n} processes at {host}:{port} within {timeout:g} s, got none of "
                f"number {', '.join(map(str, missing))}; here besides 0: {here}. Look at what those print, and "
                f"whether they reach this port.{_stale(source)}"
            )
        if problem is not None:  # processes that connect now receive it too
            arrivals.wait(time.monotonic() + _LATE_ARRIVALS, has_failed=True)
        arrivals.drop_pending()
    for link in arrivals.greeted:
        link.limit(_GREETING_TIMEOUT)
        with contextlib.suppress(OSError):  # closed again: `Peers` notices
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
    if problem is not None:
        for link in arrivals.greeted:
            link.close()
        raise problem
    return arrivals.links


class _Arrivals:
    """The connections to process 0 so far, all served at once.

    `links` are the accepted ones by process index; `greeted` also has those that are to receive an error.
    """

    def __init__(self, n: int, token: str, listener: socket.socket, selector: selectors.BaseSelector):
        self.links: dict[int, Link] = {}
        self.greeted: list[Link] = []
        self._pending: dict[Link, float] = {}  # connections without a greeting, and their deadlines
        self._n, self._token, self._listener, self._selector = n, token, listener, selector
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait(self, until: float, *, has_failed: bool = False) -> ValueError | None:
        """Wait for all processes, or until the deadline. Returns an error if a process that connects is misconfigured.

        **Arguments:**

        - `has_failed`: whether there is an error already: processes that connect are only collected, to receive it.
        """
        while len(self.greeted) < self._n - 1 and (now := time.monotonic()) < until:
            for link in [link for link, patience in self._pending.items() if patience <= now]:
                self._drop(link)
            for key, _ in self._selector.select(min([until, *self._pending.values()]) - now):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                assert isinstance(key.fileobj, Link)
                problem = self._read(key.fileobj, has_failed)
                if problem is not None:
                    return problem
        return None

    def _accept(self) -> None:
        try:
            link = Link(self._listener.accept()[0])
        except OSError:  # the other end has closed it
            return
        link.limit(0.0)
        self._pending[link] = time.monotonic() + _GREETING_TIMEOUT
        self._selector.register(link, selectors.EVENT_READ)
        if len(self._pending) > self._n + _MAX_PENDING:
            self._drop(next(iter(self._pending)))

    def _read(self, link: Link, has_failed: bool) -> ValueError | None:
        if link.fileno() < 0:  # dropped in this round
            return None
        try:
            link.fill()
            message = link.take(_MAX_GREETING)
        except BlockingIOError:
            return None
        except (OSError, ValueError):  # a port scan, another program, or a process that has ended and may be restarted
            self._drop(link)
            return None
        if link not in self._pending:  # a process sends nothing after its greeting until the coordinator replies
            self._drop(link)
            return None
        return None if message is None else self._accept_greeting(link, message, has_failed)

    def _accept_greeting(self, link: Link, message: tuple[str, Any], has_failed: bool) -> ValueError | None:
        """Accept a connection that has sent its greeting; returns an error if the greeting does not fit."""
        match message:
            case (kind, [int(index), int(n), str(host), str(token)]) if kind == _GREETING and type(index) is type(n) is int:
                link.host = brief_name(host)
            case _:
                self._drop(link)
                return None
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode(errors="replace")):
            with contextlib.suppress(OSError):
                link.send("start", ["ValueError", _other_token(link.host)])
            self._drop(link)
            return None
        del self._pending[link]
        self.greeted.append(link)
        if has_failed:
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
        if index in self.links:  # restarted, after its first connection has ended
            self._drop(self.links[index])
        self.links[index] = link
        return None

    def _drop(self, link: Link) -> None:
        self._selector.unregister(link)
        self._pending.pop(link, None)
        self.greeted = [other for other in self.greeted if other is not link]
        self.links = {i: other for i, other in self.links.items() if other is not link}
        link.close()

    def drop_pending(self) -> None:
        for link in list(self._pending):
            self._drop(link)


def _other_token(host: str) -> str:
    return (
        f"`{TOKEN}`: expected the value of process 0 in the environment, got another at {host}. "
        "Set the same in every process."
    )


def _stale(source: str) -> str:
    """Return what to do if a launcher's variables are not those of this process, as in a shell inside a job."""
    return f" If {source} did not start this process, set REDEQX_PROCESSES=1 to run it alone." if source else ""


def _listening(host: str, port: int, bind: str) -> socket.socket:
    """Return a socket that listens on `port` of the address `bind`; `""` for all addresses. `host` is for errors.

    Raises ValueError if the port is in use or not allowed, or the address is not this host's.
    """
    try:
        found = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise unknown_host(host, error) from error
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
        if error.errno == errno.EACCES:
            raise ValueError(
                f"`host0_port`: expected a port that this user may listen on, got {port} ({error.strerror}). "
                "Pass one above 1023 everywhere."
            ) from error
        raise ValueError(
            f"`host0_address`: expected an address of process 0's own host, got {host!r} ({error.strerror}). "
            "Pass the one under which the others reach it."
        ) from error
    return listener


def _join(n: int, index: int, host: str, port: int, token: str, timeout: float, source: str) -> Link:
    """The rendezvous at the other processes."""
    until = time.monotonic() + timeout
    why = ""
    while time.monotonic() < until:
        link = None
        try:
            link = Link(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)))
            link.send(_GREETING, [index, n, socket.gethostname()[:_MAX_HOST], token])
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
        f"Look at what it prints, and whether this host reaches that port.{_stale(source)}"
    )
