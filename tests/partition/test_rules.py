"""The two rules, in plans of traced losses: fully connected layers alternate, and attention is split by heads."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from redeqx.machine import make_mesh
from redeqx.partition import make_plan
from redeqx.tracing import Trace

D, F, SEQ, ROWS = 64, 256, 16, 64
OUT, IN = 0, 1
UP, DOWN = (D, F), (F, D)
KEY = jax.random.key(0)


def plan_of(model, call, size, n_shards=4):
    """The plan of a loss that calls the model on each token of a batch."""

    def loss(model, batch):
        return jnp.square(jax.vmap(lambda x: call(model, x))(batch)).mean()

    batch = jax.ShapeDtypeStruct((ROWS, SEQ, size), jnp.float32)
    return make_plan(model, make_mesh(n_shards), trace=Trace.of(loss, model, batch))


def dims(plan, leaf="weight"):
    return [plan.model_dim(name) for name in plan.leaves if name.endswith(leaf)]


def linear(size, use_bias=False):
    return eqx.filter_eval_shape(eqx.nn.Linear, *size, use_bias=use_bias, key=KEY)


def chain(layers, x):
    for layer in layers:
        x = jnp.tanh(jax.vmap(layer)(x))
    return x


# --- rule 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([UP], [OUT]),
        ([UP, DOWN], [OUT, IN]),
        ([DOWN, UP], [OUT, IN]),
        ([UP, DOWN, UP, DOWN], [OUT, IN, OUT, IN]),
        ([UP, (F, F), (F, F), DOWN], [OUT, IN, OUT, IN]),
        ([(D, D), (D, D), (D, D)], [OUT, IN, OUT]),
        ([(F, 128), (128, D), (D, 128), (128, F)], [OUT, IN, OUT, IN]),  # an autoencoder
        ([(D, 6), (6, D)], [IN, OUT]),  # 6 outputs do not divide over 4, the inputs do
        ([(6, 6), (6, D), UP], [None, OUT, IN]),
        ([(6, 6)], [None]),
    ],
)
def test_fully_connected_layers_alternate(sizes, expected):
    plan = plan_of([linear(size, use_bias=True) for size in sizes], chain, sizes[0][0])
    assert dims(plan) == expected
    assert dims(plan, "bias") == [OUT if dim == OUT else None for dim in expected]


def test_layers_of_one_input_have_one_split_whatever_the_order_of_their_fields():
    roles = {"gate": UP, "up": UP, "down": DOWN}
    for names in itertools.permutations(roles):
        cls = type("SwiGLU", (eqx.Module,), {"__annotations__": dict.fromkeys(names, Any)})
        call = lambda m, x: jax.vmap(lambda x: m.down(jax.nn.silu(m.gate(x)) * m.up(x)))(x)  # noqa: E731
        plan = plan_of(cls(**{name: linear(roles[name]) for name in names}), call, D)
        found = {name: plan.model_dim(f"{name}.weight") for name in names}
        assert found == {"gate": OUT, "up": OUT, "down": IN}, names


def test_convolutions_alternate_too():
    layers = [eqx.filter_eval_shape(eqx.nn.Conv1d, *size, 3, key=KEY) for size in (UP, DOWN)]
    layers.append(eqx.filter_eval_shape(eqx.nn.ConvTranspose1d, *UP, 3, key=KEY))
    call = lambda layers, x: layers[2](jnp.tanh(layers[1](jnp.tanh(layers[0](x.T)))))  # noqa: E731
    plan = plan_of(layers, call, D)
    assert dims(plan) == [OUT, IN, OUT] and dims(plan, "bias") == [OUT, None, OUT]


@pytest.mark.parametrize(("groups", "expected"), [(4, OUT), (8, OUT), (2, None), (6, None)])
def test_convolution_groups_are_never_divided_between_shards(groups, expected):
    options = ({"kernel_size": 1}, {"kernel_size": 3, "groups": groups})
    convs = [eqx.filter_eval_shape(eqx.nn.Conv1d, 24, 24, use_bias=False, key=KEY, **option) for option in options]
    assert dims(plan_of(convs, lambda convs, x: convs[1](jnp.tanh(convs[0](x.T))), 24))[1] == expected


def test_reason_of_each_split():
    plan = plan_of([linear(size, use_bias=True) for size in (UP, DOWN, (D, 5), (5, 6))], chain, D)
    assert [leaf.reason for leaf in plan.leaves.values()] == [
        "column: its input arrives replicated",
        "follows: added to a value that is split by `0`",
        "row: its input arrives split by `0`",
        "replicated: added to a replicated value",
        "row: 5 outputs do not divide over 4 shards, its inputs do",
        "replicated: added to a replicated value",
        "replicated: no dim of 6 x 5 divides over 4 shards",
        "replicated: added to a replicated value",
    ]


# --- rule 2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_shards", "n_heads", "expected"),
    [
        (4, 8, [OUT, OUT, OUT, IN]),
        (2, 8, [OUT, OUT, OUT, IN]),
        (1, 8, [OUT, OUT, OUT, IN]),
    ],
)
def test_attention_is_split_by_heads(n_shards, n_heads, expected):
    layer = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, n_heads, D, use_query_bias=True, use_output_bias=True, key=KEY)
    plan = plan_of(layer, lambda attention, x: attention(x, x, x), D, n_shards)
    assert dims(plan) == expected
    assert (plan.model_dim("query_proj.bias"), plan.model_dim("output_proj.bias")) == (OUT, None)
    assert plan["output_proj.weight"].reason.startswith("row: its input arrives split by ")


def test_layers_after_attention_start_with_a_column():
    layers = [eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 8, D, key=KEY), linear(UP), linear(DOWN), linear(UP)]
    plan = plan_of(layers, lambda layers, x: chain(layers[1:], x + layers[0](x, x, x)), D)
    assert dims(plan)[4:] == [OUT, IN, OUT]


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_queries_by_heads_and_fewer_keys_and_values(n_kv_heads):
    """Each shard reads the key/value heads of its own queries."""
    model = {"q": linear((D, D)), "k": linear((D, 8 * n_kv_heads)), "v": linear((D, 8 * n_kv_heads)), "o": linear((D, D))}

    def call(m, x):
        q = jax.vmap(m["q"])(x).reshape(SEQ, n_kv_heads, 8 // n_kv_heads, 8)
        k, v = (jax.vmap(m[name])(x).reshape(SEQ, n_kv_heads, 8) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("qgns,kgs->gnqk", q, k))
        return jax.vmap(m["o"])(jnp.einsum("gnqk,kgs->qgns", weights, v).reshape(SEQ, D))

    plan = plan_of(model, call, D)
    assert plan.model_dim("q.weight") == OUT and plan.model_dim("o.weight") == IN
    if n_kv_heads % 4 == 0:
        assert plan.model_dim("k.weight") == plan.model_dim("v.weight") == OUT
