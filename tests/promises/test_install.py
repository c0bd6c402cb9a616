"""Installs redeqx from a wheel and an sdist in a clean environment, away from the checkout, and checks its types there."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import redeqx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SCRIPT = """
import jax, numpy as np, optax, equinox as eqx
import redeqx
from redeqx.models import Decoder, from_pretrained, gpt2, save_pretrained

deployer = redeqx.Deployer(workdir="run", verbose=False)
config = gpt2.GPT2Config(vocab_size=32, n_positions=16, d_model=8, n_layers=1, n_heads=2)
model = gpt2.GPT2(config, key=deployer.next_key())
save_pretrained(model, config, "folder")
model, config = from_pretrained("folder", kind=Decoder, deployer=deployer)

def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch[:, :-1], key=jax.random.split(key, len(batch)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

examples = list(np.random.default_rng(0).integers(32, size=(8, 16)))
trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.adam(1e-3), collate_fn=np.stack, loss_fn=loss_fn)
trainer.fit(examples, batch_size=4, n_epochs=1)
assert trainer.step == 2
again = redeqx.load("run", eqx.filter_eval_shape(gpt2.GPT2, config, key=jax.random.key(0)))
assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (again, trainer.model))))
print(redeqx.__file__)
"""


def run(command, cwd, *, codes=(0,), **env):
    """Runs a program without access to the checkout; returns its output."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept, **env}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def build(source, out):
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", out, source], out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def with_dependencies(requirements):
    """Returns the names of the packages that these requirements install."""
    found, waiting = set(), [*requirements]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(requirement.name)
            waiting += distribution(requirement.name).requires or ()
    return found


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The Python of an environment with only the wheel and its declared dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for name in with_dependencies(PROJECT["project"]["dependencies"]):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():  # several packages may share a namespace
                (site / top).symlink_to(distribution(name).locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", built[0]], folder)
    return python


def test_the_version_is_written_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert f'__version__ = "{redeqx.__version__}"' in (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text("utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == redeqx.__version__


@pytest.mark.sweep
def test_wheel_contains_the_library_the_models_and_the_types(built):
    names = zipfile.ZipFile(built[0]).namelist()
    of_checkout = {f"redeqx/{path.relative_to(ROOT / 'redeqx')}" for path in (ROOT / "redeqx").rglob("*.py")}
    of_checkout |= {f"redeqx/{path.relative_to(ROOT)}" for path in (ROOT / "models").rglob("*.py")}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == of_checkout | {"redeqx/py.typed", "redeqx/models/README.md"} and len(names) == len(set(names))
    assert built[0].name.startswith(f"redeqx-{redeqx.__version__}-")


@pytest.mark.sweep
def test_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "docs", "examples", "tests"} <= {*os.listdir(source)}
    (tmp_path / "out").mkdir()
    ours, theirs = (zipfile.ZipFile(wheel) for wheel in (built[0], build(source, tmp_path / "out")[0]))
    assert ours.namelist() == theirs.namelist()
    assert [name for name in ours.namelist() if ours.read(name) != theirs.read(name)] == []


@pytest.mark.sweep
def test_installed_library_trains_and_has_models(python, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run([python, "script.py"], tmp_path, PYTHONWARNINGS="error")
    assert Path(printed.strip()).is_relative_to(python.parents[1])
    command = python.with_name("redeqx")
    assert run([command, "--version"], tmp_path) == f"redeqx {redeqx.__version__}\n"
    assert "20 tensors" in run([command, "inspect", "run", "--check"], tmp_path)


# --- types -------------------------------------------------------------------------------------------------------------

# User code in strict mode, where an unknown type of the library is an error. `assert_type` is exact.
TYPED = '''
# pyright: strict
"""A user's script."""
from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import equinox as eqx
import jax
import optax  # pyright: ignore[reportMissingTypeStubs]  # optax has no types

import redeqx
from redeqx.storage import StorePath


class Net(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        self.mlp = eqx.nn.MLP(2, 2, 8, 1, key=key)


def collate_fn(examples: list[Any]) -> dict[str, Any]:
    return {"x": examples}


def loss_fn(model: Net, batch: dict[str, Any], key: jax.Array) -> redeqx.Loss:
    return redeqx.Loss(batch["x"].sum(), batch["x"].size)


def pred_fn(model: Net, batch: dict[str, Any], key: jax.Array) -> jax.Array:
    return batch["x"]


class Norm(redeqx.Callback):
    def on_step(self, trainer: redeqx.Trainer, metrics: dict[str, float]) -> None:
        trainer.deployer.log_metrics({"loss": metrics["loss"]}, trainer.step)


class Record:
    def log(self, metrics: dict[str, float], step: int) -> None:
        print(metrics, step)


redeqx.simulate_devices(8)
deployer = redeqx.Deployer(n_model_shards=2, workdir="runs/x", loggers=[Record()])
net = deployer.init(lambda: Net(deployer.next_key()))
assert_type(net, Net)
plan = deployer.plan(net, loss_fn, {"x": 0}, overrides={"mlp.layers.0.weight": ("model", None)})
assert_type(plan, redeqx.Plan)
assert_type(plan.explain(), str)
assert_type(plan.leaves["mlp.layers.0.weight"], redeqx.LeafPlan)
trainer = redeqx.Trainer(deployer, model=net, optimizer=optax.adam(1e-3), collate_fn=collate_fn, loss_fn=loss_fn, plan=plan)
assert_type(trainer, redeqx.Trainer[Net])
assert_type(trainer.model, Net)
assert_type(trainer.eval_model, Net)
assert_type(trainer.step, int)
callbacks = [redeqx.EarlyStopping("loss", patience=3), redeqx.SaveEvery(minutes=5), redeqx.Profile(range(3)), Norm()]
assert_type(trainer.fit([1, 2], batch_size=2, n_epochs=1, callbacks=callbacks), dict[str, float])
assert_type(trainer.train([1, 2], batch_size=2), dict[str, float])
assert_type(trainer.update([1, 2]), dict[str, float])
assert_type(trainer.eval_loss([1, 2], batch_size=2, model=trainer.eval_model), float)
assert_type(trainer.save_ckpt("best", metrics={"loss": 1.0}), Path | StorePath)
assert_type(trainer.resume(), int)
assert_type(trainer.dry_run([1, 2], batch_size=2), redeqx.DryRun)
predictor = trainer.get_default_predictor(pred_fn)
assert_type(predictor, redeqx.Predictor)
assert_type(predictor.predict([1, 2], batch_size=2), list[Any])
assert_type(predictor.iterate([1, 2], batch_size=2), Iterator[list[Any]])
assert_type(redeqx.load("runs/x", net, deployer), Net)


def attend(q: jax.Array) -> None:
    assert_type(redeqx.attention(q, q, q, causal=True), jax.Array)


with redeqx.described("v4:2x2x2"):
    redeqx.Deployer(verbose=False)
assert_type(redeqx.__version__, str)
'''
# One mistake per line, which a type checker must find.
MISTAKES = """
import equinox as eqx, jax, optax, redeqx

deployer = redeqx.Deployer()
net = eqx.nn.MLP(2, 2, 8, 1, key=deployer.next_key())
redeqx.Deployer(n_model_shard=2)
redeqx.load("runs/x")
trainer = redeqx.Trainer(deployer, model=net, optimizer=optax.adam(1e-3), collate_fn=list, loss_fn=print)
trainer.model.mlp
trainer.fit([], batchsize=2)
trainer.train([], batch_size="2")
trainer.save_checkpoint()
trainer.step = 3
redeqx.EarlyStopping(patience=3)
"""


def pyright(python, tmp_path, *arguments):
    """Returns pyright's report as JSON, with the packages of an environment."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return json.loads(run([sys.executable, "-m", "pyright", "--outputjson", *arguments], tmp_path, codes=(0, 1), PATH=path))


@pytest.mark.sweep
def test_types_work_in_strict_mode(python, tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    found = pyright(python, tmp_path, "--pythonpath", python, "typed.py", "mistakes.py")["generalDiagnostics"]
    at = {(Path(each["file"]).name, each["range"]["start"]["line"]): each["message"] for each in found}
    assert {place: message for place, message in at.items() if place[0] == "typed.py"} == {}
    assert [line for _, line in sorted(at)] == [5, 6, 8, 9, 10, 11, 12, 13], at


@pytest.mark.sweep
def test_types_of_public_names_are_known(python, tmp_path):
    report = pyright(python, tmp_path, "--ignoreexternal", "--verifytypes", "redeqx")["typeCompleteness"]
    assert Path(report["pyTypedPath"]).is_relative_to(python.parents[1])
    symbols = {each["name"]: each for each in report["symbols"] if each["isExported"]}
    public = {name: each for name, each in symbols.items() if name.count(".") == 1}
    of_models = {name: each for name, each in symbols.items() if name.startswith("redeqx.models.")}
    assert {"redeqx.Trainer", "redeqx.load"} <= public.keys() and "redeqx.models.gpt2.GPT2" in of_models
    # A class is checked with everything that a user reaches from it. A family's tables may be inferred: the base class
    # declares their types.
    assert [name for name, each in public.items() if not each["isTypeKnown"] or each["isTypeAmbiguous"]] == []
    assert [name for name, each in of_models.items() if not (each["isTypeKnown"] or each["isTypeAmbiguous"])] == []
