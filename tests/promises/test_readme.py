"""What the README shows runs, and prints what it says that it prints."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.promises.test_imports import LAYERS

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


def tree():
    """The library from top to bottom as the README shows it: each package with the first line of its docstring."""
    root = Path(__file__).parents[2]
    names = [name for layer in reversed(LAYERS) for name in sorted(layer) if name != "__init__"]
    lines = ["redeqx/"]
    for name in [*names, "models"]:
        folder = root / "models" if name == "models" else root / "redeqx" / name
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        shown = f"{name}/" if folder.is_dir() else f"{name}.py"
        said = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {shown:15} {said}")
    return "\n".join(lines)


def test_the_tree_is_the_real_one():
    assert tree() in README
