"""A process that holds a part of the arrays, and has no peers that write the rest, never commits a checkpoint."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Two processes that started JAX themselves: each saves, as if alone, arrays that span both.
SCRIPT = """
import sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
port, index, folder, fault = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from redeqx.checkpoint import CheckpointManager, to_host
mesh = Mesh(np.array(jax.devices()), ("data",))
values = np.arange(16, dtype=np.float32)
split = jax.make_array_from_callback((16,), NamedSharding(mesh, P("data")), lambda index: values[index])
if fault == "parts":
    try:
        to_host(split)
    except ValueError as error:
        print("REFUSED", error, flush=True)
    same = jax.make_array_from_callback((16,), NamedSharding(mesh, P()), lambda index: values[index])
    print("WHOLE", to_host(same).tolist() == values.tolist(), flush=True)
else:
    checkpoints = CheckpointManager(__import__("pathlib").Path(folder) / index / "ckpts")
    if fault == "files":
        def refuse(fd, data, offset):
            raise OSError(95, "Operation not supported")
        __import__("os").pwrite = refuse
    try:
        checkpoints.save(1, {"model": {"weight": split, "other": split, "table": np.ones(3)}}, {})
        print("SAVED", flush=True)
    except OSError as error:
        print("REFUSED", error, flush=True)
    print("NAMES", checkpoints.names(), flush=True)
"""


@pytest.mark.parametrize(
    "fault", ["shards", *(pytest.param(fault, marks=pytest.mark.sweep) for fault in ("files", "parts"))]
)
def test_without_peers_a_part_is_never_saved(tmp_path, fault):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "NPROC": "16", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", SCRIPT, str(port)]
    processes = [
        subprocess.Popen([*command, str(index), str(tmp_path), fault], env=environment, stdout=subprocess.PIPE, text=True)
        for index in (0, 1)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    for index, output in enumerate(outputs):
        assert "SAVED" not in output, output
        if fault == "parts":
            assert "`array`: expected one that this process holds whole, got parts of float32 (16,)" in output
            assert "WHOLE True" in output
            continue
        assert "NAMES []" in output
        assert not list((tmp_path / str(index)).glob("ckpts/*"))
        if fault == "shards":
            expected, found = ("`table`", 0) if index else ("`other`", 8)
            assert f"numbers of {expected}, got {found} from 1 process(es): JAX has 2" in output, output
        else:
            expected = "`other` in process 0, got 1 other arrays" if index else "the file of another process, got files of 1"
            assert expected in output, output
        assert "`Deployer(n_processes=, host0_address=)`" in output, output
