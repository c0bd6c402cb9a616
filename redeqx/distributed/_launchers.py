"""Finds this process's place among the processes of a run: their number, its index, and the address of process 0.

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
from dataclasses import dataclass, replace

from ..errors import check_count
from ._addresses import interface
from ._rendezvous import START
from ._secrets import job_token

PORT = 55527  # process 0's default port; JAX's own detection uses the same on Kubernetes
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_PROCESSES, _PROCESS_ID, _HOST0 = "REDEQX_PROCESSES", "REDEQX_PROCESS_ID", "REDEQX_HOST0"
_LOOK_UP = 2.0  # seconds between two look-ups of a name
_ALONE = f"set {_PROCESSES}=1 to run this process alone"


@dataclass(frozen=True)
class Place:
    """The position of this process in a run of several, and the coordinator's address.

    **Arguments:**

    - `n`, `index`: the number of processes, and the index of this one.
    - `host`, `port`: the address of process 0.
    - `bind`: the address that process 0 listens on; `""` for all of its addresses.
    - `local_devices`: the indices of this host's devices that belong to this process; None for all.
    - `coordinator`: `host:port` that JAX's coordinator listens on; `""` for `bind` and `port`.
    - `token`: a secret that only the processes of this run know, if the launcher lets them share one, else `""`.
    - `source`: where the place comes from, for errors; `""` for arguments.
    """

    n: int
    index: int
    host: str
    port: int
    bind: str = ""
    local_devices: tuple[int, ...] | None = None
    coordinator: str = ""
    token: str = ""
    source: str = ""


def find_place(
    n_processes: int | None = None,
    host0_address: str | None = None,
    host0_port: int | None = None,
    process_id: int | None = None,
    n_local_devices: int | None = None,
) -> Place | None:
    """Return this process's place in the run, from the arguments or else from the launcher; None for a single process.

    Raises ValueError if an argument is missing or impossible, or a launcher's variables are incomplete.
    """
    local = None
    if n_local_devices is not None:
        check_count(n_local_devices, "n_local_devices", advice="Leave it out to use all.")
        local = tuple(range(n_local_devices))
    if n_processes == 1:
        return None
    if n_processes is None:
        given = {"host0_address": host0_address, "host0_port": host0_port, "process_id": process_id}
        place = _detect()
        if place is not None and local is not None:
            place = replace(place, local_devices=local)
        if any(name in os.environ for name in (_PROCESSES, _PROCESS_ID, _HOST0)):
            return place
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}`: expected with `n_processes`, got {value!r} alone. Pass both, or leave it out.")
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
    place = Place(n_processes, process_id, host0_address, PORT if host0_port is None else host0_port, host0_address, local)
    return _checked(place)


def _checked(place: Place) -> Place | None:
    check_count(place.n, "n_processes", advice="Pass the number of processes.")
    check_count(place.index, "process_id", 0, advice="Number the processes from 0.")
    check_count(place.port, "host0_port", 0, advice="Pass a port of process 0's host.")
    if place.index >= place.n:
        raise ValueError(f"`process_id`: expected 0 to {place.n - 1}, got {place.index}. Number the processes from 0.")
    if not 0 < place.port < 2**16:
        raise ValueError(f"`host0_port`: expected 1 to 65535, got {place.port}. Pass a port of process 0's host.")
    until = time.monotonic() + (START if place.source and "KUBERNETES_SERVICE_HOST" in os.environ else 0)
    while True:
        try:
            socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            return None if place.n == 1 else place
        except socket.gaierror as error:
            if time.monotonic() >= until:  # Kubernetes knows the name of a pod only once that has started
                raise ValueError(
                    f"`host0_address`: expected a host that this one can find, got {place.host!r} ({error.strerror}). "
                    "Pass its address."
                ) from error
        time.sleep(_LOOK_UP)


# --- the table ---------------------------------------------------------------------------------------------------------


class _Missing(Exception):
    """A launcher is recognised, and does not tell this process's place.

    **Arguments:**

    - `name`: the variable that is missing.
    - `rule`, `got`: what is expected and what was found, if the variable is set.
    """

    def __init__(self, name: str, rule: str = "", got: str = "none"):
        super().__init__(name)
        self.name, self.rule, self.got = name, rule, got


@dataclass(frozen=True)
class Launcher:
    """A launcher, and how it tells a process its place.

    - `read`: returns the place, None if it did not start this process; raises `_Missing` with a variable's name.
    - `remedy`: what to do if a variable is missing.
    """

    name: str
    read: Callable[[], Place | None]
    remedy: str


def _detect() -> Place | None:
    """Return the place that the innermost launcher of several processes gives; None for a single process."""
    error = None
    for launcher in LAUNCHERS:
        try:
            place = launcher.read()
        except _Missing as missing:
            rule = missing.rule or f"in the environment of a process that {launcher.name} started"
            error = error or ValueError(
                f"`{missing.name}`: expected {rule}, got {missing.got}. {launcher.remedy}, or {_ALONE}."
            )
            continue
        if place is not None and (place.n != 1 or launcher is LAUNCHERS[0]):
            return _checked(replace(place, source=launcher.name))
    if error is not None:
        raise error
    return None


def _redeqx() -> Place | None:
    if not any(name in os.environ for name in (_PROCESSES, _PROCESS_ID, _HOST0)):
        return None
    if os.environ.get(_PROCESSES) == "1":  # alone, whatever another launcher says
        return Place(1, 0, "localhost", PORT)
    missing = [name for name in (_PROCESSES, _PROCESS_ID, _HOST0) if not os.environ.get(name)]
    if missing:
        raise ValueError(f"`{missing[0]}`: expected in the environment beside the others, got none. Set all three.")
    host, _, port = os.environ[_HOST0].rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"`{_HOST0}`: expected `host:port` in the environment, got {os.environ[_HOST0]!r}. Set it.")
    host, n, index = host.strip("[]"), _number(_PROCESSES), _number(_PROCESS_ID)
    # A launcher of pods gives process 0 a name that may not be an address of its own.
    return Place(n, index, host, int(port), interface(host) if index == 0 else host)


def _jax() -> Place | None:
    """Kubeflow Trainer's JAX runtime, Iris, and whoever else sets the arguments of `jax.distributed.initialize`."""
    n, index = _given("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"), _given("JAX_PROCESS_ID", "JAX_PROCESS_INDEX")
    if n is None and index is None:
        return None
    if n is None:
        raise _Missing("JAX_NUM_PROCESSES")
    if _number(n) == 1:
        return None
    if index is None:
        raise _Missing("JAX_PROCESS_ID")
    if not os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise _Missing("JAX_COORDINATOR_ADDRESS")
    return _place(_number(n), _number(index), "", PORT)


def _iris() -> Place | None:
    n = os.environ.get("IRIS_NUM_TASKS", "1")
    if n != "1" and not {"JAX_PROCESS_COUNT", "JAX_COORDINATOR_ADDRESS"} <= os.environ.keys():
        raise _Missing("JAX_COORDINATOR_ADDRESS")
    return None


def _ray() -> Place | None:
    """Ray Train sets no variables. With GPUs and TPUs it starts JAX itself, which `start` finds before this table."""
    train = sys.modules.get("ray.train")
    try:
        n = 1 if train is None else train.get_context().get_world_size()
    except Exception:  # a driver, or another version
        return None
    if n != 1:
        raise _Missing("Deployer", f"JAX to run in all {n} workers of Ray Train, which starts it for GPUs and TPUs")
    return None


def _torchrun() -> Place | None:
    """`torchrun`, `accelerate launch`, and others that set the variables of torch's `env://`."""
    n, index = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if n is None:
        if index is not None and (index != "0" or {"LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()):
            raise _Missing("WORLD_SIZE")
        return None
    if not n.isdecimal() or n == "1":
        return None  # not torch's, or a single process
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise _Missing(name)
    n_here = _number("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else None
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # torchrun's own store listens on the master's port.
    port = _port(_number("MASTER_PORT"), avoid=_number("MASTER_PORT"))
    return _place(
        int(n),
        _number("RANK"),
        os.environ["MASTER_ADDR"],
        port,
        local="" if n_here == 1 else "LOCAL_RANK",
        token=job_token(f"torchrun {run_id} {port}", is_one_host=str(n_here) == n),
    )


def _open_mpi() -> Place | None:
    """`mpirun` of Open MPI 4, which gives the address of its own host, and 5, whose name is in the namespace of its job."""
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not any(name in os.environ for name in names) or os.environ.get(names[0]) == "1":
        return None
    for name in names:
        if name not in os.environ:
            raise _Missing(name)
    n, index = _number(names[0]), _number(names[1])
    is_one_host = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(n)
    uri, key = (os.environ.get(f"OMPI_MCA_orte_{name}") for name in ("hnp_uri", "precondition_transports"))
    namespace = os.environ.get("PMIX_NAMESPACE", "")
    if uri is not None:
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,fe80::2]:43370. Job ids are multiples of 2^12.
        found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
        if found is None:
            raise _Missing("OMPI_MCA_orte_hnp_uri")
        host, port = found.group(1) or found.group(2), _port(int(uri.split(".")[0]) // 2**12)
    elif (found := re.fullmatch(r"\w+-(?P<host>.+)-(?P<pid>\d+)@\d+", namespace)) is not None:  # prterun-HOST-PID@1
        host, port = "127.0.0.1" if is_one_host else found["host"], _port(int(found["pid"]))
    elif os.environ.get("JAX_COORDINATOR_ADDRESS"):
        host, port = "", PORT
    else:
        raise _Missing("PMIX_NAMESPACE")
    # `key` is a random number of the job, for networks of Open MPI 4.
    token = key or job_token(f"mpirun {namespace}", is_one_host=is_one_host)
    return _place(n, index, host, port, local="OMPI_COMM_WORLD_LOCAL_RANK", token=token)


def _mpich() -> Place | None:
    """`mpirun` of MPICH and of Intel MPI, which do not say where process 0 is."""
    n = os.environ.get("PMI_SIZE", "1")
    if n == "1" or not n.isdecimal() or "PMI_RANK" not in os.environ:
        return None
    if not os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise _Missing("JAX_COORDINATOR_ADDRESS")
    return _place(int(n), _number("PMI_RANK"), "", PORT, local="MPI_LOCALRANKID")


def _skypilot() -> Place | None:
    names = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    if not any(name in os.environ for name in names) or os.environ.get(names[0]) == "1":
        return None
    for name in names:
        if not os.environ.get(name):
            raise _Missing(name)
    host = os.environ[names[2]].split()[0]
    return _place(_number(names[0]), _number(names[1]), host, PORT)


def _slurm() -> Place | None:
    if "SLURM_JOB_ID" not in os.environ:
        return None
    n = os.environ.get("SLURM_NTASKS") or os.environ.get("SLURM_NPROCS") or os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    in_step = os.environ.get("SLURM_STEP_NUM_TASKS")
    if not n.isdecimal() or n == "1":
        return None
    for name in ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"):
        if name not in os.environ:
            raise _Missing(name)
    if in_step == "1":  # a shell in the job, of `salloc`: a step of one task, in a job of several
        raise _Missing("SLURM_STEP_NUM_TASKS", f"the SLURM_NTASKS={n} tasks of the job", "1")
    # node001; node001,host2; node[001-015],host2; node[001,007-015],host2
    host = re.sub(r"\[([^],-]+).*", r"\1", re.split(r",(?![^[]*])", os.environ["SLURM_STEP_NODELIST"])[0])
    job, step = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_STEP_ID", "")
    token = job_token(f"slurm {job} {step}", is_one_host=os.environ.get("SLURM_STEP_NUM_NODES") == "1")
    port = _port(_number("SLURM_JOB_ID"))
    return _place(int(in_step or n), _number("SLURM_PROCID"), host, port, local="SLURM_LOCALID", token=token)


def _jax_detection() -> Place | None:
    """Cloud TPU and Kubernetes, which JAX's own detection asks."""
    # A private API: JAX exposes its detection only inside `initialize`, and the rendezvous comes before that.
    from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster

    if OmpiCluster.is_env_present() or SlurmCluster.is_env_present():
        return None  # they come first in JAX; here they have been read
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(START))
    except Exception:
        if _is_lone_pod():
            return None
        raise
    address, n, index, local = found
    if n == 1:
        return None
    if n is None or address is None or index is None:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
            raise _Missing(_PROCESSES)
        return None
    host, _, port = address.rpartition(":")
    place = _place(n, index, host.strip("[]"), int(port), keep=True)
    return replace(place, local_devices=None if local is None else tuple(local))


def _is_lone_pod() -> bool:
    """Return whether this is a Kubernetes pod outside of any Job of several pods, such as a notebook's."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or "JOB_COMPLETION_INDEX" in os.environ:
        return False
    from jax._src.clusters import K8sCluster

    try:
        return K8sCluster.get_process_count() in (None, 1)
    except Exception:  # it has no Job, or no permission to look it up
        return True


def _stray_address() -> Place | None:
    """Part of a configuration: the address of a coordinator, without the processes that meet there."""
    if os.environ.get("JAX_COORDINATOR_ADDRESS") and _given("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT") is None:
        raise _Missing("JAX_NUM_PROCESSES", "in the environment beside JAX_COORDINATOR_ADDRESS")
    return None


_START_JAX = "Call `jax.distributed.initialize(address, n, index)` before the Deployer, which then joins these processes"
LAUNCHERS = (
    Launcher("redeqx launch", _redeqx, "Set all three"),
    Launcher("JAX_NUM_PROCESSES and JAX_PROCESS_ID", _jax, "Set the variable, or unset the others"),
    Launcher("Iris", _iris, "Call Iris's `initialize_jax()` before the Deployer, which then joins these processes"),
    Launcher("Ray Train", _ray, _START_JAX),
    Launcher("torchrun", _torchrun, "Start the script with `torchrun` or `accelerate launch`, or unset RANK and WORLD_SIZE"),
    Launcher("mpirun", _open_mpi, "Set JAX_COORDINATOR_ADDRESS to HOST:PORT of process 0"),
    Launcher("mpirun of MPICH", _mpich, "Set JAX_COORDINATOR_ADDRESS to HOST:PORT of process 0"),
    Launcher("SkyPilot", _skypilot, "Run the script in `run:` of a SkyPilot task"),
    Launcher("SLURM", _slurm, "Start the script with `srun python ...`, which starts every task"),
    Launcher(
        "Kubernetes",
        _jax_detection,
        f"Install `jax[k8s]`, or set {_PROCESSES}, {_PROCESS_ID} and {_HOST0}, as `redeqx launch --on jobset` does",
    ),
    Launcher("nobody", _stray_address, "Set it and JAX_PROCESS_ID, unset JAX_COORDINATOR_ADDRESS"),
)


def _place(n: int, index: int, host: str, port: int, *, local: str = "", token: str = "", keep: bool = False) -> Place:
    """Return a launcher's place. JAX's own variables replace the address, unless `keep`: JAX has considered them.

    **Arguments:**

    - `local`: the variable with the index of the device that is this process's.
    """
    given, coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", ""), os.environ.get(_BIND, "")
    if given and not keep:
        host, _, own_port = given.rpartition(":") if re.search(r"(^[^:]*|\]):\d+$", given) else (given, "", "")
        host, port = host.strip("[]"), int(own_port) if own_port else port
    if os.environ.get("JAX_COORDINATOR_PORT") and not keep:
        port = _number("JAX_COORDINATOR_PORT")
    bind = _host_of(coordinator) if coordinator else interface(host) if index == 0 else host
    devices = (_number(local),) if os.environ.get(local) else None
    return Place(n, index, host, port, bind, devices, coordinator, token)


def _given(*names: str) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"`{name}`: expected a number in the environment, got {os.environ[name]!r}. Set it.") from None


def _port(number: int, *, avoid: int = 0) -> int:
    """Return a port from a number of the job, above those that Linux gives to outgoing connections."""
    port = number % 2**12 + 2**16 - 2**12
    return port if port != avoid else (number + 1) % 2**12 + 2**16 - 2**12


def _host_of(address: str) -> str:
    """Return the host of `host:port`, to listen on; `""` for all addresses."""
    host = address.rpartition(":")[0].strip("[]")
    return "" if host in ("0.0.0.0", "::") else host
