"""The address of process 0, and this process's place beside it: where that one listens, and where the others reach it."""

import errno
import ipaddress
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """This process as a member of a run of several, and the coordinator's address."""

    n: int  # the number of processes
    index: int
    host: str  # the address of process 0
    port: int
    bind: str = ""  # the address that process 0 listens on; `""` for all of its addresses
    local_devices: tuple[int, ...] | None = None  # the indices of this process's devices on this host; None for all
    coordinator: str = ""  # `host:port` that JAX's coordinator listens on; `""` for `bind` and `port`
    token: str = ""  # a secret that only the processes of this run know, if they can share one, else `""`
    source: str = ""  # the launcher that gave these numbers, for errors; `""` for arguments


def unknown_host(host: str, error: socket.gaierror) -> ValueError:
    return ValueError(
        f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). Pass its address."
    )


def interface(host: str) -> str:
    """Returns the address that process 0 listens on, given the name or address that its launcher has for it. This is the
    same one if it belongs to this host and other hosts can reach it; otherwise `""`, all addresses."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return host  # the rendezvous raises the error, in all processes
    for family, kind, protocol, _, address in found:
        # On Debian a host resolves its own name to 127.0.1.1; other hosts resolve it to another address.
        if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
            return ""
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:  # another machine's address, such as a service in front of this host
                return ""
    return host


def reachable(host: str) -> tuple[str, str]:
    """Returns the address at which other processes reach this one, and the one to listen on, given JAX's coordinator's."""
    if host and (bind := interface(host)):
        return host, bind
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: finds the interface towards the coordinator
            own = probe.getsockname()[0]
        except OSError:
            return socket.gethostname(), ""
    return (host, "") if ipaddress.ip_address(own).is_loopback else (own, own)


def free_port(host: str) -> int:
    """Returns a port of this host that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def listen(host: str, port: int, bind: str) -> socket.socket:
    """Returns a socket that listens on `port` of the address `bind`; `""` for all addresses. `host` is for errors.

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
            name, rule, got = "host0_port", "a free port", f"{port}, which another program holds. Pass another everywhere"
        elif error.errno == errno.EACCES:
            name, rule = "host0_port", "a port that this user may listen on"
            got = f"{port} ({error.strerror}). Pass one above 1023 everywhere"
        else:
            name, rule = "host0_address", "an address of process 0's own host"
            got = f"{host!r} ({error.strerror}). Pass the one under which the others reach it"
        raise ValueError(f"`{name}`: expected {rule}, got {got}.") from error
    return listener
