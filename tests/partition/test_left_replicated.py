"""A traced plan leaves a small part of a model whole on every device of the model axis.

The models use their weights in other ways than by a plain matmul: they select them by data under `vmap`, look them up, use
them in loops and recurrent cells, or slice them from flat vectors.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import redeqx
from redeqx.machine import make_mesh
from redeqx.partition import make_plan
from redeqx.tracing import Trace

D, F, SEQ, ROWS = 32, 64, 4, 16
MODELS = {}


def model(fn):
    """Registers a function that takes a key and returns a model, its loss on one example, and the example's shape."""
    MODELS[fn.__name__] = fn
    return fn


def normal(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def mlp(key, d=D, f=F):
    return eqx.nn.MLP(d, d, f, 1, key=key)


# --- selected by data -------------------------------------------------------------------------------------------------


@model
def branches_under_vmap(key):
    """Under `vmap` the branch becomes a `select_n` among the weights."""
    keys = jax.random.split(key)
    model = {"a": mlp(keys[0]), "b": mlp(keys[1])}
    return model, lambda m, x: jax.lax.cond(x.sum() > 0, lambda x: m["a"](x), lambda x: m["b"](x), x), (D,)


@model
def switch_under_vmap(key):
    model = [mlp(key) for key in jax.random.split(key, 3)]

    def loss(model, x):
        return jax.lax.switch(jnp.argmax(x[:3]), [lambda x, expert=expert: expert(x) for expert in model], x)

    return model, loss, (D,)


@model
def experts_by_index(key):
    """Weights and biases are looked up for each token. Six experts do not divide evenly over four shards."""
    keys = jax.random.split(key, 3)
    model = {"router": normal(keys[0], D, 6), "up": normal(keys[1], 6, D, F), "bias": jnp.ones((6, F)),
             "down": normal(keys[2], 6, F, D)}  # fmt: skip

    def loss(m, x):
        def token_output(x):
            i = jnp.argmax(x @ m["router"])
            return jax.nn.relu(x @ m["up"][i] + m["bias"][i]) @ m["down"][i]

        return jax.vmap(token_output)(x)

    return model, loss, (SEQ, D)


# --- flat vectors -----------------------------------------------------------------------------------------------------


@model
def slices_of_a_vector(key):
    def loss(m, x):
        up, down = m["theta"][: D * F].reshape(D, F), m["theta"][D * F :].reshape(F, D)
        return jnp.tanh(x @ up) @ down

    return {"theta": jax.random.normal(key, (2 * D * F,)) / 6}, loss, (D,)


@model
def raveled_mlp(key):
    arrays, static = eqx.partition(mlp(key), eqx.is_array)
    flat, unravel = ravel_pytree(arrays)
    return {"theta": flat}, lambda m, x: eqx.combine(unravel(m["theta"]), static)(x), (D,)


# --- loops ------------------------------------------------------------------------------------------------------------


@model
def fori_loop(key):
    """A square layer whose output must be replicated for the next iteration."""
    model = eqx.nn.Linear(D, D, key=key)
    return model, lambda m, x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(m(x)), x), (D,)


@model
def while_loop(key):
    """A while loop has no reverse-mode derivative: the loop runs without gradients, one more step has them."""
    model = mlp(key)

    def loss(m, x):
        frozen = eqx.combine(jax.lax.stop_gradient(eqx.filter(m, eqx.is_array)), eqx.filter(m, eqx.is_array, inverse=True))
        z = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, frozen(c[1])), (0, x))[1]
        return m(jax.lax.stop_gradient(z))

    return model, loss, (D,)


@model
def weights_updated_in_a_loop(key):
    keys = jax.random.split(key, 2)
    model = {"up": normal(keys[0], D, F), "down": normal(keys[1], F, D)}

    def loss(m, x):
        def inner(w):
            return jnp.square(jnp.tanh(x @ w["up"]) @ w["down"] - x).mean()

        w = jax.lax.fori_loop(0, 2, lambda _, w: jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(inner)(w)), m)
        return jnp.tanh(x @ w["up"]) @ w["down"]

    return model, loss, (SEQ, D)


# --- recurrent --------------------------------------------------------------------------------------------------------


def recurrent(cell, sizes, in_decoder=False):
    def make(key):
        keys = jax.random.split(key, len(sizes) + 1)
        cells = [cell(before, after, key=key) for before, after, key in zip((D, *sizes), sizes, keys, strict=False)]
        model = {"cells": cells, "head": eqx.nn.Linear(sizes[-1], D, key=keys[-1])}
        begin = [(jnp.zeros(n), jnp.zeros(n)) if cell is eqx.nn.LSTMCell else jnp.zeros(n) for n in sizes]

        def step(cells, states, x):
            new = []
            for one, state in zip(cells, states, strict=True):
                new.append(one(x, state))
                x = new[-1][0] if cell is eqx.nn.LSTMCell else new[-1]
            return new, x

        def loss(m, x):
            if in_decoder:  # the first cell encodes, the second decodes
                encoded, _ = jax.lax.scan(lambda s, x: step(m["cells"][:1], s, x), begin[:1], x)
                _, y = jax.lax.scan(lambda s, x: step(m["cells"][1:], s, x), encoded, x[:, : sizes[0]])
            else:
                _, y = jax.lax.scan(lambda s, x: step(m["cells"], s, x), begin, x)
            return jax.vmap(m["head"])(y)

        return model, loss, (SEQ, D)

    return make


MODELS["one GRU"] = recurrent(eqx.nn.GRUCell, [F])
MODELS["two GRUs"] = recurrent(eqx.nn.GRUCell, [D, D])
MODELS["two LSTMs"] = recurrent(eqx.nn.LSTMCell, [F, D])
MODELS["GRU encoder and decoder"] = recurrent(eqx.nn.GRUCell, [D, D], in_decoder=True)


# --- unsupported primitives -------------------------------------------------------------------------------------------


@model
def orthogonal_layers(key):
    """Orthogonal layers: the dataflow does not support their `qr`."""
    model = [eqx.nn.Linear(160, 160, use_bias=False, key=key) for key in jax.random.split(key)]

    def loss(m, x):
        for layer in m:
            x = jnp.tanh(jnp.linalg.qr(layer.weight)[0] @ x)
        return x

    return model, loss, (160,)


def model_loss_and_batch(name, dtype=jnp.float32):
    model, loss, shape = MODELS[name](jax.random.key(0))
    model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)

    def batch_loss(model, batch, key=None):
        return jnp.square(jax.vmap(lambda x: loss(model, x))(batch)).mean()

    return model, batch_loss, np.random.default_rng(0).normal(size=(ROWS, *shape)).astype(dtype)


def n_replicated_parameters(plan):
    return sum(math.prod(leaf.shape) for leaf in plan.leaves.values() if leaf.n_shards == 1)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_at_most_5_percent_are_replicated(name, n):
    """Biases of summed outputs."""
    model, loss, batch = model_loss_and_batch(name)
    plan = make_plan(model, make_mesh(n), trace=Trace.of(loss, model, batch))
    assert n_replicated_parameters(plan) <= 0.05 * plan.n_parameters
    for leaf in plan.leaves.values():
        assert leaf.n_shards > 1 or leaf.reason.startswith("replicated: ")


def test_replicated_leaf_names_the_reason():
    odd = {"theta": jnp.zeros(2 * D * F + 2)}

    def loss(m, x):
        return (jnp.tanh(x @ m["theta"][: D * F].reshape(D, F)) @ m["theta"][D * F : -2].reshape(F, D)).sum()

    plan = make_plan(odd, make_mesh(4), trace=Trace.of(loss, odd, jnp.zeros((ROWS, D))))
    assert plan["theta"].reason == "replicated: 4098 entries do not divide over 4 shards; a vector padded to 4100 would"


@pytest.mark.sweep
def test_large_weights_are_split_even_if_replication_sends_less():
    """Two GRUs over many steps: if replicated, their shards would exchange nothing."""

    def dims(n, length):
        model, loss, _ = recurrent(eqx.nn.GRUCell, [n, n])(jax.random.key(0))
        batch = jax.ShapeDtypeStruct((ROWS, length, D), jnp.float32)
        trace = Trace.of(lambda model, batch: jax.vmap(lambda x: loss(model, x))(batch).sum(), model, batch)
        plan = make_plan(model, make_mesh(4), trace=trace)
        return plan, [plan[f"cells.{i}.weight_hh"].n_shards for i in range(2)]

    small, n_shards = dims(16, 512)
    assert n_shards == [1, 1] and small["cells.0.weight_hh"].reason.startswith("replicated: costs less than any split of it")
    large, n_shards = dims(80, 512)
    assert large["cells.0.weight_hh"].shape == (3 * 80, 80) and n_shards == [4, 4]


def test_many_replicated_leaves_give_a_warning():
    model = [jax.ShapeDtypeStruct((1023, 641), jnp.float32) for _ in range(4)]
    plan = make_plan(model, make_mesh(2))
    assert plan.warnings == (
        "100% of the model (2,622,972 of 2,622,972 parameters, in small leaves) is replicated: "
        "`*` (replicated: no dim of 1023 x 641 divides over 2 shards). Pad their sizes, or split them with `overrides=`.",
    )
    assert make_plan([jax.ShapeDtypeStruct((1024, 641), jnp.float32)], make_mesh(2), {"*": ("model", None)}).warnings == ()


def test_weights_of_unsupported_primitives_are_stored_split_and_gathered():
    model, loss, batch = model_loss_and_batch("orthogonal_layers")
    plan = make_plan(model, make_mesh(2, 2), trace=Trace.of(loss, model, batch))
    assert plan["0.weight"].n_shards == 4 and plan.spec_in_use("0.weight") == jax.sharding.PartitionSpec(None, None)
    assert plan["0.weight"].reason == (
        "stored split, gathered for use: `qr` computes with it, which is not followed; fsdp on dim 1"
    )


TRAINED = [
    ("branches_under_vmap", (4, 1)),
    ("experts_by_index", (4, 1)),
    ("experts_by_index", (2, 2)),
    ("slices_of_a_vector", (2, 2)),
    ("raveled_mlp", (4, 1)),
    ("fori_loop", (4, 1)),
    ("weights_updated_in_a_loop", (2, 2)),
    ("two GRUs", (4, 1)),
    ("orthogonal_layers", (2, 2)),
]


@pytest.mark.parametrize(
    ("name", "shards"), [case if i % 2 else pytest.param(*case, marks=pytest.mark.sweep) for i, case in enumerate(TRAINED)]
)
@pytest.mark.sweep
def test_sharded_update_equals_the_unsharded_update(x64, name, shards):
    model, loss, batch = model_loss_and_batch(name, jnp.float64)
    deployer = redeqx.Deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1], verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss)
    metrics = trainer.train(list(batch), ROWS // deployer.n_batch_shards)
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, batch)
    expected = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-6)
    for got, leaf in zip(jax.tree.leaves(trainer.model), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(leaf):
            np.testing.assert_allclose(np.asarray(got), np.asarray(leaf), rtol=1e-7, atol=1e-10)
