"""The documentation: every snippet runs, every page is in the navigation, every link has a target."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from redeqx import tracing, transforms

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = {f"tutorials/{path.stem}.md" for path in DOCS.glob("pages/tutorials/*.py")}  # made by `make docs`
FILES = {str(path.relative_to(DOCS / "pages")): path for path in sorted(DOCS.glob("pages/**/*.md"))}


def included(found):
    """Returns the text of a snippet: a file, or a section of it."""
    path, _, section = found[1].partition(":")
    text = (DOCS.parent / path).read_text("utf-8")
    return text.split(f"[start:{section}] -->\n")[1].split("<!-- --8<--")[0] if section else text


def text_of(path):
    return re.sub(r'^--8<-- "(.+)"$', included, path.read_text("utf-8"), flags=re.MULTILINE)


PAGES = {name: text_of(path) for name, path in FILES.items() if name not in TUTORIALS}
WITH_CODE = [
    name for name, text in PAGES.items() if "```python" in text and name != "index.md"
]  # the README's, tested there
WITH_TORCH = {"guides/data.md"}
# Those of torch, which torchdata calls, and of jaxlib's own types, since Python 3.12.
WARNINGS = "error,ignore:'set_vital' is deprecated,ignore:builtin type event_stats has no"
# Made by `make docs`.
FIGURES = set(re.findall(r'"(\w+\.svg)"', (DOCS / "figures.py").read_text("utf-8")))
FIGURES = {f"figures/{name}" for name in FIGURES}


def runnable(text):
    """Returns the Python of a page, including calls of its `redeqx inspect` commands, in order."""
    for language, block in re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL):
        if language == "python":
            # A file of the library is imported; torch comes with the parity tests.
            if "from ..tracing import" not in block and ("import torch" not in block or find_spec("torch")):
                yield block
            continue
        for line in block.splitlines():
            if line.startswith("redeqx inspect"):
                command = [sys.executable, "-m", *shlex.split(line, comments=True)]
                yield f"import subprocess; subprocess.run({command}, check=True)"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.parity if name in WITH_TORCH else pytest.mark.sweep) for name in WITH_CODE],
)
def test_snippets_of_a_page_run_in_order(name, tmp_path):
    (tmp_path / "page.py").write_text("\n".join(runnable(PAGES[name])))
    env = {**os.environ, "PYTHONPATH": str(DOCS.parent), "PYTHONWARNINGS": WARNINGS}
    run = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": (\S+\.md)$", (DOCS / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted([*PAGES, *TUTORIALS])


@pytest.mark.parametrize("name", PAGES)
def test_links_and_figures_exist(name):
    own = FILES[name].read_text("utf-8")  # without what it includes
    prose = re.sub(r"```.*?```", "", own, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if not target.startswith("http"):
            found = os.path.normpath(Path(name).parent / target)
            assert found in PAGES or found in FIGURES or found in TUTORIALS, target


@pytest.mark.parametrize("name", [*PAGES, *(f"tutorials/{path.name}" for path in DOCS.glob("pages/tutorials/*.py"))])
def test_code_fits_the_page(name):
    """At 1280 pixels a block of code has room for 128 columns."""
    text = PAGES[name] if name in PAGES else (DOCS / "pages" / name).read_text("utf-8")
    blocks = re.findall(r"```\w+\n(.*?)```", text, re.DOTALL) if name in PAGES else [text]
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 125]


def test_the_page_on_rules_names_all_of_them():
    rules = {name for name, each in vars(transforms).items() if isinstance(each, type) and issubclass(each, tracing.Rule)}
    assert rules <= set(re.findall(r"`(\w+)`", PAGES["ideas/rules.md"]))


def test_llms_txt_lists_every_page():
    text = (DOCS / "pages/llms.txt").read_text("utf-8")
    listed = re.findall(r"^- \[[^]]+\]\((\S+)\.html\): \S.*\.$", text, re.MULTILINE)
    assert sorted(f"{name}.md" for name in listed) == sorted([*PAGES, *TUTORIALS])


@pytest.mark.parametrize(
    "package", ["redeqx", "redeqx.data", "redeqx.optimizers", "redeqx.models", "redeqx.models.lora", "redeqx.tracing"]
)
def test_every_public_name_is_in_the_reference(package):
    listed = re.findall(rf"^::: {re.escape(package)}\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    init_file = DOCS.parent.joinpath(*package.split("."), "__init__.py")
    if package in ("redeqx.data", "redeqx.optimizers"):  # also export names that only the library uses
        docstring = ast.get_docstring(ast.parse(init_file.read_text("utf-8"))) or ""
        assert sorted(listed) == sorted(re.findall(r"`(\w+)`", docstring.partition("Public:")[2].partition(".")[0]))
        assert all(callable(getattr(importlib.import_module(package), name)) for name in listed)
        return
    names = set(re.findall(r"(\w+) as \1", init_file.read_text("utf-8")))
    if package == "redeqx.tracing":  # internal, except for the names that users need for their own rules
        (taught,) = re.findall(r"from redeqx.tracing import (.*)", PAGES["ideas/rules.md"])
        assert set(listed) == {"Site", *taught.split(", ")} <= names
        return
    assert sorted(listed) == sorted(names - {"lora"})


def test_every_family_is_in_the_reference():
    """Each module of models/ with a configuration, by its public class and its config."""
    folder = DOCS.parent / "models"
    sources = {path.stem: path.read_text("utf-8") for path in folder.glob("[a-z]*.py")}
    sources |= {path.parent.name: path.read_text("utf-8") for path in folder.glob("[a-z]*/_config.py")}
    del sources["generation"], sources["hf"]  # they have no models
    configs = {
        (name, config) for name, text in sources.items() for config in re.findall(r"^class ([A-Z]\w*Config)\b", text, re.M)
    }
    listed = re.findall(r"^::: redeqx\.models\.(\w+)\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    assert {name for name, _ in configs} >= {"gpt2", "llama", "t5", "clip", "unet"}
    assert configs <= set(listed)
    for module, name in listed:
        if module not in ("lora",):
            held, model = importlib.import_module(f"redeqx.models.{module}"), name.removesuffix("Config")
            assert hasattr(held, name)
            # A base of several models has none of its name; `Decoder` is listed as the package exports it.
            assert (module, model) in listed or not hasattr(held, model) or f"::: redeqx.models.{model}\n" in PAGES["api.md"]
