"""The tutorials as pages: `python docs/tutorials.py docs/pages/tutorials/mini_gpt.py` runs that source as a notebook.

The notebook with its outputs is then beside the source, as `mini_gpt.ipynb` and as the page `mini_gpt.md` with pictures.
The `.py` files, in jupytext's percent format, are the sources. What is written here is made by `make docs` and in no commit.
"""

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

LANGUAGE = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TEMPLATE = """\
{% extends "markdown/index.md.j2" %}
{% macro printed(text) %}
{% if text %}
``` { .text .printed }
{{ text.rstrip() }}
```
{% endif %}
{% endmacro %}
{% block stream %}{{ printed(output.text) }}{% endblock %}
{% block data_text scoped %}{{ printed(output.data["text/plain"]) }}{% endblock %}
{% block data_png %}![The picture that this cell draws]({{ output.metadata.filenames["image/png"] }}){% endblock %}
"""


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(LANGUAGE)
    return notebook


def execute(notebook: nbformat.NotebookNode, timeout: int = 300) -> None:
    """Runs all cells in a kernel, in an empty folder; a cell that takes longer than `timeout` seconds raises."""
    # The kernel keeps a backend that it finds in the environment, and every other one shows no picture in a notebook. The
    # devices are simulated; a TPU's plug-in that finds no TPU would write so into the page.
    env = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=timeout,
            startup_timeout=timeout,
            resources={"metadata": {"path": folder}},
            coalesce_streams=True,
        ).execute(env=env)


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes the notebook and its page beside its source."""
    nbformat.write(notebook, path.with_suffix(".ipynb"))
    pictures = f"{path.stem}_files"
    exporter = MarkdownExporter(extra_loaders=[DictLoader({"page.md.j2": TEMPLATE})], template_file="page.md.j2")
    body, resources = exporter.from_notebook_node(notebook, {"unique_key": path.stem, "output_files_dir": pictures})
    path.parent.joinpath(pictures).mkdir(exist_ok=True)
    for name, data in resources["outputs"].items():
        path.parent.joinpath(name).write_bytes(data)
    title, rest = body.lstrip().split("\n", 1)
    links = f"*This page is a notebook: [download it]({path.stem}.ipynb), or [as a script]({path.name}).*"
    path.with_suffix(".md").write_text(f"{title}\n\n{links}\n{rest}", "utf-8")


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        notebook = read(path)
        execute(notebook)
        write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
