"""The direction of imports, read from the source; and that importing redeqx changes nothing around it."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

import redeqx

FOLDER = pathlib.Path(redeqx.__file__).parent
# Bottom to top. A module imports from layers below, and from its own where that makes no circle.
LAYERS = (
    ("_paths", "_chips", "_rules", "_hlo", "_links", "_relay", "_crc32", "_shards", "_untrusted", "_exits"),
    ("_signals", "_arguments", "_user_code", "_lock"),
    ("_mesh", "_prefetch"),
    ("_rows",),
    ("_devices", "_buffers", "_meeting", "_safetensors"),
    ("_peers",),
    ("_cluster", "_interrupts", "_launch", "_replicas", "_sources", "_layouts", "_record"),
    ("_jaxprs",),
    ("_flow",),
    ("_dataflow", "_apply", "_convs", "_walk", "_nonfinite", "_work"),
    ("_plan", "_exchange"),
    ("_data", "_step", "_checkpoint", "_console"),
    ("_program",),
    ("_train_state",),
    ("_report",),
    ("_blocks",),
    ("_dry_run",),
    ("_deployer",),
    ("_fit",),
    ("_trainer", "_predictor"),
    ("__init__",),
    ("__main__",),
)
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
MODULES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}


class Imports(ast.NodeVisitor):
    """The modules of redeqx that a source file imports, also inside functions; not what only type checkers read."""

    def __init__(self):
        self.found: set[str] = set()

    def visit_If(self, node):
        is_typing = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.orelse if is_typing else [node.test, *node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node):
        names = [alias.name for alias in node.names]
        self.found |= {name.partition(".")[2] or "__init__" for name in names if name.split(".")[0] == "redeqx"}

    def visit_ImportFrom(self, node):
        module = node.module or ""
        if node.level == 0 and module.split(".")[0] != "redeqx":
            return
        inner = module if node.level else module.partition(".")[2]
        self.found |= {inner} if inner else {alias.name for alias in node.names}


def imports_of(source):
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def test_imports_are_read_in_each_spelling():
    source = """
from typing import TYPE_CHECKING
import numpy.random, redeqx, redeqx._mesh
from . import _rules
from ._paths import render
from redeqx._plan import Plan
if TYPE_CHECKING:
    from ._trainer import Trainer
else:
    from ._step import Loss
def fn():
    from redeqx.models.gpt2 import GPT2
"""
    assert imports_of(source) == {"__init__", "_mesh", "_rules", "_paths", "_plan", "_step", "models.gpt2"}


def test_every_module_has_its_layer():
    assert MODULES.keys() == LEVEL.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    for imported in imports_of(MODULES[module].read_text()):
        assert imported in LEVEL, f"{module} imports redeqx.{imported}, which is no room of the library"
        assert LEVEL[imported] <= LEVEL[module], f"{module} imports {imported}, which lies above it"


def test_no_circles():
    imports = {module: imports_of(path.read_text()) for module, path in MODULES.items()}
    below: set[str] = set()
    while ready := {module for module in imports.keys() - below if imports[module] <= below}:
        below |= ready
    assert below == imports.keys(), f"a circle among {sorted(imports.keys() - below)}"


def test_importing_changes_no_setting_variable_or_logger():
    code = """
import json, logging, os, warnings
import equinox, jax, jaxtyping, numpy, optax, rich, safetensors  # theirs is not ours

def around():
    loggers = logging.Logger.manager.loggerDict
    return {
        "config": {name: repr(value) for name, value in jax.config.values.items()},
        "environment": dict(os.environ),
        "root": [logging.root.level, repr(logging.root.handlers), logging.root.disabled],
        "loggers": {name: [getattr(l, "level", None), repr(getattr(l, "handlers", None))] for name, l in loggers.items()},
        "warnings": repr(warnings.filters),
    }

before = around()
import redeqx
after = around()
import jax._src.xla_bridge as bridge
started = bridge.backends_are_initialized()
print(json.dumps([{key: [before[key], after[key]] for key in before if before[key] != after[key]}, started]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    changed, started = json.loads(done.stdout)
    assert changed == {} and not started
