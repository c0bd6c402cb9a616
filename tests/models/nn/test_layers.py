"""Equinox's layers on whole arrays: the same as row by row."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.nn import embed, linear, norm, normal_embedding, normal_linear, times
from redeqx.optimizers import decay_mask
from tests._tree import named_leaves


@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_applies_the_layer_along_the_last_dim(use_bias):
    layer = eqx.nn.Linear(3, 5, use_bias=use_bias, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 3))
    np.testing.assert_allclose(linear(layer, x), jax.vmap(jax.vmap(layer))(x), rtol=1e-5, atol=1e-6)


def test_linear_needs_no_transposed_output():
    layer = eqx.nn.Linear(3, 5, key=jax.random.key(0))
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: linear(layer, x)))(jnp.ones((2, 4, 3)))
    (product,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert product.outvars[0].aval.shape == (2, 4, 5)


def test_norm_and_embed_apply_the_layers_row_by_row():
    layer, table = eqx.nn.LayerNorm(6), eqx.nn.Embedding(7, 6, key=jax.random.key(0))
    ids = jnp.array([3, 0, 6, 3])
    x = embed(table, ids)
    np.testing.assert_array_equal(x, jax.vmap(table)(ids))
    np.testing.assert_allclose(norm(layer, x), jax.vmap(layer)(x))
    assert np.isnan(embed(table, jnp.array([7, -1, -100]))).all()  # -1 is not the last row


def test_a_factor_is_not_rounded_to_the_dtype_of_an_array():
    x = jnp.arange(1, 200, dtype=jnp.bfloat16)
    found = times(x, 0.22)
    assert found.dtype == jnp.bfloat16 and times(x, 1.0) is x
    np.testing.assert_array_equal(found, (np.asarray(x, np.float32) * np.float32(0.22)).astype(jnp.bfloat16))
    assert (found != x * 0.22).any()


def test_normal_layers_have_the_given_standard_deviation():
    layer = normal_linear(200, 100, std=0.3, key=jax.random.key(0))
    assert layer.weight.shape == (100, 200)
    assert layer.weight.std() == pytest.approx(0.3, rel=0.02)
    assert np.all(layer.bias == 0)
    assert normal_embedding(100, 200, std=0.3, key=jax.random.key(0)).weight.std() == pytest.approx(0.3, rel=0.02)


def test_only_weights_of_layers_decay():
    model = eqx.filter_eval_shape(GPT2, GPT2Config(64, 8, 16, 2, 2), key=jax.random.key(0))
    shapes = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    marked = jax.tree_util.tree_leaves_with_path(decay_mask(shapes))
    decaying = {jax.tree_util.keystr(path).removeprefix(".stack.blocks") for path, decays in marked if decays}
    layers = [f".attention.{name}" for name in ("query", "key", "value", "output")] + [".mlp.up", ".mlp.down"]
    assert decaying == {".embedding.weight", *(f"{layer}.weight" for layer in layers)}


def test_decay_mask_of_a_users_model():
    linear, norms = eqx.nn.Linear(4, 4, key=jax.random.key(0)), [eqx.nn.LayerNorm(4), eqx.nn.GroupNorm(2, 4)]
    model = {"a": linear, "norms": norms, "weight": jnp.ones(3), "alone": jnp.ones((2, 2))}
    mask = decay_mask(eqx.filter(model, eqx.is_array))
    assert [name for name, decays in named_leaves(mask).items() if decays] == ["a.weight"]
    assert decay_mask(jnp.ones(3)) is False
    optimizer = optax.adamw(1e-3, mask=decay_mask)
    optimizer.init(eqx.filter(model, eqx.is_array))
