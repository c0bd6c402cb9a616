"""Detects this process's place in a run: the number of processes, its index, and the address of process 0.

`LAUNCHERS` is the one table of launchers, innermost first: `torchrun` inside a SLURM job comes before SLURM. The first one
that started several processes decides. One that is recognised but has not said everything is an error, never a process
that trains alone.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..errors import check_count
from ._addresses import Member, interface, unknown_host
from ._links import START

PORT = 55527  # process 0's default port; JAX's own detection uses the same on Kubernetes
_PROCESSES, _PROCESS_ID, _HOST0 = "REDEQX_PROCESSES", "REDEQX_PROCESS_ID", "REDEQX_HOST0"
_JAX_HOST0 = "JAX_COORDINATOR_ADDRESS"
_LOOK_UP = 2.0  # seconds between two look-ups of a name


def find_member(
    n_processes: int | None = None,
    host0_address: str | None = None,
    host0_port: int | None = None,
    process_id: int | None = None,
    n_local_devices: int | None = None,
) -> Member | None:
    """Returns this process as a member of its run, by the arguments or else by the launcher; None for a single process.

    Raises ValueError if an argument is missing or impossible, or a launcher's variables are incomplete.
    """
    local = None
    if n_local_devices is not None:
        check_count(n_local_devices, "n_local_devices", advice="Leave it out to use all.")
        local = tuple(range(n_local_devices))
    if n_processes == 1:
        return None
    given = {"host0_address": host0_address, "host0_port": host0_port, "process_id": process_id}
    if n_processes is None:
        member = _detect()
        if _given(_PROCESSES, _PROCESS_ID, _HOST0) is None:
            given["n_local_devices"] = None if member else n_local_devices
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"`{name}`: expected with `n_processes`, got {value!r} alone. Pass both, or leave it out."
                    )
        return member if member is None or local is None else replace(member, local_devices=local)
    for name in ("host0_address", "process_id"):
        if given[name] is None:
            raise ValueError(f"`{name}`: expected with `n_processes`={n_processes}, got None. Pass it in every process.")
    host, port, index = host0_address or "", PORT if host0_port is None else host0_port, process_id or 0
    return _checked(Member(n_processes, index, host, port, host, local))


def _checked(member: Member) -> Member | None:
    check_count(member.n, "n_processes", advice="Pass the number of processes.")
    check_count(member.index, "process_id", 0, advice="Number the processes from 0.")
    check_count(member.port, "host0_port", 0, advice="Pass a port of process 0's host.")
    if member.index >= member.n:
        raise ValueError(f"`process_id`: expected 0 to {member.n - 1}, got {member.index}. Number the processes from 0.")
    if not 0 < member.port < 2**16:
        raise ValueError(f"`host0_port`: expected 1 to 65535, got {member.port}. Pass a port of process 0's host.")
    until = time.monotonic() + (START if member.source and "KUBERNETES_SERVICE_HOST" in os.environ else 0)
    while True:
        try:
            socket.getaddrinfo(member.host, member.port, type=socket.SOCK_STREAM)
            return None if member.n == 1 else member
        except socket.gaierror as error:
            if time.monotonic() >= until:  # Kubernetes knows the name of a pod only once that has started
                raise unknown_host(member.host, error) from error
        time.sleep(_LOOK_UP)


@dataclass(eq=False)
class _Missing(Exception):
    """A launcher is recognised, and does not tell this process's place."""

    name: str  # of a variable
    rule: str = ""  # what is expected and what was found, if it is set
    got: str = "none"


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables by which it tells a process its place."""

    name: str  # for errors: what started the process, and what to do if a variable is missing
    remedy: str
    n: tuple[str, ...] = ()  # the number of processes, and this one's index; the first variable that is set counts
    index: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # further variables, first the one with the address of process 0
    local: str = ""  # the index of the device that is this process's; "" for all devices
    # Returns the address and the port of process 0; by default they are in JAX's own variables.
    where: Callable[[], tuple[str, int]] = lambda: ("", PORT)
    detect: Callable[[], Member | None] | None = None  # replaces all of these for a launcher without such variables
    only_with: str = ""  # the variable without which the others mean nothing
    is_shared: bool = False  # other programs set such variables too: a text as a number, or index 0 alone, means nothing

    def read(self) -> Member | None:
        """Returns the place; None if the launcher did not start several processes. Raises `_Missing`."""
        if self.detect is not None:
            return self.detect()
        name, index = _given(*self.n), _given(*self.index)
        if self.only_with and self.only_with not in os.environ:
            return None
        if name is None:
            is_alone = self.is_shared and index is not None and os.environ[index] == "0" and _given(self.needs[0]) is None
            if index is None or is_alone:
                return None
            raise _Missing(self.n[0])
        n = os.environ[name]
        if self.is_shared and not self.only_with and not n.isdecimal():
            return None
        _number(name)
        if n == "1":
            job = os.environ.get(_given(*(other for other in self.n if other != name)) or "", n)
            if job != n:  # a shell in the job, of SLURM's `salloc`: a step of one task, in a job of several
                raise _Missing(name, f"the {job} tasks of the job", n)
            return None
        for variable in self.needs:
            if not os.environ.get(variable):
                raise _Missing(variable)
        if index is None:
            raise _Missing(self.index[0])
        return _member(_number(name), _number(index), *self.where(), self)


def _detect() -> Member | None:
    """Returns the place that the innermost launcher of several processes gives; None for a single process."""
    if os.environ.get(_PROCESSES) == "1":  # alone, whatever another launcher says
        return None
    error = None
    for launcher in LAUNCHERS:
        try:
            member = launcher.read()
        except _Missing as missing:
            rule = missing.rule or f"in the environment of a process that {launcher.name} started"
            error = error or ValueError(
                f"`{missing.name}`: expected {rule}, got {missing.got}. {launcher.remedy}, or set {_PROCESSES}=1 to run "
                "this process alone."
            )
            if launcher is LAUNCHERS[0]:
                break
        else:
            if member is not None:
                return _checked(replace(member, source=launcher.name))
    if error is not None:
        raise error
    return None


def _member(n: int, index: int, host: str, port: int, launcher: Launcher | None = None) -> Member:
    """Returns a launcher's place. JAX's own variables replace its address, unless `redeqx launch` or JAX itself gave it."""
    given, coordinator = os.environ.get(_JAX_HOST0, ""), os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "")
    if launcher not in (None, LAUNCHERS[0]):
        if given:
            host, _, own_port = given.rpartition(":") if re.search(r"(^[^:]*|\]):\d+$", given) else (given, "", "")
            host, port = host.strip("[]"), int(own_port) if own_port else port
        if os.environ.get("JAX_COORDINATOR_PORT"):
            port = _number("JAX_COORDINATOR_PORT")
    bind = interface(host) if index == 0 else host
    if coordinator:
        bind = coordinator.rpartition(":")[0].strip("[]")
        bind = "" if bind in ("0.0.0.0", "::") else bind  # all addresses
    local = "" if launcher is None else launcher.local
    has_host = local == "LOCAL_RANK" and os.environ.get("LOCAL_WORLD_SIZE") == "1"  # torchrun, one process a host
    devices = (_number(local),) if os.environ.get(local) and not has_host else None
    return Member(n, index, host, port, bind, devices, coordinator)


def _given(*names: str) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"`{name}`: expected a number in the environment, got {os.environ[name]!r}. Set it.") from None


def _port(number: int, *, avoid: int = 0) -> int:
    """Returns a port from a number of the job, above those that Linux gives to outgoing connections."""
    port = number % 2**12 + 2**16 - 2**12
    return port if port != avoid else (number + 1) % 2**12 + 2**16 - 2**12


# --- where process 0 is ------------------------------------------------------------------------------------------------


def _redeqx() -> tuple[str, int]:
    host, _, port = os.environ[_HOST0].rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"`{_HOST0}`: expected `host:port` in the environment, got {os.environ[_HOST0]!r}. Set it.")
    return host.strip("[]"), int(port)


def _torchrun() -> tuple[str, int]:
    # torchrun's own store listens on the master's port
    return os.environ["MASTER_ADDR"], _port(_number("MASTER_PORT"), avoid=_number("MASTER_PORT"))


def _open_mpi() -> tuple[str, int]:
    """`mpirun` of Open MPI 4, which gives the address of its own host, and 5, whose name is in the namespace of its job."""
    uri, namespace = (os.environ.get(name, "") for name in ("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"))
    if uri:
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,fe80::2]:43370. Job ids are multiples of 2^12.
        found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
        if found is None:
            raise _Missing("OMPI_MCA_orte_hnp_uri")
        return found[1] or found[2], _port(int(uri.split(".")[0]) // 2**12)
    if (found := re.fullmatch(r"\w+-(?P<host>.+)-(?P<pid>\d+)@\d+", namespace)) is not None:  # prterun-HOST-PID@1
        is_one_host = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["OMPI_COMM_WORLD_SIZE"]
        return "127.0.0.1" if is_one_host else found["host"], _port(int(found["pid"]))
    if not os.environ.get(_JAX_HOST0):
        raise _Missing("PMIX_NAMESPACE")
    return "", PORT


def _slurm() -> tuple[str, int]:
    # node001; node001,host2; node[001-015],host2; node[001,007-015],host2
    host = re.sub(r"\[([^],-]+).*", r"\1", re.split(r",(?![^[]*])", os.environ["SLURM_STEP_NODELIST"])[0])
    return host, _port(_number("SLURM_JOB_ID"))


# --- launchers without variables of their own --------------------------------------------------------------------------


def _ray() -> Member | None:
    """Ray Train sets no variables. With GPUs and TPUs it starts JAX itself, which `start` finds before this table."""
    train: Any = sys.modules.get("ray.train")
    try:
        n = 1 if train is None else train.get_context().get_world_size()
    except Exception:  # a driver, or another version
        return None
    if n != 1:
        raise _Missing("Deployer", f"JAX to run in all {n} workers of Ray Train, which starts it for GPUs and TPUs")
    return None


def _jax_detection() -> Member | None:
    """Cloud TPU and Kubernetes, which JAX's own detection asks."""
    # A private API: JAX exposes its detection only inside `initialize`, and the rendezvous comes before that.
    from jax._src.clusters import ClusterEnv, K8sCluster, OmpiCluster, SlurmCluster

    if OmpiCluster.is_env_present() or SlurmCluster.is_env_present():
        return None  # they come first in JAX; here they have been read
    in_job = "JOB_COMPLETION_INDEX" in os.environ
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        address, n, index, local = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(START))
    except Exception:
        n_pods = None
        with suppress(Exception):  # it has no Job, or no permission to look it up
            n_pods = K8sCluster.get_process_count()
        if is_pod and not in_job and n_pods in (None, 1):  # outside of any Job of several pods, such as a notebook's
            return None
        raise
    if n == 1:
        return None
    if n is None or address is None or index is None:
        if is_pod and in_job:
            raise _Missing(_PROCESSES)
        return None
    host, _, port = address.rpartition(":")
    return replace(_member(n, index, host.strip("[]"), int(port)), local_devices=None if local is None else tuple(local))


def _stray_address() -> Member | None:
    """Part of a configuration: the address of a coordinator, without the processes that meet there."""
    if os.environ.get(_JAX_HOST0) and _given("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT") is None:
        raise _Missing("JAX_NUM_PROCESSES", f"in the environment beside {_JAX_HOST0}")
    return None


_MPI_REMEDY = f"Set {_JAX_HOST0} to HOST:PORT of process 0"
# fmt: off
LAUNCHERS = (
    Launcher("redeqx launch", "Set all three", (_PROCESSES,), (_PROCESS_ID,), (_HOST0,), where=_redeqx),
    # Kubeflow Trainer's JAX runtime, Iris, and whoever else sets the arguments of `jax.distributed.initialize`.
    Launcher("JAX_NUM_PROCESSES and JAX_PROCESS_ID", "Set the variable, or unset the others",
             ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"), ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX"), (_JAX_HOST0,)),
    Launcher("Iris", "Call Iris's `initialize_jax()` before the Deployer, which then joins these processes",
             ("IRIS_NUM_TASKS",), needs=(_JAX_HOST0, "JAX_PROCESS_COUNT")),
    Launcher("Ray Train", "Call `jax.distributed.initialize(address, n, index)` before the Deployer, which then joins these "
             "processes", detect=_ray),
    # `torchrun`, `accelerate launch`, and others that set the variables of torch's `env://`.
    Launcher("torchrun", "Start the script with `torchrun` or `accelerate launch`, or unset RANK and WORLD_SIZE",
             ("WORLD_SIZE",), ("RANK",), ("MASTER_ADDR", "MASTER_PORT"), "LOCAL_RANK", _torchrun, is_shared=True),
    Launcher("mpirun", _MPI_REMEDY, ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",),
             local="OMPI_COMM_WORLD_LOCAL_RANK", where=_open_mpi),
    # MPICH and Intel MPI do not say where process 0 is.
    Launcher("mpirun of MPICH", _MPI_REMEDY, ("PMI_SIZE",), ("PMI_RANK",), (_JAX_HOST0,), "MPI_LOCALRANKID", is_shared=True),
    Launcher("SkyPilot", "Run the script in `run:` of a SkyPilot task", ("SKYPILOT_NUM_NODES",), ("SKYPILOT_NODE_RANK",),
             ("SKYPILOT_NODE_IPS",), where=lambda: (os.environ["SKYPILOT_NODE_IPS"].split()[0], PORT)),
    Launcher("SLURM", "Start the script with `srun python ...`, which starts every task",
             ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES"), ("SLURM_PROCID",),
             ("SLURM_STEP_NODELIST", "SLURM_LOCALID"), "SLURM_LOCALID", _slurm, only_with="SLURM_JOB_ID", is_shared=True),
    Launcher("Kubernetes", f"Install `jax[k8s]`, or set {_PROCESSES}, {_PROCESS_ID} and {_HOST0}, as "
             "`redeqx launch --on jobset` does", detect=_jax_detection),
    Launcher("nobody", f"Set it and JAX_PROCESS_ID, unset {_JAX_HOST0}", detect=_stray_address),
)
# fmt: on
