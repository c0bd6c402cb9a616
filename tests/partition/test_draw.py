"""The picture of a plan: what is drawn of each array, what is written below it, and each error."""

import sys
from html import escape

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.machine._mesh import make_mesh
from redeqx.partition._draw import Picture
from redeqx.partition._plan import make_plan

matplotlib = pytest.importorskip("matplotlib")


class Model(eqx.Module):
    """Layers of each kind of shape: stacked, a convolution, a vector, a scalar, several alike in a list."""

    embedding: eqx.nn.Embedding
    blocks: list[eqx.nn.MLP]
    stack: eqx.nn.Linear
    conv: eqx.nn.Conv2d
    scale: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(4096, 8, key=key)
        self.blocks = [eqx.nn.MLP(8, 8, 16, 1, key=key) for _ in range(3)]
        self.stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 16, key=key))(keys)
        self.conv = eqx.nn.Conv2d(8, 16, 3, key=key)
        self.scale = jnp.ones(())


def plan(n_model_shards=1, n_fsdp_shards=1):
    return make_plan(eqx.filter_eval_shape(Model, jax.random.key(0)), make_mesh(n_model_shards, n_fsdp_shards))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, with their paths."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append((self, path)))
    return figures


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_each_array_has_its_name_its_shape_and_its_split(drawn, tmp_path):
    assert plan(n_model_shards=2).draw(tmp_path / "plan.png") == tmp_path / "plan.png"
    ((figure, path),) = drawn
    said = texts(figure)
    assert path == tmp_path / "plan.png" and said[0].startswith("mesh data=4 x fsdp=1 x model=2: ")
    for lines in (
        ["embedding.weight", "4096 x 8", "embedding", "dim 0: model"],
        ["blocks.*.layers", "0.weight  (3x)", "16 x 8", "column", "dim 0: model"],
        ["0.bias  (3x)", "16", "follows", "dim 0: model"],
        ["1.weight  (3x)", "8 x 16", "row", "dim 1: model"],
        ["scale", "scalar", "replicated"],
    ):
        at = said.index(lines[0])
        assert said[at : at + len(lines)] == lines
    assert said[-5:] == [
        "split by model", "replicated", "full colour: one device's part", "pale: the others'", "gap: longer than drawn",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shards", [{"n_model_shards": 4}, {"n_model_shards": 2, "n_fsdp_shards": 2}, {"n_fsdp_shards": 8}, {}]
)
def test_the_part_in_full_colour_is_that_of_one_device(drawn, shards):
    made = plan(**shards)
    for name, leaf in made.leaves.items():
        drawn.clear()
        made.draw("plan.png", where=name)
        figure = drawn[0][0]
        above_legend = [patch for patch in figure.axes[0].patches if patch.get_y() < figure.get_figheight() - 0.4]
        coloured = [patch for patch in above_legend if patch.get_facecolor()[:3] != (1, 1, 1) and patch.get_fill()]
        full = [patch for patch in coloured if patch.get_facecolor()[3] == 1]
        whole = max(patch.get_width() * patch.get_height() for patch in coloured)
        assert np.isclose(full[0].get_width() * full[0].get_height() / whole, 1 / leaf.n_shards), name


def test_dims_that_are_split_are_drawn_first():
    def shown(shape, *split):
        return Picture("", "x", shape, tuple((("model", 2),) if dim in split else () for dim in range(len(shape)))).shown

    assert shown(()) == () and shown((3,)) == (0,) and shown((3, 5)) == (0, 1)
    assert shown((12, 768, 3072)) == (1, 2) and shown((12, 768, 3072), 0) == (0, 2)
    assert shown((64, 3, 7, 7), 1) == (0, 1) and shown((4, 4, 4), 0, 2) == (0, 2)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files_are_written_and_no_setting_changes(tmp_path, suffix):
    settings = dict(matplotlib.rcParams)
    path = plan(n_model_shards=2, n_fsdp_shards=2).draw(str(tmp_path / f"plan.{suffix}"))
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begin) and path.stat().st_size > 5000
    assert dict(matplotlib.rcParams) == settings


def test_errors(tmp_path, monkeypatch):
    made = plan()
    with pytest.raises(ValueError) as raised:
        made.draw(tmp_path / "x.png", where="blocks.*.weigth")
    assert str(raised.value).startswith(
        "`where`: expected a path of the model, got 'blocks.*.weigth'. Did you mean `blocks."
    )
    with pytest.raises(ValueError) as raised:
        made.draw(tmp_path / "x.bmpp")
    assert str(raised.value).startswith(f"`{tmp_path}/x.bmpp`: expected a suffix among ") and "png" in str(raised.value)
    assert str(raised.value).endswith("got '.bmpp'. Pass `plan.png`, say.")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError) as raised:
        made.draw(tmp_path / "x.png")
    assert str(raised.value) == (
        '`Plan.draw`: expected matplotlib, got no such package. Run `pip install "redeqx[draw]"`, or print `plan.explain()`.'
    )
    assert [*tmp_path.iterdir()] == []


def test_a_notebook_shows_the_table_and_the_warnings():
    weight = jax.ShapeDtypeStruct((1025, 1025), jnp.float32)  # of no known layer, and no two devices divide it
    made = make_plan({"a<b": weight}, make_mesh(2, 1))
    html = made._repr_html_()
    assert "plan on mesh data=4 x fsdp=1 x model=2: 1,050,625 parameters" in html
    assert ">a&lt;b</th>" in html and ">1025 x 1025</td>" in html and "a<b" not in html
    assert [escape(warning) in html for warning in made.warnings] == [True]
