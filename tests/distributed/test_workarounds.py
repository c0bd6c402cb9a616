"""Faults of other packages that redeqx works around. A test that fails says that a workaround can go.

Measured on 2026-11-25 with JAX 0.10.2, tensorboardX 2.6.5 and rich 15.0.
"""

import io
import os
import signal
import socket
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

CONNECT = """
import os, signal, sys, time, jax
port, n, index = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", int(n), int(index), initialization_timeout=5)
os.kill(os.getpid(), signal.SIGTERM)
print("connected", flush=True)
if n == "2":
    time.sleep(1 if index == "0" else 10)
print("alive", flush=True)
os._exit(0)
"""
COLLECTIVE = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("x",))
sums = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
x = jax.device_put(np.ones((128, 16), np.float32), jax.NamedSharding(mesh, P("x")))
for _ in range(1000):
    y = sums(x)
y.block_until_ready()
"""
DONATED = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
sharding = jax.NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
x = jax.device_put(np.ones(2, np.float32), sharding)
for _ in range(2):
    x + 1
jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)(x)
try:
    x + 1
except RuntimeError:
    pass
"""


def begin(script, *arguments, **environment):
    given = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "16", **environment}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    """The exit code and standard output of a process."""
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out.splitlines()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.sweep
def test_jax_ends_a_process_whose_coordinator_is_gone(port):
    """It aborts before the process can say which step is safe: answered by `_relay.py`.

    And it takes over SIGTERM, which ends no process any more: answered by `_cluster.start`.
    """
    coordinator, other = [begin(CONNECT, port, 2, index) for index in (0, 1)]
    assert end(coordinator) == (0, ["connected", "alive"])
    code, lines = end(other)
    assert code != 0 and lines == ["connected"]


@pytest.mark.sweep
def test_grpc_uses_a_proxy_for_the_own_host(port):
    """Answered by `_cluster._no_proxies`."""
    code, lines = end(begin(CONNECT, port, 1, 0, http_proxy="http://127.0.0.1:9"))
    assert code != 0 and lines == []


@pytest.mark.sweep
def test_collectives_deadlock_with_fewer_threads_than_devices():
    """XLA's CPU client has `NPROC` threads. Answered by `_launch.launch`. Of 50 sums in a row half the runs deadlocked."""
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=2 --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    assert end(begin(COLLECTIVE, XLA_FLAGS=flags))[0] == 0
    assert end(begin(COLLECTIVE, NPROC="4", XLA_FLAGS=flags))[0] != 0


@pytest.mark.sweep
def test_jax_crashes_on_a_donated_array_of_several_devices():
    """Answered by `TrainState.delete_donated`."""
    assert end(begin(DONATED))[0] == -signal.SIGSEGV


def test_tensorboardx_replaces_a_file_of_the_same_second(tmp_path):
    """Answered by the suffix in `_trackers.TensorBoard`."""
    writer = pytest.importorskip("tensorboardX").SummaryWriter
    for _ in range(9):
        writer(str(tmp_path)).close()
    assert len(list(tmp_path.iterdir())) < 9


def test_rich_cuts_cells_if_a_minimal_width_does_not_fit():
    """Answered by the fixed width in `Console.table`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("leaf", overflow="fold", min_width=20)
    table.add_column("shape", overflow="fold")
    table.add_row("blocks.attention.output", "x" * 60)
    out = io.StringIO()
    Console(file=out, width=24).print(table)
    assert out.getvalue().count("x") < 60
