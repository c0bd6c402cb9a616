"""A model of a user with `MixtureOfExperts`: training, the numbers of one device on every mesh, and the recorded routing."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.models import cross_entropy
from redeqx.models.nn import MixtureOfExperts, add_routing

VOCAB, LENGTH, WIDTH = 32, 16, 16


class Block(eqx.Module):
    """Causal attention, and an MLP or experts in its place."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP | MixtureOfExperts

    def __init__(self, is_sparse, key):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        if is_sparse:
            self.mlp = MixtureOfExperts(WIDTH, 16, 8, 2, d_shared=8, init_std=0.2, key=keys[1])
        else:
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 32, 1, key=keys[1])

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=jnp.tri(len(x), dtype=bool))
        h = jax.vmap(self.norms[1])(x)
        y, routing = self.mlp(h) if isinstance(self.mlp, MixtureOfExperts) else (jax.vmap(self.mlp)(h), None)
        return x + y, routing


class GPT(eqx.Module):
    """A model of a user: every second block has experts, and so has the last one."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, n_layers, key):
        first, last, *keys = jax.random.split(key, n_layers + 2)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=first)
        self.blocks = [Block((n_layers - i) % 2 == 1, key) for i, key in enumerate(keys)]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=last)

    def __call__(self, ids):
        x, routings = jax.vmap(self.embedding)(ids), []
        for block in self.blocks:
            x, routing = block(x)
            routings += [] if routing is None else [routing]
        return jax.vmap(self.head)(x), routings


def loss_fn(model, batch, key):
    logits, routings = jax.vmap(model)(batch[:, :-1])
    return add_routing(cross_entropy(logits, batch[:, 1:]), routings, balance_loss=0.02, z_loss=0.001)


def texts(n):
    """Texts in which each token tells the next."""
    start = np.random.default_rng(0).integers(0, VOCAB, (n, 1))
    return ((start + 5 * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)


def trainer_of(n_layers, optimizer, *, workdir=None, accumulate=1, **mesh):
    deployer = redeqx.Deployer(verbose=False, workdir=workdir, **mesh)
    model = deployer.init(lambda: GPT(n_layers, jax.random.key(0)))
    return redeqx.Trainer(
        deployer, model=model, optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn, accumulate_grad_batches=accumulate
    )  # fmt: skip


@pytest.mark.sweep
def test_a_gpt_with_experts_trains(tmp_path):
    trainer = trainer_of(2, optax.adam(1e-2), workdir=tmp_path, n_model_shards=2, n_fsdp_shards=2)
    trainer.fit(texts(64), 8, 20)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "imbalance" in row]
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    for row in rows:
        assert 1.5 < row["balance_loss"] < 8 and 1 <= row["imbalance"] <= 4 and row["dropped"] == 0
        assert row["router_z_loss"] > 0


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"n_fsdp_shards": 8},
        {"n_fsdp_shards": 2, "n_model_shards": 4},
        {"n_model_shards": 2, "accumulate": 2},
        {"n_sequence_shards": 2, "n_model_shards": 2},
    ],
    ids=str,
)
@pytest.mark.sweep
def test_every_mesh_trains_to_the_numbers_of_one_device(mesh):
    """Key biases would be noise: their gradient is zero. Equinox's attention has none."""
    trainer, data = trainer_of(1, optax.sgd(0.5), **mesh), texts(32)
    model = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if eqx.is_array(x) else x, trainer.model)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def mean_loss(model, batch):
        loss = loss_fn(model, batch, None)
        return loss.total / loss.weight

    for batch in (data[:16], data[16:]):
        _, gradient = mean_loss(model, jnp.asarray(batch))
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, gradient))
    trainer.train(data, batch_size=16)
    assert trainer.step == 2
    leaves = (jax.tree_util.tree_leaves_with_path(eqx.filter(of, eqx.is_array)) for of in (trainer.model, model))
    for (path, found), (_, wanted) in zip(*leaves, strict=True):
        error = np.linalg.norm(np.asarray(found) - np.asarray(wanted))
        assert error <= 1e-6 * np.linalg.norm(wanted), f"{jax.tree_util.keystr(path)}: {error}"


class Embedded(eqx.Module):
    """A mean over the tokens so far, and experts."""

    table: jax.Array
    experts: MixtureOfExperts

    def __init__(self, **options):
        first, second = jax.random.split(jax.random.key(0))
        self.table = jax.random.normal(first, (VOCAB, WIDTH))
        self.experts = MixtureOfExperts(WIDTH, 16, 8, 2, init_std=0.2, key=second, **options)

    def __call__(self, ids):
        x = self.table[ids]
        x += jnp.cumsum(x, 0) / len(x)  # so that there are positions
        return x + self.experts(x)[0]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"n_sequence_shards": 2}, {"capacity_factor": 1.0}),
        ({"n_sequence_shards": 4}, {}),
        ({"n_sequence_shards": 2, "n_model_shards": 2}, {"use_bias": True}),
        ({"n_fsdp_shards": 2, "n_sequence_shards": 4}, {"use_bias": True, "d_shared": 8}),
    ],
    ids=str,
)
@pytest.mark.sweep
def test_tokens_stay_on_the_devices_of_their_positions(mesh, options):
    def mean_square(model, batch, key):
        return jnp.square(jax.vmap(model)(batch)).mean()

    model, rate = Embedded(**options), 1024.0  # so that the gradients are read from the new leaves without loss of digits
    data = np.random.default_rng(0).integers(0, VOCAB, (8, 128), dtype=np.int32)
    deployer = redeqx.Deployer(**mesh, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(rate), collate_fn=np.stack, loss_fn=mean_square
    )  # fmt: skip
    sent = collectives(Module.of(trainer.compile(list(data), batch_size=8).as_text()))
    choices = 2 * data.size // deployer.n_batch_shards * WIDTH * 4  # bytes of a device's rows, once for each choice
    assert max(each.bytes for each in sent) < choices, [(each.kind, each.shape, each.op_name) for each in sent]
    assert any(re.search("in a sort by keys .*: each device sorts all keys", each) for each in trainer.plan.positions)
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(mean_square))(model, data, None)
    np.testing.assert_allclose(trainer.update(list(data))["loss"], loss, rtol=1e-6)
    leaves = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (trainer.model, model, grads))
    for new, old, grad in zip(*leaves, strict=True):
        found = (np.asarray(old, np.float64) - np.asarray(new, np.float64)) / rate
        assert np.linalg.norm(found - grad) <= 1e-6 * np.linalg.norm(grad)


@pytest.mark.sweep
def test_devices_compute_their_own_rows():
    """Sorted tokens, scores and counts of a sequence stay on its device: only sums are sent."""
    run = trainer_of(2, optax.sgd(0.1)).dry_run(texts(16), batch_size=16, search="none")
    sent = run.steps["train"].collectives
    assert {collective.kind for collective in sent} == {"all-reduce"}
    assert max(collective.bytes for collective in sent) <= max(leaf.n_bytes for leaf in run.plan.leaves.values())
