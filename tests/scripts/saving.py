"""Two processes that save a checkpoint twice; some are killed at a given point of the second save.

    saving.py FOLDER in_place|apart < TRIALS

Each line of standard input is a trial, `["name", port, [[process, point], ...]]`: a folder of that name under FOLDER, a free
port, and which processes are killed before which of their system calls, messages to each other and collectives of the second
save, counted from 0. With `apart`, each process has a folder of its own. For each trial, one line of standard output:
`["name", [exit code of 0, of 1], [the calls that each process made]]`.

The processes are forked from this one, before JAX has devices: importing takes longer than a trial.
"""

import json
import os
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.checkpoint import CheckpointManager, _tree_files
from redeqx.distributed import Peers, start
from redeqx.machine import make_mesh, put

warnings.filterwarnings("ignore", message="os.fork")
LIMIT = 20.0
LAYOUT = sys.argv[2]
CALLS = [(os, name) for name in ("mkdir", "posix_fallocate", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir")]
CALLS += [(shutil, "rmtree"), (Peers, "contribute"), (_tree_files, "gathered")]


def trees(step):
    """Leaves in every sharding: split along either dim, over both processes, and replicated."""
    mesh = make_mesh(2, 2)
    specs = {"columns": P("model", None), "rows": P(None, "model"), "both": P("fsdp", "model"), "whole": P()}
    return {
        "model": {
            name: put(np.full((4, 8), step, np.float32) + np.arange(8, dtype=np.float32), NamedSharding(mesh, spec))
            for name, spec in specs.items()
        },
        "optimizer": {"count": put(np.asarray(step, np.int32), NamedSharding(mesh, P()))},
    }


def process(index, folder, port, point):
    """Runs one of the two processes to its end, or to its kill."""
    os.environ.update(REDEQX_PROCESSES="2", REDEQX_PROCESS_ID=str(index), REDEQX_HOST0=f"127.0.0.1:{port}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    peers = start(None, None, None, None, None)
    checkpoints = CheckpointManager(folder / ("ckpts" if LAYOUT == "in_place" else str(index)) / "ckpts", peers)
    checkpoints.save(1, trees(1), {"step": 1}, keep_last=1)
    second = trees(2)
    passed = []

    def armed(name, call):
        def counted(*args, **kwargs):
            if len(passed) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed.append(name)
            (folder / f"passed_{index}").write_text("\n".join(passed))
            return call(*args, **kwargs)

        return counted

    for owner, name in CALLS:
        setattr(owner, name, armed(name, getattr(owner, name)))
    checkpoints.save(2, second, {"step": 2}, keep_last=1)
    peers.close()  # as at a script's exit; otherwise the other process treats this end as a failure


def run(folder, port, kills):
    folder.mkdir(parents=True)
    points = dict(kills)
    children = []
    for index in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                errors = os.open(folder / f"errors_{index}", os.O_CREAT | os.O_WRONLY)
                os.dup2(errors, 1)
                os.dup2(errors, 2)
                process(index, folder, port, points.get(index))
                code = 0
            except BaseException:
                # As at a script's end. A collective raises if the other process is killed, maybe before the channel notices.
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        children.append(child)
    codes = {}
    until = time.monotonic() + LIMIT
    while len(codes) < 2:
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    passed = [folder / f"passed_{index}" for index in (0, 1)]
    return [codes[child] for child in children], [p.read_text().split() if p.exists() else [] for p in passed]


if __name__ == "__main__":
    for line in sys.stdin:
        name, port, kills = json.loads(line)
        codes, passed = run(Path(sys.argv[1]) / name, port, kills)
        print(json.dumps([name, codes, passed]), flush=True)
