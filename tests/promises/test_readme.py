"""The README is short, and its example runs and prints what the README shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language):
    """Returns the first fenced block of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[0]


def test_it_is_short():
    assert len(README.encode()) <= 10_000
    assert len([line for line in block("python").splitlines() if line]) <= 25


def test_the_example_prints_what_is_shown(tmp_path):
    (tmp_path / "train.py").write_text(block("python"))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "error"}
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    header_and_steps, plan = block("text").split("\n\n")
    plan, accuracy = plan.rsplit("accuracy ", 1)
    assert plan in run.stdout
    assert abs(float(accuracy.rstrip("%\n")) - float(run.stdout.rsplit("accuracy ", 1)[1].rstrip("%\n"))) < 4
    printed = [line.split() for line in run.stdout.splitlines()]  # the width of the header's columns varies
    for line in header_and_steps.splitlines():
        stable = re.split(r"  loss| eval loss| saved", line)[0].split()  # and so do speeds and last digits
        assert any(words[: len(stable)] == stable for words in printed), line
    assert (tmp_path / "runs/digits/ckpts/index.json").exists()
