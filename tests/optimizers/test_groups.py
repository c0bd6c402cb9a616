"""Groups of leaves by kind: masks for optax, weight decay, and an optimizer for each kind."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _structures import STRUCTURES, batched

import redeqx
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.optimizers import decay_mask, groups, kinds, of_kind
from tests._tree import named_leaves
from tests.models.families._case import random_model

MODEL = random_model(GPT2, GPT2Config(64, 8, 16, n_layers=2, n_heads=2, is_tied=False))


def names_by_value(tree):
    """Groups the names of the leaves by their value."""
    found: dict = {}
    for name, value in named_leaves(tree).items():
        found.setdefault(value, set()).add(name)
    return found


BLOCK = "stack.blocks"
LAYERS = [f"{BLOCK}.attention.{name}" for name in ("query", "key", "value", "output")]
LAYERS += [f"{BLOCK}.mlp.{name}" for name in ("up", "down")]
KINDS = {
    "embedding": {"embedding.weight"},
    "head": {"head.weight"},
    "matrix": {f"{layer}.weight" for layer in LAYERS},
    "bias": {f"{layer}.bias" for layer in LAYERS},
    "norm": {
        f"{norm}.{leaf}" for norm in (f"{BLOCK}.attention_norm", f"{BLOCK}.mlp_norm", "norm") for leaf in ("weight", "bias")
    },
    "other": {"positions"},
}


def test_kind_of_each_leaf():
    assert names_by_value(kinds(eqx.filter(MODEL, eqx.is_array))) == KINDS
    assert names_by_value(kinds(eqx.filter_eval_shape(lambda: MODEL))) == names_by_value(kinds(MODEL))


def test_masks_work_with_optax():
    params = eqx.filter(MODEL, eqx.is_array)
    assert names_by_value(of_kind("matrix", "head")(params))[True] == KINDS["matrix"] | KINDS["head"]
    optimizer = optax.masked(optax.scale(0.0), of_kind("norm"))
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    zeros = {name for name, leaf in named_leaves(updates).items() if not leaf.any()}
    assert zeros == KINDS["norm"]


def test_only_weights_decay():
    params = eqx.filter(MODEL, eqx.is_array)
    decaying = KINDS["matrix"] | KINDS["head"] | KINDS["embedding"]
    assert names_by_value(decay_mask(params))[True] == decaying
    ones = jax.tree.map(jnp.ones_like, params)
    optimizer = optax.adamw(1.0, weight_decay=0.5, mask=decay_mask)
    moved, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(ones), ones)
    assert {name for name, leaf in named_leaves(moved).items() if leaf.any()} == decaying


class Scale(eqx.Module):
    weight: jax.Array
    gain: jax.Array


def test_decay_of_custom_modules_by_name_or_by_plan():
    model = {"own": Scale(jnp.ones(8), jnp.ones(8)), "linear": eqx.nn.Linear(8, 8, key=jax.random.key(0))}
    assert names_by_value(decay_mask(model))[True] == {"own.weight", "linear.weight"}

    def loss(model, batch, key):
        return jax.vmap(lambda x: model["linear"](x * model["own"].weight + model["own"].gain))(batch).mean()

    plan = redeqx.Deployer(verbose=False).plan(model, loss, np.ones((8, 8), np.float32))
    assert names_by_value(decay_mask(model, plan))[True] == {"linear.weight"}


def test_plan_gives_kinds_to_arrays_outside_layers():
    structure = STRUCTURES["einsum_attention"](jax.random.key(0))
    batch = np.zeros((16, *structure.example.shape), structure.example.dtype)
    plan = redeqx.Deployer(verbose=False).plan(structure.model, lambda m, b, key: batched(structure.loss)(m, b), batch)
    matrices = {"q", "k", "v", "o", "up"}
    assert names_by_value(kinds(structure.model, plan))["matrix"] == matrices
    assert names_by_value(of_kind("matrix", plan=plan)(structure.model))[True] == matrices
    optimizer = optax.adamw(1e-3, mask=partial(decay_mask, plan=plan))
    optimizer.init(structure.model)
    assert names_by_value(decay_mask(structure.model, plan))[True] == matrices | {"down"}


def test_one_optimizer_for_each_kind_on_a_mesh():
    model = MODEL
    examples = np.random.default_rng(0).integers(0, 64, (16, 8)).astype(np.int32)
    sizes = {"embedding": 1.0, "bias": 2.0}
    optimizer = groups({kind: optax.sgd(size) for kind, size in sizes.items()}, default=optax.sgd(4.0))

    def loss(model, batch, key):
        return sum(leaf.sum() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))

    trainer = redeqx.Trainer(
        redeqx.Deployer(0, 2, 2, verbose=False), model=model, optimizer=optimizer, collate_fn=np.stack, loss_fn=loss
    )
    trainer.train(examples, batch_size=16)
    before, after = (named_leaves(eqx.filter(m, eqx.is_array)) for m in (model, trainer.model))
    for kind, names in KINDS.items():
        for name in names:
            np.testing.assert_allclose(np.asarray(before[name]) - after[name], sizes.get(kind, 4.0), rtol=1e-5)


def test_muon_for_the_matrix_group():
    from redeqx.optimizers import muon

    params = eqx.filter(MODEL, eqx.is_array)
    optimizer = groups({"matrix": muon(1e-2)}, default=optax.set_to_zero())
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert {name for name, leaf in named_leaves(updates).items() if leaf.any()} == KINDS["matrix"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: of_kind("matrices"), "`matrices`: expected a kind of leaf. Did you mean `matrix`? Pass one of "),
        (lambda: groups({"weights": optax.sgd(1.0)}, optax.sgd(1.0)), "`weights`: expected a kind of leaf. Pass one of "),
    ],
)
def test_unknown_kinds_are_errors(make, expected):
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value) == f"{expected}matrix, head, embedding, convolution, bias, norm, other."


def test_plan_of_another_model_is_an_error():
    plan = redeqx.Deployer(verbose=False).plan(MODEL)
    for of in (kinds, decay_mask):
        with pytest.raises(ValueError) as raised:
            of(eqx.nn.Linear(2, 2, key=jax.random.key(0)), plan)
        assert str(raised.value) == (
            "`plan`: expected the plan of this model, got one without `weight`. "
            "Pass `deployer.plan(model, loss_fn, batch)` of the model that is trained."
        )
