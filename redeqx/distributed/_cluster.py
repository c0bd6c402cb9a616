"""How a process of several finds its number and the others, and starts JAX's distributed runtime with them.

Where nothing is given, JAX's own detection is asked: SLURM, Open MPI, Kubernetes, Cloud TPU; and `REDEQX_PROCESSES`,
`REDEQX_PROCESS_ID` and `REDEQX_HOST0` before it, which `python -m redeqx launch` sets. What can be wrong is said before JAX
starts, since of that much ends a process without a word of Python.
"""

import atexit
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import jax

from ._exits import attempt, exit_now
from ._peers import HEARTBEAT, Peers
from ._relay import Relay
from ._rendezvous import START

PORT = 55527  # of process 0, where none is given; the one that JAX's own detection takes on Kubernetes
_HOOK = 30.0  # seconds that a hook for exceptions may take, such as one that reports them elsewhere
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PROCESSES, _PROCESS_ID, _HOST0 = "REDEQX_PROCESSES", "REDEQX_PROCESS_ID", "REDEQX_HOST0"


@dataclass(frozen=True)
class Place:
    """This process in a run of several.

    **Arguments:**

    - `n`, `index`: how many processes, and which this is.
    - `host`, `port`: of process 0.
    - `bind`: the address that process 0 listens at; `""` for all that it has.
    - `local_devices`: numbers of those of this host's devices that are this process's; None for all.
    - `coordinator`: the address and port that JAX's coordinator listens at; `""` for `bind` and `port`.
    """

    n: int
    index: int
    host: str
    port: int
    bind: str = ""
    local_devices: tuple[int, ...] | None = None
    coordinator: str = ""


_peers: Peers | None = None  # of this process, once it has started: a process joins one run


def start(
    n_processes: int | None,
    host0_address: str | None,
    host0_port: int | None,
    process_id: int | None,
    n_local_devices: int | None,
    *,
    heartbeat: float = HEARTBEAT,
    timeout: float = START,
) -> Peers:
    """The processes of this run, JAX started over them; this one alone where there are no others.

    Raises ValueError where what is given or found cannot work, PeerError where some do not come; RuntimeError where JAX has
    been used already.
    """
    global _peers
    place = find_place(n_processes, host0_address, host0_port, process_id, n_local_devices)
    if _peers is not None:
        if place is not None and (place.n, place.index) != (_peers.n, _peers.index):
            raise ValueError(
                f"`n_processes`: expected {_peers.n}, as this process began with, got {place.n}. Use one number."
            )
        return _peers
    if place is None:
        return Peers()
    _check_unused()
    peers = Peers(place.n, place.index, heartbeat)
    peers.meet(place.host, place.port, bind=place.bind, timeout=timeout)
    relay = Relay(place.host, place.port, timeout)
    # As JAX has it by default, where there is none to listen at; given nothing, it would take the relay's port.
    bind = f"[{place.bind or '::'}]" if ":" in (place.bind or "::") else place.bind
    at_sigterm = signal.getsignal(signal.SIGTERM)
    with _no_proxies():
        jax.distributed.initialize(
            f"{relay.host}:{relay.port}",
            place.n,
            place.index,
            local_device_ids=None if place.local_devices is None else list(place.local_devices),
            cluster_detection_method="deactivate",
            coordinator_bind_address=place.coordinator or f"{bind}:{place.port}",
            initialization_timeout=int(timeout),
            # Ours comes first: JAX's ends the process without a word of where the run stands.
            heartbeat_timeout_seconds=int(2 * heartbeat) + 10,
        )
    if threading.current_thread() is threading.main_thread():
        # JAX notes SIGTERM, and goes on: outside of `fit`, which saves, it does what it would do without JAX.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if at_sigterm is None else at_sigterm)
    _peers = peers
    _say_ends(peers)
    os.register_at_fork(after_in_child=lambda: _leave_run(peers, relay))
    return peers


@contextlib.contextmanager
def _no_proxies() -> Iterator[None]:
    """The environment without them: gRPC takes one for the web, as clusters set (`http_proxy`), and waits for ever."""
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(proxies)


def _check_unused() -> None:
    """Raise RuntimeError where JAX has its devices already, to which none could be added any more."""
    try:  # The first thing that it checks is that; the next is what it lacks here.
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:
        return
    except RuntimeError as error:
        raise RuntimeError(
            "`Deployer`: expected to come before anything that uses JAX's devices, as several processes share theirs, got "
            "JAX in use. Make the Deployer first: no `jax.random.key`, array or `jax.devices()` before it."
        ) from error


# --- where a process is ----------------------------------------------------------------------------------------------


def find_place(
    n_processes: int | None = None,
    host0_address: str | None = None,
    host0_port: int | None = None,
    process_id: int | None = None,
    n_local_devices: int | None = None,
) -> Place | None:
    """Where this process is among others, from what is given or else from its launcher; None where it is alone.

    Raises ValueError where some of it is missing or cannot be.
    """
    local = None if n_local_devices is None else tuple(range(n_local_devices))
    if n_local_devices is not None and n_local_devices < 1:
        raise ValueError(f"`n_local_devices`: expected at least 1, got {n_local_devices}. Leave it out to use all.")
    if n_processes is None and any(name in os.environ for name in (_PROCESSES, _PROCESS_ID, _HOST0)):
        missing = [name for name in (_PROCESSES, _PROCESS_ID, _HOST0) if not os.environ.get(name)]
        if missing:
            raise ValueError(f"`{missing[0]}`: expected in the environment beside the others, got none. Set all three.")
        host, _, port = os.environ[_HOST0].rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"`{_HOST0}`: expected `host:port` in the environment, got {os.environ[_HOST0]!r}. Set it.")
        host = host.strip("[]")
        return _checked(_number(_PROCESSES), _number(_PROCESS_ID), host, int(port), host, local)
    if n_processes == 1:
        return None
    if n_processes is None:
        given = {"host0_address": host0_address, "host0_port": host0_port, "process_id": process_id}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}`: expected with `n_processes`, got {value!r} alone. Pass both, or leave it out.")
        place = _detected(local)
        if place is None and n_local_devices is not None:
            raise ValueError(
                f"`n_local_devices`: expected with several processes, got {n_local_devices} on one. Leave it out."
            )
        return place
    missing = {"host0_address": host0_address, "process_id": process_id}
    for name, value in missing.items():
        if value is None:
            raise ValueError(f"`{name}`: expected with `n_processes`={n_processes}, got None. Pass it in every process.")
    assert host0_address is not None
    assert process_id is not None
    port = PORT if host0_port is None else host0_port
    return _checked(n_processes, process_id, host0_address, port, host0_address, local)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"`{name}`: expected a number in the environment, got {os.environ[name]!r}. Set it.") from None


def _checked(n: int, index: int, host: str, port: int, bind: str, local: tuple[int, ...] | None) -> Place | None:
    if n < 1:
        raise ValueError(f"`n_processes`: expected at least 1, got {n}. Pass how many processes there are.")
    if not 0 <= index < n:
        raise ValueError(f"`process_id`: expected 0 to {n - 1}, got {index}. Number the processes from 0.")
    if not 0 < port < 2**16:
        raise ValueError(f"`host0_port`: expected 1 to 65535, got {port}. Pass a port of process 0's host.")
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"`host0_address`: expected a host that this one can find, got {host!r} ({error.strerror}). Pass its address."
        ) from error
    return None if n == 1 else Place(n, index, host, port, bind, local)


def _detected(local: tuple[int, ...] | None) -> Place | None:
    """What the launcher says, as JAX reads it."""
    _check_slurm()
    # JAX gives what it detects to nobody but its own start, before which we meet.
    from jax._src.clusters import ClusterEnv

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, local, None, int(START))
    except Exception:
        if _is_lone_pod():
            return None
        raise
    address, n, index, local_ids = found
    if n is None or n == 1 or address is None or index is None:
        return None
    host, _, port = address.rpartition(":")
    host, coordinator = host.strip("[]"), os.environ.get(_BIND, "")
    bind = _host_of(coordinator) if coordinator else _interface(host) if index == 0 else host
    place = _checked(n, index, host, int(port), bind, None if local_ids is None else tuple(local_ids))
    return None if place is None else replace(place, coordinator=coordinator)


def _host_of(address: str) -> str:
    """The host of `host:port`, to listen at; `""` for all addresses."""
    host = address.rpartition(":")[0].strip("[]")
    return "" if host in ("0.0.0.0", "::") else host


def _interface(host: str) -> str:
    """What process 0 listens at, where its launcher calls it by that name or address: that, if it is an address of this
    host which others reach; else `""`, all that it has."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return host  # said later, to all
    for family, kind, protocol, _, address in found:
        # On Debian a host's own name is 127.0.1.1 to itself, and something else to the others.
        if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
            return ""
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:  # such as that of a service in front of it
                return ""
    return host


def _is_lone_pod() -> bool:
    """Whether this is a pod of Kubernetes that belongs to no Job of several, such as a notebook's."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or "JOB_COMPLETION_INDEX" in os.environ:
        return False
    from jax._src.clusters import K8sCluster

    try:
        return K8sCluster.get_process_count() in (None, 1)
    except Exception:  # it has no Job, or may not ask for it
        return True


_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def _check_slurm() -> None:
    """Raise ValueError in a SLURM job of several tasks of which this process is none: JAX would run it alone."""
    n = os.environ.get("SLURM_NTASKS", "1")
    missing = [name for name in _SLURM if name not in os.environ]
    if n.isdecimal() and int(n) > 1 and missing and "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"`{missing[0]}`: expected in the environment of one of SLURM_NTASKS={n} tasks, got none. Start the script with "
            "`srun python ...`, which starts every task; or pass `n_processes=1` to run this one alone."
        )


# --- ends ------------------------------------------------------------------------------------------------------------


def _say_ends(peers: Peers) -> None:
    """An exception that ends this process ends the others first, and is then the last thing printed, once."""
    hook = sys.excepthook

    def failing(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if os.getpid() != pid or peers.fail():  # a forked child fails for itself
            attempt(lambda: hook(kind, error, frames), seconds=_HOOK)
        exit_now(1)  # JAX would wait at exit for processes that are gone

    pid = os.getpid()
    sys.excepthook = failing
    atexit.register(peers.close)


def _leave_run(peers: Peers, relay: Relay) -> None:
    """In a forked child: what it does, and how it ends, is nothing to the run."""
    atexit.unregister(peers.close)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.api import clean_up  # takes leave of the coordinator, in the name of the process that forked

        atexit.unregister(clean_up)
    peers.forget()
    relay.forget()
