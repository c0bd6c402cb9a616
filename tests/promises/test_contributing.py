"""CONTRIBUTING.md shows the sources as they are, and the paths and commands of the pages for contributors exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.promises.test_imports import LAYERS

ROOT = Path(__file__).parents[2]


def tree():
    """Returns the source tree as it is shown: the library, then the models, from top to bottom, each package with the first
    line of its docstring."""
    names = [name for layer in reversed(LAYERS) for name in sorted(layer) if not name.endswith("__init__")]
    lines = ["redeqx/"]
    for name in sorted(names, key=lambda name: name.startswith("models.")):  # stable: the library first
        path = ROOT.joinpath(*(name if "." in name else f"redeqx.{name}").split("."))
        if name.startswith("models.") and "models/" not in lines:
            lines.append("models/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        shown = f"{path.name}/" if path.is_dir() else source.name
        said = (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {shown:15} {said}")
    return "\n".join(lines)


def test_the_source_tree_is_correct():
    expected = f"```text\n{tree()}\n```"
    assert expected in (ROOT / "CONTRIBUTING.md").read_text("utf-8"), f"expected in CONTRIBUTING.md:\n{expected}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_paths_and_commands_exist(page):
    text = (ROOT / page).read_text("utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if not link.startswith("http")]
    paths = [code for code in re.findall(r"(?<!`)`([^`\s]+)`(?!`)", prose) if "/" in code or code.endswith((".md", ".toml"))]
    paths += re.findall(r"pytest (?:-q )?(tests/\S+)", text)
    missing = [path for path in (*links, *paths) if not (ROOT / path).exists()]
    assert not missing
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = {name for line in re.findall(r"^([\w ]+):(?!=)", makefile, re.M) for name in line.split()}
    used = re.findall(r"(?:^|`)make ((?:[a-z]+ ?)+)", text, re.M)
    assert {name for names in used for name in names.split()} <= targets


def test_tests_that_comments_name_exist():
    """Such as those that fail once a workaround is not needed any more."""
    sources, tests = (
        "\n".join(path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
        for folders in (("redeqx", "models"), ("tests",))
    )
    named = set(re.findall(r"`(test_\w+)`", sources))
    assert named and named <= set(re.findall(r"^def (test_\w+)", tests, re.M))
