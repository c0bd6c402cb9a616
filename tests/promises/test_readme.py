"""The README's example runs and prints what the README shows, and its source tree is the real one."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.promises.test_imports import LAYERS

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language, containing):
    """The first fenced block of a language that contains a text."""
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
    """The source tree as the README shows it: the library, then the models, from top to bottom, each package with the first
    line of its docstring."""
    root = Path(__file__).parents[2]
    names = [name for layer in reversed(LAYERS) for name in sorted(layer) if not name.endswith("__init__")]
    lines = ["redeqx/"]
    for name in sorted(names, key=lambda name: name.startswith("models.")):  # stable: the library first
        path = root.joinpath(*(name if "." in name else f"redeqx.{name}").split("."))
        if name.startswith("models.") and "models/" not in lines:
            lines.append("models/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        shown = f"{path.name}/" if path.is_dir() else source.name
        said = (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {shown:15} {said}")
    return "\n".join(lines)


def test_the_tree_is_the_real_one():
    assert tree() in README
