"""The figure of a plan: the shape and labels drawn for each array, the files written, and the error messages."""

import sys
from html import escape

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.machine import make_mesh
from redeqx.partition import make_plan
from redeqx.tracing import Trace

matplotlib = pytest.importorskip("matplotlib")


class Model(eqx.Module):
    """One layer of each kind of shape: stacked, convolution, vector, scalar, and equal layers in a list."""

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

    def __call__(self, i, image):
        x = self.embedding(i)
        for block in self.blocks:
            x = x + block(x)
        arrays, static = eqx.partition(self.stack, eqx.is_array)
        every = jax.vmap(lambda layer: eqx.combine(layer, static)(x))(arrays)
        return self.scale * (jnp.square(every).sum() + jnp.square(self.conv(image)).sum())


def plan(n_model_shards=1, n_fsdp_shards=1):
    model, batch = eqx.filter_eval_shape(Model, jax.random.key(0)), (jnp.zeros(512, jnp.int32), jnp.zeros((512, 8, 4, 4)))
    trace = Trace.of(lambda model, batch: jax.vmap(model)(*batch).mean(), model, batch)
    return make_plan(model, make_mesh(n_model_shards, n_fsdp_shards), trace=trace)


@pytest.fixture
def saved_figures(monkeypatch):
    """The figures saved by `Plan.draw`, with their paths."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append((self, path)))
    return figures


def texts(figure):
    return [line for text in figure.axes[0].texts for line in text.get_text().splitlines()]


def test_each_array_is_labelled_with_name_shape_and_split(saved_figures, tmp_path):
    assert plan(n_model_shards=2).draw(tmp_path / "plan.png") == tmp_path / "plan.png"
    ((figure, path),) = saved_figures
    labels = texts(figure)
    assert path == tmp_path / "plan.png" and labels[0].startswith("mesh data=4 x fsdp=1 x model=2: ")
    for lines in (
        ["embedding.weight", "4096 x 8", "embedding", "dim 0: model"],
        ["blocks.*.layers", "0.weight  (3x)", "16 x 8", "column", "dim 0: model"],
        ["0.bias  (3x)", "16", "follows", "dim 0: model"],
        ["1.weight  (3x)", "8 x 16", "row", "dim 1: model"],
        ["scale", "scalar", "replicated"],
    ):
        at = labels.index(lines[0])
        assert labels[at : at + len(lines)] == lines
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["split by model", "replicated", "one device's part", "the others'"]


@pytest.mark.parametrize(
    "shards", [{"n_model_shards": 4}, {"n_model_shards": 2, "n_fsdp_shards": 2}, {"n_fsdp_shards": 8}, {}]
)
def test_full_colour_marks_the_share_of_one_device(saved_figures, shards):
    model_plan = plan(**shards)
    for name, leaf in model_plan.leaves.items():
        saved_figures.clear()
        model_plan.draw("plan.png", where=name)
        figure = saved_figures[0][0]
        areas = {patch.get_facecolor()[3] == 1: patch.get_width() * patch.get_height() for patch in figure.axes[0].patches}
        assert np.isclose(areas[True] / max(areas.values()), 1 / leaf.n_shards), name


@pytest.mark.parametrize(
    ("shape", "split", "shown"),
    [((), (), (1, 1)), ((3,), (), (3, 1)), ((12, 768, 3072), (), (768, 3072)), ((12, 768, 3072), (0,), (12, 3072)),
     ((64, 3, 7, 7), (1,), (64, 3)), ((4, 8, 4), (0, 2), (4, 4))],
)  # fmt: skip
def test_split_dims_are_drawn_in_preference_to_others(saved_figures, shape, split, shown):
    spec = ["fsdp" if dim in split[:1] else "model" if dim in split else None for dim in range(len(shape))]
    model = {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "largest": jax.ShapeDtypeStruct((3072,), jnp.float32)}
    make_plan(model, make_mesh(1), overrides={"x": spec} if split else None).draw("plan.png")
    patch = saved_figures[0][0].axes[0].patches[-1 if not split else -2]
    largest = saved_figures[0][0].axes[0].patches[0].get_height()
    expected = [largest * (size / 3072) ** 0.25 if size > 1 else 0.09 for size in shown]
    np.testing.assert_allclose([patch.get_height(), patch.get_width()], expected, rtol=1e-6)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_writes_each_format_and_leaves_matplotlib_settings_alone(tmp_path, suffix):
    settings = dict(matplotlib.rcParams)
    path = plan(n_model_shards=2, n_fsdp_shards=2).draw(str(tmp_path / f"plan.{suffix}"))
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begin) and path.stat().st_size > 5000
    assert dict(matplotlib.rcParams) == settings


def test_error_messages(tmp_path, monkeypatch):
    model_plan = plan()
    with pytest.raises(ValueError) as raised:
        model_plan.draw(tmp_path / "x.png", where="blocks.*.weigth")
    assert str(raised.value).startswith(
        "`where`: expected a path of the model, got 'blocks.*.weigth'. Did you mean `blocks."
    )
    with pytest.raises(ValueError) as raised:
        model_plan.draw(tmp_path / "x.bmpp")
    assert str(raised.value).startswith(f"`{tmp_path}/x.bmpp`: expected a suffix among ") and "png" in str(raised.value)
    assert str(raised.value).endswith("got '.bmpp'. Pass `plan.png`.")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError) as raised:
        model_plan.draw(tmp_path / "x.png")
    assert str(raised.value) == (
        '`Plan.draw`: expected matplotlib, got no such package. Run `pip install "redeqx[draw]"`, or print `plan.explain()`.'
    )
    assert [*tmp_path.iterdir()] == []


def test_notebook_output_has_the_table_and_the_warnings():
    weight = jax.ShapeDtypeStruct((1025, 1025), jnp.float32)  # not in a known layer, and 2 devices divide neither dim
    model_plan = make_plan({"a<b": weight}, make_mesh(2, 1))
    html = model_plan._repr_html_()
    assert "mesh data=4 x fsdp=1 x model=2: 1,050,625 parameters" in html
    assert "a&lt;b   1025 x 1025" in html and "a<b" not in html
    assert [escape(warning) in html for warning in model_plan.warnings] == [True]
