"""`Stack`: the same result as its blocks one by one, in a program whose size does not grow with depth."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from redeqx.models.nn import Stack

D = 8


class Block(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, *, key, p=0.5):
        self.linear = eqx.nn.Linear(D, D, key=key)
        self.dropout = eqx.nn.Dropout(p)

    def __call__(self, x, scale=1.0, *, key=None):
        return x + self.dropout(jnp.tanh(self.linear(x)) * scale, key=key)


@eqx.filter_jit
def make_stack(n_layers=3, **kwargs):
    return Stack(lambda key: Block(key=key), n_layers, key=jax.random.key(0), **kwargs)


def inputs():
    return jax.random.normal(jax.random.key(1), (D,))


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_stores_one_block_with_a_leading_layer_dim():
    stack = make_stack()
    assert stack.blocks.linear.weight.shape == (3, D, D)
    assert stack.blocks.linear.bias.shape == (3, D)
    assert stack.blocks.dropout.p == 0.5  # not an array, so it is shared
    keys = jax.random.split(jax.random.key(0), 3)
    for i, key in enumerate(keys):
        assert_same(stack[i], Block(key=key))


@pytest.mark.parametrize("with_key", [False, True])
def test_equals_its_blocks_applied_one_by_one(with_key):
    stack = make_stack() if with_key else eqx.nn.inference_mode(make_stack())
    key = jax.random.key(2) if with_key else None
    keys = [None] * 3 if key is None else jax.random.split(key, 3)
    x = inputs()
    for block, block_key in zip(stack.unstack(), keys, strict=True):
        x = block(x, 0.7, key=block_key)
    np.testing.assert_allclose(stack(inputs(), 0.7, key=key), x, rtol=1e-6)


def test_a_list_of_blocks_gives_the_same():
    stack, key = make_stack(), jax.random.key(2)
    listed = eqx.tree_at(lambda s: s.blocks, stack, stack.unstack())
    np.testing.assert_allclose(listed(inputs(), key=key), stack(inputs(), key=key), rtol=1e-6)
    assert_same(listed[1], stack[1])
    assert_same(listed[-1], stack[2])


def test_unstack_and_of_are_inverses():
    stack = make_stack(remat=True)
    again = Stack.of(stack.unstack(), remat=True)
    assert_same(stack, again)
    for a, b in zip(again.unstack(), stack.unstack(), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("listed", [False, True])
def test_remat_changes_neither_value_nor_gradients(remat, listed):
    def loss(stack, x, key):
        return jnp.sum(stack(x, key=key) ** 2)

    results = []
    for option in (False, remat):
        stack = make_stack(remat=option)
        if listed:
            stack = eqx.tree_at(lambda s: s.blocks, stack, stack.unstack())
        results.append(eqx.filter_jit(eqx.filter_value_and_grad(loss))(stack, inputs(), jax.random.key(2)))
        jaxpr = jax.make_jaxpr(partial(loss, stack))(inputs(), jax.random.key(2))
        assert ("remat" in str(jaxpr) or "checkpoint" in str(jaxpr)) == bool(option)
    (value, grads), (remat_value, remat_grads) = results
    np.testing.assert_allclose(value, remat_value, rtol=1e-6)
    for a, b in zip(leaves(grads), leaves(remat_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_program_does_not_grow_with_depth():
    def size(n_layers):
        def grads(stack, x, key):
            return eqx.filter_grad(lambda s: jnp.sum(s(x, key=key)))(stack)

        lowered = eqx.filter_jit(grads).lower(make_stack(n_layers), inputs(), jax.random.key(2))
        return lowered.as_text().count("\n")

    assert size(24) == size(6)


def test_bfloat16_stays_bfloat16():
    stack = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, make_stack())
    out = stack(inputs().astype(jnp.bfloat16), key=jax.random.key(2))
    assert out.dtype == jnp.bfloat16


def test_is_created_abstractly_and_in_shards():
    abstract = eqx.filter_eval_shape(make_stack, 5)
    assert abstract.blocks.linear.weight.shape == (5, D, D)

    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    sharding = NamedSharding(mesh, P(None, "model"))
    arrays = jax.jit(lambda: eqx.filter(make_stack(), eqx.is_array), out_shardings=sharding)()
    assert arrays.blocks.linear.weight.sharding == sharding
    for a, b in zip(leaves(arrays), leaves(make_stack()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_rejects_no_layers():
    with pytest.raises(ValueError, match=r"`n_layers`: expected at least 1, got 0\. Omit the stack"):
        make_stack(0)
    with pytest.raises(ValueError, match=r"`blocks`: expected at least 1, got 0\. Omit the stack"):
        Stack.of([])


@pytest.mark.parametrize("i", [3, -4])
def test_rejects_an_index_beyond_its_layers(i):
    with pytest.raises(IndexError, match=rf"`stack\[{i}\]`: expected an index from -3 to 2, got {i}"):
        make_stack()[i]


def test_rejects_blocks_that_differ():
    blocks = make_stack().unstack()
    wider = eqx.tree_at(lambda b: b.linear.bias, blocks[1], jnp.zeros(D + 1))
    with pytest.raises(ValueError, match=r"`blocks\.1\.linear\.bias`: expected float32\[8\] .*, got float32\[9\]"):
        Stack.of([blocks[0], wider])
    other_rate = Block(key=jax.random.key(0), p=0.1)
    with pytest.raises(ValueError, match=r"`blocks\.1\.dropout\.p`: expected 0\.5 as in `blocks\.0`, got 0\.1"):
        Stack.of([blocks[0], other_rate])
    no_bias = eqx.tree_at(lambda b: b.linear, blocks[1], eqx.nn.Linear(D, D, use_bias=False, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"`blocks\.2`: expected the structure .* \(`linear\.bias`\)"):
        Stack.of([blocks[0], blocks[1], no_bias])
