"""Detects the number of processes, this process's index and the coordinator, and starts JAX's distributed runtime.

Without arguments, the environment decides: `REDEQX_PROCESSES`, `REDEQX_PROCESS_ID` and `REDEQX_HOST0`, which
`python -m redeqx launch` sets, then JAX's own detection (SLURM, Open MPI, Kubernetes, Cloud TPU). Everything is checked
before JAX starts, because in its runtime many failures abort without a Python exception.
"""

import atexit
import contextlib
import ipaddress
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import jax

from ..errors import check_count
from ._exits import attempt, exit_now, run_exit_callbacks
from ._peers import FAILURE, HEARTBEAT, Peers
from ._relay import Relay
from ._rendezvous import START

PORT = 55527  # process 0's default port; JAX's own detection uses the same on Kubernetes
_NEVER = 10**8  # seconds
_HOOK = 30.0  # seconds that an exception hook may take, for example one that reports to a service
WORKER = "redeqx-collate"  # the name of a worker process that collates
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PROCESSES, _PROCESS_ID, _HOST0 = "REDEQX_PROCESSES", "REDEQX_PROCESS_ID", "REDEQX_HOST0"


@dataclass(frozen=True)
class Place:
    """The position of this process in a run of several, and the coordinator's address.

    **Arguments:**

    - `n`, `index`: the number of processes, and the index of this one.
    - `host`, `port`: the address of process 0.
    - `bind`: the address that process 0 listens on; `""` for all of its addresses.
    - `local_devices`: the indices of this host's devices that belong to this process; None for all.
    - `coordinator`: `host:port` that JAX's coordinator listens on; `""` for `bind` and `port`.
    """

    n: int
    index: int
    host: str
    port: int
    bind: str = ""
    local_devices: tuple[int, ...] | None = None
    coordinator: str = ""


_peers: Peers | None = None  # set by `start`: a process joins only one run


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
    """Start JAX's distributed runtime; returns the processes of this run, which may be this one alone.

    Raises ValueError if the arguments or the environment are invalid, PeerError if some processes do not connect,
    RuntimeError if JAX's devices have been used already.
    """
    global _peers
    if multiprocessing.current_process().name == WORKER:  # a worker imports the script, but does not belong to the run
        return Peers()
    place = find_place(n_processes, host0_address, host0_port, process_id, n_local_devices)
    if _peers is not None:
        if place is not None and place.n != _peers.n:
            raise ValueError(
                f"`n_processes`: expected {_peers.n}, as this process began with, got {place.n}. Use one number."
            )
        if place is not None and place.index != _peers.index:
            raise ValueError(
                f"`process_id`: expected {_peers.index}, as this process began with, got {place.index}. Use one number."
            )
        return _peers
    if place is None:
        return Peers()
    _check_unused()
    peers = Peers(place.n, place.index, heartbeat)
    peers.meet(place.host, place.port, bind=place.bind, timeout=timeout)
    relay = Relay(place.host, place.port, timeout)
    # If there is no address to bind, this is JAX's own default. Without this argument JAX would bind the relay's port.
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
            # Only our heartbeat ends a run. JAX's does not say which step is safe, and reads the wall clock: a step of some
            # seconds aborted all processes. (One back to before the start of the run still does.)
            heartbeat_timeout_seconds=_NEVER,
        )
    if threading.current_thread() is threading.main_thread():
        # JAX installs a handler that only records the signal. Restore the previous one, which applies outside of `fit`.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if at_sigterm is None else at_sigterm)
    _peers = peers
    _report_ends(peers)
    os.register_at_fork(after_in_child=lambda: _detach_child(peers, relay))
    return peers


@contextlib.contextmanager
def _no_proxies() -> Iterator[None]:
    """Hide the web proxies that clusters set (`http_proxy`): gRPC would use one to reach the coordinator, and hang."""
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(proxies)


def _check_unused() -> None:
    """Raise RuntimeError if JAX's backends have started: then devices of other processes can no longer be added."""
    try:  # JAX checks this before the arguments, which are missing here
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:
        return
    except RuntimeError as error:
        raise RuntimeError(
            "`Deployer`: expected to come before anything that uses JAX's devices, as several processes share theirs, got "
            "JAX in use. Make the Deployer first: no `jax.random.key`, array or `jax.devices()` before it."
        ) from error


# --- cluster detection -----------------------------------------------------------------------------------------------


def find_place(
    n_processes: int | None = None,
    host0_address: str | None = None,
    host0_port: int | None = None,
    process_id: int | None = None,
    n_local_devices: int | None = None,
) -> Place | None:
    """Return this process's place in the run, from the arguments or else from the launcher; None for a single process.

    Raises ValueError if an argument is missing or impossible.
    """
    local = None
    if n_local_devices is not None:
        check_count(n_local_devices, "n_local_devices", advice="Leave it out to use all.")
        local = tuple(range(n_local_devices))
    if n_processes is None and any(name in os.environ for name in (_PROCESSES, _PROCESS_ID, _HOST0)):
        missing = [name for name in (_PROCESSES, _PROCESS_ID, _HOST0) if not os.environ.get(name)]
        if missing:
            raise ValueError(f"`{missing[0]}`: expected in the environment beside the others, got none. Set all three.")
        host, _, port = os.environ[_HOST0].rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"`{_HOST0}`: expected `host:port` in the environment, got {os.environ[_HOST0]!r}. Set it.")
        host = host.strip("[]")
        return _make_place(_env_number(_PROCESSES), _env_number(_PROCESS_ID), host, int(port), host, local)
    if n_processes == 1:
        return None
    if n_processes is None:
        given = {"host0_address": host0_address, "host0_port": host0_port, "process_id": process_id}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}`: expected with `n_processes`, got {value!r} alone. Pass both, or leave it out.")
        place = _detect_place(local)
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
    return _make_place(n_processes, process_id, host0_address, port, host0_address, local)


def _env_number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"`{name}`: expected a number in the environment, got {os.environ[name]!r}. Set it.") from None


def _make_place(n: int, index: int, host: str, port: int, bind: str, local: tuple[int, ...] | None) -> Place | None:
    check_count(n, "n_processes", advice="Pass the number of processes.")
    check_count(index, "process_id", 0, advice="Number the processes from 0.")
    check_count(port, "host0_port", 0, advice="Pass a port of process 0's host.")
    if index >= n:
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


def _detect_place(local: tuple[int, ...] | None) -> Place | None:
    """Return this process's place as JAX's own detection finds it from the launcher; None for a single process."""
    _check_slurm()
    # A private API: JAX exposes its detection only inside `initialize`, and the rendezvous comes before that.
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
    place = _make_place(n, index, host, int(port), bind, None if local_ids is None else tuple(local_ids))
    return None if place is None else replace(place, coordinator=coordinator)


def _host_of(address: str) -> str:
    """Return the host of `host:port`, to listen on; `""` for all addresses."""
    host = address.rpartition(":")[0].strip("[]")
    return "" if host in ("0.0.0.0", "::") else host


def _interface(host: str) -> str:
    """Return the address that process 0 listens on, given the name or address that its launcher has for it.

    This is the same one if it belongs to this host and other hosts can reach it; otherwise `""`, all addresses.
    """
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


def _is_lone_pod() -> bool:
    """Return whether this is a Kubernetes pod outside of any Job of several pods, such as a notebook's."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or "JOB_COMPLETION_INDEX" in os.environ:
        return False
    from jax._src.clusters import K8sCluster

    try:
        return K8sCluster.get_process_count() in (None, 1)
    except Exception:  # it has no Job, or no permission to look it up
        return True


_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def _check_slurm() -> None:
    """Raise ValueError in a SLURM job of several tasks if this process is none of them: JAX would run it alone."""
    n = os.environ.get("SLURM_NTASKS", "1")
    missing = [name for name in _SLURM if name not in os.environ]
    if n.isdecimal() and int(n) > 1 and missing and "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"`{missing[0]}`: expected in the environment of one of SLURM_NTASKS={n} tasks, got none. Start the script with "
            "`srun python ...`, which starts every task; or pass `n_processes=1` to run this one alone."
        )


# --- ends ------------------------------------------------------------------------------------------------------------


def _report_ends(peers: Peers) -> None:
    """Install a hook: if an exception ends this process, the others end first and the traceback is printed once, last."""
    hook = sys.excepthook

    def failing(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if os.getpid() != pid or peers.fail(in_runtime=_is_of_runtime(error)):  # a forked child fails alone
            attempt(lambda: hook(kind, error, frames), seconds=_HOOK)
            attempt(run_exit_callbacks, seconds=_HOOK)
        exit_now(FAILURE)  # at a normal exit JAX would wait for processes that are gone

    pid = os.getpid()
    sys.excepthook = failing
    atexit.register(peers.close)


def _is_of_runtime(error: BaseException | None) -> bool:
    """Return whether JAX's runtime raised this exception, or one that it comes from."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _detach_child(peers: Peers, relay: Relay) -> None:
    """In a forked child: detach from the run, so that the child's exit does not end the run."""
    atexit.unregister(peers.close)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.api import clean_up  # would tell the coordinator that the parent process ends

        atexit.unregister(clean_up)
    peers.forget()
    relay.forget()
