"""The start of a run of several processes: all find each other, or each says who is missing, or what is wrong with whom.

It is a star: process 0, the hub, accepts a connection from each of the others. Where the hub is, and which process this is,
`_cluster` finds out; what is said over the connections later is `_peers`'.
"""

import contextlib
import socket
import time

from ._links import Link, PeerError

START = 300.0  # seconds in which all must have come
_DOOR = 1.0  # seconds in which others may come to hear what is wrong
_GREETING = "redeqx peers 1"


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
    if index == 0:
        return _wait_for_all(n, host, port, bind, timeout)
    return {0: _join_hub(n, index, host, port, timeout)}


def _wait_for_all(n: int, host: str, port: int, bind: str, timeout: float) -> dict[int, Link]:
    """At process 0."""
    until = time.monotonic() + timeout
    links: dict[int, Link] = {}
    listener = _listening(host, port, bind)
    refused: list[Link] = []
    problem: Exception | None = None
    with listener:
        while problem is None and len(links) < n - 1:
            listener.settimeout(max(until - time.monotonic(), 0.01))
            try:
                link = Link(listener.accept()[0])
            except TimeoutError:
                here = ", ".join(f"{i} ({links[i].host})" for i in sorted(links)) or "none"
                missing = [i for i in range(1, n) if i not in links]
                problem = PeerError(
                    f"`n_processes`: expected {n} processes at {host}:{port} within {timeout:g} s, got none of "
                    f"number {', '.join(map(str, missing))}; here besides 0: {here}. Look at what those print, and "
                    "whether they reach this port."
                )
                break
            problem = _welcome(link, n, links, until)
            if problem is not None:
                refused.append(link)
        if problem is not None:  # for those that are at the door
            listener.settimeout(_DOOR)
            with contextlib.suppress(OSError, ValueError):
                while len(links) + len(refused) < n - 1:
                    refused.append(Link(listener.accept()[0]))
                    refused[-1].limit(_DOOR)
                    refused[-1].receive()  # what is closed unread takes with it what was sent
    for link in [*links.values(), *refused]:
        with contextlib.suppress(OSError):  # gone again: who is taken up is listened to from now on
            link.send("start", None if problem is None else [type(problem).__name__, str(problem)])
    if problem is not None:
        for link in [*links.values(), *refused]:
            link.close()
        raise problem
    return links


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


def _join_hub(n: int, index: int, host: str, port: int, timeout: float) -> Link:
    """At the others."""
    until = time.monotonic() + timeout
    why = ""
    while time.monotonic() < until:
        link = None
        try:
            link = Link(socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.01)))
            link.limit(max(until - time.monotonic(), 0.01) + 5)  # the hub speaks first, when its time is up too
            link.send(_GREETING, [index, n, socket.gethostname()])
            kind, problem = link.receive()
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
        if problem is not None:
            link.close()
            raise {"ValueError": ValueError, "PeerError": PeerError}[problem[0]](problem[1])
        return link
    raise PeerError(
        f"`host0_address`: expected process 0 at {host}:{port} within {timeout:g} s, got no answer ({why}). "
        "Look at what it prints, and whether this host reaches that port."
    )
