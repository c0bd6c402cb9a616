"""Leaf names: every kind of tree path renders to one form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from redeqx._tree import is_array_like, map_named, named_leaves, nearest, render


class Layer(eqx.Module):
    weight: jax.Array
    name: str = "layer"


class Model(eqx.Module):
    blocks: list[Layer]
    heads: dict[str, Layer]
    pair: tuple[Layer, None]


def make_model():
    layer = Layer(jnp.zeros(2))
    return Model([layer, layer], {"lm": layer}, (layer, None))


@pytest.mark.parametrize(
    "path, name",
    [
        ((), "value"),
        ((jtu.GetAttrKey("blocks"), jtu.SequenceKey(3)), "blocks.3"),
        ((jtu.DictKey("lm"), jtu.GetAttrKey("weight")), "lm.weight"),
        ((jtu.DictKey(7), jtu.FlattenedIndexKey(2)), "7.2"),
    ],
)
def test_render_paths(path, name):
    assert render(path) == name


def test_named_leaves_follow_the_tree_order():
    model = make_model()
    names = ["blocks.0", "blocks.1", "heads.lm", "pair.0"]
    assert list(named_leaves(model)) == [f"{name}.{field}" for name in names for field in ("weight", "name")]
    assert list(named_leaves(model, is_leaf=lambda node: isinstance(node, Layer))) == names
    assert list(named_leaves(jnp.zeros(2))) == ["value"]


def test_duplicate_names_raise():
    with pytest.raises(ValueError, match=r"`a\.b`: expected one leaf of that name, got two\. Rename the dict key"):
        named_leaves({"a": {"b": 1}, "a.b": 2})


def test_map_named_passes_the_name_of_each_leaf():
    tree = {"a": [1, 2], "b": 3}
    assert map_named(lambda name, x, y: (name, x + y), tree, tree) == {"a": [("a.0", 2), ("a.1", 4)], "b": ("b", 6)}
    assert map_named(lambda name, x: name, tree, is_leaf=lambda x: isinstance(x, list)) == {"a": "a", "b": "b"}


def test_nearest_suggests_a_similar_name():
    assert nearest("head.wieght", ["head.weight", "body.bias"]) == " Did you mean `head.weight`?"
    assert nearest("head.weight", ["x"]) == ""


@pytest.mark.parametrize(
    "leaf, expected",
    [
        (np.zeros(2), True),
        (np.float32(1), True),
        (jax.ShapeDtypeStruct((2,), jnp.float32), True),
        (1.0, False),
        ("name", False),
        (None, False),
        (jnp.tanh, False),
    ],
)
def test_is_array_like(leaf, expected):
    assert is_array_like(leaf) is expected


def test_jax_arrays_and_typed_keys_are_array_like():
    assert is_array_like(jnp.zeros(2)) and is_array_like(jax.random.key(0))
