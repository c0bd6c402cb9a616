"""Kinds of leaves, from layer types or from a traced loss, and the output and input dims of matrices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _structures import batched, of_shapes

import redeqx
from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.partition import kinds_of
from redeqx.tracing import Trace


def model_and_trace(name):
    structure = of_shapes(name)
    batch = jax.ShapeDtypeStruct((16, *structure.example.shape), structure.example.dtype)
    return structure.model, Trace.of(batched(structure.loss), structure.model, batch)


def kind_strings(kinds, *names):
    """The kind of each leaf as `kind` or `kind:outputs<-inputs`; `names` limits the kinds."""
    dims = {name: f":{''.join(map(str, k.outputs))}<-{''.join(map(str, k.inputs))}" for name, k in kinds.items() if k.inputs}
    return {name: k.name + dims.get(name, "") for name, k in kinds.items() if not names or k.name in names}


ATTENTION = {f"attention.{name}_proj.weight": "matrix:0<-1" for name in ("query", "key", "value", "output")}
BY_LOSS = {
    "reversed_fields": {"head.weight": "head:0<-1", "down.weight": "matrix:0<-1", "up.weight": "matrix:0<-1"},
    "swiglu_down_gate_up": {"a.weight": "head:0<-1", "b.weight": "matrix:0<-1", "c.weight": "matrix:0<-1"},
    "transposed_autoencoder": {"weight": "matrix:0<-1"},
    "parallel_block": ATTENTION
    | {"up.weight": "matrix:0<-1", "down.weight": "head:0<-1", "attention.output_proj.weight": "head:0<-1"},
    "scanned_stack": dict.fromkeys((*ATTENTION, "up.weight", "down.weight"), "matrix:1<-2"),
    "einsum_attention": {
        "q": "matrix:12<-0", "k": "matrix:12<-0", "v": "matrix:12<-0", "o": "matrix:2<-01",
        "up": "matrix:1<-0", "down": "head:1<-0",
    },
    "language_model": {f"block.{name}": kind for name, kind in ATTENTION.items()}
    | {"block.up.weight": "matrix:0<-1", "block.down.weight": "matrix:0<-1", "embedding.weight": "embedding"},
    "gru": {"cell.weight_ih": "matrix:0<-1", "cell.weight_hh": "matrix:0<-1", "head.weight": "head:0<-1"},
    "low_rank_adapter": {"a": "matrix:0<-1", "b": "matrix:0<-1", "up": "matrix:0<-1", "down": "head:0<-1"},
    "state_space": {
        "in_proj": "matrix:0<-1", "conv": "convolution", "bc_proj": "matrix:0<-1", "out_proj": "head:0<-1",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BY_LOSS)
def test_kinds_from_the_loss(name):
    found = kinds_of(*model_and_trace(name))
    assert kind_strings(found, "matrix", "head", "embedding", "convolution") == BY_LOSS[name]


BY_TYPE = {  # only the differences from the kinds that the loss gives
    "reversed_fields": {"head.weight": "matrix:0<-1", "up.weight": "head:0<-1"},  # the last field
    "swiglu_down_gate_up": {"a.weight": "matrix:0<-1", "c.weight": "head:0<-1"},
    "parallel_block": {"attention.output_proj.weight": "matrix:0<-1"},
    "scanned_stack": {},
    "language_model": {},
}


@pytest.mark.parametrize("name", BY_TYPE)
def test_kinds_from_layer_types(name):
    found = kinds_of(model_and_trace(name)[0])
    assert kind_strings(found, "matrix", "head", "embedding", "convolution") == BY_LOSS[name] | BY_TYPE[name]


def test_layer_types_give_no_kind_to_arrays_outside_layers():
    model, _ = model_and_trace("einsum_attention")
    assert {kind.name for kind in kinds_of(model).values()} <= {"other", "norm"}


class Sliced(eqx.Module):
    """A stack indexed in a Python loop, a weight with heads to merge, and a fused weight."""

    stack: jax.Array  # [layers, in, out]
    heads: jax.Array  # [d, heads, size]
    fused: jax.Array  # [3 out, in]
    scale: jax.Array
    table: jax.Array
    last: jax.Array

    def __init__(self):
        shapes = [(2, 8, 8), (8, 2, 4), (24, 8), (8,), (16, 8), (8, 5)]
        draws = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        self.stack, self.heads, self.fused, self.scale, self.table, self.last = draws

    def __call__(self, ids):
        x = self.table[ids] * self.scale
        for i in range(2):
            x = x @ self.stack[i]
        x = x @ self.heads.reshape(8, 8)
        a, b, c = jnp.split(x @ self.fused.T, 3, axis=-1)
        return (a * b * c) @ self.last


def test_views_of_a_leaf_determine_its_matrix_dims():
    model, ids = Sliced(), jax.ShapeDtypeStruct((4, 6), jnp.int32)
    found = kinds_of(model, Trace.of(lambda model, ids: jax.vmap(model)(ids).sum(), model, ids))
    expected = {
        "stack": "matrix:2<-1", "heads": "matrix:12<-0", "fused": "matrix:0<-1", "scale": "other", "table": "embedding",
        "last": "head:1<-0",
    }  # fmt: skip
    assert kind_strings(found) == expected


def test_tied_and_untied_head():
    for is_tied in (True, False):
        # As many positions as features: the positions must not be taken for outputs.
        config = GPT2Config(64, 32, 32, 2, 4, is_tied=is_tied)
        found = kinds_of(eqx.filter_eval_shape(GPT2, config, key=jax.random.key(0)))
        assert kind_strings(found, "head") == ({} if is_tied else {"head.weight": "head:0<-1"})
        assert found["embedding.weight"].name == "embedding"


@pytest.mark.sweep
def test_kinds_of_a_partially_trained_model():
    """An optimizer gets such a tree when only some leaves are trained."""
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    without_head = eqx.tree_at(lambda m: m.layers[-1].weight, model, None)
    assert kind_strings(kinds_of(without_head), "matrix", "head") == {f"layers.{i}.weight": "matrix:0<-1" for i in (0, 1)}
    adapted = lora.add(GPT2(GPT2Config(64, 8, 16, 2, 2), key=jax.random.key(0)), rank=2, where="*", key=jax.random.key(1))
    trained = eqx.filter(adapted, lora.trainable(adapted))
    assert set(kind_strings(kinds_of(trained)).values()) == {"matrix:1<-2"}  # the adapters of a stack


def test_convolution_norm_stacked_and_unknown_layers():
    keys = jax.random.split(jax.random.key(0), 4)
    model = {
        "conv": eqx.nn.Conv2d(3, 4, 3, key=keys[0]),
        "norm": eqx.nn.GroupNorm(2, 4),
        "experts": eqx.filter_vmap(eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 5, key=key)))(
            jax.random.split(keys[1], (2, 7))
        ),
        "head": eqx.nn.Linear(5, 2, key=keys[2]),
        "raw": np.ones((3, 3)),
    }
    assert kind_strings(kinds_of(model)) == {
        "conv.weight": "convolution", "conv.bias": "bias", "norm.weight": "norm", "norm.bias": "norm",
        "experts.weight": "matrix:2<-3", "experts.bias": "bias", "head.weight": "head:0<-1", "head.bias": "bias",
        "raw": "other",
    }  # fmt: skip
    assert kind_strings(kinds_of(eqx.nn.Linear(3, 2, key=keys[3]))) == {"weight": "head:0<-1", "bias": "bias"}


def test_plan_has_the_same_kinds_on_every_mesh():
    loss = of_shapes("einsum_attention")
    model = loss.model
    batch = np.zeros((16, *loss.example.shape), loss.example.dtype)
    kinds = []
    for shards in ((1, 1), (4, 1), (2, 2)):
        deployer = redeqx.Deployer(0, *shards, verbose=False)
        plan = deployer.plan(model, lambda model, batch, key: batched(loss.loss)(model, batch), batch)
        kinds.append(kind_strings({name: leaf.kind for name, leaf in plan.leaves.items()}, "matrix", "head"))
    assert kinds == [BY_LOSS["einsum_attention"]] * 3
