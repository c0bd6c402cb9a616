"""Plans: the exact spec and reason of each leaf, overrides, reports, and models and optimizer states placed by a plan."""

import re
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redeqx import register_attention
from redeqx._tree import is_array_like, named_leaves
from redeqx.machine import make_mesh
from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.partition import make_plan, mark_read, place, shardings_like
from redeqx.tracing import Trace

KEY = jax.random.key(0)
M, F = "model", "fsdp"
D = 16


def shapes(make, *args, **kwargs):
    """The model with shapes in place of arrays."""
    return eqx.filter_eval_shape(lambda key: make(*args, **kwargs, key=key), KEY)


def zeros(model):
    """The model with zeros in place of shapes."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) if is_array_like(leaf) else leaf, model)


def linear(in_size, out_size, **kwargs):
    return shapes(eqx.nn.Linear, in_size, out_size, **kwargs)


def plan_of(model, n_model_shards=4, n_fsdp_shards=1, overrides=None):
    plan = make_plan(model, make_mesh(n_model_shards, n_fsdp_shards), overrides)
    arrays = {name: leaf for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
    assert plan.leaves.keys() == arrays.keys()
    for name, leaf in plan.leaves.items():  # checked for every plan in this file
        assert leaf.reason and leaf.shape == arrays[name].shape == tuple(leaf.shape) and len(leaf.spec) == len(leaf.shape)
        assert np.prod(plan.sharding(name).shard_shape(leaf.shape), dtype=int) * leaf.n_shards == np.prod(
            leaf.shape, dtype=int
        )
    return plan


def specs(plan):
    return {name: leaf.spec for name, leaf in plan.leaves.items()}


def reasons(plan):
    return {name: leaf.reason for name, leaf in plan.leaves.items()}


COLUMN, ROW, REPLICATED = P(M, None), P(None, M), P(None, None)


# --- rule 1: fully connected --------------------------------------------------------------------------------------------


def test_mlp():
    plan = plan_of(shapes(eqx.nn.MLP, 8, 4, 32, depth=3))
    assert specs(plan) == {
        "layers.0.weight": COLUMN,
        "layers.0.bias": P(M),
        "layers.1.weight": ROW,
        "layers.1.bias": P(None),
        "layers.2.weight": COLUMN,
        "layers.2.bias": P(M),
        "layers.3.weight": ROW,
        "layers.3.bias": P(None),
    }
    assert plan["layers.1.weight"].reason == "row: its input arrives split by `layers.0`"
    assert plan["layers.0.bias"].reason == "follows dim 0 of its weight"
    assert plan["layers.1.bias"].reason == "replicated: added to a replicated output"


@pytest.mark.parametrize(
    "sizes, weight, bias",
    [
        ((8, 12), COLUMN, P(M)),
        ((8, 10), ROW, P(None)),  # the outputs do not divide over 4
        ((10, 8), COLUMN, P(M)),
        ((10, 6), REPLICATED, P(None)),  # neither does
        ((8, "scalar"), ROW, P(None)),
        (("scalar", 8), COLUMN, P(M)),
        (("scalar", "scalar"), REPLICATED, P(None)),
    ],
)
def test_linear_with_indivisible_sizes(sizes, weight, bias):
    plan = plan_of([linear(*sizes)])
    assert specs(plan) == {"0.weight": weight, "0.bias": bias}
    if weight == REPLICATED:
        assert plan["0.weight"].reason.startswith("replicated: neither ")


def test_convolutions():
    model = [
        shapes(eqx.nn.Conv2d, 3, 8, 3),
        shapes(eqx.nn.Conv2d, 8, 16, 3, use_bias=False),
        shapes(eqx.nn.ConvTranspose2d, 16, 8, 3),
        shapes(eqx.nn.Conv1d, 8, 8, 3, groups=4),
        shapes(eqx.nn.Conv1d, 8, 8, 3, groups=2),
        shapes(eqx.nn.Conv1d, 6, 10, 3),
    ]
    plan = plan_of(model)
    column, row, replicated = P(M, None, None, None), P(None, M, None, None), P(None, None, None)
    assert specs(plan) == {
        "0.weight": column,
        "0.bias": P(M, None, None),
        "1.weight": row,
        "2.weight": column,
        "2.bias": P(M, None, None),
        "3.weight": P(M, None, None),
        "3.bias": P(M, None),
        "4.weight": replicated,
        "4.bias": P(None, None),
        "5.weight": replicated,
        "5.bias": P(None, None),
    }
    assert plan["3.weight"].reason == "column: 4 groups, none cut in two"
    assert plan["4.weight"].reason == "replicated: 2 groups do not divide over 4 shards"


def test_stacked_layers():
    """`eqx.filter_vmap` over constructors adds one or two leading dims, which are never split."""

    def make(key):
        return {
            "conv": eqx.nn.ConvTranspose1d(8, 8, 3, key=key),
            "gain": jnp.ones(8),
            "mlp": eqx.nn.MLP(8, 8, 32, depth=1, key=key),
            "norm": eqx.nn.LayerNorm(8),
        }

    for n_layers in [(4,), (4, 8)]:
        lead = [None] * len(n_layers)
        stacked = make
        for _ in n_layers:
            stacked = eqx.filter_vmap(stacked)
        assert specs(plan_of(eqx.filter_eval_shape(stacked, jax.random.split(KEY, n_layers)))) == {
            "conv.weight": P(*lead, M, None, None),
            "conv.bias": P(*lead, M, None),
            "gain": P(*lead, None),
            # dicts are flattened in key order, so the split output of the convolution is the input here: the sizes match
            "mlp.layers.0.weight": P(*lead, None, M),
            "mlp.layers.0.bias": P(*lead, None),
            "mlp.layers.1.weight": P(*lead, M, None),
            "mlp.layers.1.bias": P(*lead, M),
            "norm.weight": P(*lead, None),
            "norm.bias": P(*lead, None),
        }


# --- rule 2: attention --------------------------------------------------------------------------------------------------


def attention_specs(query, key, value, output, names=("query", "key", "value", "output")):
    return dict(zip((f"{name}.weight" for name in names), (query, key, value, output), strict=True))


def test_multihead_attention():
    plan = plan_of(shapes(eqx.nn.MultiheadAttention, 4, D, use_query_bias=True, use_output_bias=True))
    assert specs(plan) == {
        "query_proj.weight": COLUMN,
        "query_proj.bias": P(M),
        "key_proj.weight": COLUMN,
        "value_proj.weight": COLUMN,
        "output_proj.weight": ROW,
        "output_proj.bias": P(None),
    }
    assert plan["query_proj.weight"].reason == "attention: query by heads, 4 heads over 4 shards"


class Attention(eqx.Module):
    """Attention whose roles cannot be inferred from the names or the order of its fields."""

    mix: eqx.nn.Linear
    c: eqx.nn.Linear
    b: eqx.nn.Linear
    a: eqx.nn.Linear
    extra: eqx.nn.MLP
    n_heads: int
    n_kv_heads: int

    def __init__(self, n_heads, n_kv_heads, size=4, d=D):
        self.a = linear(d, n_heads * size, use_bias=False)
        self.b = linear(d, n_kv_heads * size, use_bias=False)
        self.c = linear(d, n_kv_heads * size, use_bias=False)
        self.mix = linear(n_heads * size, d, use_bias=False)
        self.extra = shapes(eqx.nn.MLP, 8, 8, 32, depth=1, use_bias=False, use_final_bias=False)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads


class RegisteredAttention(Attention):
    pass


register_attention(RegisteredAttention, query="a", key="b", value="c", output="mix")
FIELDS = ("a", "b", "c", "mix")
EXTRA_SPECS = {"extra.layers.0.weight": COLUMN, "extra.layers.1.weight": ROW}


@pytest.mark.parametrize(
    "n_heads, n_kv_heads, expected",
    [
        (8, 8, (COLUMN, COLUMN, COLUMN, ROW)),
        (8, 4, (COLUMN, COLUMN, COLUMN, ROW)),
        (8, 2, (COLUMN, REPLICATED, REPLICATED, ROW)),  # fewer key/value heads than shards, though their features divide
        (6, 6, (ROW, ROW, ROW, COLUMN)),  # 24 features divide over 4 shards, 6 heads do not
    ],
)
def test_registered_attention(n_heads, n_kv_heads, expected):
    plan = plan_of({"layer": RegisteredAttention(n_heads, n_kv_heads)})
    expected_specs = {**attention_specs(*expected, names=FIELDS), **EXTRA_SPECS}
    assert specs(plan) == {f"layer.{name}": spec for name, spec in expected_specs.items()}
    assert "recognised by" not in "".join(reasons(plan).values())


def test_subclass_of_a_registered_attention_is_attention():
    class Sub(RegisteredAttention):
        pass

    assert specs(plan_of(Sub(8, 8))) == {**attention_specs(COLUMN, COLUMN, COLUMN, ROW, names=FIELDS), **EXTRA_SPECS}
    # The numbers of heads decide, not the sizes of the layers.
    assert specs(plan_of(Sub(8, 2))) == {**attention_specs(COLUMN, REPLICATED, REPLICATED, ROW, names=FIELDS), **EXTRA_SPECS}
    assert specs(plan_of(Sub(6, 6))) == {**attention_specs(ROW, ROW, ROW, COLUMN, names=FIELDS), **EXTRA_SPECS}


def test_heads_given_as_a_function_of_the_module():
    class WithConfig(Attention):
        pass

    register_attention(
        WithConfig,
        query="a",
        key="b",
        value="c",
        output="mix",
        heads=lambda module: module.n_heads // 2,
        kv_heads="n_kv_heads",
    )
    assert specs(plan_of(WithConfig(8, 2)))["b.weight"] == REPLICATED
    assert specs(plan_of(WithConfig(4, 4)))["a.weight"] == ROW  # 4 // 2 heads over 4 shards


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj", "o_proj"), ("wq", "wk", "wv", "wo"), ("q", "k", "v", "proj")]
)
def test_attention_recognised_by_field_names_is_noted_in_the_reason(names):
    fields = {**dict.fromkeys(names, eqx.nn.Linear), "num_heads": int}
    cls = type("Unregistered", (eqx.Module,), {"__annotations__": fields})
    model = [cls(*[linear(D, D, use_bias=False)] * 3, linear(D, D, use_bias=False), 8)]
    plan = plan_of(model)
    assert specs(plan) == {
        f"0.{name}": spec for name, spec in attention_specs(COLUMN, COLUMN, COLUMN, ROW, names=names).items()
    }
    note = "; recognised by the names of its fields, register Unregistered to be sure"
    assert all(reason.endswith(note) for reason in reasons(plan).values())
    assert "8 heads over 4 shards" in plan[f"0.{names[0]}.weight"].reason
    headless = type("Unregistered", (eqx.Module,), {"__annotations__": dict.fromkeys(names, eqx.nn.Linear)})
    assert "(number of heads unknown)" in plan_of(headless(*[linear(D, D)] * 4))[f"{names[0]}.weight"].reason


def test_four_linears_with_other_names_are_not_attention():
    model = Attention(8, 8)
    assert "attention" not in "".join(reasons(plan_of(model)).values())


def test_activations_after_attention_are_replicated():
    model = [shapes(eqx.nn.MultiheadAttention, 4, D), linear(D, 64), linear(64, D), linear(D, 64)]
    assert [specs(plan_of(model))[f"{i}.weight"] for i in (1, 2, 3)] == [COLUMN, ROW, COLUMN]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"cls": dict},
            TypeError,
            "`cls`: expected a subclass of eqx.Module, got <class 'dict'>. Register the class, not an instance.",
        ),
        ({"query": "aa"}, ValueError, "`query`: expected a field of Attention, got 'aa'."),
        ({"output": "mixx"}, ValueError, "`output`: expected a field of Attention, got 'mixx'. Did you mean `mix`?"),
    ],
)
def test_register_attention_errors(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        register_attention(**{"cls": Attention, "query": "a", "key": "b", "value": "c", "output": "mix", **arguments})


def test_registered_field_must_hold_a_linear():
    class Wrong(Attention):
        pass

    register_attention(Wrong, query="a", key="b", value="c", output="extra")
    with pytest.raises(
        TypeError, match=r"`layer\.extra`: expected an eqx\.nn\.Linear, as registered for Wrong, got MLP\. Reg"
    ):
        plan_of({"layer": Wrong(4, 4)})


# --- complete models ----------------------------------------------------------------------------------------------------

GPT2_CONFIG = GPT2Config(vocab_size=64, n_positions=16, d_model=64, n_layers=2, n_heads=4)


def gpt2_specs(block, *lead):
    """The expected specs of a block, with the block's name as prefix."""
    column, row = P(*lead, M, None), P(*lead, None, M)
    table = {"attention_norm.weight": P(*lead, None), "attention_norm.bias": P(*lead, None)}
    for name in ("attention.query", "attention.key", "attention.value"):
        table |= {f"{name}.weight": column, f"{name}.bias": P(*lead, M)}
    table |= {"attention.output.weight": row, "attention.output.bias": P(*lead, None)}
    table |= {"mlp_norm.weight": P(*lead, None), "mlp_norm.bias": P(*lead, None)}
    table |= {"mlp.up.weight": column, "mlp.up.bias": P(*lead, M)}
    table |= {"mlp.down.weight": row, "mlp.down.bias": P(*lead, None)}
    return {f"{block}.{name}": spec for name, spec in table.items()}


NON_BLOCK_SPECS = {"embedding.weight": COLUMN, "positions": REPLICATED, "norm.weight": P(None), "norm.bias": P(None)}


def test_gpt2_stacked():
    assert specs(plan_of(shapes(GPT2, GPT2_CONFIG))) == {**NON_BLOCK_SPECS, **gpt2_specs("stack.blocks", None)}


def test_gpt2_unstacked():
    def make(key):
        model = GPT2(GPT2_CONFIG, key=key)
        return eqx.tree_at(lambda m: m.stack.blocks, model, model.stack.unstack())

    plan = plan_of(eqx.filter_eval_shape(make, KEY))
    assert specs(plan) == {**NON_BLOCK_SPECS, **gpt2_specs("stack.blocks.0"), **gpt2_specs("stack.blocks.1")}
    # Blocks that differ only in their index share a row.
    rows = {row[0]: row[1:] for row in plan.rows()}
    assert rows["stack.blocks.*.mlp.down.weight  (2x)"] == (
        "64 x 256",
        "·, model",
        "row: its input arrives split by `stack.blocks.*.mlp.up`",
    )
    assert len(rows) == len(NON_BLOCK_SPECS) + len(gpt2_specs("block"))


@pytest.mark.parametrize("n_model_shards, n_fsdp_shards", [(1, 8), (2, 2)])
def test_gpt2_with_fsdp(n_model_shards, n_fsdp_shards):
    plan = plan_of(shapes(GPT2, GPT2_CONFIG), n_model_shards, n_fsdp_shards)
    column, row = P(None, M, F), P(None, F, M)  # never the stacked dim, and never the dim of the model axis
    split = {"stack.blocks.mlp.up.weight": column, "stack.blocks.mlp.down.weight": row, "embedding.weight": P(M, F)}
    split |= {f"stack.blocks.attention.{name}.weight": column for name in ("query", "key", "value")}
    split |= {"stack.blocks.attention.output.weight": row}
    assert specs(plan) == {**NON_BLOCK_SPECS, **gpt2_specs("stack.blocks", None), **split}
    assert plan["stack.blocks.mlp.up.weight"].reason.endswith("; fsdp on dim 2")
    assert plan.spec_in_use("stack.blocks.mlp.up.weight") == P(None, M, None)


# --- tied and other leaves ----------------------------------------------------------------------------------------------


class Tied(eqx.Module):
    embedding: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __init__(self, *, key):
        self.embedding = eqx.nn.Embedding(64, D, key=key)
        self.head = eqx.nn.Linear(D, 64, key=key)


def test_head_tied_to_the_embedding_by_eqx_shared():
    model = eqx.nn.Shared(zeros(shapes(Tied)), lambda m: m.head.weight, lambda m: m.embedding.weight)
    plan = plan_of(model)
    assert specs(plan) == {"pytree.embedding.weight": COLUMN, "pytree.head.bias": P(M)}
    assert plan.warnings == ()


def test_array_at_two_leaves_gets_one_split():
    """Only training can let them drift apart, and the Trainer warns of that: a plan does not know what is trained."""
    model = zeros(shapes(Tied))
    plan = plan_of(eqx.tree_at(lambda m: m.head.weight, model, model.embedding.weight))
    assert specs(plan) == {"embedding.weight": COLUMN, "head.weight": COLUMN, "head.bias": P(M)}
    assert plan["head.weight"].reason == "tied: the same array as `embedding.weight`"
    assert plan.warnings == ()


def test_raw_array_tied_to_a_layer_has_the_layer_split():
    head = zeros(linear(D, 64, use_bias=False))
    plan = plan_of({"a_table": head.weight, "head": head})
    assert specs(plan) == {"a_table": COLUMN, "head.weight": COLUMN}
    assert plan["a_table"].reason == "tied: the same array as `head.weight`"


def test_embedding_with_indivisible_rows_is_replicated():
    plan = plan_of(shapes(eqx.nn.Embedding, 50257, D))
    assert specs(plan) == {"weight": REPLICATED}
    assert plan["weight"].reason == "replicated: 50257 rows do not divide over 4 shards; a table padded to 50260 rows would"


def test_norms_and_unknown_leaves_are_replicated():
    model = {
        "layer_norm": eqx.nn.LayerNorm((4, 8)),
        "rms_norm": eqx.nn.RMSNorm(8),
        "group_norm": eqx.nn.GroupNorm(2, 8),
        "batch_norm": eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")[0],
        "cell": shapes(eqx.nn.GRUCell, 8, 8, use_bias=False),
        "raw": jnp.zeros((8, 8)),
        "table": np.zeros((8, 8), np.int32),
        "scalar": jnp.zeros(()),
        "keys": jax.random.split(KEY, 8),
        "rate": 0.1,
        "activation": jnp.tanh,
    }
    plan = plan_of(model)
    assert all(axis is None for spec in specs(plan).values() for axis in spec)
    norms = {name for name, reason in reasons(plan).items() if reason == "replicated: normalisation"}
    assert norms == {f"{n}_norm.{p}" for n in ("layer", "rms", "group", "batch") for p in ("weight", "bias")}
    others = {name: leaf for name, leaf in plan.leaves.items() if name not in norms}
    assert others.keys() == {"cell.weight_ih", "cell.weight_hh", "raw", "table", "scalar", "keys"}
    assert {leaf.reason for leaf in others.values()} == {"replicated: no known layer"}
    assert plan["keys"].n_bytes == 8 * 8 and plan["table"].n_bytes == 256 and plan["scalar"].n_bytes == 4


def test_shapes_and_arrays_give_the_same_plan():
    model = shapes(eqx.nn.MLP, 8, 8, 32, depth=2)
    assert plan_of(model).leaves == plan_of(zeros(model)).leaves


# --- the fsdp axis ------------------------------------------------------------------------------------------------------

BIG = 64 * 64  # the smallest leaf that the fsdp axis splits


@pytest.mark.parametrize(
    "n_model_shards, shape, spec, note",
    [
        (1, (BIG // 16, 16), P(F, None), "; fsdp on dim 0"),
        (1, (16, BIG // 16), P(None, F), "; fsdp on dim 1"),
        (2, (64, 64), P(F, None), "; fsdp on dim 0"),  # the first of the equal dims
        (2, (64, 63), REPLICATED, ""),  # too small
        (1, (4, 1100), P(None, None), "; no free dim for 8 fsdp shards"),
        (1, (12, 3, 800), P(None, None, F), "; fsdp on dim 2"),
        (1, (BIG,), P(F), "; fsdp on dim 0"),
    ],
)
def test_fsdp_splits_the_largest_dim_that_divides(n_model_shards, shape, spec, note):
    plan = plan_of([jax.ShapeDtypeStruct(shape, jnp.float32)], n_model_shards, 8 // n_model_shards)
    assert specs(plan) == {"0": spec} and plan["0"].reason == "replicated: no known layer" + note


def test_fsdp_uses_dims_that_the_model_axis_leaves_free():
    model = [linear(64, 512), linear(512, 64), linear(3, 4096), shapes(eqx.nn.Conv2d, 5, 4096, 3, use_bias=False)]
    assert specs(plan_of(model, 2, 2)) == {
        "0.weight": P(M, F),
        "0.bias": P(M),
        "1.weight": P(F, M),
        "1.bias": P(None),
        "2.weight": P((M, F), None),  # 3 inputs do not divide, so both axes are on the outputs
        "2.bias": P((M, F)),
        "3.weight": P((M, F), None, None, None),
    }
    plan = plan_of(model, 2, 2)
    assert plan["2.weight"].n_shards == 4 and plan["2.weight"].reason.endswith("; fsdp on dim 0")
    assert plan.spec_in_use("2.weight") == P(M, None)
    assert {row[0]: row[2] for row in plan.rows()}["2.weight"] == "model+fsdp, ·"


def test_both_axes_share_a_dim_only_if_their_product_divides_it():
    plan = plan_of([linear(3, 4098), linear(3, 4100)], 2, 2)
    assert specs(plan) == {
        "0.weight": P(M, None),  # 4098 = 2 x 2049
        "0.bias": P(M),
        "1.weight": P((M, F), None),
        "1.bias": P((M, F)),
    }
    assert plan["0.weight"].reason.endswith("; no free dim for 2 fsdp shards") and plan["0.weight"].n_shards == 2


def test_fsdp_never_splits_stacked_dims():
    model = {
        "mlp": eqx.filter_eval_shape(
            eqx.filter_vmap(lambda key: eqx.nn.MLP(8, 8, 64, 1, key=key)), jax.random.split(KEY, 64)
        )
    }
    model["mlp"] = eqx.tree_at(lambda m: m.activation, model["mlp"], jax.ShapeDtypeStruct((64, 9, 9), jnp.float32))
    plan = plan_of(model, 1, 8)
    assert specs(plan) == {
        "mlp.layers.0.weight": P(None, M, F),
        "mlp.layers.0.bias": P(None, (M, F)),
        "mlp.layers.1.weight": P(None, F, M),
        "mlp.layers.1.bias": P(None, None),
        "mlp.activation": P(None, None, None),  # not in a known layer: stacked like the layers beside it
    }
    assert plan["mlp.activation"].reason.endswith("; no free dim for 8 fsdp shards")


def test_an_array_beside_layers_of_different_stacks_is_stacked_like_the_least_stacked():
    def block(key):
        experts = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jax.random.split(key, 4))
        return {"experts": experts, "out": eqx.nn.Linear(16, 16, key=key), "router": jnp.zeros((512, 9))}

    model = {"blocks": eqx.filter_eval_shape(eqx.filter_vmap(block), jax.random.split(KEY, 8))}
    assert plan_of(model, 1, 8)["blocks.router"].spec == P(None, F, None)  # blocks are stacked once, experts twice


# --- overrides ----------------------------------------------------------------------------------------------------------


def two_layers():
    return {"up": linear(8, 32), "down": linear(32, 8)}


def test_overrides():
    overrides = {"up.weight": (None, "model"), "*.weight": P(("data", "model")), "down.bias": None, "up.*": ["data"]}
    plan = plan_of(two_layers(), overrides=overrides)
    assert specs(plan) == {
        "up.weight": ROW,  # early patterns win
        "down.weight": P(("data", "model"), None),
        "down.bias": P(None),
        "up.bias": P("data"),
    }
    assert plan["up.weight"].reason == "overridden by 'up.weight'"
    assert plan["down.weight"].reason == "overridden by '*.weight'" and plan["down.weight"].n_shards == 8
    assert plan.spec_in_use("down.weight") == P(("data", "model"), None)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"up.wieght": None}, "`overrides['up.wieght']`: expected a path of the model. Did you mean `up.weight`?"),
        ({"*.kernel": None}, "`overrides['*.kernel']`: expected a path of the model."),
        (
            {"up.weight": ("modle",)},
            "`overrides['up.weight']`: expected mesh axes among ('data', 'fsdp', 'sequence', 'model'), got 'modle'. "
            "Did you mean `model`?",
        ),
        (
            {"up.bias": (None, "model")},
            "`overrides['up.bias']`: expected at most 1 entries for `up.bias` of shape (32,), got (None, 'model'). "
            "Give one mesh axis or None for each dim.",
        ),
        (
            {"*.weight": (("data", "model"), "model")},
            "`overrides['*.weight']`: expected each mesh axis once, got (('data', 'model'), 'model'). Split one dim by it.",
        ),
        (
            {"down.weight": (("data", "model"), None), "up.weight": ("model", ("data", "model"))},
            "`overrides['up.weight']`: expected each mesh axis once",
        ),
        (
            {"odd.bias": ("model",)},
            "`overrides['odd.bias']`: expected dim 0 of `odd.bias` to divide over 4 shards, got (6,). "
            "Choose another dim, or None.",
        ),
    ],
)
def test_overrides_errors(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_of({**two_layers(), "odd": linear(5, 6)}, overrides=overrides)


# --- reports of a plan ----------------------------------------------------------------------------------------------------


def test_large_replicated_leaf_gives_a_warning():
    model = {"table": jax.ShapeDtypeStruct((1030, 1025), jnp.float32), "small": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    reason = "replicated: no known layer"
    assert plan_of(model).warnings == (
        f"`table`: (1030, 1025), 4.03 MiB, is replicated on every device ({reason}). "
        "Split it with `overrides={'table': ...}`.",
    )
    assert plan_of(model, n_model_shards=1).warnings == ()  # no axis splits anything
    assert plan_of(model, overrides={"table": None}).warnings == ()  # requested by the override
    assert plan_of(model, 1, 2).warnings == ()  # split by fsdp
    model["rest"] = jax.ShapeDtypeStruct((2**14, 2**14), jnp.float32)
    assert all("`rest`" in warning for warning in plan_of(model).warnings)  # less than 1 % of the model


def test_explain_table():
    model = {"mlps": [shapes(eqx.nn.MLP, 8, 8, 1024, depth=1, use_final_bias=False) for _ in range(2)]}
    plan = plan_of({**model, "scale": jax.ShapeDtypeStruct((), jnp.float32)}, 2, 2)
    assert plan.explain() == (
        """\
leaf                          shape     split        reason
---------------------------------------------------------------------------------------------------------------------
mlps.*.layers.0.weight  (2x)  1024 x 8  model, fsdp  column: its input arrives replicated; fsdp on dim 1
mlps.*.layers.0.bias  (2x)    1024      model        follows dim 0 of its weight
mlps.*.layers.1.weight  (2x)  8 x 1024  fsdp, model  row: its input arrives split by `mlps.*.layers.0`; fsdp on dim 0
scale                         scalar    ·            replicated: no known layer
mesh data=2 x fsdp=2 x model=2: 34,817 parameters, 136.0 KiB, 36.0 KiB a device"""
    )
    assert str(plan) == plan.explain()
    assert plan.summary() == "7 leaves: 6 split over model, 4 split over fsdp, 1 replicated"
    assert repr(plan) == "Plan(7 leaves: 6 split over model, 4 split over fsdp, 1 replicated)"


def test_summary_counts_leaves_that_only_axes_of_size_1_split_as_replicated():
    model = [shapes(eqx.nn.MLP, 8, 8, 1024, depth=1)]
    assert plan_of(model, 1, 1).summary() == "4 leaves: 4 replicated"  # data parallelism: every device holds all
    assert plan_of(model, 1, 2).summary() == "4 leaves: 2 split over fsdp, 2 replicated"  # biases of 1024 and 8 numbers
    one = plan_of(model, 1, 1).on(make_mesh(1, 1, jax.devices()[:1]))
    assert one.summary() == "4 leaves on one device"


def test_warnings_end_the_explanation():
    plan = plan_of({"table": jax.ShapeDtypeStruct((1024, 1025), jnp.float32)})
    assert plan.explain().splitlines()[-1] == f"warning: {plan.warnings[0]}"


def test_bytes():
    model = {"up": linear(64, 256, dtype=jnp.bfloat16), "norm": eqx.nn.LayerNorm(10)}
    plan = plan_of(model, 2, 2)
    assert plan["up.weight"].n_bytes == 2 * 64 * 256
    assert plan.n_parameters == 64 * 256 + 256 + 20
    assert plan.n_bytes == 2 * (64 * 256 + 256) + 4 * 20
    assert plan.n_bytes_per_device == 2 * (64 * 256 // 4 + 256 // 2) + 4 * 20


def test_unknown_leaf_error():
    with pytest.raises(KeyError, match=r"`up\.wieght`: expected a leaf of the plan\. Did you mean `up\.weight`\?"):
        plan_of(two_layers())["up.wieght"]


def test_leaves_unread_by_the_loss_are_marked():
    model = {"used": linear(8, 8, use_bias=False), "unused": linear(8, 8, use_bias=False), "n": jnp.zeros(3)}
    plan = plan_of(model)
    assert plan["used.weight"].is_read is None

    def loss(model, batch, scale):
        return jnp.sum(jax.vmap(model["used"])(batch["x"])) * scale

    marked = mark_read(plan, Trace.of(loss, model, {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}, 2.0))
    assert {name: leaf.is_read for name, leaf in marked.leaves.items()} == {
        "used.weight": True,
        "unused.weight": False,
        "n": False,
    }
    assert marked["unused.weight"].reason == "row: its input arrives split by `used`; the loss does not read it" or (
        marked["unused.weight"].reason == "column: its input arrives replicated; the loss does not read it"
    )
    assert marked["used.weight"].reason == plan["used.weight"].reason and specs(marked) == specs(plan)


# --- models placed by a plan ----------------------------------------------------------------------------------------------


def test_place_copies_the_arrays_of_the_caller():
    """A step that donates its arguments must never delete the caller's arrays."""
    model = {
        "mlp": eqx.nn.MLP(8, 8, 32, depth=1, key=KEY),
        "table": np.arange(8.0, dtype=np.float32),
        "keys": jax.random.split(KEY, 8),
        "same": jax.device_put(jnp.arange(8.0), jax.devices()[0]),
    }
    arrays = named_leaves(eqx.filter(model, is_array_like))
    for n_model_shards, n_fsdp_shards in [(4, 1), (1, 8)]:
        plan = plan_of(model, n_model_shards, n_fsdp_shards)
        placed = place(model, plan)
        assert placed["mlp"].activation is model["mlp"].activation
        leaves = named_leaves(eqx.filter(placed, is_array_like))
        assert all(isinstance(leaf, jax.Array) and leaf.sharding == plan.sharding(name) for name, leaf in leaves.items())
        jax.jit(lambda leaves: jax.tree.map(lambda x: x, leaves), donate_argnums=0)(leaves)
        assert leaves["mlp.layers.0.weight"].is_deleted()
        assert not any(leaf.is_deleted() for leaf in arrays.values() if isinstance(leaf, jax.Array))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b),
        eqx.filter(place(model, plan)["mlp"], eqx.is_array),
        eqx.filter(model["mlp"], eqx.is_array),
    )


@pytest.mark.parametrize("n_fsdp_shards", [1, 8])
def test_place_copies_the_memory_of_the_caller(n_fsdp_shards):
    memory = np.ones(8 * 2**14 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # JAX keeps NumPy's memory where it is aligned to 64 bytes
    table = memory[start : start + 8 * 2**14].reshape(8, 2**14)
    placed = place({"table": table}, plan_of({"table": table}, 1, n_fsdp_shards))["table"]
    table[:] = 0
    np.testing.assert_array_equal(placed, 1)


def test_place_reuses_arrays_with_the_planned_sharding():
    plan = plan_of(model := {"w": jnp.zeros((8, 8))}, overrides={"w": ("model",)})
    placed = place(model, plan)
    assert place(placed, plan)["w"] is placed["w"]
    assert place(placed, plan_of(model))["w"] is not placed["w"]


OPTIMIZERS = {
    "adam": optax.adamw(1e-3),
    "momentum": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
        lambda params: {
            "up": jax.tree.map(lambda _: "a", params["up"]),
            "down": jax.tree.map(lambda _: "b", params["down"]),
        },
    ),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
}
COPIES = {"adam": 2, "momentum": 1, "multi_transform": None, "adafactor": None, "ema": 3}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_have_the_sharding_of_their_parameters(name):
    params = eqx.filter(two_layers(), is_array_like)
    plan = plan_of(params)
    state = jax.eval_shape(OPTIMIZERS[name].init, params)
    shardings = named_leaves(shardings_like(state, plan))
    leaves = named_leaves(state)
    assert shardings.keys() == leaves.keys()
    placed = {}
    for path, sharding in shardings.items():
        assert len(sharding.shard_shape(leaves[path].shape)) == leaves[path].ndim
        owner = next((p for p in plan.leaves if path.endswith(f".{p}") and plan[p].shape == leaves[path].shape), None)
        assert sharding.spec == (P() if owner is None else plan[owner].spec), path
        placed.setdefault(owner, []).append(path)
    owned = {owner: len(paths) for owner, paths in placed.items() if owner is not None}
    if COPIES[name]:
        assert owned == dict.fromkeys(plan.leaves, COPIES[name])
    elif name == "multi_transform":
        assert owned == {"up.weight": 2, "up.bias": 2, "down.weight": 1, "down.bias": 1}
    else:  # adafactor: a matrix's row and column averages are replicated, a bias's moment is sharded like the bias
        assert owned == {"up.bias": 1, "down.bias": 1} or owned.keys() == plan.leaves.keys()


def test_gradients_have_the_sharding_of_their_parameters():
    plan = plan_of(two_layers())
    shardings = shardings_like(eqx.filter(two_layers(), is_array_like), plan)
    assert shardings["up"].weight == plan.sharding("up.weight")
    # The longest name wins: `up.weight` is not matched as `weight`.
    plan = plan_of({"weight": jax.ShapeDtypeStruct((32, 8), jnp.float32), **two_layers()})
    state = {
        "mu": {
            "weight": jax.ShapeDtypeStruct((32, 8), jnp.float32),
            "up": {"weight": jax.ShapeDtypeStruct((32, 8), jnp.float32)},
        }
    }
    shardings = shardings_like(state, plan)
    assert (shardings["mu"]["weight"].spec, shardings["mu"]["up"]["weight"].spec) == (REPLICATED, plan["up.weight"].spec)


# --- arrays that a subclass of a known layer adds -----------------------------------------------------------------------


def adapted(model, rank=3, where="*"):
    return eqx.filter_eval_shape(lambda model: lora.add(model, rank=rank, where=where, key=KEY), model)


def test_adapter_dims_follow_the_split_of_their_layer():
    plan = plan_of(adapted(shapes(eqx.nn.MLP, 8, 4, 32, depth=1)))
    assert specs(plan) == {
        "layers.0.weight": COLUMN,
        "layers.0.bias": P(M),
        "layers.0.lora_a": REPLICATED,
        "layers.0.lora_b": COLUMN,
        "layers.1.weight": ROW,
        "layers.1.bias": P(None),
        "layers.1.lora_a": ROW,
        "layers.1.lora_b": REPLICATED,
    }
    assert plan["layers.0.lora_b"].reason == "follows dim 0 of its weight"
    assert plan["layers.0.lora_a"].reason == "replicated: does not follow dim 0 of its weight"
    assert plan["layers.1.lora_a"].reason == "follows dim 1 of its weight"
    plan = plan_of(adapted([linear(10, 6)]))
    assert specs(plan) == {"0.weight": REPLICATED, "0.bias": P(None), "0.lora_a": REPLICATED, "0.lora_b": REPLICATED}
    assert plan["0.lora_b"].reason == "replicated: follows its weight, which is replicated"


def test_adapters_of_stacked_and_attention_layers():
    config = GPT2Config(vocab_size=48, n_positions=16, d_model=32, n_layers=2, n_heads=4)
    base = shapes(GPT2, config)
    plain, plan = plan_of(base), plan_of(adapted(base))
    assert {name: leaf for name, leaf in specs(plan).items() if ".lora_" not in name} == specs(plain)  # nothing else changed
    column, row, replicated = P(None, M, None), P(None, None, M), P(None, None, None)
    blocks = "stack.blocks"
    assert {name.removeprefix(f"{blocks}."): leaf for name, leaf in specs(plan).items() if ".lora_" in name} == {
        **{f"attention.{role}.lora_a": replicated for role in ("query", "key", "value")},
        **{f"attention.{role}.lora_b": column for role in ("query", "key", "value")},
        "attention.output.lora_a": row,
        "attention.output.lora_b": replicated,
        "mlp.up.lora_a": replicated,
        "mlp.up.lora_b": column,
        "mlp.down.lora_a": row,
        "mlp.down.lora_b": replicated,
    }
    plan = plan_of(adapted(shapes(eqx.nn.MultiheadAttention, 6, 24)))  # uneven heads: adapters flip like their layers
    assert specs(plan)["query_proj.lora_a"] == ROW and specs(plan)["output_proj.lora_b"] == COLUMN


def test_fsdp_splits_large_adapters():
    plan = plan_of(adapted([linear(512, 1024)], rank=8), 2, 2)
    assert specs(plan)["0.lora_a"] == P(None, F) and specs(plan)["0.lora_b"] == P(M, F)
    assert plan["0.lora_b"].reason == "follows dim 0 of its weight; fsdp on dim 1"


class Scaled(eqx.nn.Linear):
    """A user's layer: a gain for each output, and a table that is not in `follows_weight`."""

    gain: jax.Array | None
    table: jax.Array

    follows_weight: ClassVar = {"gain": (0,)}

    def __init__(self, in_size, out_size, gain, *, key):
        super().__init__(in_size, out_size, key=key)
        self.gain = None if gain is None else jnp.ones(gain)
        self.table = jnp.ones((8, 8))


class Rows(eqx.nn.Embedding):
    scale: jax.Array

    follows_weight: ClassVar = {"scale": (None, 0)}

    def __init__(self, n_rows, size, *, key):
        super().__init__(n_rows, size, key=key)
        self.scale = jnp.ones((2, n_rows))


def test_follows_weight_of_user_layers():
    plan = plan_of({"layer": shapes(Scaled, 8, 16, 16), "none": shapes(Scaled, 8, 16, None), "rows": shapes(Rows, 12, 5)})
    assert specs(plan) == {
        "layer.weight": COLUMN,
        "layer.bias": P(M),
        "layer.gain": P(M),
        "layer.table": REPLICATED,
        "none.weight": COLUMN,
        "none.bias": P(M),
        "none.table": REPLICATED,
        "rows.weight": COLUMN,
        "rows.scale": ROW,
    }
    assert plan["layer.table"].reason == "replicated: no known layer"


def test_follows_weight_size_mismatch_error():
    with pytest.raises(ValueError) as raised:
        plan_of([shapes(Scaled, 8, 16, 12)])
    assert str(raised.value) == (
        "`0.gain`: expected dims that follow (0,) of a weight (16, 8), as `Scaled.follows_weight` says, got (12,). "
        "Correct the shape, or the attribute."
    )
    with pytest.raises(ValueError, match=r"got \(16, 1\)\."):
        plan_of([shapes(Scaled, 8, 16, (16, 1))])
