"""Starts JAX's distributed runtime for the processes that `_launchers` finds, or joins the one that the script started.

Everything is checked before JAX starts, because in its runtime many failures abort without a Python exception.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

import jax

from ._addresses import Member, free_port, reachable
from ._exits import attempt, exit_now
from ._launchers import find_member
from ._links import START, PeerError
from ._peers import FAILURE, HEARTBEAT, Peers
from ._relay import HOST, start_relay

_NEVER = 10**8  # seconds
_HOOK = 30.0  # seconds that an exception hook may take, for example one that reports to a service
_KEY = "redeqx/process 0"  # in JAX's key-value store: where process 0 listens
WORKER = "redeqx-collate"  # the name of a worker process that collates


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
    """Starts JAX's distributed runtime; returns the processes of this run, which may be this one alone.

    Raises ValueError if the arguments or the environment are invalid, PeerError if some processes do not connect,
    RuntimeError if JAX's devices have been used already.
    """
    global _peers
    if multiprocessing.current_process().name == WORKER:  # a worker imports the script, but does not belong to the run
        return Peers()
    if _peers is not None:
        _check_same(_peers, n_processes, process_id, "as this process began with")
        return _peers
    if jax.distributed.is_initialized():
        member = _running_member(host0_port, timeout)
        _check_same(member, n_processes, process_id, "as JAX runs with since `jax.distributed.initialize`")
    else:
        member = find_member(n_processes, host0_address, host0_port, process_id, n_local_devices)
        if member is None:
            _check_span(1)
            return Peers()
        _check_unused()
    peers = Peers(member.n, member.index, heartbeat)
    if member.n > 1:
        peers.meet(member, timeout)
    if not jax.distributed.is_initialized():
        _start_jax(member, start_relay(member.host, member.port, timeout), timeout)
    if threading.current_thread() is threading.main_thread():
        # JAX installs a handler that only records the signal (JAX 0.10.2; 2026-11-25). Restore Python's, which applies
        # outside of `fit`.
        at_sigterm = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if at_sigterm is None else at_sigterm)
    _peers = peers
    if member.n > 1:
        _report_ends(peers)
        os.register_at_fork(after_in_child=lambda: _detach_child(peers))
    _check_span(member.n)
    return peers


def _check_same(member: Member | Peers, n: int | None, index: int | None, why: str) -> None:
    for name, own, given in (("n_processes", member.n, n), ("process_id", member.index, index)):
        if given is not None and given != own:
            raise ValueError(f"`{name}`: expected {own}, {why}, got {given}. Use one number.")


def _check_span(n: int) -> None:
    """Raises RuntimeError if other processes have a part of JAX's devices: each would save what it holds as the whole."""
    if jax.process_count() != n:
        raise RuntimeError(
            f"`Deployer`: expected devices of {n} processes, as its arguments or the launcher say, got those of "
            f"{jax.process_count()}. Pass `n_processes`, `host0_address` and `process_id`, or call "
            "`jax.distributed.initialize` before it."
        )


def _running_member(port: int | None, timeout: float) -> Member:
    """Returns this process in the runtime that the script started. Process 0 publishes in it where the others connect."""
    # A private API: JAX has no public door to its key-value store.
    from jax._src.distributed import global_state

    n, index, store = global_state.num_processes, global_state.process_id, global_state.client
    assert store is not None
    if n == 1:
        return Member(1, 0, HOST, 1)
    source = "jax.distributed.initialize"
    if index == 0:
        host, bind = reachable((global_state.coordinator_address or "").rpartition(":")[0].strip("[]"))
        member = Member(n, 0, host, port or free_port(bind), bind, token=secrets.token_hex(16), source=source)
        store.key_value_set(_KEY, json.dumps([member.host, member.port, member.token]))
        return member
    try:
        host, listens, token = json.loads(store.blocking_key_value_get(_KEY, int(1000 * timeout)))
    except jax.errors.JaxRuntimeError as error:
        raise PeerError(
            f"`Deployer`: expected process 0 of {n} to make one within {timeout:g} s, got none. Make it in each process "
            "that `jax.distributed.initialize` has connected."
        ) from error
    return Member(n, index, host, listens, token=token, source=source)


def _start_jax(member: Member, port: int, timeout: float) -> None:
    # If there is no address to bind, this is JAX's own default. Without this argument JAX would bind the relay's port.
    bind = f"[{member.bind or '::'}]" if ":" in (member.bind or "::") else member.bind
    with _no_proxies():
        jax.distributed.initialize(
            f"{HOST}:{port}",
            member.n,
            member.index,
            local_device_ids=None if member.local_devices is None else list(member.local_devices),
            cluster_detection_method="deactivate",
            coordinator_bind_address=member.coordinator or f"{bind}:{member.port}",
            initialization_timeout=int(timeout),
            # Only our heartbeat ends a run. JAX's does not say which step is safe, and reads the wall clock: a step of some
            # seconds aborted all processes. (One back to before the start of the run still does.)
            heartbeat_timeout_seconds=_NEVER,
        )


@contextlib.contextmanager
def _no_proxies() -> Iterator[None]:
    """Hides the web proxies that clusters set (`http_proxy`): gRPC would use one to reach the coordinator, and hang. So JAX
    0.10.2 does, and warns (2026-11-25); `tests/distributed/test_workarounds.py` tells when it no longer does."""
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(proxies)


def _check_unused() -> None:
    """Raises RuntimeError if JAX's backends have started: then devices of other processes can no longer be added."""
    try:  # JAX checks this before the arguments, which are missing here
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:
        return
    except RuntimeError as error:
        raise RuntimeError(
            "`Deployer`: expected to come before anything that uses JAX's devices, as several processes share theirs, got "
            "JAX in use. Make the Deployer first: no `jax.random.key`, array or `jax.devices()` before it."
        ) from error


# --- ends ------------------------------------------------------------------------------------------------------------


def _report_ends(peers: Peers) -> None:
    """Installs a hook: if an exception ends this process, the others end first and the traceback is printed once, last."""
    hook = sys.excepthook

    def failing(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if os.getpid() != pid or peers.fail(in_runtime=_is_of_runtime(error)):  # a forked child fails alone
            attempt(lambda: hook(kind, error, frames), seconds=_HOOK)
        exit_now(FAILURE, _HOOK)  # at a normal exit JAX would wait for processes that are gone

    pid = os.getpid()
    sys.excepthook = failing
    atexit.register(peers.close)


def _is_of_runtime(error: BaseException | None) -> bool:
    """Returns whether JAX's runtime raised this exception, or one that it comes from."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _detach_child(peers: Peers) -> None:
    """In a forked child: detach from the run, so that the child's exit does not end the run."""
    atexit.unregister(peers.close)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.api import clean_up  # would tell the coordinator that the parent process ends

        atexit.unregister(clean_up)
    peers.forget()
