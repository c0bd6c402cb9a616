"""What the README shows runs, and prints what it says that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language, containing):
    """The first fenced block of that language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(text for text in blocks if containing in text)


def test_example_runs_and_prints_its_plan(tmp_path):
    code = block("python", "class Net").replace("n_epochs=10", "n_epochs=1")
    code += "\nassert trainer.plan == deployer.plan(model, loss_fn, collate_fn(examples[:64]))\n"
    (tmp_path / "example.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "error"}
    run = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert block("text", "mlp.layers.0.weight") in run.stdout
    assert (tmp_path / "runs/digits/ckpts/index.json").exists()
