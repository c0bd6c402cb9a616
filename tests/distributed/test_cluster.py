"""A process finds its index from arguments or its launcher; invalid settings raise before JAX starts."""

import os
import re
import socket
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax._src.clusters import ClusterEnv, K8sCluster

from redeqx.distributed import Member, Peers, find_member, start

PORT = 55527  # JAX's on Kubernetes

LAUNCHERS = ("REDEQX_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "IRIS_", "TORCHELASTIC_", "KUBERNETES_", "MASTER_", "LOCAL_")
LAUNCHERS += ("RANK", "WORLD_SIZE", "JAX_COORDINATOR", "JAX_PROCESS", "JAX_NUM_PROCESSES", "JOB_COMPLETION")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Hides any launcher that started the tests."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def setenv(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def found(**arguments):
    """The place that the environment gives, without its source."""
    place = find_member(**arguments)
    return place and replace(place, source="")


def error_message(**arguments):
    with pytest.raises(ValueError) as caught:
        find_member(**arguments)
    return str(caught.value)


BY_ARGUMENTS = {"n_processes": 2, "host0_address": "localhost", "process_id": 1}


def test_process_without_settings_is_alone():
    assert find_member() is None
    assert start(None, None, None, None, None).n == 1


def test_one_process_ignores_its_launcher(monkeypatch):
    setenv(monkeypatch, SLURM_JOB_ID="7", SLURM_NTASKS="4")
    assert find_member(n_processes=1) is None
    setenv(monkeypatch, REDEQX_PROCESSES="2")
    assert find_member(n_processes=1) is None


# --- by arguments ----------------------------------------------------------------------------------------------------


def test_arguments_set_the_place():
    assert find_member(4, "127.0.0.1", 1234, 3) == Member(4, 3, "127.0.0.1", 1234, "127.0.0.1", None)
    assert find_member(4, "localhost", None, 0, 2) == Member(4, 0, "localhost", PORT, "localhost", (0, 1))


def test_arguments_override_the_launcher(monkeypatch):
    setenv(monkeypatch, REDEQX_PROCESSES="8", REDEQX_PROCESS_ID="7", REDEQX_HOST0="localhost:99")
    assert find_member(2, "127.0.0.1", 1234, 1) == Member(2, 1, "127.0.0.1", 1234, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("arguments", "name", "remedy"),
    [
        ({"host0_address": "localhost"}, "host0_address", "Pass both, or leave it out."),
        ({"host0_port": 99, "process_id": 1}, "host0_port", "Pass both, or leave it out."),
        ({"process_id": 0}, "process_id", "Pass both, or leave it out."),
        ({"n_local_devices": 2}, "n_local_devices", "Pass both, or leave it out."),
        ({"n_local_devices": 0}, "n_local_devices", "Leave it out to use all."),
        ({"n_processes": 2, "process_id": 0}, "host0_address", "Pass it in every process."),
        ({"n_processes": 2, "host0_address": "localhost"}, "process_id", "Pass it in every process."),
        ({**BY_ARGUMENTS, "n_processes": 0}, "n_processes", "Pass the number of processes."),
        ({**BY_ARGUMENTS, "process_id": 2}, "process_id", "Number the processes from 0."),
        ({**BY_ARGUMENTS, "process_id": -1}, "process_id", "Number the processes from 0."),
        ({**BY_ARGUMENTS, "host0_port": 0}, "host0_port", "Pass a port of process 0's host."),
        ({**BY_ARGUMENTS, "host0_port": 65536}, "host0_port", "Pass a port of process 0's host."),
        ({**BY_ARGUMENTS, "host0_address": "nowhere.invalid"}, "host0_address", "Pass its address."),
    ],
)
def test_missing_or_invalid_arguments_are_named(arguments, name, remedy):
    assert re.fullmatch(rf"`{name}`: expected .+, got .+\. {re.escape(remedy)}", error_message(**arguments))


@pytest.mark.parametrize(("name", "value"), [("process_id", "1"), ("process_id", 0.5), ("host0_port", "80")])
def test_numbers_of_another_type_are_named(name, value):
    with pytest.raises(TypeError, match=rf"^`{name}`: expected an integer, got {value!r}\. Pass a whole number"):
        find_member(**{**BY_ARGUMENTS, name: value})


@pytest.mark.parametrize(("n", "index", "name"), [(3, 0, "n_processes"), (2, 1, "process_id")])
def test_second_start_must_name_the_same_place(monkeypatch, n, index, name):
    monkeypatch.setattr("redeqx.distributed._cluster._peers", Peers(2, 0))
    with pytest.raises(ValueError, match=rf"^`{name}`: expected \d, as this process began with, got \d\. Use one number"):
        start(n, "localhost", None, index, None)


# --- by `launch` -----------------------------------------------------------------------------------------------------

OURS = {"REDEQX_PROCESSES": "2", "REDEQX_PROCESS_ID": "1", "REDEQX_HOST0": "127.0.0.1:1234"}


def test_redeqx_launcher_is_detected(monkeypatch):
    setenv(monkeypatch, **OURS)
    assert found() == Member(2, 1, "127.0.0.1", 1234, "127.0.0.1", None)
    assert found(n_local_devices=1) == Member(2, 1, "127.0.0.1", 1234, "127.0.0.1", (0,))


def test_redeqx_launcher_with_one_process(monkeypatch):
    setenv(monkeypatch, **{**OURS, "REDEQX_PROCESSES": "1", "REDEQX_PROCESS_ID": "0"})
    assert find_member() is None


def test_ipv6_brackets_are_removed(monkeypatch):
    setenv(monkeypatch, **{**OURS, "REDEQX_HOST0": "[::1]:1234"})
    assert found() == Member(2, 1, "::1", 1234, "::1", None)


@pytest.mark.parametrize("name", OURS)
def test_redeqx_launcher_needs_all_variables(monkeypatch, name):
    setenv(monkeypatch, **{**OURS, name: ""})
    empty = error_message()
    monkeypatch.delenv(name)
    assert empty == error_message()
    assert re.fullmatch(rf"`{name}`: expected .+, got none\. Set all three, or set REDEQX_PROCESSES=1 .+", empty)


@pytest.mark.parametrize(
    ("name", "value", "named", "remedy"),
    [
        ("REDEQX_PROCESSES", "two", "REDEQX_PROCESSES", "Set it."),
        ("REDEQX_PROCESS_ID", "1.5", "REDEQX_PROCESS_ID", "Set it."),
        ("REDEQX_PROCESS_ID", "2", "process_id", "Number the processes from 0."),
        ("REDEQX_PROCESSES", "0", "n_processes", "Pass the number of processes."),
        ("REDEQX_HOST0", "h:70000", "host0_port", "Pass a port of process 0's host."),
        *(
            ("REDEQX_HOST0", host, "REDEQX_HOST0", "Set it.")
            for host in ("localhost", ":1234", "localhost:", "localhost:http")
        ),
    ],
)
def test_redeqx_launcher_variables_are_validated(monkeypatch, name, value, named, remedy):
    setenv(monkeypatch, **{**OURS, name: value})
    assert re.fullmatch(rf"`{named}`: expected .+, got .+\. {re.escape(remedy)}", error_message())


# --- by other launchers ----------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_slurm_task_is_detected(monkeypatch):
    """One device per task, a port derived from the job id, and the first node's address to listen on."""
    setenv(monkeypatch, **SLURM)
    assert found() == Member(4, 3, "localhost", 5000 % 4096 + 61440, "localhost", (1,))
    assert found(n_local_devices=2) == Member(4, 3, "localhost", 5000 % 4096 + 61440, "localhost", (0, 1))


def test_single_slurm_task_is_alone(monkeypatch):
    setenv(monkeypatch, **{**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert find_member() is None


def test_slurm_batch_script_with_one_task_is_alone(monkeypatch):
    setenv(monkeypatch, SLURM_JOB_ID="5000", SLURM_NTASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert find_member() is None
    monkeypatch.delenv("SLURM_NTASKS")
    assert find_member() is None


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"])
def test_missing_srun_is_reported(monkeypatch, name):
    setenv(monkeypatch, **SLURM)
    monkeypatch.delenv(name)
    assert re.match(rf"`{name}`: expected .+ SLURM started, got none\. Start the script with `srun python", error_message())


def test_open_mpi_rank_is_detected(monkeypatch):
    setenv(
        monkeypatch,
        OMPI_MCA_orte_hnp_uri=f"{20 * 4096}.0;tcp://127.0.0.1,10.0.0.1:34911",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
    )
    assert found() == Member(2, 1, "127.0.0.1", 20 + 61440, "127.0.0.1", (0,))


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        # Debian resolves the host's own name to a loopback address, which no other host reaches.
        ("node1", ["127.0.0.1"], ""),
        ("node1", ["192.0.2.1"], ""),  # the address of a service in front of the host
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "localhost"),
    ],
)
def test_process_0_binds_to_a_named_address_of_its_own(monkeypatch, host, addresses, expected):
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    setenv(monkeypatch, **{**OURS, "REDEQX_PROCESS_ID": "0", "REDEQX_HOST0": f"{host}:1234"})
    assert found() == Member(2, 0, host, 1234, expected)


@pytest.mark.parametrize(("given_bind", "bind"), [("127.0.0.1:77", "127.0.0.1"), ("[::]:77", ""), ("0.0.0.0:77", "")])
def test_environment_sets_the_bind_address(monkeypatch, given_bind, bind):
    setenv(monkeypatch, **{**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, JAX_COORDINATOR_BIND_ADDRESS=given_bind)
    assert found() == Member(4, 0, "localhost", 5000 % 4096 + 61440, bind, (0,), given_bind)


def in_kubernetes(monkeypatch, n_pods, **environment):
    """Simulates a pod that JAX cannot configure, in a Job of `n_pods` pods, or in no Job if None."""

    def fail(*_):
        raise KeyError("job-name")

    monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", fail)
    monkeypatch.setattr(K8sCluster, "get_process_count", fail if n_pods is None else lambda: n_pods)
    setenv(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1", **environment)


@pytest.mark.parametrize("n_pods", [None, 1])
def test_pod_without_others_is_alone(monkeypatch, n_pods):
    """For example, a notebook's pod."""
    in_kubernetes(monkeypatch, n_pods)
    assert find_member() is None


@pytest.mark.parametrize(("n_pods", "environment"), [(4, {}), (None, {"JOB_COMPLETION_INDEX": "0"})])
def test_pod_of_a_larger_job_does_not_run_alone(monkeypatch, n_pods, environment):
    in_kubernetes(monkeypatch, n_pods, **environment)
    with pytest.raises(KeyError, match="job-name"):
        find_member()


# --- the table of launchers ------------------------------------------------------------------------------------------

KUBEFLOW = {
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1",
    "JAX_COORDINATOR_PORT": "6666",
}
IRIS = {
    "IRIS_NUM_TASKS": "2",
    "JAX_PROCESS_COUNT": "2",
    "JAX_PROCESS_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1:8476",
}
TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI_4 = {**MPI, "OMPI_MCA_orte_hnp_uri": f"{20 * 4096}.0;tcp://127.0.0.1,10.0.0.1:34911"}
MPI_5 = {**MPI, "PMIX_NAMESPACE": "prterun-localhost-4116@1"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "4",
    "SKYPILOT_NODE_RANK": "3",
    "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
}
HIGH = 2**16 - 2**12  # the first of the ports that are derived from a job's number
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "4"}

TABLE = {
    "Kubeflow": (KUBEFLOW, Member(4, 3, "127.0.0.1", 6666, "127.0.0.1")),
    "Iris": (IRIS, Member(2, 1, "127.0.0.1", 8476, "127.0.0.1")),
    # torchrun's store listens on the master's port itself
    "torchrun": (TORCHRUN, Member(4, 3, "127.0.0.1", HIGH + 29500 % 4096, "127.0.0.1", (1,))),
    "torchrun, one process a host": (
        {**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        Member(4, 3, "127.0.0.1", HIGH + 29500 % 4096, "127.0.0.1"),
    ),
    "torchrun, whose port is the derived one": (
        {**TORCHRUN, "MASTER_PORT": str(HIGH + 7)},
        Member(4, 3, "127.0.0.1", HIGH + 8, "127.0.0.1", (1,)),
    ),
    "Open MPI 4": (MPI_4, Member(4, 3, "127.0.0.1", HIGH + 20, "127.0.0.1", (1,))),
    "Open MPI 5": (MPI_5, Member(4, 3, "localhost", HIGH + 20, "localhost", (1,))),
    "MPICH": (MPICH, Member(4, 3, "127.0.0.1", 1234, "127.0.0.1", (1,))),
    "SkyPilot": (SKYPILOT, Member(4, 3, "127.0.0.1", PORT, "127.0.0.1")),
    "SLURM": (STEP, Member(4, 3, "localhost", HIGH + 5000 % 4096, "localhost", (1,))),
    "srun --ntasks=4 in a SLURM job of 8": (
        {**STEP, "SLURM_NTASKS": "8"},
        Member(4, 3, "localhost", HIGH + 5000 % 4096, "localhost", (1,)),
    ),
    "SLURM, with an address for JAX": (
        {**STEP, "JAX_COORDINATOR_ADDRESS": "127.0.0.1:99"},
        Member(4, 3, "127.0.0.1", 99, "127.0.0.1", (1,)),
    ),
    # The innermost launcher counts.
    "torchrun in a SLURM job": ({**STEP, **TORCHRUN}, Member(4, 3, "127.0.0.1", HIGH + 29500 % 4096, "127.0.0.1", (1,))),
    "torchrun in SkyPilot": ({**SKYPILOT, **TORCHRUN}, Member(4, 3, "127.0.0.1", HIGH + 29500 % 4096, "127.0.0.1", (1,))),
    # What says little about this process does not hide what says all.
    "SLURM, and torch's variables for the whole job": (
        {**STEP, "WORLD_SIZE": "4", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"},
        Member(4, 3, "localhost", HIGH + 5000 % 4096, "localhost", (1,)),
    ),
    "SLURM, and one process of torchrun": (
        {**STEP, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        Member(4, 3, "localhost", HIGH + 5000 % 4096, "localhost", (1,)),
    ),
    "srun --mpi=pmi2": (
        {**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"},
        Member(4, 3, "localhost", HIGH + 904, "localhost", (1,)),
    ),
}


@pytest.mark.parametrize(("environment", "expected"), TABLE.values(), ids=TABLE)
def test_launcher_gives_the_place(monkeypatch, environment, expected):
    setenv(monkeypatch, **environment)
    assert found() == expected


ALONE = {
    "Kubeflow": {**KUBEFLOW, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
    "Iris": {"IRIS_NUM_TASKS": "1"},
    "torchrun": {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "variables of other programs": {"RANK": "0", "MASTER_ADDR": "localhost", "WORLD_SIZE": "large"},
    "Open MPI": {**MPI_5, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    "a notebook's SLURM job": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"},
    "an ssh session, which has the job's id only": {"SLURM_JOB_ID": "7"},
    "a shell in a SLURM job, by request": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "REDEQX_PROCESSES": "1"},
}


@pytest.mark.parametrize("environment", ALONE.values(), ids=ALONE)
def test_single_process_of_a_launcher_is_alone(monkeypatch, environment):
    setenv(monkeypatch, **environment)
    assert find_member() is None


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


INCOMPLETE = {
    "Kubeflow, no index": (without(KUBEFLOW, "JAX_PROCESS_ID"), "`JAX_PROCESS_ID`"),
    "Kubeflow, no number": (without(KUBEFLOW, "JAX_NUM_PROCESSES"), "`JAX_NUM_PROCESSES`"),
    "Kubeflow, no address": (without(KUBEFLOW, "JAX_COORDINATOR_ADDRESS"), "`JAX_COORDINATOR_ADDRESS`"),
    "an address alone": ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "`JAX_NUM_PROCESSES`"),
    "Iris": ({"IRIS_NUM_TASKS": "2"}, "`JAX_COORDINATOR_ADDRESS`"),
    "torch, no index": (without(TORCHRUN, "RANK"), "`RANK`"),
    "torch, no number": (without(TORCHRUN, "WORLD_SIZE"), "`WORLD_SIZE`"),
    "torch, no address": (without(TORCHRUN, "MASTER_ADDR"), "`MASTER_ADDR`"),
    "torch, no port": (without(TORCHRUN, "MASTER_PORT"), "`MASTER_PORT`"),
    "Open MPI 5, another namespace": ({**MPI_5, "PMIX_NAMESPACE": "12"}, "`PMIX_NAMESPACE`"),
    "Open MPI, no index": (without(MPI_4, "OMPI_COMM_WORLD_RANK"), "`OMPI_COMM_WORLD_RANK`"),
    "MPICH": (without(MPICH, "JAX_COORDINATOR_ADDRESS"), "`JAX_COORDINATOR_ADDRESS`"),
    "SkyPilot, no addresses": (without(SKYPILOT, "SKYPILOT_NODE_IPS"), "`SKYPILOT_NODE_IPS`"),
    "SkyPilot, no index": (without(SKYPILOT, "SKYPILOT_NODE_RANK"), "`SKYPILOT_NODE_RANK`"),
    "a batch script on the first of several nodes": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"},
        "`SLURM_STEP_NODELIST`",
    ),
    "salloc's own step": ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "`SLURM_STEP_NUM_TASKS`"),
}


def test_a_text_as_the_number_of_tasks_is_refused(monkeypatch):
    """SLURM's own variables mean SLURM. WORLD_SIZE may be anybody's."""
    setenv(monkeypatch, **{**SLURM, "SLURM_NTASKS": "x"})
    assert error_message() == "`SLURM_NTASKS`: expected a number in the environment, got 'x'. Set it."


@pytest.mark.parametrize(("environment", "name"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_incomplete_variables_are_refused_with_the_remedy(monkeypatch, environment, name):
    """A process of several never trains alone. Its user may still ask for that."""
    setenv(monkeypatch, **environment)
    message = error_message()
    assert message.startswith(f"{name}: expected "), message
    assert message.endswith(", or set REDEQX_PROCESSES=1 to run this process alone."), message
    assert find_member(n_processes=1) is None
    monkeypatch.setenv("REDEQX_PROCESSES", "1")
    assert find_member() is None


@pytest.mark.parametrize(
    ("environment", "name"), [(TORCHRUN, "LOCAL_RANK"), (STEP, "SLURM_LOCALID"), (SKYPILOT, "SKYPILOT_NODE_RANK")]
)
def test_variable_that_is_no_number_is_named(monkeypatch, environment, name):
    setenv(monkeypatch, **{**environment, "LOCAL_WORLD_SIZE": "2", name: "first"})
    assert error_message() == f"`{name}`: expected a number in the environment, got 'first'. Set it."


def test_ray_workers_without_jax_are_refused(monkeypatch):
    """Ray Train sets no variables, and starts JAX for GPUs and TPUs only."""
    setenv(monkeypatch)
    train = types.ModuleType("ray.train")
    train.get_context = lambda: types.SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert re.match(
        r"`Deployer`: expected .+ all 2 workers of Ray Train.+ Call `jax\.distributed\.initialize", error_message()
    )
    train.get_context = lambda: types.SimpleNamespace(get_world_size=lambda: 1)
    assert find_member() is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-015],other", "node003"),
        ("gpu-a[1,007-015]-b", "gpu-a1"),
        ("rack1node[2,3],x", "rack1node2"),
    ],
)
def test_first_slurm_node_is_process_0(monkeypatch, nodes, host):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    setenv(monkeypatch, **{**STEP, "SLURM_STEP_NODELIST": nodes})
    assert found().host == host


def test_pod_waits_until_kubernetes_knows_the_name_of_process_0(monkeypatch):
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 2)

    def look_up(*_, **__):
        if (error := next(answers, None)) is not None:
            raise error
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("redeqx.distributed._launchers._LOOK_UP", 0.01)
    setenv(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1", **{**OURS, "REDEQX_HOST0": "train-worker-0-0.train:55527"})
    assert found() == Member(2, 1, "train-worker-0-0.train", 55527, "train-worker-0-0.train")


def test_pod_of_an_indexed_job_without_jax_k8s_is_refused(monkeypatch):
    """JAX only warns that the package is missing: each pod would train alone."""
    monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: (None, None, None, None))
    setenv(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="0")
    assert re.match(r"`REDEQX_PROCESSES`: expected .+ Kubernetes started, got none\. Install `jax\[k8s\]`", error_message())


# --- JAX started by the script ---------------------------------------------------------------------------------------

OWN = """
import os, sys, jax
os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{sys.argv[1]}"
jax.distributed.initialize(num_processes=2, process_id=int(sys.argv[2]))
jax.random.key(0)  # JAX's devices are in use
import redeqx
redeqx.Deployer(verbose=False, **eval(sys.argv[3]))
deployer = redeqx.Deployer(verbose=False)  # the environment alone does not tell the number of processes
print(jax.process_count(), deployer.mesh.size, deployer.decide(int(sys.argv[2])))
"""


def run_own(tmp_path, arguments="{}"):
    """The exit codes and outputs of two processes that have called `jax.distributed.initialize` themselves."""
    (tmp_path / "own.py").write_text(OWN)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": "16",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "own.py", port, str(i), arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out.splitlines()[-1:], err) for process, (out, err) in zip(processes, ended, strict=True)]


@pytest.mark.sweep
def test_running_processes_of_jax_are_joined(tmp_path):
    for code, out, err in run_own(tmp_path):
        assert code == 0, err
        assert out == ["2 2 0"]  # the last is process 0's value, by redeqx's own channel


@pytest.mark.sweep
def test_arguments_must_agree_with_the_running_processes(tmp_path):
    for code, _, err in run_own(tmp_path, "{'n_processes': 1}"):
        assert code != 0
        assert (
            "`n_processes`: expected 2, as JAX runs with since `jax.distributed.initialize`, got 1. Use one number." in err
        )


def test_devices_of_other_processes_are_refused(monkeypatch):
    """For example on a pod of TPUs whose launcher says nothing: each process would save its part as the whole."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(RuntimeError, match=r"^`Deployer`: expected devices of 1 .+, got those of 4\. Pass `n_processes`"):
        start(None, None, None, None, None)


def test_start_fails_if_jax_is_in_use(monkeypatch):
    """It raises before it waits for the other processes."""
    setenv(monkeypatch, **OURS)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"^`Deployer`: expected to come before .* Make the Deployer first"):
        start(None, None, None, None, None)


@pytest.mark.sweep
def test_web_proxy_is_not_used_to_reach_process_0(tmp_path):
    """gRPC would use the proxy and wait forever on clusters where the proxy does not reach process 0."""
    script = tmp_path / "started.py"
    script.write_text(
        "import os, signal, jax, redeqx\nsignal.signal(signal.SIGTERM, handler := lambda *_: None)\nredeqx.Deployer()\n"
        "assert signal.getsignal(signal.SIGTERM) is handler  # that of the user\n"
        "print(jax.process_count(), os.environ['http_proxy'], jax.device_count())"
    )
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", "2", str(script)]
    proxies = dict.fromkeys(("http_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **proxies, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{i}] 2 http://127.0.0.1:9 2" for i in (0, 1)]
    assert "proxy" not in ended.stderr
