"""The two sharding rules, in plans of layers that differ only in their sizes."""

import itertools
from typing import Any

import equinox as eqx
import jax
import pytest

from redeqx.machine import make_mesh
from redeqx.partition import make_plan

D, F = 8, 32
OUT, IN = 0, 1
UP, DOWN = (D, F), (F, D)


def linear(size):
    return eqx.filter_eval_shape(eqx.nn.Linear, *size, use_bias=False, key=jax.random.key(0))


def fields(layers, **others):
    """A module with these layers, by name, as its fields in this order."""
    cls = type("Module", (eqx.Module,), {"__annotations__": dict.fromkeys([*layers, *others], Any)})
    return cls(**{name: linear(size) for name, size in layers.items()}, **others)


def siblings(*sizes):
    return fields({f"layer{i}": size for i, size in enumerate(sizes)})


def elements(*sizes):
    return [linear(size) for size in sizes]


def plan_of(model, n_shards=4):
    return make_plan(model, make_mesh(n_shards))


def dims(model, n_shards=4):
    plan = plan_of(model, n_shards)
    return [plan.model_dim(name) for name in plan.leaves]


# --- rule 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([UP], [OUT]),
        ([UP, DOWN], [OUT, IN]),
        ([DOWN, UP], [IN, OUT]),  # sizes allow both orders: the layer that widens comes first
        ([UP, UP, DOWN], [OUT, OUT, IN]),  # siblings take the same input
        ([UP, DOWN, UP], [OUT, IN, OUT]),
        ([DOWN, UP, UP], [IN, OUT, OUT]),
        ([(D, D), (D, D)], [OUT, IN]),  # neither widens
        ([(F, 16), (16, D), (D, 16), (16, F)], [OUT, IN, OUT, IN]),  # an autoencoder, in its own order
        ([DOWN, (D, 16)], [OUT, IN]),
    ],
)
def test_fields_of_a_module(sizes, expected):
    assert dims(siblings(*sizes)) == expected


def test_swiglu_splits_do_not_depend_on_the_field_order():
    roles = {"gate": UP, "up": UP, "down": DOWN}
    for names in itertools.permutations(roles):
        plan = plan_of(fields({name: roles[name] for name in names}))
        found = {name: plan.model_dim(f"{name}.weight") for name in names}
        assert found == {"gate": OUT, "up": OUT, "down": IN}, names


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([UP, (F, F), (F, F), DOWN], [OUT, IN, OUT, IN]),
        ([(D, D), (D, D), (D, D)], [OUT, IN, OUT]),
        ([UP, UP], [OUT, OUT]),  # sizes do not match: not consecutive
        ([UP, (16, D)], [OUT, OUT]),
        ([(D, 6), (6, D)], [IN, OUT]),  # 6 outputs do not divide over 4, the 8 inputs do
        ([(6, D), (D, 6)], [OUT, IN]),
        ([(6, 6)], [None]),
        ([(D, 1), (1, D)], [IN, OUT]),
        ([(6, 6), (6, D), UP], [None, OUT, IN]),
    ],
)
def test_elements_of_a_list(sizes, expected):
    assert dims(elements(*sizes)) == expected


def test_all_siblings_after_a_split_layer_are_rows():
    assert dims([linear(UP), fields({"a": DOWN, "b": DOWN})]) == [OUT, IN, IN]


@pytest.mark.parametrize(("groups", "expected"), [(4, OUT), (8, OUT), (2, None), (6, None)])
def test_convolution_groups_are_never_divided_between_shards(groups, expected):
    conv = eqx.filter_eval_shape(eqx.nn.Conv1d, 24, 24, 3, groups=groups, use_bias=False, key=jax.random.key(0))
    plan = plan_of([conv])
    assert plan.model_dim("0.weight") == expected
    reason = plan["0.weight"].reason
    assert reason.startswith("column: " if expected == OUT else "replicated: ") and f"{groups} groups" in reason


def test_reason_of_each_split():
    plan = plan_of([*elements(UP, DOWN, (6, 5), (8, 5)), eqx.nn.Embedding(8, 2, key=jax.random.key(0)), linear(DOWN)])
    assert [leaf.reason for leaf in plan.leaves.values()] == [
        "column: its input arrives replicated",
        "row: its input arrives split by `0`",
        "replicated: neither 5 outputs nor 6 inputs divide over 4 shards",
        "row: 5 outputs do not divide over 4 shards, its inputs do",
        "embedding: 8 rows over 4 shards",
        "column: its input arrives replicated",
    ]


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def attention(n_heads, n_kv_heads, out, kv_out=None, d=D):
    sizes = {"q": (d, out), "k": (d, kv_out or out), "v": (d, kv_out or out), "o": (out, d)}
    return fields(sizes, **({} if n_heads is None else {"n_heads": n_heads, "n_kv_heads": n_kv_heads}))


@pytest.mark.parametrize(
    ("n_shards", "module", "expected"),
    [
        (4, attention(8, 8, 64), [OUT, OUT, OUT, IN]),
        (4, attention(None, None, 64), [OUT, OUT, OUT, IN]),
        (4, attention(8, 4, 64, 32), [OUT, OUT, OUT, IN]),
        (4, attention(8, 2, 64, 16), [OUT, None, None, IN]),  # fewer K/V heads than shards
        (4, attention(8, 1, 64, 8), [OUT, None, None, IN]),
        (4, attention(6, 6, 48), [IN, IN, IN, OUT]),  # 48 divides, 6 heads do not
        (4, attention(6, 6, 48, d=10), [None] * 4),
        (1, attention(3, 3, 9, d=9), [OUT, OUT, OUT, IN]),
    ],
)
def test_attention(n_shards, module, expected):
    assert dims(module, n_shards) == expected


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "role", "reason"),
    [
        (8, 8, "q", "attention: query by heads, 8 heads over 4 shards"),
        (8, 4, "v", "attention: value by heads, 4 heads over 4 shards"),
        (8, 2, "k", "replicated: 2 key/value heads do not divide over 4 shards, queries on each read them"),
        (8, 8, "o", "attention: output contracts the split heads"),
        (6, 6, "q", "row: 6 heads do not divide over 4 shards, the other dim does"),
        (6, 6, "o", "column: 6 heads do not divide over 4 shards, the other dim does"),
        (None, None, "k", "attention: key by heads, 4 shards (number of heads unknown)"),
    ],
)
def test_reasons_of_attention_splits(n_heads, n_kv_heads, role, reason):
    assert plan_of(attention(n_heads, n_kv_heads, 96))[f"{role}.weight"].reason.startswith(f"{reason};")


def test_attention_with_unknown_heads_divides_features():
    reason = plan_of(attention(None, None, 6, d=9))["q.weight"].reason
    assert reason.startswith("replicated: 6 features do not divide over 4 shards, nor does the other dim")
