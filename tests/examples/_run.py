"""Runs examples as a user does: in a new process, here with four simulated devices and with warnings as errors."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """The result of a run: its exit status, its output, and the lines of `metrics.jsonl`."""

    status: int
    output: str
    metrics: list[dict[str, float]]

    def series(self, name: str) -> list[float]:
        """The values of one metric, in order."""
        return [line[name] for line in self.metrics if name in line]


def run_example(name: str, *flags: object, workdir: Path | None = None, timeout: float = 240) -> Outcome:
    """Run `python -m examples.NAME FLAGS`. With a `workdir`, the mesh is (data=2, model=2) and the run must succeed.

    NAME may include a subcommand.
    """
    mesh = [] if workdir is None else ["--workdir", workdir, "--simulate-devices", 4, "--n-model-shards", 2]
    process = subprocess.run(
        [sys.executable, "-W", "error", "-m", *f"examples.{name}".split(), *map(str, [*mesh, *flags])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert workdir is None or process.returncode == 0, process.stdout
    path = None if workdir is None else workdir / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path is not None and path.is_file() else []
    return Outcome(process.returncode, process.stdout, [json.loads(line) for line in lines])


def refusal(name: str, *flags: str) -> Outcome:
    """Like `run_example`, for flags that are refused. Runs in this process, because a new one takes seconds to import."""
    package, *rest = f"examples.{name}".split()
    output, status = io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [package, *rest, *flags]),
        mock.patch.dict(os.environ, COLUMNS="200"),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            runpy.run_module(package, run_name="__main__")
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int)
    return Outcome(status, output.getvalue(), [])
