"""Tokens are sent to the devices of whole experts and back, whatever the imbalance, where that sends fewer bytes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.machine import describe, make_mesh, split_rows
from redeqx.models.nn import MixtureOfExperts
from redeqx.tracing import transformed
from redeqx.transforms import GroupMatmuls
from tests._tree import drawn

E, D, F, K, ROWS, T = 4, 12, 24, 2, 8, 8  # experts, features, hidden features, choices, rows, tokens of a row
KEYS = jax.random.split(jax.random.key(0), 5)
X = drawn(jax.ShapeDtypeStruct((ROWS, T, D), jnp.float32), 1.0)
SHAPES = {"down": (E, F, D), "gate": (E, D, F), "router": (D, E), "up": (E, D, F)}
WEIGHTS = {name: drawn(jax.ShapeDtypeStruct(s, jnp.float32), s[-2] ** -0.5, i) for i, (name, s) in enumerate(SHAPES.items())}


def chosen(p, x):
    """The weights and the experts of each token's choices."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), K)
    return weights.reshape(-1, 1), experts.reshape(-1)


def mlp(p, rows, sizes):
    gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
    return jax.lax.ragged_dot(jax.nn.relu(gate) * up, p["down"], sizes)


def added(p, x):
    """All tokens are sorted, and outputs are added to their tokens by a scatter."""
    x = x.reshape(-1, D)
    weights, experts = chosen(p, x)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=E)
    return jnp.zeros_like(x).at[order // K].add(mlp(p, x[order // K], sizes) * weights[order])


def to_one_expert(p, x):
    """All choices of all tokens are one expert's: as many passes as devices."""
    x = x.reshape(-1, D)
    order, sizes = jnp.argsort(jnp.full(len(x) * K, 2)), jnp.array([0, 0, len(x) * K, 0])
    return jnp.zeros_like(x).at[order // K].add(mlp(p, x[order // K], sizes))


def limited(p, x):
    """An expert takes the first ten rows of the sort alone, in a loop over layers that are recomputed."""

    @jax.checkpoint
    def layer(x, p):
        weights, experts = chosen(p, x)
        order, sizes = jnp.argsort(experts), jnp.minimum(jnp.bincount(experts, length=E), 10)
        y = mlp(p, jnp.repeat(x, K, 0)[order] * weights[order], sizes)[jnp.argsort(order)]
        return x + y.reshape(len(x), K, -1).sum(1), None

    return jax.lax.scan(layer, x.reshape(-1, D), jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p))[0]


LAYER = drawn(eqx.filter_eval_shape(lambda: MixtureOfExperts(D, F, E, K, d_shared=8, key=KEYS[0])), 0.3)
LAYER, STATIC = eqx.partition(LAYER, eqx.is_array)


def by_sequence(p, x):
    return jax.vmap(eqx.combine(p, STATIC))(x)[0]


CASES = [
    ("added", added, WEIGHTS, {"n_model_shards": 4}),
    ("to one expert", to_one_expert, WEIGHTS, {"n_model_shards": 4}),
    ("by sequence", by_sequence, LAYER, {"n_model_shards": 2, "n_fsdp_shards": 2}),
    ("limited", limited, WEIGHTS, {"n_model_shards": 2, "n_fsdp_shards": 2}),
    ("by sequence, 4", by_sequence, LAYER, {"n_model_shards": 4}),
]
QUICK = ("added",)


@pytest.mark.parametrize(
    ("fn", "weights", "shards"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.sweep) for name, *case in CASES],
)
def test_values_and_gradients_are_those_of_one_device(fn, weights, shards):
    mesh = make_mesh(**shards)
    splits = [0 if leaf.ndim == 3 else None for leaf in jax.tree.leaves(weights)]  # by experts

    def step(fn):
        def run(weights, x):
            y, gradients = jax.vjp(fn, weights, x)
            return y, gradients(2 * y)

        return jax.jit(run)

    ruled = transformed(fn, [GroupMatmuls(mesh, splits)])
    specs = [NamedSharding(mesh, P() if split is None else P("model")) for split in splits]
    args = (
        jax.device_put(weights, jax.tree.unflatten(jax.tree.structure(weights), specs)),
        jax.device_put(X, split_rows(mesh)),
    )
    compiled = step(ruled).lower(*args).compile()
    wanted = step(fn)(weights, X)
    for found, want in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6 * np.abs(want).max())
    # Weights and their gradients stay on their devices, and hidden features are those of a device's share of the rows.
    text, n = compiled.as_text(), ROWS * T * K // mesh.size
    assert f"f32[{n},{F}]" in text and f"f32[{E},{D},{F}]" not in text and f"f32[{E},{F},{D}]" not in text
    if fn in (added, by_sequence):  # rows are sent there and back, and so are their gradients; further passes are in loops
        sent = f" = f32[{mesh.shape['model']},{n},{D}]"
        lines = [line for line in text.splitlines() if sent in line and " all-gather(" in line and "/while/" not in line]
        assert len(lines) == 4


@pytest.mark.sweep
def test_a_pass_sends_each_chosen_row_there_and_back_once():
    """By TPUs: simulated devices gather the rows of all. With each row travels the weight of its choice, which TPUs pad to
    128 numbers. The first pass takes all rows of a balanced routing; `collectives` leaves out the choices of the others."""
    mesh, width = make_mesh(n_model_shards=4, devices=describe("v5e:2x2").devices), 2048
    layer = eqx.filter_eval_shape(lambda: MixtureOfExperts(width, F, E, K, key=KEYS[0]))
    weights, static = eqx.partition(layer, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    splits = [0 if leaf.ndim == 3 else None for leaf in jax.tree.leaves(weights)]  # by experts
    fn = transformed(lambda p, x: jax.vmap(eqx.combine(p, static))(x)[0], [GroupMatmuls(mesh, splits)])

    def placed(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = [NamedSharding(mesh, P() if split is None else P("model")) for split in splits]
    weights = jax.tree.map(placed, weights, jax.tree.unflatten(jax.tree.structure(weights), specs))
    x = placed(jax.ShapeDtypeStruct((ROWS, T, width), jnp.float32), split_rows(mesh))
    step = jax.jit(jax.value_and_grad(lambda p, x: jnp.square(fn(p, x)).mean(), (0, 1)))
    sent = collectives(Module.of(step.lower(weights, x).compile().as_text()))
    for is_backward in (False, True):
        exchanges = [each for each in sent if "all-to-all" in each.kind and each.is_backward == is_backward]
        of_rows = 2 * (ROWS * T * K // 4) * width * 4  # of a device's, there and back
        assert of_rows <= sum(each.bytes * each.n_executions for each in exchanges) <= 1.05 * of_rows
    assert all("all-to-all" in each.kind for each in sent if width in each.shape)


class Model(eqx.Module):
    table: jax.Array
    experts: MixtureOfExperts

    def __call__(self, ids):
        x = self.table[ids]
        return (x + self.experts(x)[0]) @ self.table.T


def loss_fn(model, ids, key):
    return jax.nn.logsumexp(jax.vmap(model)(ids), -1).mean()


@pytest.mark.sweep
def test_the_plan_sends_tokens_where_that_sends_fewer_bytes():
    """With two choices of a token over 8 shards, and not over 4."""
    experts = MixtureOfExperts(D, F, 8, K, key=KEYS[0])
    model, ids = Model(jax.random.normal(KEYS[1], (16, D)), experts), np.zeros((8, 16), np.int32)
    for n in (4, 8):
        plan = redeqx.Deployer(n_model_shards=n, verbose=False).plan(model, loss_fn, ids)
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            leaf = plan[f"experts.experts.{name}.weight"]
            assert leaf.spec[0 if n == 8 else dim] == "model"
            assert ("to which tokens are sent and back" in leaf.reason) == (n == 8)


class Decoder(eqx.Module):
    table: jax.Array
    attention: eqx.nn.MultiheadAttention
    experts: MixtureOfExperts

    def __call__(self, ids):
        x = self.table[ids]
        x = x + self.attention(x, x, x, mask=jnp.tri(len(x), dtype=bool))
        return (x + self.experts(x)[0]) @ self.table.T


@pytest.mark.sweep
def test_an_update_with_a_split_residual_stream_is_that_of_one_device():
    """There two choices of a token over 4 shards send less than the sum."""
    experts = MixtureOfExperts(32, F, 8, K, init_std=0.2, key=KEYS[0])
    attention = eqx.nn.MultiheadAttention(4, 32, key=KEYS[1])
    model = Decoder(0.3 * jax.random.normal(KEYS[2], (16, 32)), attention, experts)
    ids = np.random.default_rng(0).integers(0, 16, (8, 32))
    compute, rate = redeqx.Compute(split_residual=True, remat="full"), 1024.0  # gradients are read from the new parameters
    trainer = redeqx.Trainer(
        redeqx.Deployer(n_model_shards=4, verbose=False), model=model, optimizer=optax.sgd(rate), collate_fn=np.stack,
        loss_fn=loss_fn, compute=compute,
    )  # fmt: skip
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, ids, None)
    np.testing.assert_allclose(trainer.update(ids)["loss"], loss, rtol=1e-6)
    assert trainer.plan["experts.experts.up.weight"].spec[0] == "model"
    leaves = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (model, trainer.model, grads))
    for before, after, grad in zip(*leaves, strict=True):
        found, rounding = (np.asarray(before, np.float64) - np.asarray(after)) / rate, np.linalg.norm(after) * 2**-23 / rate
        assert np.linalg.norm(found - grad) <= 1e-6 * np.linalg.norm(grad) + rounding
