"""The start of a run of several processes: all find each other, or each says who is missing, or what is wrong with whom.

It is a star: process 0, the hub, accepts a connection from each of the others. Where the hub is, and which process this is,
`_cluster` finds out; what is said over the connections later is `_peers`'.

The port is open to whoever reaches it. So a connection counts only once it has sent a greeting of a few bytes, within a few
seconds, while others are attended to; what sends anything else is closed and forgotten. With a token in the environment
(`launch` sets one) a greeting must hold the same; without, whoever knows this format can pose as a process of the run.
"""

import contextlib
import hmac
import os
import selectors
import socket
import time
from typing import Any

from ..errors import brief_name
from ._links import Link, PeerError

START = 300.0  # seconds in which all must have come
TOKEN = "REDEQX_TOKEN"  # in the environment: what all processes of a run must know, where it is set
_DOOR = 1.0  # seconds in which others may come to hear what is wrong
_GREETING = "redeqx peers 2"
_GREETED = 5.0  # seconds in which a connection must have said whose it is
_LATE = 5.0  # seconds after its time is up in which one that joins waits for the hub's, which speaks first
_MAX_GREETING = 2**12  # bytes
_MAX_HOST = 2**8  # characters of a host's name in a greeting
_MAX_START = 2**16  # bytes of the hub's answer
_MAX_STRANGERS = 64  # connections, beside as many as there are processes, that may have said nothing yet


def meet(n: int, index: int, host: str, port: int, *, bind: str, timeout: float) -> dict[int, Link]:
    """The connections of this process, by the number of the other one, once all processes are here.

    **Arguments:**

    - `n`, `index`: how many processes there are, and which this is.
    - `host`, `port`: where process 0 is.
    - `bind`: the address that process 0 listens at, `""` for all that it has.
    - `timeout`: seconds.

    Raises ValueError, the same in every process, where a number is taken twice or out of range, the port is taken or the
    host not known; PeerError where some do not come in time, with their numbers.
    """
    token = os.environ.get(TOKEN, "")
    if index == 0:
        return _wait_for_all(n, host, port, bind, token, timeout)
    return {0: _join_hub(n, index, host, port, token, timeout)}


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
        if problem is not None:  # for those that are at the door
            arrivals.wait(time.monotonic() + _DOOR, is_over=True)
        arrivals.forget_strangers()
    for link in arrivals.greeted:
        link.limit(_GREETED)
        with contextlib.suppress(OSError):  # gone again: who is taken up is listened to from now on
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
    if problem is not None:
        for link in arrivals.greeted:
            link.close()
        raise problem
    return arrivals.links


class _Arrivals:
    """At process 0: the connections that have come, all attended to at once.

    `links` are those of its processes, by number; `greeted` besides them those to which something is to be said.
    """

    def __init__(self, n: int, token: str, listener: socket.socket, selector: selectors.BaseSelector):
        self.links: dict[int, Link] = {}
        self.greeted: list[Link] = []
        self._strangers: dict[Link, float] = {}  # when each must have said whose it is
        self._n, self._token, self._listener, self._selector = n, token, listener, selector
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait(self, until: float, *, is_over: bool = False) -> ValueError | None:
        """Wait for all processes, or until then; returns what is wrong with one that has come.

        **Arguments:**

        - `is_over`: whether something is wrong already, and whoever comes is only to be told.
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
        except OSError:  # gone again
            return
        link.limit(0.0)
        self._strangers[link] = time.monotonic() + _GREETED
        self._selector.register(link, selectors.EVENT_READ)
        if len(self._strangers) > self._n + _MAX_STRANGERS:
            self._forget(next(iter(self._strangers)))

    def _read(self, link: Link, is_over: bool) -> ValueError | None:
        if link.fileno() < 0:  # forgotten a moment ago
            return None
        try:
            link.fill()
            message = link.take(_MAX_GREETING)
        except BlockingIOError:
            return None
        except (OSError, ValueError):  # a port scan, another program's, or a process that has ended and may come again
            self._forget(link)
            return None
        if link not in self._strangers:  # the hub speaks next
            self._forget(link)
            return None
        return None if message is None else self._welcome(link, message, is_over)

    def _welcome(self, link: Link, message: tuple[str, Any], is_over: bool) -> ValueError | None:
        """Take up one that has greeted; or what is wrong with it."""
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
                f"`n_processes`: expected {self._n}, as process 0 has it, got {n} at {link.host}. Pass one number."
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
        if index in self.links:  # started again, before its first connection was seen to end
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


def _welcome(link: Link, n: int, links: dict[int, Link], until: float) -> Exception | None:
    """Take up one that has come; or what is wrong with it."""
    link.limit(min(5.0, max(until - time.monotonic(), 0.01)))
    try:
        kind, hello = link.receive()
    except (OSError, ValueError):
        kind, hello = "", None
    if kind != _GREETING or hello is None:
        link.close()  # a port scan, or another program's: no process of ours
        return None
    index, found, link.host = hello
    if found != n:
        return ValueError(f"`n_processes`: expected {n}, as process 0 has it, got {found} at {link.host}. Pass one number.")
    if not 0 < index < n:
        return ValueError(
            f"`process_id`: expected 1 to {n - 1} beside process 0, got {index} at {link.host}. Number them from 0."
        )
    if index in links:
        return ValueError(
            f"`process_id`: expected each number once, got {index} at {links[index].host} and at {link.host}. "
            "Number the processes from 0."
        )
    links[index] = link
    return None


def _join_hub(n: int, index: int, host: str, port: int, token: str, timeout: float) -> Link:
    """At the others."""
    until = time.monotonic() + timeout
    why = ""
    while time.monotonic() < until:
        link = None
        try:
            link = Link(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)))
            link.send(_GREETING, [index, n, socket.gethostname()[:_MAX_HOST], token])
            kind, problem = link.receive(until=until + _LATE, limit=_MAX_START)
            if kind != "start":  # such as what echoes: where no hub is yet, a connection may even reach itself
                raise ValueError("it is no process 0")
        except socket.gaierror as error:
            raise ValueError(
                f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). "
                "Pass its address."
            ) from error
        except (OSError, ValueError) as error:  # not there yet, or JAX's coordinator of another run is
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
