"""Plans: exact specs, with a loss and without one, overrides, reports, and models and optimizer states placed by a plan."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

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


def next_token(model, ids):
    return jnp.square(jax.vmap(model)(ids)).mean()


def of_rows(model, batch):
    return jnp.square(jax.vmap(jax.vmap(model))(batch)).mean()


def floats(size):
    return jax.ShapeDtypeStruct((64, 16, size), jnp.float32)


def plan_of(model, n_model_shards=4, n_fsdp_shards=1, overrides=None, loss=None, batch=None):
    trace = None if loss is None else Trace.of(loss, model, batch)
    plan = make_plan(model, make_mesh(n_model_shards, n_fsdp_shards), overrides, trace)
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
WITHOUT_LOSS = "stored split, gathered for use: no loss is known"


# --- complete models ----------------------------------------------------------------------------------------------------

GPT2_CONFIG = GPT2Config(vocab_size=64, n_positions=16, d_model=64, n_layers=2, n_heads=4).without_dropout()
IDS = jax.ShapeDtypeStruct((16, 16), jnp.int32)


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
    assert specs(plan_of(shapes(GPT2, GPT2_CONFIG), loss=next_token, batch=IDS)) == {
        **NON_BLOCK_SPECS,
        **gpt2_specs("stack.blocks", None),
    }


def test_gpt2_unstacked():
    def make(key):
        model = GPT2(GPT2_CONFIG, key=key)
        return eqx.tree_at(lambda m: m.stack.blocks, model, model.stack.unstack())

    plan = plan_of(eqx.filter_eval_shape(make, KEY), loss=next_token, batch=IDS)
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
    plan = plan_of(shapes(GPT2, GPT2_CONFIG), n_model_shards, n_fsdp_shards, loss=next_token, batch=IDS)
    column, row = P(None, M, F), P(None, F, M)  # never the stacked dim, and never the dim of the model axis
    split = {"stack.blocks.mlp.up.weight": column, "stack.blocks.mlp.down.weight": row, "embedding.weight": P(M, F)}
    split |= {f"stack.blocks.attention.{name}.weight": column for name in ("query", "key", "value")}
    split |= {"stack.blocks.attention.output.weight": row}
    assert specs(plan) == {**NON_BLOCK_SPECS, **gpt2_specs("stack.blocks", None), **split}
    assert plan["stack.blocks.mlp.up.weight"].reason.endswith("; fsdp on dim 2")
    assert plan.spec_in_use("stack.blocks.mlp.up.weight") == P(None, M, None)


# --- without a loss -----------------------------------------------------------------------------------------------------


def test_leaves_are_stored_split_along_their_largest_dims_until_a_loss_is_known():
    model = {"up": linear(64, 256), "down": linear(256, 64), "conv": shapes(eqx.nn.Conv2d, 6, 96, 3), "raw": jnp.zeros(4096)}
    plan = plan_of(model, 2, 2)
    assert specs(plan) == {
        "up.weight": P(M, F),
        "up.bias": P(None),  # too small
        "down.weight": P(F, M),
        "down.bias": P(None),
        "conv.weight": P(M, F, None, None),
        "conv.bias": P(None, None, None),
        "raw": P((M, F)),
    }
    assert (
        plan["raw"].reason == f"{WITHOUT_LOSS}; fsdp on dim 0" and plan["up.bias"].reason == "replicated: no loss is known"
    )
    assert {plan.spec_in_use(name) for name in ("up.weight", "down.weight")} == {REPLICATED}  # layers compute with all of it
    assert plan.warnings == ()


def test_stacked_dims_are_not_split_without_a_loss():
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(16, 16, 64, 1, key=key))
    plan = plan_of(eqx.filter_eval_shape(stacked, jax.random.split(KEY, 64)), 4)
    assert plan["layers.0.weight"].spec == P(None, M, None) and plan["layers.1.weight"].spec == P(None, None, M)


def test_a_leaf_that_no_axis_divides_says_so():
    plan = plan_of([jax.ShapeDtypeStruct((1023, 641), jnp.float32)], 2)
    assert specs(plan) == {"0": REPLICATED} and plan["0"].reason == "replicated: no dim of 1023 x 641 divides over 2 shards"


# --- tied and other leaves ----------------------------------------------------------------------------------------------


class Tied(eqx.Module):
    embedding: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __init__(self, *, key):
        self.embedding = eqx.nn.Embedding(64, D, key=key)
        self.head = eqx.nn.Linear(D, 64, key=key)

    def __call__(self, ids):
        return jax.vmap(lambda i: self.head(self.embedding(i)))(ids)


def test_head_tied_to_the_embedding_by_eqx_shared():
    model = eqx.nn.Shared(zeros(shapes(Tied)), lambda m: m.head.weight, lambda m: m.embedding.weight)
    plan = plan_of(model, loss=lambda model, ids: next_token(model(), ids), batch=IDS)
    assert specs(plan) == {"pytree.embedding.weight": COLUMN, "pytree.head.bias": P(M)}
    assert plan.warnings == ()


def test_array_at_two_leaves_gets_one_split():
    """Only training can let them drift apart, and the Trainer warns of that: a plan does not know what is trained."""
    model = zeros(shapes(Tied))
    plan = plan_of(eqx.tree_at(lambda m: m.head.weight, model, model.embedding.weight), loss=next_token, batch=IDS)
    assert specs(plan) == {"embedding.weight": COLUMN, "head.weight": COLUMN, "head.bias": P(M)}
    assert plan["head.weight"].reason == "tied: the same array as `embedding.weight`"
    assert plan.warnings == ()


def test_of_leaves_with_one_array_the_one_that_is_followed_decides():
    table = jnp.ones((64, 64))
    model = {"a_table": table, "head": table}
    plan = plan_of(model, loss=lambda m, x: (jnp.linalg.qr(m["a_table"])[0].sum() + x @ m["head"]).sum(), batch=floats(64))
    assert specs(plan) == {"a_table": P(None, M), "head": P(None, M)}
    assert plan["a_table"].reason == "tied: the same array as `head`"


def test_an_unread_array_tied_to_a_layer_has_the_layer_split():
    head = zeros(linear(D, 64, use_bias=False))
    plan = plan_of({"a_table": head.weight, "head": head}, loss=lambda m, x: of_rows(m["head"], x), batch=floats(D))
    assert specs(plan) == {"a_table": COLUMN, "head.weight": COLUMN}
    assert plan["a_table"].reason == "tied: the same array as `head.weight`"


def test_embedding_with_indivisible_rows_is_replicated():
    model = shapes(eqx.nn.Embedding, 50257, D)
    plan = plan_of(model, loss=lambda m, ids: next_token(jax.vmap(m), ids), batch=IDS)
    assert specs(plan) == {"weight": REPLICATED}
    assert plan["weight"].reason == "replicated: 50257 rows do not divide over 4 shards; a table padded to 50260 rows would"


def test_leaves_that_are_no_weights():
    model = {
        "table": np.zeros((8, 8), np.int32),
        "scalar": jnp.zeros(()),
        "keys": jax.random.split(KEY, 8),
        "rate": 0.1,
        "activation": jnp.tanh,
    }
    plan = plan_of(model)
    assert specs(plan) == {"table": REPLICATED, "scalar": P(), "keys": P(None)}
    assert plan["keys"].n_bytes == 8 * 8 and plan["table"].n_bytes == 256 and plan["scalar"].n_bytes == 4


@pytest.mark.parametrize("use", ["unread", "only with other weights"])
def test_large_leaves_that_no_data_meets_are_stored_split(use):
    model = {"used": linear(64, 64, use_bias=False), "other": jnp.zeros((64, 128))}

    def loss(m, x):
        return of_rows(m["used"], x) + (0 if use == "unread" else jnp.square(m["other"]).sum())

    plan = plan_of(model, 2, 2, loss=loss, batch=floats(64))
    assert plan["other"].spec == P(F, M) and plan.spec_in_use("other") == REPLICATED
    assert plan["other"].reason == "stored split, gathered for use: no operation on data splits it; fsdp on dim 0"


def test_shapes_and_arrays_give_the_same_plan():
    model = shapes(eqx.nn.MLP, 8, 8, 32, depth=2)
    assert plan_of(model).leaves == plan_of(zeros(model)).leaves


# --- the fsdp axis ------------------------------------------------------------------------------------------------------

BIG = 64 * 64  # the smallest leaf that the fsdp axis splits


@pytest.mark.parametrize(
    "n_model_shards, shape, spec, note",
    [
        (1, (BIG // 16, 16), P(M, F), "; fsdp on dim 1"),
        (1, (16, BIG // 16), P(F, M), "; fsdp on dim 0"),
        (2, (64, 64), P(M, F), "; fsdp on dim 1"),  # the first of the equal dims
        (1, (4, 1100), P(None, M), "; no free dim for 8 fsdp shards"),
        (1, (12, 3, 800), P(None, None, (M, F)), "; fsdp on dim 2"),
        (1, (BIG,), P((M, F)), "; fsdp on dim 0"),
        (1, (8, 16, 64), P(None, F, M), "; fsdp on dim 1"),
    ],
)
def test_fsdp_splits_the_largest_free_dim_that_divides(n_model_shards, shape, spec, note):
    plan = plan_of([jax.ShapeDtypeStruct(shape, jnp.float32)], n_model_shards, 8 // n_model_shards)
    assert specs(plan) == {"0": spec} and plan["0"].reason == WITHOUT_LOSS + note


def test_fsdp_uses_dims_that_the_model_axis_leaves_free():
    model = [linear(64, 512), linear(512, 64), shapes(eqx.nn.Conv2d, 5, 4096, 3, use_bias=False)]

    def loss(model, batch):
        y = jax.vmap(lambda x: model[1](jnp.tanh(model[0](x))))(batch["x"])
        return jnp.square(y).mean() + jnp.square(jax.vmap(model[2])(batch["image"])).mean()

    batch = {"x": jax.ShapeDtypeStruct((512, 64), jnp.float32), "image": jax.ShapeDtypeStruct((8, 5, 8, 8), jnp.float32)}
    plan = plan_of(model, 2, 2, loss=loss, batch=batch)
    assert specs(plan) == {
        "0.weight": P(M, F),
        "0.bias": P(M),
        "1.weight": P(F, M),
        "1.bias": P(None),
        "2.weight": P((M, F), None, None, None),  # 5 inputs do not divide, so both axes are on the outputs
    }
    assert plan["2.weight"].n_shards == 4 and plan["2.weight"].reason.endswith("; fsdp on dim 0")
    assert plan.spec_in_use("2.weight") == P(M, None, None, None)
    assert {row[0]: row[2] for row in plan.rows()}["2.weight"] == "model+fsdp, ·, ·, ·"


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
        "mlp.layers.1.bias": P(None, None),  # too small
        "mlp.activation": P(None, M, None),  # not in a known layer: stacked like the layers beside it
    }
    assert plan["mlp.activation"].reason.endswith("; no free dim for 8 fsdp shards")


def test_an_array_beside_layers_of_different_stacks_is_stacked_like_the_least_stacked():
    def block(key):
        experts = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jax.random.split(key, 4))
        return {"experts": experts, "out": eqx.nn.Linear(16, 16, key=key), "router": jnp.zeros((512, 9))}

    model = {"blocks": eqx.filter_eval_shape(eqx.filter_vmap(block), jax.random.split(KEY, 8))}
    assert plan_of(model, 1, 8)["blocks.router"].spec == P(None, (M, F), None)  # blocks are stacked once, experts twice


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
        (
            {"up.wieght": None},
            "`overrides['up.wieght']`: expected a path of the model, got none of that name. Did you mean `up.weight`?",
        ),
        (
            {"*.kernel": None},
            "`overrides['*.kernel']`: expected a path of the model, got none of that name. `deployer.plan(model).explain()` "
            "lists them.",
        ),
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
    reason = "replicated: no dim of 1030 x 1025 divides over 4 shards"
    assert plan_of(model).warnings == (
        f"`table`: (1030, 1025), 4.03 MiB, is replicated on every device ({reason}). "
        "Split it with `overrides={'table': ...}`.",
    )
    assert plan_of(model, n_model_shards=1).warnings == ()  # no axis splits anything
    assert plan_of(model, overrides={"table": None}).warnings == ()  # requested by the override
    assert plan_of(model, 1, 2).warnings == ()  # split by fsdp
    model["rest"] = jax.ShapeDtypeStruct((2**14 + 1, 2**14 + 1), jnp.float32)
    assert all("`rest`" in warning for warning in plan_of(model).warnings)  # less than 1 % of the model


def test_explain_table():
    model = {"mlps": [shapes(eqx.nn.MLP, 8, 8, 1024, depth=1, use_final_bias=False) for _ in range(2)]}
    model["scale"] = jax.ShapeDtypeStruct((), jnp.float32)

    def loss(model, batch):
        return sum(of_rows(mlp, batch) for mlp in model["mlps"]) * model["scale"]

    plan = plan_of(model, 2, 2, loss=loss, batch=floats(8))
    assert plan.explain() == (
        """\
leaf                          shape     split        reason
---------------------------------------------------------------------------------------------------------------------
mlps.*.layers.0.weight  (2x)  1024 x 8  model, fsdp  column: its input arrives replicated; fsdp on dim 1
mlps.*.layers.0.bias  (2x)    1024      model        follows: added to a value that is split by `mlps.*.layers.0`
mlps.*.layers.1.weight  (2x)  8 x 1024  fsdp, model  row: its input arrives split by `mlps.*.layers.0`; fsdp on dim 0
scale                         scalar    ·            replicated: no operation on data splits it
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
    plan = plan_of({"table": jax.ShapeDtypeStruct((1026, 1025), jnp.float32)})
    assert plan.explain().splitlines()[-1] == f"warning: {plan.warnings[0]}"


def test_bytes():
    model = {"up": linear(64, 256, dtype=jnp.bfloat16), "norm": eqx.nn.LayerNorm(10)}
    plan = plan_of(model, 2, 2)
    assert plan["up.weight"].n_bytes == 2 * 64 * 256
    assert plan.n_parameters == 64 * 256 + 256 + 20
    assert plan.n_bytes == 2 * (64 * 256 + 256) + 4 * 20
    assert plan.n_bytes_per_device == 2 * (64 * 256 // 4 + 256) + 4 * 20


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
    assert marked["unused.weight"].reason == "replicated: no loss is known; the loss does not read it"
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


# --- adapters -----------------------------------------------------------------------------------------------------------


def adapted(model, rank=3):
    return eqx.filter_eval_shape(lambda model: lora.add(model, rank=rank, where="*", key=KEY), model)


def test_adapter_dims_follow_the_split_of_their_layer():
    plan = plan_of(adapted(shapes(eqx.nn.MLP, 8, 8, 32, depth=1)), loss=of_rows, batch=floats(8))
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
    plan = plan_of(adapted(linear(10, 6)), loss=of_rows, batch=floats(10))
    assert specs(plan) == {"weight": REPLICATED, "bias": P(None), "lora_a": REPLICATED, "lora_b": REPLICATED}
    assert plan["lora_b"].reason == "replicated: follows its weight, which is replicated"


def test_adapters_of_stacked_and_attention_layers():
    base = shapes(GPT2, GPT2_CONFIG)
    plain, plan = (plan_of(model, loss=next_token, batch=IDS) for model in (base, adapted(base)))
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


def test_fsdp_splits_large_adapters():
    plan = plan_of(adapted(linear(512, 1024), rank=8), 2, 2, loss=of_rows, batch=floats(512))
    assert specs(plan)["lora_a"] == P(None, F) and specs(plan)["lora_b"] == P(M, F)
    assert plan["lora_b"].reason == "follows dim 0 of its weight; fsdp on dim 1"
