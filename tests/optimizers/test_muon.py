"""Muon: updates equal to optax's for each matrix, on every mesh, with no collective in the iterations; resumed runs."""

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
from redeqx.compiled import Module, collectives
from redeqx.optimizers import decay_mask, kinds, muon
from redeqx.partition import kinds_of
from tests._tree import named_leaves

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
    """Three scanned layers and two layers in a list."""

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


build = eqx.filter_jit(Model)


def make_model():
    return build(jax.random.key(0))


def trained_parameters(model):
    return eqx.filter(model, eqx.is_inexact_array)


def random_like(tree, key):
    def draw(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.random.normal(jax.random.fold_in(key, len(name)), x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(draw, tree)


def run_updates(optimizer, params, n=3, jit=jax.jit):
    """The updates for `n` random gradients, which are the same for each optimizer."""
    state, all_updates = optimizer.init(params), []
    update = jit(optimizer.update)
    for i in range(n):
        updates, state = update(random_like(params, jax.random.key(i)), state, params)
        all_updates.append(updates)
    return all_updates


def make_trainer(optimizer, *shards, workdir=None, model=None, **options):
    deployer = redeqx.Deployer(0, *shards, workdir=workdir, verbose=False)
    options = {"collate_fn": np.stack, "loss_fn": loss_fn, **options}
    return redeqx.Trainer(deployer, model=model or make_model(), optimizer=optimizer, **options)


def leaves_on_host(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)).items()}


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "optax_options"),
    [
        pytest.param({}, {"consistent_rms": 0.2}, marks=pytest.mark.sweep),
        pytest.param({"consistent_rms": None}, {}, marks=pytest.mark.sweep),
        pytest.param(
            {"nesterov": False, "ns_coeffs": (PUBLISHED,) * 3, "beta": 0.9, "consistent_rms": 1.0},
            {"nesterov": False, "ns_steps": 3, "beta": 0.9, "consistent_rms": 1.0},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["consistent_rms", "by width", "other options"],
)
def test_each_stacked_matrix_is_updated_as_by_optax(options, optax_options):
    with jax.enable_x64(True):  # iterations amplify float32's rounding, which differs between one matrix and a stack
        params = jax.tree.map(lambda x: x.astype(np.float64), trained_parameters(make_model()))
        assert {name for name, kind in kinds_of(params).items() if kind.name == "matrix"} == MATRICES
        all_updates = run_updates(muon(1e-2, weight_decay=0.1, **options), params)
        one = optax.contrib.muon(1e-2, weight_decay=0.1, muon_weight_dimension_numbers=lambda _: DIMS, **optax_options)
        update = jax.jit(one.update)
        for name in MATRICES:
            leaf, stacked = named_leaves(params)[name], name.startswith("scanned")
            for layer in range(len(leaf) if stacked else 1):
                pick = (lambda x, layer=layer: x[layer]) if stacked else (lambda x: x)
                state = one.init(pick(leaf))
                for i, updates in enumerate(all_updates):
                    grads = named_leaves(random_like(params, jax.random.key(i)))[name]
                    wanted, state = update(pick(grads), state, pick(leaf))
                    got = pick(named_leaves(updates)[name])
                    np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-8 * float(jnp.abs(wanted).max()))


@pytest.mark.sweep
def test_other_leaves_are_updated_by_adamw():
    params = trained_parameters(make_model())
    adamw = optax.adamw(1e-2, b2=0.95, weight_decay=0.1, mask=decay_mask)
    names = [name for name, kind in kinds_of(params).items() if kind.name != "matrix"]
    assert {"table.weight", "head.weight", "scanned.up.bias", "listed.0.norm.weight"} <= set(names)
    # An operation at a time: two programs may round a sum of products differently.
    both = [run_updates(each, params, jit=lambda update: update) for each in (muon(1e-2, weight_decay=0.1), adamw)]
    for got, wanted in zip(*both, strict=True):
        for name in names:
            np.testing.assert_array_equal(named_leaves(got)[name], named_leaves(wanted)[name])


@pytest.mark.sweep
def test_singular_values_are_close_to_one():
    params = {"a": jnp.diag(jnp.array([5.0, 1.0, 0.2])), "head": eqx.nn.Linear(3, 2, key=jax.random.key(0))}
    linear = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(3, 3, key=jax.random.key(1)), params["a"])
    model = trained_parameters([linear, params["head"]])
    optimizer = muon(1.0, consistent_rms=None, ns_coeffs=(PUBLISHED,) * 8)
    updates, _ = optimizer.update(model, optimizer.init(model), model)
    values = np.linalg.svd(updates[0].weight, compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3))


@pytest.mark.sweep
def test_newton_schulz_coefficients_and_dtype():
    keys = jax.random.split(jax.random.key(0))
    params = trained_parameters(
        [eqx.nn.Linear(16, 64, key=keys[0]), eqx.nn.Linear(64, 2, key=keys[1])]
    )  # the last is a head
    triples = ((3.0, -3.2, 1.2), (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    (wide,) = run_updates(muon(1e-2, ns_coeffs=triples), params, 1)
    (narrow,) = run_updates(muon(1e-2, ns_coeffs=triples, ns_dtype="bfloat16"), params, 1)
    one = optax.contrib.muon(
        1e-2, ns_coeffs=triples, ns_steps=3, consistent_rms=0.2, muon_weight_dimension_numbers=lambda _: DIMS
    )
    weight = params[0].weight
    grads = random_like(params, jax.random.key(0))[0].weight
    wanted, _ = jax.jit(one.update)(grads, one.init(weight), weight)
    np.testing.assert_allclose(wide[0].weight, wanted, rtol=1e-5, atol=1e-7)
    narrow = narrow[0].weight
    assert narrow.dtype == jnp.float32 and 1e-4 < jnp.abs(narrow - wanted).max() / jnp.abs(wanted).max() < 0.05


@pytest.mark.sweep
def test_bfloat16_momentum_and_custom_rest_optimizer():
    params = trained_parameters(make_model())
    optimizer = muon(1e-2, mu_dtype="bfloat16", rest=optax.sgd(0.5))
    state = optimizer.init(params)
    momentum = [leaf for name, leaf in named_leaves(state).items() if name.endswith("scanned.up.weight")]
    assert [leaf.dtype for leaf in momentum] == [jnp.bfloat16]
    grads = random_like(params, jax.random.key(0))
    updates, after = optimizer.update(grads, state, params)
    np.testing.assert_allclose(updates.head.bias, -0.5 * grads.head.bias)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.sweep
def test_excluded_matrices_are_updated_by_the_rest_optimizer():
    params = trained_parameters(make_model())
    (got,) = run_updates(muon(1e-2, exclude=["*.up.*"], rest=optax.sgd(0.5)), params, 1)
    grads = random_like(params, jax.random.key(0))
    np.testing.assert_allclose(got.scanned.up.weight, -0.5 * grads.scanned.up.weight)
    assert not np.allclose(got.scanned.mix.weight, -0.5 * grads.scanned.mix.weight)


MISTAKES = {
    "model without matrices": (
        lambda: muon(1e-2).init({"a": jnp.ones((2, 2))}),
        "`muon`: expected a model with hidden weight matrices, got none in 1 leaves. Where its matrices are not in "
        "Equinox's layers, pass `deployer.plan(model, loss_fn, batch)` as `plan`.",
    ),
    "glob without a match": (
        lambda: muon(1e-2, exclude=["scanned.up"]).init(trained_parameters(make_model())),
        "`exclude`: expected globs over names of matrices, got 'scanned.up'. Did you mean `scanned.up.weight`?",
    ),
    "one triple of coefficients": (
        lambda: muon(1e-2, ns_coeffs=(3.4445, -4.7750, 2.0315)),
        "`ns_coeffs`: expected three numbers for each iteration, got shape (3,). Pass `((a, b, c),) * 5`.",
    ),
    "plan of another model": (
        lambda: muon(1e-2, redeqx.Deployer(verbose=False).plan(eqx.nn.MLP(2, 2, 2, 2, key=jax.random.key(0)))).init(
            trained_parameters(make_model())
        ),
        "`plan`: expected the plan of this model, got one without `table.weight`. Pass "
        "`deployer.plan(model, loss_fn, batch)` of the model that is trained.",
    ),
    "plan without matrices": (
        lambda: muon(1e-2, redeqx.Deployer(verbose=False).plan(eqx.nn.LayerNorm(4))).init(eqx.nn.LayerNorm(4)),
        "`muon`: expected a model with hidden weight matrices, got none in 2 leaves. Choose another optimizer.",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_error_messages(case):
    make, expected = MISTAKES[case]
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value) == expected


# --- on meshes ----------------------------------------------------------------------------------------------------------

MESHES = {"data=8": (1, 1), "data=2, fsdp=2, model=2": (2, 2), "model=8": (8, 1), "fsdp=8": (1, 8)}
# The collectives that reshard matrices for the iterations and back. They move two or three batches: the 16 x 16 matrices,
# and the 16 x 64 ones split along either dim. All matrices are too small to be split by the fsdp axis.
EXCHANGES = {
    "data=8": {"all-gather data": 2},
    "data=2, fsdp=2, model=2": {"all-to-all model": 6, "all-gather data": 2, "all-gather fsdp": 2},
    "model=8": {"all-to-all model": 6},
    "fsdp=8": {"all-gather fsdp": 2},
}


@pytest.fixture(scope="module")
def single_device_results():
    """The parameters and the optimizer state after four updates on one device, without a Trainer."""
    model, optimizer = make_model(), muon(1e-2, weight_decay=0.1)
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)

    @jax.jit
    def step(params, state, ids):
        grads = jax.grad(lambda params: loss_fn(eqx.combine(params, static), ids, None))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = trained_parameters(model)
    state = optimizer.init(params)
    for start in range(0, 64, 16):
        params, state = step(params, state, IDS[start : start + 16])
    return leaves_on_host(params), leaves_on_host(state)


def count_exchanges(trainer):
    """The number of collectives that exchange matrices in a step, by kind and axis."""
    found = [c for c in collectives(Module.of(trainer.compiled_step.as_text())) if "shard_map" in c.op_name]
    unique = {c.instruction: f"{c.kind} {' '.join(c.axes(trainer.deployer.mesh))}" for c in found}
    return Counter(unique.values())


QUICK = ("data=2, fsdp=2, model=2",)


@pytest.mark.parametrize("mesh", [pytest.param(x, marks=[pytest.mark.sweep] * (x not in QUICK)) for x in MESHES])
def test_results_equal_on_every_mesh_without_collectives_in_iterations(mesh, single_device_results):
    trainer = make_trainer(muon(1e-2, weight_decay=0.1), *MESHES[mesh])
    trainer.train(IDS, batch_size=16)
    for got, wanted in zip(
        (leaves_on_host(trainer.model), leaves_on_host(trainer.opt_state)), single_device_results, strict=True
    ):
        assert got.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_allclose(got[name], leaf, rtol=1e-4, atol=2e-5, err_msg=name)
    text = trainer.compiled_step.as_text()
    assert "newton_schulz" in text and not [c for c in collectives(Module.of(text)) if "newton_schulz" in c.op_name]
    assert count_exchanges(trainer) == EXCHANGES[mesh]
    plan = trainer.deployer.plan(make_model(), loss_fn, IDS[:16])
    momentum = {name.split(".mu.")[1]: x for name, x in named_leaves(trainer.opt_state).items() if ".0.mu." in name}
    for name in MATRICES:
        assert momentum[name].sharding.is_equivalent_to(plan.sharding(name), momentum[name].ndim)


@pytest.mark.sweep
def test_exchange_moves_each_matrix_once_in_each_direction():
    """Each device sends its shards of all matrices to the other devices and receives the results."""
    keys = jax.random.split(jax.random.key(0), 9)
    model = [eqx.nn.Linear(64, 64, key=key) for key in keys]
    n_bytes = 8 * 64 * 64 * 4  # the ninth layer is the head

    def loss(model, batch, key):
        for layer in model:
            batch = jnp.tanh(jax.vmap(layer)(batch))
        return batch.mean()

    trainer = make_trainer(muon(1e-2), 1, 8, model=model, loss_fn=loss)
    trainer.train(np.ones((8, 64), np.float32), batch_size=8)
    assert count_exchanges(trainer) == {"all-to-all fsdp": 2}
    # The all-to-all is listed in parts, each with the bytes that a device sends to one other device.
    found = [c for c in collectives(Module.of(trainer.compiled_step.as_text())) if "shard_map" in c.op_name]
    assert sum(c.moved for c in found) == pytest.approx(2 * n_bytes / 8 * 7 / 8)


@pytest.mark.sweep
def test_indivisible_matrices_and_merged_dims():
    """Weights `[d, heads, size]` split by heads, one matrix of each shape for eight devices, and kinds from the plan."""
    structure = STRUCTURES["einsum_attention"](jax.random.key(0))

    def loss(model, batch, key):
        return batched(structure.loss)(model, batch)

    batch = np.random.default_rng(0).normal(size=(16, *structure.example.shape)).astype(np.float32)
    results = []
    for shards in ((1, 1), (2, 2), (4, 1)):
        deployer = redeqx.Deployer(0, *shards, verbose=False)
        plan = deployer.plan(structure.model, loss, batch)
        trainer = make_trainer(muon(1e-2, plan), *shards, model=structure.model, loss_fn=loss, plan=plan)
        trainer.train(batch, batch_size=8)
        momentum = [
            name.split(".mu.")[1] for name in named_leaves(trainer.opt_state) if ".0.mu." in name and "matrices" in name
        ]
        assert set(momentum) == {"q", "k", "v", "o", "up"}
        results.append(leaves_on_host(trainer.model))
    for other in results[1:]:
        for name, leaf in results[0].items():
            np.testing.assert_allclose(other[name], leaf, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.sweep
def test_custom_splits_of_any_dim(single_device_results):
    """Including a dim split over two axes, in both orders of the axes."""
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
    for name, leaf in leaves_on_host(trainer.model).items():
        np.testing.assert_allclose(leaf, single_device_results[0][name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.sweep
def test_split_stacked_dim():
    deployer = redeqx.Deployer(0, 2, 2, verbose=False)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 6))
    model = [stacked, eqx.nn.Linear(8, 2, key=jax.random.key(1))]  # the last one is the head
    plan = deployer.plan(model, overrides={"0.weight": P(("data"), "model")})
    assert plan["0.weight"].spec == P("data", "model", None) and kinds(model)[0].weight == "matrix"
    optimizer, params = muon(1e-2), trained_parameters(model)
    grads, state = random_like(params, jax.random.key(0)), optimizer.init(params)
    sharded = eqx.tree_at(lambda m: m[0].weight, grads, jax.device_put(grads[0].weight, plan.sharding("0.weight")))
    got = jax.jit(lambda grads: optimizer.update(grads, state, params, plan=plan)[0])(sharded)
    wanted, _ = optimizer.update(grads, state, params)
    np.testing.assert_allclose(got[0].weight, wanted[0].weight, rtol=1e-5, atol=1e-7)


# --- in a Trainer -------------------------------------------------------------------------------------------------------


def fit(trainer, **options):
    trainer.fit(IDS, batch_size=16, n_epochs=2, save_every_n_steps=3, **options)
    return leaves_on_host(trainer.model) | leaves_on_host(trainer.opt_state)


@pytest.mark.sweep
def test_resumed_run_is_bitwise_equal(tmp_path):
    def make(folder, *shards):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(1e-2, weight_decay=0.1))
        return make_trainer(optimizer, *shards, workdir=tmp_path / folder)

    uninterrupted = fit(make("uninterrupted", 2, 2))
    fit(make("resumed", 2, 2), max_steps=5)
    resumed = make("resumed", 2, 2)
    after = fit(resumed)
    assert resumed.step == 8 and after.keys() == uninterrupted.keys()
    for name, leaf in uninterrupted.items():
        assert after[name].tobytes() == leaf.tobytes(), name
    other = make("uninterrupted", 1, 4)  # loads on another mesh
    other.load_ckpt()
    restored = leaves_on_host(other.model) | leaves_on_host(other.opt_state)
    for name, leaf in uninterrupted.items():
        assert restored[name].tobytes() == leaf.tobytes(), name


WRAPPED = {
    "MultiSteps": lambda: optax.MultiSteps(muon(1e-2), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(muon)(learning_rate=optax.linear_schedule(1e-2, 0, 4)),
    "apply_if_finite": lambda: optax.apply_if_finite(muon(optax.linear_schedule(1e-2, 0, 4)), 3),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x != "MultiSteps")) for x in WRAPPED])
@pytest.mark.sweep
def test_muon_inside_optax_wrappers(name):
    before = leaves_on_host(make_model())
    trainer = make_trainer(WRAPPED[name](), 2, 2)
    trainer.train(IDS, batch_size=16)
    after = leaves_on_host(trainer.model)
    assert all(not np.array_equal(after[name], before[name]) for name in (*MATRICES, "head.weight"))
    is_given_the_plan = name != "MultiSteps"
    assert count_exchanges(trainer) == (EXCHANGES["data=2, fsdp=2, model=2"] if is_given_the_plan else {})


@pytest.mark.sweep
def test_bfloat16_parameters_with_float32_copies():
    trainer = make_trainer(muon(1e-2), 2, 2, compute=redeqx.Precision("bfloat16", parameters="bfloat16"))
    trainer.train(IDS, batch_size=16)
    momentum = [leaf for name, leaf in named_leaves(trainer.opt_state).items() if ".mu." in name]
    assert {leaf.dtype for leaf in momentum} == {np.dtype("float32")}


@pytest.mark.sweep
def test_dry_run_compiles_muon():
    trainer = make_trainer(muon(1e-2), 2, 2)
    step = trainer.dry_run(IDS, batch_size=16).steps["train"]
    assert not step.unread and any(c.kind == "all-to-all" for c in step.collectives)
