"""The picture of a plan: the shape and labels drawn for each array, and the error messages."""

from dataclasses import dataclass
from html import escape
from xml.etree import ElementTree

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.machine import make_mesh
from redeqx.partition import make_plan
from redeqx.tracing import Trace


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


@dataclass(frozen=True)
class Drawn:
    """What an SVG shows."""

    texts: list[str]
    rectangles: list[dict[str, float]]


@pytest.fixture
def drawn(tmp_path):
    """Draws leaves of a plan, and reads the picture."""

    def draw(plan, where="*"):
        path = plan.draw(str(tmp_path / "plan.svg"), where=where)
        assert path == tmp_path / "plan.svg"
        elements = ElementTree.parse(path).getroot()
        numbers = ("x", "y", "width", "height", "opacity")
        rectangles = [{key: float(each.get(key)) for key in numbers} for each in elements if each.tag.endswith("rect")]
        return Drawn([each.text for each in elements if each.tag.endswith("text")], rectangles)

    return draw


def test_each_array_is_labelled_with_name_shape_and_split(drawn):
    labels = drawn(plan(n_model_shards=2)).texts
    assert labels[0].startswith("mesh data=4 x fsdp=1 x model=2: ")
    for lines in (
        ["embedding.weight", "4096 x 8", "embedding", "dim 0: model"],
        ["blocks.*.layers", "0.weight  (3x)", "16 x 8", "column", "dim 0: model"],
        ["0.bias  (3x)", "16", "follows", "dim 0: model"],
        ["1.weight  (3x)", "8 x 16", "row", "dim 1: model"],
        ["scale", "scalar", "replicated"],
    ):
        at = labels.index(lines[0])
        assert labels[at : at + len(lines)] == lines
    assert labels[-2:] == ["split by model", "replicated"]


@pytest.mark.parametrize(
    "shards", [{"n_model_shards": 4}, {"n_model_shards": 2, "n_fsdp_shards": 2}, {"n_fsdp_shards": 8}, {}]
)
def test_full_colour_marks_the_share_of_one_device(drawn, shards):
    model_plan = plan(**shards)
    for name, leaf in model_plan.leaves.items():
        *of_array, _ = drawn(model_plan, name).rectangles  # the last one is in the legend
        areas = {each["opacity"] == 1: each["width"] * each["height"] for each in of_array}
        np.testing.assert_allclose(areas[True] / max(areas.values()), 1 / leaf.n_shards, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "split", "shown"),
    [((), (), (1, 1)), ((3,), (), (3, 1)), ((12, 768, 3072), (), (768, 3072)), ((12, 768, 3072), (0,), (12, 3072)),
     ((64, 3, 7, 7), (1,), (64, 3)), ((4, 8, 4), (0, 2), (4, 4))],
)  # fmt: skip
def test_split_dims_are_drawn_in_preference_to_others(drawn, shape, split, shown):
    spec = ["fsdp" if dim in split[:1] else "model" if dim in split else None for dim in range(len(shape))]
    model = {"a largest": jax.ShapeDtypeStruct((3072,), jnp.float32), "x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    largest, first, *_ = drawn(make_plan(model, make_mesh(1), overrides={"x": spec} if split else None)).rectangles
    expected = [largest["height"] * (size / 3072) ** 0.25 if size > 1 else 6 for size in shown]
    np.testing.assert_allclose([first["height"], first["width"]], expected, rtol=1e-4)


def test_error_messages(tmp_path):
    model_plan = plan()
    with pytest.raises(ValueError) as raised:
        model_plan.draw(tmp_path / "x.svg", where="blocks.*.weigth")
    assert str(raised.value).startswith(
        "`where`: expected a path of the model, got 'blocks.*.weigth'. Did you mean `blocks."
    )
    with pytest.raises(ValueError) as raised:
        model_plan.draw(tmp_path / "x.png")
    assert str(raised.value) == f"`{tmp_path}/x.png`: expected the suffix .svg, got '.png'. Pass `plan.svg`."
    assert [*tmp_path.iterdir()] == []


def test_notebook_output_has_the_table_and_the_warnings():
    weight = jax.ShapeDtypeStruct((1025, 1025), jnp.float32)  # not in a known layer, and 2 devices divide neither dim
    model_plan = make_plan({"a<b": weight}, make_mesh(2, 1))
    html = model_plan._repr_html_()
    assert "mesh data=4 x fsdp=1 x model=2: 1,050,625 parameters" in html
    assert "a&lt;b   1025 x 1025" in html and "a<b" not in html
    assert [escape(warning) in html for warning in model_plan.warnings] == [True]
