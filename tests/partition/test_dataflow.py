"""Plans from a traced loss: the exact splits of every structure, their reasons, and equal training results."""

import cProfile
from collections import Counter
from functools import cache

import _structures
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _structures import STRUCTURES, batched, of_shapes
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx._tree import is_array_like, named_leaves
from redeqx.compiled import Module, collectives
from redeqx.models.bert import BertConfig, BertForMaskedLM
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.nn import Stack
from redeqx.partition import order
from redeqx.tracing import Trace

D, F, SEQ = _structures.D, _structures.F, _structures.SEQ


def splits_of(model, loss, *args, n=4):
    return order(Trace.of(loss, model, *args), n).splits


def dims(model, loss, *args, n=4):
    return {name: split.dim for name, split in splits_of(model, loss, *args, n=n).items()}


def zeros(*shape):
    return jnp.zeros(shape)


@cache
def splits_of_structure(name, n=4):
    structure = of_shapes(name)
    batch = jax.ShapeDtypeStruct((16, *structure.example.shape), structure.example.dtype)
    found = order(Trace.of(batched(structure.loss), structure.model, batch), n)
    assert found.errors == {}  # no equation is unsupported
    return found.splits


# --- all structures ---------------------------------------------------------------------------------------------------

BLOCK = {
    "norm.weight": None, "norm.bias": None, "norm2.weight": None, "norm2.bias": None,
    "attention.query_proj.weight": 0, "attention.key_proj.weight": 0, "attention.value_proj.weight": 0,
    "attention.output_proj.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None,
}  # fmt: skip
EXPECTED = {
    "mlp": {
        "layers.0.weight": 0, "layers.0.bias": 0, "layers.1.weight": 1, "layers.1.bias": None,
        "layers.2.weight": 0, "layers.2.bias": 0, "layers.3.weight": 1, "layers.3.bias": None,
    },
    "swiglu_gate_up_down": {"a.weight": 0, "b.weight": 0, "c.weight": 1},
    "swiglu_down_gate_up": {"a.weight": 1, "b.weight": 0, "c.weight": 0},
    "swiglu_gate_down_up": {"a.weight": 0, "b.weight": 1, "c.weight": 0},
    "fused_glu": {"both": 0, "down": 1},
    "reversed_fields": {
        "up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None, "head.weight": 0, "head.bias": 0,
    },
    "transposed_autoencoder": {"weight": 0},
    "square_residual": {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": None},
    "block": BLOCK,
    "parallel_block": {name: dim for name, dim in BLOCK.items() if not name.startswith("norm2")},  # it does not call `norm2`
    "scanned_stack": {name: dim if dim is None else dim + 1 for name, dim in BLOCK.items()},
    "patches_and_blocks": {
        **{f"blocks.{i}.{name}": dim for i in range(2) for name, dim in BLOCK.items()},
        "patches.weight": 1, "patches.bias": None, "positions": None,
    },
    "fused_qkv": {"qkv": 0, "output": 1, "up": 0, "down": 1},
    "fused_qkv_heads_first": {"qkv": 0, "output": 1, "up": 0, "down": 1},
    "einsum_attention": {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0},
    "grouped_query": {"q": 0, "k": 0, "v": 0, "o": 1},
    "odd_heads": {"q": 0, "k": 0, "v": 0, "o": 1},
    "language_model": {"embedding.weight": 0, **{f"block.{name}": dim for name, dim in BLOCK.items()}},
    "mixture_of_experts": {"router": 0, "up": 0, "down": 0},
    "separable_cnn": {
        **{f"blocks.{i}.{j}.weight": (0, 0, 1)[j] for i in range(2) for j in range(3)},
        **{f"blocks.{i}.{j}.bias": (0, 0, None)[j] for i in range(2) for j in range(3)},
        "head.weight": 0, "head.bias": 0,
    },
    "gru": {
        "cell.weight_ih": None, "cell.weight_hh": None, "cell.bias": None, "cell.bias_n": None,
        "head.weight": 0, "head.bias": 0,
    },
    "state_space": {"in_proj": 0, "conv": 0, "bc_proj": 1, "log_a": 0, "skip": 0, "out_proj": 1},
    "low_rank_adapter": {"up": 0, "a": None, "b": 0, "down": 1},
}  # fmt: skip


def test_every_structure_has_expected_splits():
    assert EXPECTED.keys() == STRUCTURES.keys()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", EXPECTED)
def test_splits_of_each_structure(name, n):
    assert {leaf: split.dim for leaf, split in splits_of_structure(name, n).items()} == EXPECTED[name]


def test_reasons_name_the_causing_layer():
    reasons = {name: split.reason for name, split in splits_of_structure("block").items()}
    assert reasons["up.weight"] == "column: its input arrives replicated"
    assert reasons["up.bias"] == "follows: added to a value that is split by `up`"
    assert reasons["down.weight"] == "row: its input arrives split by `up`"
    assert reasons["down.bias"] == "replicated: added to a replicated value"
    assert reasons["norm.weight"] == "replicated: combined elementwise with a replicated value"
    assert splits_of_structure("language_model")["embedding.weight"].reason == "embedding: 384 rows over 4 shards"
    depthwise = splits_of_structure("separable_cnn")["blocks.0.1.weight"].reason
    assert depthwise == "follows: its input arrives split in the same way by `blocks.0.0`"
    assert splits_of_structure("gru")["cell.weight_hh"].reason.startswith("replicated: costs less than any split of it")


def test_blocks_stacked_in_the_loss_have_the_splits_of_unstacked_blocks():
    def unstacked(blocks, x):
        for up, bias, down in blocks:
            x = x + jnp.tanh(x @ up + bias) @ down
        return jnp.sum(x)

    def stacked(blocks, x):
        layers = [jnp.stack(leaves) for leaves in zip(*blocks, strict=True)]
        return jnp.sum(jax.lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer[0] + layer[1]) @ layer[2], None), x, layers)[0])

    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    blocks = [(jnp.ones((8, 16)), jnp.ones(16), jnp.ones((16, 8))) for _ in range(3)]
    for loss in (unstacked, stacked):
        plan = deployer.plan(blocks, lambda model, batch, key, loss=loss: loss(model, batch), jnp.ones((4, 8)))
        assert [leaf.spec for leaf in plan.leaves.values()] == [P(None, "model"), P("model"), P("model", None)] * 3


# --- transforms around a loss ---------------------------------------------------------------------------------------------


def mlp(w1, w2, x):
    return jnp.tanh(x @ w1) @ w2


@jax.custom_jvp
def with_jvp(w1, w2, x):
    return mlp(w1, w2, x)


with_jvp.defjvps(None, None, None)


@jax.custom_vjp
def with_vjp(w1, w2, x):
    return mlp(w1, w2, x)


with_vjp.defvjp(lambda *args: (mlp(*args), args), lambda args, g: jax.vjp(mlp, *args)[1](g))

WRAPPED = {
    "plain": mlp,
    "jit": jax.jit(mlp),
    "remat": jax.checkpoint(mlp),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "vmap": lambda w1, w2, x: jax.vmap(mlp, (None, None, 0))(w1, w2, x[:, None])[:, 0],
    "cond": lambda w1, w2, x: jax.lax.cond(x.sum() > 0, mlp, lambda w1, w2, x: 2 * mlp(w1, w2, x), w1, w2, x),
    "while": lambda w1, w2, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, mlp(w1, w2, c[1])), (0, x))[1],
    "scan over constants": lambda w1, w2, x: jax.lax.scan(lambda x, _: (mlp(w1, w2, x), None), x, length=3)[0],
    "scan over slices": lambda w1, w2, x: jax.lax.scan(lambda _, x: (None, mlp(w1, w2, x)), None, x)[1],
    "fori_loop": lambda w1, w2, x: jax.lax.fori_loop(0, 3, lambda _, x: mlp(w1, w2, x), x),
    "einsum": lambda w1, w2, x: jnp.einsum("fd,bf->bd", w2, jnp.tanh(jnp.einsum("df,bd->bf", w1, x))),
    "scaled weights": lambda w1, w2, x: mlp(2 * w1.astype(jnp.float32) ** 2, jnp.tril(w2) * w2.std(), x),
    "stop_gradient": lambda w1, w2, x: mlp(w1, w2, jax.lax.stop_gradient(x)),
    "barrier": lambda w1, w2, x: mlp(*jax.lax.optimization_barrier((w1, w2, x))),
    "grad inside": lambda w1, w2, x: jax.grad(lambda x: jnp.square(mlp(w1, w2, x)).sum())(x),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_transforms_do_not_change_the_splits(name):
    model = {"w1": zeros(D, F), "w2": zeros(F, D)}

    def loss(model, x):
        return jnp.square(WRAPPED[name](model["w1"], model["w2"], x)).sum()

    assert dims(model, loss, zeros(8, D)) == {"w1": 1, "w2": 0}


def test_scanned_and_indexed_stacks_have_the_same_splits():
    model = {"w1": zeros(3, D, F), "w2": zeros(3, F, D)}

    def scanned(model, x):
        return jax.lax.scan(lambda x, w: (x + mlp(w["w1"], w["w2"], x), None), x, model)[0].sum()

    def indexed(model, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x + mlp(model["w1"][i], model["w2"][i], x), x).sum()

    for loss in (scanned, indexed):
        assert dims(model, loss, zeros(8, D)) == {"w1": 2, "w2": 1}
    assert order(Trace.of(scanned, model, zeros(8, D)), 4).stacked == {"w1": 1, "w2": 1}


@pytest.mark.parametrize(
    "activation", [jax.nn.relu, jax.custom_jvp(lambda x: jnp.maximum(x, 0)), jax.checkpoint(jax.nn.silu)]
)
def test_a_gated_layer_after_a_projection_is_split_alike_whatever_call_its_activation_is(activation):
    if isinstance(activation, jax.custom_jvp):
        activation.defjvp(lambda primals, tangents: (activation(*primals), tangents[0] * (primals[0] > 0)))

    def loss(model, batch):
        x = batch @ model["in"]
        return ((activation(x @ model["gate"]) * (x @ model["up"])) @ model["down"]).sum()

    model = {"in": zeros(32, 64), "gate": zeros(64, 256), "up": zeros(64, 256), "down": zeros(256, 64)}
    assert dims(model, loss, zeros(128, 32), n=2) == {"in": 0, "gate": 1, "up": 1, "down": 0}


def test_loop_cost_is_multiplied_by_the_trip_count():
    """Twelve iterations cost the same in one loop and in two nested loops."""
    model = {"w1": zeros(D, F), "w2": zeros(F, D)}

    def cost(*lengths):
        def loss(model, x):
            def times(step, length):
                return lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=length)[0]

            step = lambda x: x + mlp(model["w1"], model["w2"], x)  # noqa: E731
            for length in lengths:
                step = times(step, length)
            return step(x).sum()

        return order(Trace.of(loss, model, zeros(8, D)), 4).cost

    assert cost(12) == cost(3, 4) == cost(2, 3, 2) == 12 * cost(1) > 0


def test_weights_that_read_a_loop_carry():
    """The carry is replicated before and after each iteration, so each iteration starts with a column split."""
    model = {"w1": zeros(D, F), "w2": zeros(F, D)}

    def loss(model, x):
        def body(carry, _):
            x, y = carry
            return (y, mlp(model["w1"], model["w2"], x)), None

        return sum(out.sum() for out in jax.lax.scan(body, (x, x), length=4)[0])

    assert dims(model, loss, zeros(8, D)) == {"w1": 1, "w2": 0}


def test_layer_state_is_treated_as_data():
    model, state = eqx.nn.make_with_state(
        lambda key: eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(4, 32, 3, key=key),
                eqx.nn.BatchNorm(32, "batch", mode="ema"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(32, 8, 3, key=key),
            ]
        )
    )(jax.random.key(0))

    def loss(model, state, x):
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0].sum()

    assert dims(model, loss, state, zeros(8, 4, 9, 9)) == {
        "layers.0.weight": 0, "layers.0.bias": 0, "layers.1.weight": 0, "layers.1.bias": 0,
        "layers.3.weight": 1, "layers.3.bias": None,
    }  # fmt: skip


# --- dims that do not divide, unsupported primitives -------------------------------------------------------------------


def test_indivisible_dim_falls_back_to_the_other_dim_or_to_replication():
    model = {"up": zeros(F, D), "head": zeros(D, 10), "odd": zeros(10, 3)}

    def loss(model, x):
        return (jax.nn.relu(x @ model["up"]) @ model["head"] @ model["odd"]).sum()

    splits = splits_of(model, loss, zeros(8, F))
    assert (splits["up"].dim, splits["head"].dim, splits["odd"].dim) == (1, 0, None)
    assert splits["odd"].reason == "replicated: no dim of 10 x 3 divides over 4 shards"
    splits = splits_of({"head": zeros(D, 10)}, lambda model, x: (x @ model["head"]).sum(), zeros(8, D))
    assert splits["head"].reason == "row: 10 outputs do not divide over 4 shards, its inputs do"


@pytest.mark.parametrize(("groups", "expected"), [(8, 0), (4, 0), (2, None), (6, None)])
def test_convolution_groups_are_never_divided_between_shards(groups, expected):
    """Over 4 shards. The 24 channels divide evenly; the groups must do so too."""
    model = {"up": zeros(D, 24), "kernel": zeros(24, 24 // groups, 3), "down": zeros(24, D)}

    def loss(model, x):
        x = jnp.einsum("btd,dc->bct", x, model["up"])
        x = jax.lax.conv_general_dilated(x, model["kernel"], (1,), "SAME", feature_group_count=groups)
        return jnp.einsum("bct,cd->btd", x, model["down"]).sum()

    # The convolution's output is split if its groups are, and replicated otherwise.
    assert dims(model, loss, zeros(8, 9, D)) == {"up": 1, "kernel": expected, "down": 1 if expected is None else 0}


def test_stacked_scan_outputs_are_not_split_along_the_iteration_dim():
    """A matmul after the scan reads the hidden values of all layers: [layers, rows, features]."""
    model = {"up": zeros(4, D, F), "head": zeros(F, D)}

    def loss(model, x):
        _, hidden = jax.lax.scan(lambda x, up: (x, jax.nn.relu(x @ up)), x, model["up"])
        return (hidden @ model["head"]).sum()

    assert dims(model, loss, zeros(8, D)) == {"up": 2, "head": 0}


def cumulative(name):
    return lambda y, dim: getattr(jax.lax, name)(y, axis=dim % y.ndim)


ALONG = {
    **{name: cumulative(name) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "sort": jnp.sort,
    "sort of several": lambda y, dim: jax.lax.sort((y, 2 * y), dim, num_keys=1)[1],
}


@pytest.mark.parametrize("name", ALONG)
def test_cumulative_operations_gather_a_value_that_is_split_along_their_dim(name):
    """Its later entries need the earlier ones of other devices. Along another dim the split stays."""
    model = {"up": zeros(D, F), "down": zeros(F, D)}

    def order_of(dim):
        loss = lambda model, x: (ALONG[name](x @ model["up"], dim) @ model["down"]).sum()  # noqa: E731
        return order(Trace.of(loss, model, jax.ShapeDtypeStruct((16, D), jnp.float32)), 4)

    across, along = order_of(0), order_of(-1)
    assert {name: split.dim for name, split in across.splits.items()} == {"up": 1, "down": 0}
    assert {name: split.dim for name, split in along.splits.items()} == {"up": 1, "down": 1}
    assert along.splits["down"].reason == "column: its input arrives replicated"
    assert along.cost > across.cost


def test_embedding_with_indivisible_rows_is_replicated():
    splits = splits_of({"table": zeros(50257, D)}, lambda model, ids: model["table"][ids].sum(), jnp.zeros((8, 4), int))
    assert splits["table"].dim is None
    assert splits["table"].reason == "replicated: 50257 rows do not divide over 4 shards; a table padded to 50260 rows would"


def test_position_tables_follow_the_value_they_are_added_to():
    """A lookup whose indices do not depend on data, as in T5's per-head biases, returns a view of the parameter."""
    model = {"q": zeros(D, 8, 4), "table": zeros(32, 8), "positions": zeros(SEQ, D)}
    buckets = np.abs(np.arange(SEQ)[:, None] - np.arange(SEQ)) // 2

    def loss(model, x):
        q = jnp.einsum("btd,dhk->bhtk", x + model["positions"][jnp.arange(SEQ)], model["q"])
        return (jnp.einsum("bhtk,bhsk->bhts", q, q) + model["table"][buckets].transpose(2, 0, 1)).sum()

    assert dims(model, loss, zeros(4, SEQ, D)) == {"q": 1, "table": 1, "positions": None}


@pytest.mark.parametrize(
    ("compute", "primitive"),
    [
        (lambda w, x: jnp.linalg.cholesky(x @ x.T + w), "cholesky"),
        (lambda w, x: jax.pure_callback(lambda w, x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), w, x), "pure_callback"),
        (lambda w, x: jax.scipy.linalg.solve_triangular(w, x), "triangular_solve"),
    ],
)
def test_unsupported_primitives_replicate_their_weights_and_name_the_reason(compute, primitive):
    def loss(model, x):
        hidden = x @ model["up"]
        return jax.lax.stop_gradient(compute(model["w"], hidden)).sum()

    splits = splits_of({"up": zeros(D, D), "w": zeros(D, D)}, loss, zeros(D, D))
    assert splits["up"].dim is not None or splits["up"].reason.startswith("replicated: costs less")
    if primitive != "cholesky":  # its input is a sum of the weight and data
        assert splits["w"].reason == f"replicated: `{primitive}` computes with it, which is not followed"


def test_weights_that_never_meet_data_get_no_split():
    model = {"used": zeros(D, F), "unused": zeros(D, F)}
    assert dims(model, lambda model, x: (x @ model["used"]).sum() + model["unused"].sum(), zeros(8, D)) == {"used": 1}


def test_equal_layers_in_a_list_get_equal_splits():
    model = [eqx.nn.Linear(D, D, key=jax.random.key(0)) for _ in range(6)]

    def loss(model, x):
        for layer in model:
            x = x + jax.vmap(layer)(jax.lax.top_k(x, D)[0])  # `top_k` needs its input replicated
        return x.sum()

    split = dims(model, loss, zeros(8, D))
    assert len({split[f"{i}.weight"] for i in range(6)}) == 1


# --- plans from a trace -------------------------------------------------------------------------------------------------


class ReversedFields(eqx.Module):
    """Two layers of one size, called in reverse field order."""

    second: eqx.nn.Linear
    first: eqx.nn.Linear

    def __init__(self):
        self.first = eqx.nn.Linear(64, 64, use_bias=False, key=jax.random.key(0))
        self.second = eqx.nn.Linear(64, 64, use_bias=False, key=jax.random.key(1))

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def mse_loss(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def test_plan_is_in_the_order_of_calls_and_not_of_fields():
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    plan = deployer.plan(ReversedFields(), mse_loss, jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert plan["first.weight"].spec == P(("model",), ("fsdp",)) and plan["second.weight"].spec == P(("fsdp",), ("model",))
    assert plan["second.weight"].reason == "row: its input arrives split by `first`; fsdp on dim 0"


def test_trainer_plans_with_its_first_batch():
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=ReversedFields(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=mse_loss
    )
    trainer.train(list(np.ones((8, 64), np.float32)), 2)
    assert trainer.plan["first.weight"].spec == P(("model",), None)


def test_llama_with_fewer_key_value_heads_than_shards():
    """Two key/value heads over four shards: each shard reads one of them with half of its queries."""
    config = LlamaConfig(vocab_size=128, n_positions=16, d_model=64, d_mlp=128, n_layers=2, n_heads=8, n_kv_heads=2)
    model = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    plan = deployer.plan(model, lambda model, ids, key: jax.vmap(model)(ids).mean(), ids)
    specs = {name.removeprefix("stack.blocks."): leaf.spec for name, leaf in plan.leaves.items()}
    assert specs["attention.query.weight"] == specs["mlp.gate.weight"] == P(None, ("model",), None)
    assert specs["attention.output.weight"] == specs["mlp.down.weight"] == P(None, None, ("model",))


def test_split_with_a_negligible_saving_is_not_chosen():
    """A row split of BERT's last dense layer has the same counted cost, but XLA would then split the layers before it."""
    config = BertConfig(dropout=0.0, attention_dropout=0.0, n_layers=2)
    model = eqx.filter_eval_shape(BertForMaskedLM, config, key=jax.random.key(0))
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    ids = jax.ShapeDtypeStruct((32, 512), jnp.int32)

    def loss_fn(model, ids, key):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(ids), ids).mean()

    assert deployer.plan(model, loss_fn, ids)["transform.weight"].spec == P(("model",), None)


TRAINED = ["einsum_attention", "fused_qkv", "odd_heads", "grouped_query", "state_space", "separable_cnn"]


@pytest.mark.parametrize(
    "name",
    [name if name == "grouped_query" else pytest.param(name, marks=pytest.mark.sweep) for name in TRAINED],
)
def test_every_plan_trains_to_the_same_parameters(x64, name):
    """Uses float64, so that differences in summation order stay far below the tolerance."""
    structure = STRUCTURES[name](jax.random.key(0))
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, structure.model)
    examples = list(np.random.default_rng(0).normal(size=(16, *structure.example.shape)))
    replicated = {path: None for path, leaf in named_leaves(model).items() if is_array_like(leaf)}
    loss_fn, results = batched(structure.loss), {}
    for kind in ("replicated", "without a loss", "dataflow"):
        deployer = redeqx.Deployer(n_model_shards=4, verbose=False)  # a new one restarts the order of the examples
        traced = (loss_fn, np.stack(examples)) if kind == "dataflow" else (None, None)
        plan = deployer.plan(model, *traced, overrides=replicated if kind == "replicated" else None)
        trainer = redeqx.Trainer(
            deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, plan=plan
        )
        trainer.train(examples, 4)
        results[kind] = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))], plan
    assert any("model" in str(leaf.spec) for leaf in results["dataflow"][1].leaves.values())
    for kind in ("without a loss", "dataflow"):
        for a, b in zip(results["replicated"][0], results[kind][0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


# --- stacks ---------------------------------------------------------------------------------------------------------------


class AttentionBlock(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.norm, self.attention = eqx.nn.RMSNorm(D, use_bias=False), eqx.nn.MultiheadAttention(8, D, key=key)

    def __call__(self, x, key=None):
        y = jax.vmap(self.norm)(x)
        return x + self.attention(y, y, y)


class OwnStack(eqx.Module):
    """A stack written without `redeqx.models`, as a user would."""

    blocks: AttentionBlock

    def __init__(self, n_layers, key):
        self.blocks = eqx.filter_vmap(AttentionBlock)(jax.random.split(key, n_layers))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, arrays: (eqx.combine(arrays, static)(x), None), x, arrays)[0]


@pytest.mark.parametrize(
    ("n_model_shards", "n_fsdp_shards"),
    [pytest.param(4, 1, marks=pytest.mark.sweep), pytest.param(1, 8, marks=pytest.mark.sweep), (2, 2)],
)
def test_user_written_scan_has_the_collectives_of_our_stack(n_model_shards, n_fsdp_shards):
    """Compares the kind, size, axes and execution count of each collective, in the forward and in the backward pass."""
    sent = []
    for model in (OwnStack(3, jax.random.key(0)), Stack(AttentionBlock, 3, key=jax.random.key(0))):
        deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False)
        trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=mse_loss)
        compiled = trainer.compile(list(np.zeros((16, SEQ, D), np.float32)), 16 // deployer.n_batch_shards)
        counts = Counter()
        for c in collectives(Module.of(compiled.as_text())):
            counts[c.kind, c.dtype, c.shape, c.bytes, c.axes(deployer.mesh), c.is_backward] += c.n_executions
        sent.append(counts)
    assert sent[0] == sent[1]
    assert {axis for *_, axes, _ in sent[0] for axis in axes} == {a for a, n in deployer.mesh.shape.items() if n > 1}


def test_a_sum_of_many_parameters_takes_linear_time():
    def n_calls(n):
        loss = lambda leaves, x: jnp.mean(x @ sum(leaves))  # noqa: E731
        trace, profile = Trace.of(loss, [zeros(D)] * n, zeros(8, D)), cProfile.Profile()
        profile.runcall(order, trace, 4)
        return sum(entry.callcount for entry in profile.getstats())

    assert n_calls(200) < 5 * n_calls(50)


@pytest.mark.parametrize("write", ["set", "add", "subtract", "multiply", "max", "min"])
def test_values_written_at_a_position_keep_their_split(write):
    """As keys in a cache: each row writes at its own position, so that the update is a scatter."""

    def loss(model, x, positions):
        rows = jax.vmap(lambda row, i: getattr(jnp.zeros((SEQ, F)).at[i], write)(row))(jnp.tanh(x @ model["up"]), positions)
        return ((rows.sum(1) @ model["down"]) ** 2).mean()

    model = {"down": zeros(F, D), "up": zeros(D, F)}
    assert dims(model, loss, zeros(16, D), jnp.zeros(16, jnp.int32)) == {"down": 0, "up": 1}
