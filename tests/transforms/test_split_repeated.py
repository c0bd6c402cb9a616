"""Products that lose the rows of the batch are computed once, with the same function, and other models do not change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _mixtures import MIXTURES, VOCAB, LanguageModel, T, loss_fn
from _structures import STRUCTURES, batched, of_shapes
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.machine import make_mesh, split_rows
from redeqx.tracing import Trace, transformed
from redeqx.transforms import SplitRepeated
from tests.models.families._case import collect

ROWS, RATE = 16, 0.1
FEW = 6  # rows, which a sequence axis does not divide: of a buffer it splits the places
MESHES = {
    "data": ({}, 1.2),
    "fsdp": ({"n_fsdp_shards": 8}, 1.2),
    "model": ({"n_model_shards": 4}, 1.5),
    "all": ({"n_model_shards": 2, "n_fsdp_shards": 2}, 1.5),
    "sequence": ({"n_sequence_shards": 4}, 1.2),
}
EXAMPLES = list(np.random.default_rng(0).integers(0, VOCAB, (ROWS, T)).astype(np.int32))


def arrays(model):
    return eqx.filter(model, eqx.is_inexact_array)


def by_hand(model, examples):
    """A step of gradient descent on one device: the new weights, and the program's FLOPs."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(params, batch):
        grads = jax.grad(lambda params: loss_fn(eqx.combine(params, static), batch))(params)
        return jax.tree.map(lambda w, g: w - RATE * g, params, grads)

    batch = jnp.asarray(np.stack(examples))
    return step(params, batch), step.lower(params, batch).compile().cost_analysis()["flops"]


QUICK = (("buffers_by_scatter", "all"), ("buffers_by_scatter", "data"), ("one_hot", "model"), ("one_hot", "sequence"))
EACH = [
    pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.sweep)
    for i, name in enumerate(MIXTURES)
    for mesh in dict.fromkeys([*[*MESHES][i % 2 : 4 : 2], *(mesh for of, mesh in QUICK if of == name)])
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mesh"), EACH)
def test_each_device_computes_its_share_of_the_same_function(name, mesh):
    model, (shards, most) = LanguageModel(name, jax.random.key(1)), MESHES[mesh]
    examples = EXAMPLES[:FEW] if mesh == "sequence" else EXAMPLES
    expected, flops = by_hand(model, examples)
    deployer = redeqx.Deployer(verbose=False, **shards)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(RATE), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.train(examples, len(examples) // deployer.n_batch_shards)  # a warning of repeated work is an error
    for new, by_one in zip(jax.tree.leaves(arrays(trainer.model)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, by_one, rtol=0, atol=1e-6 * np.abs(by_one).max())
    program = trainer.compiled_step
    assert program is not None
    if name != "sorted_tokens":  # what a grouped matmul costs depends on the groups: the compiler cannot count it
        assert program.cost_analysis()["flops"] * jax.device_count() <= most * flops


# --- one product --------------------------------------------------------------------------------------------------------

N, K = 64, 32  # rows, and features


def by_order(w, x):
    return jnp.tanh(x[jnp.argsort(x[:, 0])] @ w)


def by_index(w, x):
    """The products are of values that all rows may be in."""
    first = jnp.argsort(x[:, 1])[:32]
    return jnp.tanh(x[first] @ w) @ w


def by_scatter(w, x):
    """The buffers' places do not divide, and the experts do."""
    places = jnp.argsort(x[:, 0])
    buffers = jnp.zeros((8, 9, K)).at[places % 8, places // 8].set(x)
    return jnp.einsum("ecd,edf->ecf", buffers, jnp.broadcast_to(w, (8, K, K)) * jnp.arange(1.0, 9)[:, None, None])


def by_loop(w, x):
    """Layers after a sort. The carry has lost its rows before the loop."""
    layers = jnp.stack([w, w.T, -w]) / 2
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x[jnp.argsort(x[:, 0])], layers)[0]


@pytest.mark.parametrize(
    ("fn", "shards"),
    [
        (by_order, {"n_fsdp_shards": 4}),
        (by_order, {"n_sequence_shards": 4}),
        (by_index, {"n_fsdp_shards": 2, "n_model_shards": 2}),
        (by_index, {}),
        (by_scatter, {}),
        (by_scatter, {"n_fsdp_shards": 2, "n_model_shards": 2}),
        (by_loop, {"n_sequence_shards": 4}),
        (by_loop, {"n_fsdp_shards": 4}),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else each.__name__,
)
def test_a_product_without_rows_is_split(fn, shards):
    mesh = make_mesh(**shards)
    w, x = (
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(jax.random.key(0)), ((K, K), (N, K)), strict=True)
    )
    step = jax.value_and_grad(lambda w, x, fn: jnp.square(fn(w, x)).sum(), (0, 1))
    plain, split = (jax.jit(lambda w, x, f=f: step(w, x, f)) for f in (fn, transformed(fn, [SplitRepeated(mesh, 1, 0)])))
    args = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, split_rows(mesh))
    for found, expected in zip(jax.tree.leaves(split(*args)), jax.tree.leaves(plain(w, x)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    by_one, by_each, before = (
        f.lower(*given).compile().cost_analysis()["flops"] for f, given in ((plain, (w, x)), (split, args), (plain, args))
    )
    assert before > 0.8 * by_one  # XLA still computes all of it on each device
    assert by_each * mesh.size / mesh.shape["model"] < 1.3 * by_one


# --- what stays as it is ------------------------------------------------------------------------------------------------


def is_unchanged(loss, model, *args, min_flops=0):
    trace = Trace.of(loss, model, *args)
    return SplitRepeated(make_mesh(), len(trace.names), min_flops).of(trace.closed) is None


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_do_not_change(name):
    structure = of_shapes(name)
    batch = jax.ShapeDtypeStruct((16, *structure.example.shape), structure.example.dtype)
    assert is_unchanged(batched(structure.loss), structure.model, batch)


# Without tables of an encoder, decoder or image encoder whose layers others here have.
LEFT_OUT = ("bert-classes", "llama", "roberta-mlm", "distilbert", "clip", "vit", "mixtral", "opt", "opt-350m", "unet")
FAMILIES = [training for training in collect("TRAININGS") if training.name not in LEFT_OUT]


@pytest.mark.parametrize("training", FAMILIES, ids=lambda training: training.name)
def test_families_do_not_change(training):
    model = eqx.filter_eval_shape(training.make, jax.random.key(0))
    batch = jax.tree.map(lambda *rows: np.stack(rows), *training.examples)
    assert is_unchanged(training.loss_fn, model, batch, jax.random.key(0))


ROWS_STAY = {
    "by row": lambda w, x, key: x @ w,
    "flattened": lambda w, x, key: x.reshape(-1, K) @ w,
    "in chunks of rows": lambda w, x, key: jnp.einsum("ncd,df->ncf", x.reshape(8, -1, K), w),
    "reversed": lambda w, x, key: x[::-1] @ w,
    "rolled": lambda w, x, key: jnp.roll(x, 1, 0) @ w,
    "joined": lambda w, x, key: jnp.concatenate([x, -x]) @ w,
    "a running sum": lambda w, x, key: jnp.cumsum(x, 0) @ w,
    "pairs of rows": lambda w, x, key: jnp.einsum("ntd,mtd->nm", x @ w, x),
    "covariance": lambda w, x, key: jnp.einsum("ntd,nte->de", x @ w, x),
    "noise": lambda w, x, key: jax.random.normal(key, (N, K)) @ w + x[:, 0],
    "mixed up": lambda w, x, key: (0.5 * x + 0.5 * x[jax.random.permutation(key, N)]) @ w,
    "weights": lambda w, x, key: x @ (w @ w.T),
    "a scan over positions": lambda w, x, key: jax.lax.scan(
        lambda h, x: (jnp.tanh(h @ w + x), h), jnp.zeros((N, K)), jnp.swapaxes(x, 0, 1)
    )[1],
}


@pytest.mark.parametrize("name", ROWS_STAY)
def test_products_of_rows_do_not_change(name):
    w, x = jnp.zeros((K, K)), jnp.zeros((N, 4, K))
    assert is_unchanged(lambda w, x, key: ROWS_STAY[name](w, x, key).sum(), w, x, jax.random.key(0))


def test_small_products_do_not_change():
    def loss(w, x):
        return jnp.square(by_order(w, x)).sum()

    w, x = jnp.zeros((K, K)), jnp.zeros((N, K))
    flops = 2 * N * K * K
    assert is_unchanged(loss, w, x, min_flops=flops + 1) and not is_unchanged(loss, w, x, min_flops=flops)


def test_a_batch_of_one_row_does_not_change():
    assert is_unchanged(lambda w, x: jnp.square(x @ w).sum(), jnp.zeros((K, K)), jnp.zeros((1, N, K)))


def test_one_device_changes_nothing():
    rule = SplitRepeated(make_mesh(devices=jax.devices()[:1]), 1, 0)
    assert rule.of(Trace.of(lambda w, x: by_order(w, x).sum(), jnp.zeros((K, K)), jnp.zeros((N, K))).closed) is None
