"""The direction of imports in the source code; and that importing redeqx changes no global setting."""

import ast
import json
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

import redeqx

FOLDER = pathlib.Path(redeqx.__file__).parent
# Bottom to top; a package imports from those below it. Files beside the packages are packages of one file.
LAYERS = (
    ("_at_end", "_origins", "_promotion", "_rounding", "_tree", "_version"),
    ("_quantised", "errors"),
    ("machine", "tracing", "distributed", "storage"),
    ("kernels", "monitor"),
    ("compiled", "checkpoint", "dims"),
    ("data",),
    ("partition", "memory"),
    ("transforms", "optimizers"),
    ("steps",),
    ("_deployer",),
    ("training",),
    ("dry_run",),
    ("_load",),
    ("_predictor", "_trainer"),
    ("__init__",),
    ("models._kinds", "models.nn"),
    ("models.generation",),
    ("models.hf",),
    ("models.decoder", "models.diffusion", "models.encoder", "models.lora", "models.vision"),
    ("models.bart", "models.bert", "models.clip", "models.distilbert", "models.gpt2", "models.gptj", "models.opt"),
    ("models.gemma", "models.glm", "models.gpt_neox", "models.granite", "models.llama", "models.mistral", "models.olmo"),
    ("models.arcee", "models.cohere", "models.ernie", "models.exaone", "models.olmoe", "models.seed_oss", "models.stablelm"),
    ("models.modernbert", "models.phi", "models.qwen", "models.roberta", "models.smollm", "models.starcoder2", "models.t5"),
    ("models.deepseek", "models.dots", "models.glm_moe", "models.gpt_oss", "models.nemotron", "models.qwen_moe"),
    ("models.deberta", "models.deepseek_v3", "models.falcon", "models.gpt_neo", "models.helium"),
    ("models.apertus", "models.bloom", "models.glm_flash", "models.hunyuan", "models.mpt", "models.phi_moe"),
    ("models.granite_hybrid", "models.lfm", "models.mamba", "models.minimax", "models.mistral4", "models.nemotron_h"),
    ("models.afmoe", "models.bamba", "models.biogpt", "models.cwm", "models.gpt_bigcode", "models.jamba", "models.mamba2"),
    ("models.falcon_h1", "models.gemma4", "models.lfm_moe", "models.qwen3_5", "models.qwen_next"),
    ("models.exaone3", "models.granite_swa", "models.hyperclovax", "models.internlm", "models.mellum"),
    ("models.hy3", "models.minicpm", "models.openai_gpt", "models.xglm", "models.youtu"),
    ("models.aria", "models.flint", "models.kolibri", "models.nanochat", "models.sarvam"),
    ("models.axk1", "models.cohere_moe", "models.lara", "models.lfm3"),
    ("models.dinov2", "models.mmdit", "models.schedulers", "models.siglip", "models.unet", "models.vae", "models.vit"),
    ("models.llava", "models.text_to_image", "models.vision_encoder_decoder", "models.whisper"),
    ("models._families",),
    ("models.evaluation", "models.sentence"),
    ("models.__init__",),
    ("cli",),
    ("__main__",),
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
# Their public interface is `redeqx` itself.
FACADES = {"_load", "_predictor", "_trainer", "__init__"}
FILES = {  # in a checkout `redeqx/models` is a link to `models`
    path.relative_to(FOLDER).with_suffix("").parts: path
    for path in sorted([*FOLDER.rglob("*.py"), *(FOLDER / "models").rglob("*.py")])
}


def layer_of(parts):
    """Returns the entry of `LAYERS` that a module belongs to."""
    return ".".join((*parts, "__init__")[:2]) if parts[0] == "models" else parts[0]


def package_of(parts):
    return "_facades" if parts[0] in FACADES else layer_of(parts)


def entry_of(parts):
    """Returns the module from which other packages import the names of this module's package."""
    return ("__init__",) if parts[0] in FACADES else (*parts, "__init__")[:2] if parts[0] == "models" else parts[:1]


PACKAGES = sorted({layer_of(parts) for parts in FILES if len(parts) > 1 + (parts[0] == "models")})


@dataclass
class Source:
    """What a file imports, uses and defines.

    **Arguments:**

    - `imports`: the modules of redeqx that it imports, also for type checkers only, each as the parts of its name.
    - `private`: the underscored names that it imports, each with the modules that they are from.
    - `attributes`: the underscored attributes that it uses on objects other than `self` and `cls`.
    - `names`: the names that it defines: functions, classes, variables, and attributes of `self` and `cls`.
    """

    imports: set = field(default_factory=set)
    private: list = field(default_factory=list)
    attributes: set = field(default_factory=set)
    names: set = field(default_factory=set)


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def read(source, parts):
    """Reads the source of the file whose name has these parts, such as `("data", "_rows")`, in one walk."""
    found = Source()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = imports_of(node, parts)
            found.imports |= modules
            private = [alias.name for alias in node.names if is_private(alias.name)]
            found.private += [(private, modules)] if private and isinstance(node, ast.ImportFrom) else []
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_own and isinstance(node.ctx, ast.Store):
                found.names.add(node.attr)
            elif not is_own and is_private(node.attr):
                found.attributes.add(node.attr)
    return found


def imports_of(node, parts):
    """Returns the modules of redeqx that an import of a file names."""
    found = set()
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        found |= {tuple(name[1:]) or ("__init__",) for name in names if name[0] == "redeqx"}
    else:
        module = (node.module or "").split(".") if node.module else []
        if node.level == 0 and module[:1] != ["redeqx"]:
            return found
        base = module[1:] if node.level == 0 else [*parts[: len(parts) - node.level], *module]
        names = [alias.name for alias in node.names]
        # `from . import _pass` names modules; `from ..data import slices` a name that the package exports.
        files = {(*base, name) for name in names if {(*base, name), (*base, name, "__init__")} & FILES.keys()}
        found |= files if len(files) == len(names) else {*files, tuple(base) or ("__init__",)}
    return {("models", "__init__") if parts == ("models",) else parts for parts in found}


@pytest.fixture(scope="module")
def sources():
    return {parts: read(path.read_text(), parts) for parts, path in FILES.items()}


def test_all_forms_of_imports_are_found():
    source = """
from typing import TYPE_CHECKING
import numpy.random, redeqx, redeqx.machine
from . import _flow
from ._pass import Pass
from .._tree import render
from ..data import slices
from redeqx.checkpoint._manager import CheckpointManager
if TYPE_CHECKING:
    from .._trainer import Trainer
def fn():
    from redeqx.models.gpt2 import GPT2
    from redeqx.models.nn import Stack
    from redeqx import Loss, models
"""
    assert read(source, ("partition", "_plan")).imports == {
        ("__init__",), ("machine",), ("partition", "_flow"), ("partition", "_pass"), ("_tree",), ("data",),
        ("checkpoint", "_manager"), ("_trainer",), ("models", "gpt2"), ("models", "nn"), ("models", "__init__"),
    }  # fmt: skip


def test_every_package_has_a_layer():
    assert {layer_of(parts) for parts in FILES} == LEVEL.keys()


def test_imports_point_downwards_and_use_the_package_entry(sources):
    problems = []
    for parts, source in sources.items():
        file = ".".join(parts)
        for imported in source.imports:
            said = f"{file} imports redeqx.{'.'.join(imported)}"
            if layer_of(imported) not in LEVEL:
                problems.append(f"{said}, which is not a package of the library")
            elif package_of(imported) != package_of(parts):
                problems += [f"{said}, not the package's entry"] * (imported != entry_of(imported))
                problems += [f"{said}, which is not below it"] * (LEVEL[layer_of(imported)] >= LEVEL[layer_of(parts)])
    assert not problems, "\n".join(problems)


def test_packages_have_no_import_cycle(sources):
    imports: dict[str, set[str]] = {}
    for parts, source in sources.items():
        found = {package_of(imported) for imported in source.imports}
        imports.setdefault(package_of(parts), set()).update(found - {package_of(parts)})
    assert_no_cycle(imports)


@pytest.mark.parametrize("package", [*PACKAGES, "_facades"])
def test_files_of_a_package_have_no_import_cycle(package, sources):
    files = [parts for parts in FILES if package_of(parts) == package and parts[-1] != "__init__"]
    assert_no_cycle({parts: sources[parts].imports & {*files} for parts in files})


def assert_no_cycle(imports):
    below = set()
    while ready := {name for name in imports.keys() - below if imports[name] <= below}:
        below |= ready
    assert below == imports.keys(), f"a cycle among {sorted(imports.keys() - below)}"


@pytest.mark.parametrize("package", [*PACKAGES, "models"])
def test_an_init_file_documents_its_package_and_only_re_exports(package):
    folder = tuple(package.split("."))
    tree = ast.parse(FILES[*folder, "__init__"].read_text())
    said = ast.get_docstring(tree) or ""
    first = [name for name in said.replace("`", " ").split() if name.endswith(".py")]
    assert first and all((*folder, name.removesuffix(".py")) in FILES for name in first), (
        f"{package}: which file to open first?"
    )
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom) and node.level == 1, ast.unparse(node)
        assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)


def test_no_private_attribute_of_another_package_is_used(sources):
    own: dict[str, set[str]] = {}
    for parts, source in sources.items():
        own.setdefault(package_of(parts), set()).update(source.names)
    foreign = {".".join(p): source.attributes - ALLOWED - own[package_of(p)] for p, source in sources.items()}
    problems = [
        f"{file} uses {sorted(names)}, which its package does not define" for file, names in foreign.items() if names
    ]
    assert not problems, "\n".join(problems)


def test_no_private_name_of_another_package_is_imported(sources):
    problems = []
    for parts, source in sources.items():
        for private, modules in source.private:
            if not all(package_of(module) in (package_of(parts), alias) for module in modules for alias in private):
                problems.append(f"{'.'.join(parts)} imports {private}, private to {modules}")
    assert not problems, "\n".join(problems)


# Private names of the standard library and of JAX that have no public equivalent.
ALLOWED = {"_exit", "_current_frames", "_replace", "_asdict", "_fields"}
ALLOWED |= {"_splash_attention_bwd"}  # of JAX: `tests/kernels` tells when a public function replaces it


def test_importing_changes_no_setting_variable_or_logger_and_imports_no_extra():
    code = """
import json, logging, os, sys, warnings
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
import redeqx.models
after = around()
import jax._src.xla_bridge as bridge
started = bridge.backends_are_initialized()
extras = {'matplotlib', 'tokenizers', 'tensorboardX', 'wandb', 'mlflow', 'trackio', 'IPython'} & sys.modules.keys()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps([changed, started, sorted(extras)]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    changed, started, extras = json.loads(done.stdout)
    assert changed == {} and not started and extras == []
