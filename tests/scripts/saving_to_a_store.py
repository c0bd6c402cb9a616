"""Processes that save checkpoints into an object store, one trial after another.

    saving_to_a_store.py N < TRIALS

Each line of standard input is a trial, `["s3://bucket/folder", step]`: N processes save one checkpoint together and keep no
other. With a third item they save so many, a step apart, and find each; what fails, in all of them, is done once more. For
each trial, two lines of standard output: the process ids after the start, and the exit codes.

The processes are forked from this one, before JAX has devices and before any request: importing takes longer than a trial.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import obstore  # noqa: F401
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.checkpoint import CheckpointManager, Lock
from redeqx.distributed import Peers, start
from redeqx.machine import make_mesh, put
from redeqx.storage import location

warnings.filterwarnings("ignore", message="os.fork")
N = int(sys.argv[1])
LIMIT = 180  # seconds for all saves of a trial: 30 take 30 s, more beside other work
Lock.stale, Lock.grace = 0.5, 5.0


def trees(step):
    mesh = make_mesh(2, 2)
    specs = {"columns": P("model", None), "rows": P(None, "model"), "both": P("fsdp", "model"), "whole": P()}
    return {
        "model": {
            name: put(np.full((4, 8), step, np.float32) + np.arange(8, dtype=np.float32), NamedSharding(mesh, spec))
            for name, spec in specs.items()
        },
        "optimizer": {"count": put(np.asarray(step, np.int32), NamedSharding(mesh, P()))},
    }


def process(index, folder, step, n_saves, port):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // N)
    peers = Peers()
    if N > 1:
        os.environ.update(REDEQX_PROCESSES=str(N), REDEQX_PROCESS_ID=str(index), REDEQX_HOST0=f"127.0.0.1:{port}")
        peers = start(None, None, None, None, None)
    checkpoints = CheckpointManager(location(folder), peers)
    save = lambda step: checkpoints.save(step, trees(step), {"step": step}, keep_last=1)  # noqa: E731
    if n_saves == 1:
        save(step)
        return
    for later in range(step, step + n_saves):
        for act in (save, lambda _: checkpoints.newest(), lambda _: checkpoints.resolve("last")):
            is_done = False
            while not is_done:
                with contextlib.suppress(OSError):
                    act(later)
                    is_done = True
                assert set(peers.gather("is done", is_done)) == {is_done}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(folder, step, n_saves=1):
    port, pids = free_port(), []
    for index in range(N):
        pid = os.fork()
        if pid == 0:
            code = 1
            os.dup2(2, 1)  # gloo prints to standard output
            try:
                process(index, folder, step, n_saves, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                if code == 0:
                    sys.exit(0)  # runs the exit handlers
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    codes, until = {}, time.monotonic() + LIMIT
    while len(codes) < N:
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    print(json.dumps([codes[pid] for pid in pids]), flush=True)


for line in sys.stdin:
    run(*json.loads(line))
