"""Runs of `scripts/training.py` in one process and in several, each with a hard limit of its time."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


def free_port():
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


SCRIPT = Path(__file__).parent / "scripts" / "training.py"
LIMIT = 120.0  # seconds; each takes about ten


@dataclass(frozen=True)
class Run:
    """How a run ended: its exit code, what it printed without gloo's chatter, and when (seconds since 1970)."""

    code: int
    lines: list[str]
    ended: float

    @property
    def text(self):
        return "\n".join(self.lines)

    @property
    def result(self):
        return next(
            json.loads(line.partition("{")[1] + line.partition("{")[2]) for line in self.lines if '"metrics"' in line
        )

    def seconds_after_fault(self):
        found = re.search(r"fault \w+ at ([\d.]+)", self.text)
        assert found is not None, self.text
        return self.ended - float(found[1])


def train(workdir, *arguments, n_processes=2, n_devices=4, limit=LIMIT):
    """Train on `n_devices` simulated devices of each of the processes; the output lines begin with `[i] `."""
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", str(n_processes), str(SCRIPT)]
    command += ["--workdir", str(workdir), "--devices", str(n_devices), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "NPROC": "16"}
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, check=False
    )
    ended = time.time()
    lines = process.stdout.decode(errors="replace").splitlines()
    return Run(
        process.returncode, [line for line in lines if "[Gloo]" not in line and " is connected to " not in line], ended
    )


def trained_on(workdir, n_examples):
    """The numbers of the examples of each step, in order, by how many processes the run had (as text). What is evaluated has
    numbers from `n_examples` on."""
    runs = {}
    for path in sorted(workdir.glob("rows_*_of_*.jsonl")):
        steps = [json.loads(line)[1] for line in path.read_text().splitlines()]
        kept = []
        for numbers in steps:
            # Some examples of the first step are collated alone, too, as their shapes may tell that lengths vary.
            is_alone = len(numbers) == 1 and kept and numbers[0] in kept[-1]
            if numbers[0] < n_examples and not is_alone:
                kept.append(numbers)
        runs.setdefault(path.stem.rpartition("_")[2], []).append(kept)
    return {n: [sorted(set().union(*of_step)) for of_step in zip(*processes, strict=False)] for n, processes in runs.items()}
