"""A process finds its index from arguments or its launcher; invalid settings raise before JAX starts."""

import os
import re
import socket
import subprocess
import sys

import jax
import pytest
from jax._src.clusters import ClusterEnv, K8sCluster

from redeqx.distributed import Peers, _cluster
from redeqx.distributed._cluster import PORT, Place, _check_unused, _interface, find_place, start


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Hides any launcher that started the tests."""
    for name in list(os.environ):
        if name.startswith(("REDEQX_", "SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)


def setenv(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def error_message(**arguments):
    with pytest.raises(ValueError) as caught:
        find_place(**arguments)
    return str(caught.value)


def test_process_without_settings_is_alone():
    assert find_place() is None
    assert start(None, None, None, None, None).n == 1


def test_one_process_ignores_its_launcher(monkeypatch):
    setenv(monkeypatch, SLURM_JOB_ID="7", SLURM_NTASKS="4")
    assert find_place(n_processes=1) is None
    setenv(monkeypatch, REDEQX_PROCESSES="2")
    assert find_place(n_processes=1) is None


# --- by arguments ----------------------------------------------------------------------------------------------------


def test_arguments_set_the_place():
    assert find_place(4, "127.0.0.1", 1234, 3) == Place(4, 3, "127.0.0.1", 1234, "127.0.0.1", None)
    assert find_place(4, "localhost", None, 0, 2) == Place(4, 0, "localhost", PORT, "localhost", (0, 1))


def test_arguments_override_the_launcher(monkeypatch):
    setenv(monkeypatch, REDEQX_PROCESSES="8", REDEQX_PROCESS_ID="7", REDEQX_HOST0="localhost:99")
    assert find_place(2, "127.0.0.1", 1234, 1) == Place(2, 1, "127.0.0.1", 1234, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"host0_address": "localhost"},
            "`host0_address`: expected with `n_processes`, got 'localhost' alone. Pass both, or leave it out.",
        ),
        (
            {"host0_port": 99, "process_id": 1},
            "`host0_port`: expected with `n_processes`, got 99 alone. Pass both, or leave it out.",
        ),
        ({"process_id": 0}, "`process_id`: expected with `n_processes`, got 0 alone. Pass both, or leave it out."),
        (
            {"n_local_devices": 2},
            "`n_local_devices`: expected with several processes, got 2 on one. Leave it out.",
        ),
        ({"n_local_devices": 0}, "`n_local_devices`: expected at least 1, got 0. Leave it out to use all."),
        (
            {"n_processes": 2, "process_id": 0},
            "`host0_address`: expected with `n_processes`=2, got None. Pass it in every process.",
        ),
        (
            {"n_processes": 2, "host0_address": "localhost"},
            "`process_id`: expected with `n_processes`=2, got None. Pass it in every process.",
        ),
        (
            {"n_processes": 0, "host0_address": "localhost", "process_id": 0},
            "`n_processes`: expected at least 1, got 0. Pass the number of processes.",
        ),
        (
            {"n_processes": 2, "host0_address": "localhost", "process_id": 2},
            "`process_id`: expected 0 to 1, got 2. Number the processes from 0.",
        ),
        (
            {"n_processes": 2, "host0_address": "localhost", "process_id": -1},
            "`process_id`: expected at least 0, got -1. Number the processes from 0.",
        ),
        *(
            (
                {"n_processes": 2, "host0_address": "localhost", "process_id": 1, "host0_port": port},
                f"`host0_port`: expected 1 to 65535, got {port}. Pass a port of process 0's host.",
            )
            for port in (0, 65536)
        ),
    ],
)
def test_missing_or_invalid_arguments_are_named(arguments, expected):
    assert error_message(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"process_id": "1"}, "`process_id`: expected an integer, got '1'. Pass a whole number."),
        ({"process_id": 0.5}, "`process_id`: expected an integer, got 0.5. Pass a whole number."),
        ({"process_id": 1, "host0_port": "80"}, "`host0_port`: expected an integer, got '80'. Pass a whole number."),
    ],
)
def test_numbers_of_another_type_are_named(arguments, expected):
    with pytest.raises(TypeError) as raised:
        find_place(n_processes=2, host0_address="localhost", **arguments)
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("n", "index", "expected"),
    [
        (3, 0, "`n_processes`: expected 2, as this process began with, got 3. Use one number."),
        (2, 1, "`process_id`: expected 0, as this process began with, got 1. Use one number."),
    ],
)
def test_second_start_must_name_the_same_place(monkeypatch, n, index, expected):
    monkeypatch.setattr(_cluster, "_peers", Peers(2, 0))
    with pytest.raises(ValueError) as raised:
        start(n, "localhost", None, index, None)
    assert str(raised.value) == expected


def test_unknown_host_is_reported():
    assert re.fullmatch(
        r"`host0_address`: expected a host that this one can find, got 'nowhere\.invalid' \(.+\)\. Pass its address\.",
        error_message(n_processes=2, host0_address="nowhere.invalid", process_id=1),
    )


# --- by `launch` -----------------------------------------------------------------------------------------------------

OURS = {"REDEQX_PROCESSES": "2", "REDEQX_PROCESS_ID": "1", "REDEQX_HOST0": "127.0.0.1:1234"}


def test_redeqx_launcher_is_detected(monkeypatch):
    setenv(monkeypatch, **OURS)
    assert find_place() == Place(2, 1, "127.0.0.1", 1234, "127.0.0.1", None)
    assert find_place(n_local_devices=1) == Place(2, 1, "127.0.0.1", 1234, "127.0.0.1", (0,))


def test_redeqx_launcher_with_one_process(monkeypatch):
    setenv(monkeypatch, **{**OURS, "REDEQX_PROCESSES": "1", "REDEQX_PROCESS_ID": "0"})
    assert find_place() is None


def test_ipv6_brackets_are_removed(monkeypatch):
    setenv(monkeypatch, **{**OURS, "REDEQX_HOST0": "[::1]:1234"})
    assert find_place() == Place(2, 1, "::1", 1234, "::1", None)


@pytest.mark.parametrize("name", OURS)
def test_redeqx_launcher_needs_all_variables(monkeypatch, name):
    expected = f"`{name}`: expected in the environment beside the others, got none. Set all three."
    setenv(monkeypatch, **{**OURS, name: ""})
    assert error_message() == expected
    monkeypatch.delenv(name)
    assert error_message() == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("REDEQX_PROCESSES", "two", "`REDEQX_PROCESSES`: expected a number in the environment, got 'two'. Set it."),
        ("REDEQX_PROCESS_ID", "1.5", "`REDEQX_PROCESS_ID`: expected a number in the environment, got '1.5'. Set it."),
        ("REDEQX_PROCESS_ID", "2", "`process_id`: expected 0 to 1, got 2. Number the processes from 0."),
        ("REDEQX_PROCESSES", "0", "`n_processes`: expected at least 1, got 0. Pass the number of processes."),
        ("REDEQX_HOST0", "h:70000", "`host0_port`: expected 1 to 65535, got 70000. Pass a port of process 0's host."),
        *(
            ("REDEQX_HOST0", value, f"`REDEQX_HOST0`: expected `host:port` in the environment, got '{value}'. Set it.")
            for value in ("localhost", ":1234", "localhost:", "localhost:http")
        ),
    ],
)
def test_redeqx_launcher_variables_are_validated(monkeypatch, name, value, expected):
    setenv(monkeypatch, **{**OURS, name: value})
    assert error_message() == expected


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
    assert find_place() == Place(4, 3, "localhost", 5000 % 4096 + 61440, "localhost", (1,))
    assert find_place(n_local_devices=2) == Place(4, 3, "localhost", 5000 % 4096 + 61440, "localhost", (0, 1))


def test_single_slurm_task_is_alone(monkeypatch):
    setenv(monkeypatch, **{**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert find_place() is None


def test_slurm_batch_script_with_one_task_is_alone(monkeypatch):
    setenv(monkeypatch, SLURM_JOB_ID="5000", SLURM_NTASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert find_place() is None
    monkeypatch.delenv("SLURM_NTASKS")
    assert find_place() is None


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"])
def test_missing_srun_is_reported(monkeypatch, name):
    setenv(monkeypatch, **SLURM)
    monkeypatch.delenv(name)
    assert error_message() == (
        f"`{name}`: expected in the environment of one of SLURM_NTASKS=4 tasks, got none. Start the script with "
        "`srun python ...`, which starts every task; or pass `n_processes=1` to run this one alone."
    )


def test_open_mpi_rank_is_detected(monkeypatch):
    setenv(
        monkeypatch,
        OMPI_MCA_orte_hnp_uri=f"{20 * 4096}.0;tcp://127.0.0.1,10.0.0.1:34911",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
    )
    assert find_place() == Place(2, 1, "127.0.0.1", 20 + 61440, "127.0.0.1", (0,))


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
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert _interface(host) == expected


@pytest.mark.parametrize(("given_bind", "bind"), [("127.0.0.1:77", "127.0.0.1"), ("[::]:77", ""), ("0.0.0.0:77", "")])
def test_environment_sets_the_bind_address(monkeypatch, given_bind, bind):
    setenv(monkeypatch, **{**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, JAX_COORDINATOR_BIND_ADDRESS=given_bind)
    assert find_place() == Place(4, 0, "localhost", 5000 % 4096 + 61440, bind, (0,), given_bind)


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
    assert find_place() is None


@pytest.mark.parametrize(("n_pods", "environment"), [(4, {}), (None, {"JOB_COMPLETION_INDEX": "0"})])
def test_pod_of_a_larger_job_does_not_run_alone(monkeypatch, n_pods, environment):
    in_kubernetes(monkeypatch, n_pods, **environment)
    with pytest.raises(KeyError, match="job-name"):
        find_place()


def test_jax_already_in_use_is_reported():
    assert len(jax.devices()) == 8
    with pytest.raises(RuntimeError) as caught:
        _check_unused()
    assert str(caught.value) == (
        "`Deployer`: expected to come before anything that uses JAX's devices, as several processes share theirs, got JAX "
        "in use. Make the Deployer first: no `jax.random.key`, array or `jax.devices()` before it."
    )


def test_start_fails_if_jax_is_in_use(monkeypatch):
    """It raises before it waits for the other processes."""
    setenv(monkeypatch, **OURS)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"^`Deployer`: expected to come before anything"):
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
