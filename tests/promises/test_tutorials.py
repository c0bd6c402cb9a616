"""The tutorials: they run as scripts and as notebooks, and each link has a target."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "pages" / "tutorials"
SOURCES = sorted(FOLDER.glob("*.py"))
by_name = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def run_python(script, *args, folder):
    env = {**os.environ, "PYTHONPATH": str(DOCS.parent), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error", str(script), *map(str, args)]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def shortened(name, folder, changes):
    """A copy of a tutorial with fewer steps. `make docs` runs them whole: their own assertions check their claims."""
    text = (FOLDER / f"{name}.py").read_text()
    for long, short in changes.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    source = folder / f"{name}.py"
    source.write_text(text)
    return source


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_tutorial_runs_as_a_script(tmp_path):
    smaller = {"N_TOKENS = 128": "N_TOKENS = 32", "N_HEADS, N_BLOCKS = 128, 4, 2": "N_HEADS, N_BLOCKS = 32, 4, 1"}
    fewer = {"n_epochs=2": "max_steps=10", "every = 200": "every = 5"}
    source = shortened("mini_gpt", tmp_path, {**smaller, **fewer})
    (tmp_path / "reader").mkdir()
    run_python(source, folder=tmp_path / "reader")
    assert not list((tmp_path / "reader").iterdir())  # the reader's folder is unchanged


SMALL = """\
# %% [markdown]
# # A line

# %%
import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import redeqx

redeqx.simulate_devices(2)
trainer = redeqx.Trainer(
    redeqx.Deployer(), model=eqx.nn.Linear(4, 1, key=jax.random.key(0)), optimizer=optax.sgd(0.1), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
)

# %%
trainer.fit([np.full(4, i / 48, np.float32) for i in range(48)], batch_size=4, n_epochs=2)
plt.plot(np.asarray(trainer.model.weight[0]))
plt.show()
"""


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_tutorial_runs_as_a_notebook_and_is_converted_to_a_page(tmp_path):
    """A small one: `make docs` runs all of them."""
    source = tmp_path / "small.py"
    source.write_text(SMALL)
    run_python(DOCS / "tutorials.py", source, folder=tmp_path)
    page = (tmp_path / "small.md").read_text()
    (picture,) = re.findall(r"!\[[^]]*\]\((\S+)\)", page)
    assert (tmp_path / picture).stat().st_size > 1000
    assert page.startswith("# A line\n") and "compiled train step in" in page
    notebook = nbformat.read(tmp_path / "small.ipynb", as_version=4)
    nbformat.validate(notebook)
    (fit,) = [cell for cell in notebook.cells if "trainer.fit(" in cell.source]
    lines, figure = fit.outputs  # the printed lines, the picture
    assert [output.output_type for output in fit.outputs] == ["stream", "display_data"]
    assert "step 24/24" in lines.text and "\ncompiled train step in" in lines.text
    assert "image/png" in figure.data


@by_name
def test_a_notebook_equals_its_source(source):
    notebook = runpy.run_path(str(DOCS / "tutorials.py"))["read"](source)
    again = nbformat.reads(nbformat.writes(notebook), as_version=4)
    again.metadata = {"jupytext": {"notebook_metadata_filter": "-all", "cell_metadata_filter": "-all"}}
    assert jupytext.writes(again, fmt="py:percent") == source.read_text()
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("code") >= 7


def test_a_page_shows_the_outputs(tmp_path):
    """A notebook with one output of each kind, without a kernel."""
    source = tmp_path / "small.py"
    source.write_text("# %% [markdown]\n# # Small\n#\n# Text.\n\n# %%\nprint(1)\n")
    functions = runpy.run_path(str(DOCS / "tutorials.py"))
    notebook = functions["read"](source)
    make = nbformat.v4.new_output
    notebook.cells[1].outputs = [
        make("stream", name="stdout", text="a < b\n"),
        make("execute_result", data={"text/plain": "{'loss': 1}"}, execution_count=1),
        make("display_data", data={"text/plain": ""}),
        make("display_data", data={"image/png": "iVBORw0KGgo="}),
    ]
    functions["write"](notebook, source)
    page = (tmp_path / "small.md").read_text()
    assert page.startswith("# Small\n\n*This page is a notebook: [download it](small.ipynb), or [as a script](small.py).*\n")
    assert "```python\nprint(1)\n```" in page
    assert "``` { .text .printed }\na < b\n```" in page and "``` { .text .printed }\n{'loss': 1}\n```" in page
    assert page.count(".printed") == 2
    (picture,) = re.findall(r"!\[[^]]*\]\((\S+)\)", page)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@by_name
def test_links_of_tutorials_exist(source):
    prose = "\n".join(cell.source for cell in jupytext.read(source).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if not target.startswith("http"):
            found = FOLDER / target
            assert found.is_file() or found.with_suffix(".py") in SOURCES, target


def test_every_tutorial_is_in_the_navigation():
    listed = re.findall(r": tutorials/(\w+)\.md$", (DOCS / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [path.stem for path in SOURCES]
