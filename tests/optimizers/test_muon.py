"""Muon: the same updates as optax's on single matrices, on every mesh; no collective in the iterations; resumed runs."""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _structures import STRUCTURES, batched
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx._tree import map_named, named_leaves
from redeqx.compiled import collectives
from redeqx.models import cross_entropy
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.optimizers import decay_mask, muon
from redeqx.partition import kinds_of

DIMS = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)  # of a weight [out, in]
PUBLISHED = (3.4445, -4.7750, 2.0315)


class Layer(eqx.Module):
    mix: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.mix = eqx.nn.Linear(16, 16, key=keys[0])
        self.up, self.down = eqx.nn.Linear(16, 64, key=keys[1]), eqx.nn.Linear(64, 16, key=keys[2])
        self.norm = eqx.nn.LayerNorm(16)

    def __call__(self, x):
        x = x + self.mix(x)
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Model(eqx.Module):
    """Three scanned layers, and two in a list."""

    table: eqx.nn.Embedding
    scanned: Layer
    listed: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 7)
        self.table = eqx.nn.Embedding(32, 16, key=keys[0])
        self.scanned = eqx.filter_vmap(Layer)(keys[1:4])
        self.listed = [Layer(keys[4]), Layer(keys[5])]
        self.head = eqx.nn.Linear(16, 32, key=keys[6])

    def __call__(self, token):
        arrays, static = eqx.partition(self.scanned, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), self.table(token), arrays)
        for layer in self.listed:
            x = layer(x)
        return self.head(x)


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch[:, 0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1]).mean()


IDS = np.random.default_rng(0).integers(0, 32, (64, 2)).astype(np.int32)
MATRICES = {f"{layer}.{name}.weight" for layer in ("scanned", "listed.0", "listed.1") for name in ("mix", "up", "down")}


def make_model():
    return Model(jax.random.key(0))


def trained(model):
    return eqx.filter(model, eqx.is_inexact_array)


def random_like(tree, key):
    return map_named(lambda name, x: jax.random.normal(jax.random.fold_in(key, len(name)), x.shape, x.dtype), tree)


def updates_of(optimizer, params, n=3):
    """The updates for a few random gradients, the same for each optimizer."""
    state, made = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for i in range(n):
        updates, state = update(random_like(params, jax.random.key(i)), state, params)
        made.append(updates)
    return made


def make_trainer(optimizer, *shards, workdir=None, model=None, **options):
    deployer = redeqx.Deployer(0, *shards, workdir=workdir, verbose=False)
    options = {"collate_fn": np.stack, "loss_fn": loss_fn, **options}
    return redeqx.Trainer(deployer, model=model or make_model(), optimizer=optimizer, **options)


def host(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)).items()}


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "of_optax"),
    [
        ({}, {"consistent_rms": 0.2}),
        ({"consistent_rms": None}, {}),
        (
            {"nesterov": False, "ns_coeffs": (PUBLISHED,) * 3, "beta": 0.9, "consistent_rms": 1.0},
            {"nesterov": False, "ns_steps": 3, "beta": 0.9, "consistent_rms": 1.0},
        ),
    ],
    ids=["consistent_rms", "by width", "other options"],
)
def test_each_matrix_of_a_stack_as_by_optax_alone(options, of_optax):
    params = trained(make_model())
    assert {name for name, kind in kinds_of(params).items() if kind.name == "matrix"} == MATRICES
    made = updates_of(muon(1e-2, weight_decay=0.1, **options), params)
    one = optax.contrib.muon(1e-2, weight_decay=0.1, muon_weight_dimension_numbers=lambda _: DIMS, **of_optax)
    update = jax.jit(one.update)
    for name in MATRICES:
        leaf, stacked = named_leaves(params)[name], name.startswith("scanned")
        for layer in range(len(leaf) if stacked else 1):
            pick = (lambda x, layer=layer: x[layer]) if stacked else (lambda x: x)
            state = one.init(pick(leaf))
            for i, updates in enumerate(made):
                grads = named_leaves(random_like(params, jax.random.key(i)))[name]
                wanted, state = update(pick(grads), state, pick(leaf))
                got = pick(named_leaves(updates)[name])
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_all_else_is_updated_by_adamw():
    params = trained(make_model())
    adamw = optax.adamw(1e-2, b2=0.95, weight_decay=0.1, mask=decay_mask)
    names = [name for name, kind in kinds_of(params).items() if kind.name != "matrix"]
    assert {"table.weight", "head.weight", "scanned.up.bias", "listed.0.norm.weight"} <= set(names)
    for got, wanted in zip(updates_of(muon(1e-2, weight_decay=0.1), params), updates_of(adamw, params), strict=True):
        for name in names:
            np.testing.assert_array_equal(named_leaves(got)[name], named_leaves(wanted)[name])


def test_singular_values_come_near_to_one():
    params = {"a": jnp.diag(jnp.array([5.0, 1.0, 0.2])), "head": eqx.nn.Linear(3, 2, key=jax.random.key(0))}
    linear = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(3, 3, key=jax.random.key(1)), params["a"])
    model = trained([linear, params["head"]])
    optimizer = muon(1.0, consistent_rms=None, ns_coeffs=(PUBLISHED,) * 8)
    updates, _ = optimizer.update(model, optimizer.init(model), model)
    values = np.linalg.svd(updates[0].weight, compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3))


def test_coefficients_of_each_iteration_and_their_dtype():
    params = trained(make_model())
    triples = ((3.0, -3.2, 1.2), (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    (wide,) = updates_of(muon(1e-2, ns_coeffs=triples), params, 1)
    (narrow,) = updates_of(muon(1e-2, ns_coeffs=triples, ns_dtype="bfloat16"), params, 1)
    one = optax.contrib.muon(
        1e-2, ns_coeffs=triples, ns_steps=3, consistent_rms=0.2, muon_weight_dimension_numbers=lambda _: DIMS
    )
    weight = params.listed[0].up.weight
    grads = random_like(params, jax.random.key(0)).listed[0].up.weight
    wanted, _ = one.update(grads, one.init(weight), weight)
    np.testing.assert_allclose(wide.listed[0].up.weight, wanted, rtol=1e-5, atol=1e-7)
    narrow = narrow.listed[0].up.weight
    assert narrow.dtype == jnp.float32 and 1e-4 < jnp.abs(narrow - wanted).max() / jnp.abs(wanted).max() < 0.05


@pytest.mark.sweep
def test_momentum_in_bfloat16_and_another_optimizer_for_the_rest():
    params = trained(make_model())
    optimizer = muon(1e-2, mu_dtype="bfloat16", rest=optax.sgd(0.5))
    state = optimizer.init(params)
    momentum = [leaf for name, leaf in named_leaves(state).items() if name.endswith("scanned.up.weight")]
    assert [leaf.dtype for leaf in momentum] == [jnp.bfloat16]
    grads = random_like(params, jax.random.key(0))
    updates, after = optimizer.update(grads, state, params)
    np.testing.assert_allclose(updates.head.bias, -0.5 * grads.head.bias)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_what_is_excluded_is_updated_by_the_rest():
    params = trained(make_model())
    (got,) = updates_of(muon(1e-2, exclude=["*.up.*"], rest=optax.sgd(0.5)), params, 1)
    grads = random_like(params, jax.random.key(0))
    np.testing.assert_allclose(got.scanned.up.weight, -0.5 * grads.scanned.up.weight)
    assert not np.allclose(got.scanned.mix.weight, -0.5 * grads.scanned.mix.weight)


MISTAKES = {
    "no matrix": (
        lambda: muon(1e-2).init({"a": jnp.ones((2, 2))}),
        "`muon`: expected a model with hidden weight matrices, got none in 1 leaves. Where its matrices are not in "
        "Equinox's layers, pass `deployer.plan(model, loss_fn, batch)` as `plan`.",
    ),
    "a glob of nothing": (
        lambda: muon(1e-2, exclude=["scanned.up"]).init(trained(make_model())),
        "`exclude`: expected globs over names of matrices, got 'scanned.up'. Did you mean `scanned.up.weight`?",
    ),
    "one triple": (
        lambda: muon(1e-2, ns_coeffs=(3.4445, -4.7750, 2.0315)),
        "`ns_coeffs`: expected three numbers for each iteration, got shape (3,). Pass `((a, b, c),) * 5`, say.",
    ),
    "another model's plan": (
        lambda: muon(1e-2, redeqx.Deployer(verbose=False).plan(eqx.nn.MLP(2, 2, 2, 2, key=jax.random.key(0)))).init(
            trained(make_model())
        ),
        "`plan`: expected the plan of this model, got one without `table.weight`. Pass "
        "`deployer.plan(model, loss_fn, batch)` of the model that is trained.",
    ),
    "a plan without matrices": (
        lambda: muon(1e-2, redeqx.Deployer(verbose=False).plan(eqx.nn.LayerNorm(4))).init(eqx.nn.LayerNorm(4)),
        "`muon`: expected a model with hidden weight matrices, got none in 2 leaves. Choose another optimizer.",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    make, expected = MISTAKES[case]
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value) == expected


# --- on meshes ----------------------------------------------------------------------------------------------------------

MESHES = {"data=8": (1, 1), "data=2, fsdp=2, model=2": (2, 2), "model=8": (8, 1), "fsdp=8": (1, 8)}
# How matrices are brought to where they are computed, and back, in two or three batches: of 16 x 16, and of 16 x 64, split
# along one dim or along the other. All are too small for the fsdp axis to split.
EXCHANGES = {
    "data=8": {"all-gather data": 2},
    "data=2, fsdp=2, model=2": {"all-to-all model": 6, "all-gather data": 2, "all-gather fsdp": 2},
    "model=8": {"all-to-all model": 6},
    "fsdp=8": {"all-gather fsdp": 2},
}


@pytest.fixture(scope="module")
def alone():
    """The parameters and the optimizer's state after four updates by hand, on one device."""
    model, optimizer = make_model(), muon(1e-2, weight_decay=0.1)
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)

    @jax.jit
    def step(params, state, ids):
        grads = jax.grad(lambda params: loss_fn(eqx.combine(params, static), ids, None))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = trained(model)
    state = optimizer.init(params)
    for start in range(0, 64, 16):
        params, state = step(params, state, IDS[start : start + 16])
    return host(params), host(state)


def instructions(trainer):
    """The exchanges of a step's matrices: the number of instructions by kind and axis."""
    found = [c for c in collectives(trainer.compiled_step.as_text()) if "shard_map" in c.op_name]
    unique = {c.instruction: f"{c.kind} {' '.join(c.axes(trainer.deployer.mesh))}" for c in found}
    return Counter(unique.values())


QUICK = ("data=2, fsdp=2, model=2", "fsdp=8")


@pytest.mark.parametrize("mesh", [pytest.param(x, marks=[pytest.mark.sweep] * (x not in QUICK)) for x in MESHES])
def test_the_same_numbers_on_every_mesh_and_no_collective_in_the_iterations(mesh, alone):
    trainer = make_trainer(muon(1e-2, weight_decay=0.1), *MESHES[mesh])
    trainer.train(IDS, batch_size=16)
    for got, wanted in zip((host(trainer.model), host(trainer.opt_state)), alone, strict=True):
        assert got.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_allclose(got[name], leaf, rtol=1e-4, atol=2e-5, err_msg=name)
    text = trainer.compiled_step.as_text()
    assert "newton_schulz" in text and not [c for c in collectives(text) if "newton_schulz" in c.op_name]
    assert instructions(trainer) == EXCHANGES[mesh]
    plan = trainer.deployer.plan(make_model(), loss_fn, IDS[:16])
    momentum = {name.split(".mu.")[1]: x for name, x in named_leaves(trainer.opt_state).items() if ".0.mu." in name}
    for name in MATRICES:
        assert momentum[name].sharding.is_equivalent_to(plan.sharding(name), momentum[name].ndim)


def test_the_exchange_moves_each_matrix_once_each_way():
    """Each device sends its share of all matrices to the others, and gets it back."""
    keys = jax.random.split(jax.random.key(0), 9)
    model = [eqx.nn.Linear(64, 64, key=key) for key in keys]
    n_bytes = 8 * 64 * 64 * 4  # the last is the head

    def loss(model, batch, key):
        for layer in model:
            batch = jnp.tanh(jax.vmap(layer)(batch))
        return batch.mean()

    trainer = make_trainer(muon(1e-2), 1, 8, model=model, loss_fn=loss)
    trainer.train(np.ones((8, 64), np.float32), batch_size=8)
    assert instructions(trainer) == {"all-to-all fsdp": 2}
    # Listed as its parts, each with the bytes that a device sends to one other.
    found = [c for c in collectives(trainer.compiled_step.as_text()) if "shard_map" in c.op_name]
    assert sum(c.moved for c in found) == pytest.approx(2 * n_bytes / 8 * 7 / 8)


def test_matrices_that_do_not_divide_and_dims_that_are_merged():
    """Weights `[d, heads, size]` split by heads, one matrix of each shape over eight devices; kinds are the plan's."""
    made = STRUCTURES["einsum_attention"](jax.random.key(0))

    def loss(model, batch, key):
        return batched(made.loss)(model, batch)

    batch = np.random.default_rng(0).normal(size=(16, *made.example.shape)).astype(np.float32)
    results = []
    for shards in ((1, 1), (2, 2), (4, 1)):
        deployer = redeqx.Deployer(0, *shards, verbose=False)
        plan = deployer.plan(made.model, loss, batch)
        trainer = make_trainer(muon(1e-2, plan), *shards, model=made.model, loss_fn=loss, plan=plan)
        trainer.train(batch, batch_size=8)
        momentum = [
            name.split(".mu.")[1] for name in named_leaves(trainer.opt_state) if ".0.mu." in name and "matrices" in name
        ]
        assert set(momentum) == {"q", "k", "v", "o", "up"}
        results.append(host(trainer.model))
    for other in results[1:]:
        for name, leaf in results[0].items():
            np.testing.assert_allclose(other[name], leaf, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.sweep
def test_splits_by_hand_of_any_dim(alone):
    """Also of a stacked dim, of one dim over two axes, and in both orders."""
    model = make_model()
    overrides = {
        "scanned.up.weight": P(None, ("model", "fsdp")),
        "scanned.down.weight": P(None, None, ("fsdp", "model")),
        "scanned.mix.weight": P(None, "fsdp", "model"),
        "listed.0.mix.weight": P(("data", "fsdp"), "model"),
        "listed.1.up.weight": P("model", ("data", "fsdp")),
    }
    plan = redeqx.Deployer(0, 2, 2, verbose=False).plan(model, loss_fn, IDS[:16], overrides=overrides)
    trainer = make_trainer(muon(1e-2, weight_decay=0.1), 2, 2, plan=plan)
    trainer.train(IDS, batch_size=16)
    for name, leaf in host(trainer.model).items():
        np.testing.assert_allclose(leaf, alone[0][name], rtol=1e-4, atol=2e-5, err_msg=name)


def test_a_split_of_stacked_dims():
    from redeqx.optimizers._newton_schulz import NewtonSchulz, orthogonalize

    deployer = redeqx.Deployer(0, 2, 2, verbose=False)
    model = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 6))
    plan = deployer.plan(model, overrides={"weight": P(("data"), "model")})
    iterate = NewtonSchulz((PUBLISHED,) * 5, 1e-8)
    x = jax.device_put(model.weight, plan.sharding("weight"))
    kinds = kinds_of(model)

    @jax.jit
    def spread(x):
        return orthogonalize({"weight": x}, kinds, plan, iterate)["weight"]

    assert kinds["weight"].inputs == (2,) and plan["weight"].spec == P("data", "model", None)
    np.testing.assert_allclose(spread(x), iterate(model.weight), atol=1e-5)


# --- in a Trainer -------------------------------------------------------------------------------------------------------


def fit(trainer, **options):
    trainer.fit(IDS, batch_size=16, n_epochs=2, save_every_n_steps=3, **options)
    return host(trainer.model) | host(trainer.opt_state)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    def make(folder, *shards):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(1e-2, weight_decay=0.1))
        return make_trainer(optimizer, *shards, workdir=tmp_path / folder)

    straight = fit(make("straight", 2, 2))
    fit(make("resumed", 2, 2), max_steps=5)
    resumed = make("resumed", 2, 2)
    after = fit(resumed)
    assert resumed.step == 8 and after.keys() == straight.keys()
    for name, leaf in straight.items():
        assert after[name].tobytes() == leaf.tobytes(), name
    other = make("straight", 1, 4)  # restored onto another mesh
    other.load_ckpt()
    restored = host(other.model) | host(other.opt_state)
    for name, leaf in straight.items():
        assert restored[name].tobytes() == leaf.tobytes(), name


WRAPPED = {
    "MultiSteps": lambda: optax.MultiSteps(muon(1e-2), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(muon)(learning_rate=optax.linear_schedule(1e-2, 0, 4)),
    "apply_if_finite": lambda: optax.apply_if_finite(muon(optax.linear_schedule(1e-2, 0, 4)), 3),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x != "MultiSteps")) for x in WRAPPED])
@pytest.mark.sweep
def test_inside_of_optax_wrappers(name):
    before = host(make_model())
    trainer = make_trainer(WRAPPED[name](), 2, 2)
    trainer.train(IDS, batch_size=16)
    after = host(trainer.model)
    assert all(not np.array_equal(after[name], before[name]) for name in (*MATRICES, "head.weight"))
    passes_the_plan_on = name != "MultiSteps"
    assert instructions(trainer) == (EXCHANGES["data=2, fsdp=2, model=2"] if passes_the_plan_on else {})


@pytest.mark.sweep
def test_parameters_in_bfloat16_with_copies():
    trainer = make_trainer(muon(1e-2), 2, 2, precision=redeqx.Precision("bfloat16", parameters="bfloat16"))
    trainer.train(IDS, batch_size=16)
    momentum = [leaf for name, leaf in named_leaves(trainer.opt_state).items() if ".mu." in name]
    assert {leaf.dtype for leaf in momentum} == {np.dtype("float32")}


@pytest.mark.sweep
def test_a_dry_run_compiles_it():
    trainer = make_trainer(muon(1e-2), 2, 2)
    step = trainer.dry_run(IDS, batch_size=16).steps["train"]
    assert not step.failed and any(c.kind == "all-to-all" for c in step.collectives)


@pytest.mark.sweep
def test_a_language_model(tmp_path):
    """The losses of Muon on two meshes and, for the same learning rate, those of AdamW."""
    config = GPT2Config(32, 16, 32, n_layers=3, n_heads=4).without_dropout()
    ids = np.random.default_rng(0).integers(0, 8, (256, 16)).cumsum(-1).astype(np.int32) % 32

    def loss(model, batch, key):
        return cross_entropy(jax.vmap(model)(batch[:, :-1]), batch[:, 1:])

    def last(optimizer, *shards):
        model = GPT2(config, key=jax.random.key(0))
        trainer = make_trainer(optimizer, *shards, model=model, loss_fn=loss)
        trainer.fit(ids, batch_size=16, n_epochs=4)
        return trainer.eval_loss(ids, batch_size=16)

    losses = [last(muon(3e-3), 1, 1), last(muon(3e-3), 2, 2), last(optax.adamw(3e-3, b2=0.95), 2, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] < losses[2]
