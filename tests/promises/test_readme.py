"""The README's example runs and prints what the README shows, and its source tree is correct."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises.test_imports import LAYERS

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language, containing):
    """Returns the first fenced block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(text for text in blocks if containing in text)


def run(script, folder):
    """Runs a script in a folder by a new interpreter, with warnings as errors; returns its output."""
    (folder / "script.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_its_plan_and_its_weights_load(tmp_path):
    code = block("python", "class Net").replace("n_epochs=10", "n_epochs=1")
    code += "\nassert trainer.plan == deployer.plan(model, loss_fn, collate_fn(examples[:64]))\n"
    code += block("python", "load_file").replace("step_00000240", "step_00000024")
    code += "\nassert np.array_equal(weights['mlp.layers.0.weight'], model.mlp.layers[0].weight)\n"
    assert block("text", "mlp.layers.0.weight") in run(code, tmp_path)
    assert (tmp_path / "runs/digits/ckpts/index.json").exists()


MODELS = """
import equinox as eqx, jax, numpy as np, optax, redeqx
from redeqx.models import llama

redeqx.simulate_devices(8)
tiny = llama.LlamaConfig("llama", 64, 64, 16, 32, 2, 4, 4)
save = redeqx.models.save_pretrained
save(llama.Llama(tiny, key=jax.random.key(0)), tiny, "llama-3.1-8b")
"""


@pytest.mark.sweep
def test_the_models_section_runs(tmp_path):
    """With a tiny model instead of the folder, and with the omitted arguments."""
    data = "collate_fn=collate_fn)\ntrainer.fit(examples, batch_size=4, n_epochs=1)\n"
    data += "outputs = trainer.get_default_predictor(pred_fn).predict(examples, batch_size=4)\nassert len(outputs) == 8"
    code = block("python", "lora.merge").replace("128, sample", "4, sample")
    before, after = code.split("...)\n...")
    collate = """
def collate_fn(examples):
    ids = np.stack(examples)
    return {"ids": ids, "labels": np.roll(ids, -1, 1), "mask": np.ones_like(ids)}

examples = list(np.random.default_rng(0).integers(3, 64, (8, 12), np.int32))
"""
    run(MODELS + collate + before + data + after, tmp_path)
    assert (tmp_path / "adapter").is_dir() and (tmp_path / "llama-tuned" / "config.json").exists()


def tree():
    """Returns the source tree as in the README: the library, then the models, from top to bottom, each package with the
    first line of its docstring."""
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


def test_the_source_tree_is_correct():
    assert tree() in README
