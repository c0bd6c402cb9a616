"""Training steps: losses, model parts, trainable leaves, dtypes, custom gradients, model state, optimizers and remat."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx.dims import Inputs
from redeqx.machine import replicated
from redeqx.steps import Structure, _task, accumulate, as_sums, number_rows, plan_rules
from redeqx.tracing import transformed
from redeqx.transforms import Rows
from tests._compilations import counted_compilations
from tests._tree import named_leaves


class Recorder:
    """A tracker that keeps all logged metrics."""

    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append(metrics)

    def of(self, name):
        return [row[name] for row in self.rows if name in row]


def make_deployer(n_model_shards=8, n_fsdp_shards=1, **kwargs):
    """Return a deployer, by default with one batch shard, which allows the smallest micro-batches."""
    return redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False, **kwargs)


def make_examples(n, n_in=4, n_out=8, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=n_in), "y": rng.normal(size=n_out)} for _ in range(n)]


def stack(examples):
    return {name: np.stack([example[name] for example in examples]).astype(np.float32) for name in examples[0]}


def mse(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def make_linear(n_in=4, n_out=8):
    return eqx.nn.Linear(n_in, n_out, key=jax.random.key(0))


def make_trainer(deployer=None, **kwargs):
    options = {"model": make_linear(), "optimizer": optax.sgd(0.1), "collate_fn": stack, "loss_fn": mse, **kwargs}
    return redeqx.Trainer(deployer or make_deployer(), **options)


def to_numpy(tree):
    """Return the arrays of a tree by name, as NumPy arrays."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)).items()}


def assert_close(actual, desired, rtol=1e-5, atol=1e-6):
    actual, desired = to_numpy(actual), to_numpy(desired)
    assert actual.keys() == desired.keys()
    for name, leaf in desired.items():
        np.testing.assert_allclose(actual[name], leaf, rtol=rtol, atol=atol, err_msg=name)


def plain_equinox_loop(model, optimizer, examples, batch_size, loss_fn=mse):
    """Train in a plain Equinox loop; return the model, and the loss and gradient norm of each step."""
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses, norms = [], []

    @eqx.filter_jit
    def step(model, state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, jax.random.key(0))
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss, optax.tree.norm(grads)

    for start in range(0, len(examples), batch_size):
        model, state, loss, norm = step(model, state, stack(examples[start : start + batch_size]))
        losses.append(float(loss))
        norms.append(float(norm))
    return model, losses, norms


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


# --- losses -------------------------------------------------------------------------------------------------------------


def to_floats(sums):
    total, weight, metrics = sums
    assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(sums))
    return float(total), float(weight), {name: tuple(map(float, pair)) for name, pair in metrics.items()}


@pytest.mark.parametrize("mean", [0.5, np.float64(0.5), jnp.bfloat16(0.5), jnp.float32(0.5)])
def test_scalar_loss_is_a_mean_over_the_rows(mean):
    assert to_floats(as_sums(mean, 6)) == (3.0, 6.0, {})


def test_loss_holds_a_sum_and_its_weight():
    loss = redeqx.Loss(jnp.float32(3), 4, {"hits": jnp.int32(2), "of_its_own": (jnp.bfloat16(1), 5)})
    assert to_floats(as_sums(loss, 6)) == (3.0, 4.0, {"hits": (2.0, 4.0), "of_its_own": (1.0, 5.0)})


SCALAR = "Return a scalar or `redeqx.Loss(total, weight, metrics)`; with `model_state`, `(loss, state)`."
MEAN = "Return its mean, or `redeqx.Loss(total=its sum, weight=its size)`."


@pytest.mark.parametrize(
    ("loss", "error", "expected"),
    [
        (jnp.zeros(3), ValueError, f"`loss_fn`: expected the loss to be a scalar, got shape (3,). {MEAN}"),
        (
            redeqx.Loss(jnp.zeros(3), 3),
            ValueError,
            f"`loss_fn`: expected `Loss.total` to be a scalar, got shape (3,). {MEAN}",
        ),
        (
            redeqx.Loss(1.0, jnp.ones((2, 2))),
            ValueError,
            f"`loss_fn`: expected `Loss.weight` to be a scalar, got shape (2, 2). {MEAN}",
        ),
        (
            redeqx.Loss(1.0, 1.0, {"a": jnp.zeros(2)}),
            ValueError,
            f"`loss_fn`: expected metric 'a' to be a scalar, got shape (2,). {MEAN}",
        ),
        (
            redeqx.Loss(1.0, 1.0, {"a": (1.0, jnp.zeros(2))}),
            ValueError,
            f"`loss_fn`: expected the weight of metric 'a' to be a scalar, got shape (2,). {MEAN}",
        ),
        ({"loss": 1.0}, TypeError, f"`loss_fn`: expected the loss to be a scalar, got dict. {SCALAR}"),
        (None, TypeError, f"`loss_fn`: expected the loss to be a scalar, got NoneType. {SCALAR}"),
        ("low", TypeError, f"`loss_fn`: expected the loss to be a scalar, got str. {SCALAR}"),
        ((jnp.zeros(()), {"a": 1}), TypeError, f"`loss_fn`: expected the loss to be a scalar, got tuple. {SCALAR}"),
        ((jnp.zeros(()), jnp.zeros(())), TypeError, f"`loss_fn`: expected the loss to be a scalar, got tuple. {SCALAR}"),
        (
            jnp.complex64(1j),
            TypeError,
            "`loss_fn`: expected the loss to be a real number, got complex64. Convert it to one.",
        ),
        (True, TypeError, "`loss_fn`: expected the loss to be a real number, got bool. Convert it to one."),
        (
            redeqx.Loss(1.0, 1.0, {"a": (1.0, 2.0, 3.0)}),
            TypeError,
            "`loss_fn`: expected metric 'a' to be a scalar, got tuple. A metric is a scalar, a sum that is divided by "
            "`Loss.weight`, or a pair `(total, weight)`.",
        ),
    ],
)
def test_invalid_losses_raise(loss, error, expected):
    assert message(error, as_sums, loss, 6) == expected


@pytest.mark.parametrize(
    ("metrics", "found"),
    [(None, "NoneType"), (["mse"], "list"), ({1: 0.0}, "names [1]")],
)
def test_invalid_loss_metrics_raise(metrics, found):
    expected = f'`Loss.metrics`: expected a dict of sums by name, got {found}. Write {{"correct": n_correct}}.'
    assert message(TypeError, redeqx.Loss, 1.0, 1.0, metrics) == expected


def test_metric_pair_can_be_a_list():
    assert to_floats(as_sums(redeqx.Loss(3.0, 4.0, {"a": [1.0, 5.0]}), 6))[2] == {"a": (1.0, 5.0)}


def weighted_loss(model, batch, key):
    """Weigh each row by its `w`; the metric `seen` has its own weight."""
    errors = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=1)
    weight = jnp.sum(batch["w"])
    seen = (jnp.sum(batch["y"][:, 0]), len(batch["x"]))
    return redeqx.Loss(jnp.sum(errors * batch["w"]), weight, {"error": jnp.sum(errors * batch["w"]), "seen": seen})


@pytest.mark.parametrize(
    ("shards", "accumulate"),
    [pytest.param((1, 1), 1, marks=pytest.mark.sweep), ((2, 2), 1), pytest.param((8, 1), 4, marks=pytest.mark.sweep)],
)
def test_weighted_mean_does_not_depend_on_devices_or_micro_batches(shards, accumulate):
    """One step of 11 rows of unequal weight: on eight devices, on four, and in micro-batches with a remainder."""
    examples = [{**e, "w": np.asarray(i % 4 + 1)} for i, e in enumerate(make_examples(11))]
    batch = stack(examples)
    weights = batch["w"] / batch["w"].sum()

    def loss_of_whole_batch(model):
        errors = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=1)
        return jnp.sum(errors * weights)

    model = make_linear()
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss_of_whole_batch))(model)
    deployer = make_deployer(*shards, loggers=[log := Recorder()])
    trainer = make_trainer(deployer, loss_fn=weighted_loss, accumulate_grad_batches=accumulate)
    per_device = -(-11 // (deployer.n_batch_shards * accumulate))
    assert trainer.batch_size(per_device) >= 11
    metrics = trainer.train(examples, per_device)
    assert trainer.step == 1
    assert_close(trainer.model, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["error"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["seen"], batch["y"][:, 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    assert log.rows == [metrics]

    evaluated = trainer.eval_metrics(examples, per_device)
    again = trainer.eval_metrics(examples, 1)
    after = loss_of_whole_batch(jax.device_get(trainer.model))
    np.testing.assert_allclose([evaluated["loss"], again["loss"], evaluated["error"]], after, rtol=1e-5)
    np.testing.assert_allclose([evaluated["seen"], again["seen"]], metrics["seen"], rtol=1e-5)


# --- model parts --------------------------------------------------------------------------------------------------------


class Mixed(eqx.Module):
    """A model with arrays of several kinds, functions, strings and a static field."""

    first: eqx.nn.Linear
    layers: list
    count: jax.Array
    scale: np.ndarray
    name: str
    activation: object
    size: int = eqx.field(static=True)

    def __init__(self):
        self.first = make_linear()
        self.layers = [make_linear(8, 8), eqx.nn.Dropout(0.5), None]
        self.count = jnp.arange(3)
        self.scale = np.ones(2, np.float16)
        self.name = "mixed"
        self.activation = jax.nn.relu
        self.size = 4


FLOATS = ("first.weight", "first.bias", "layers.0.weight", "layers.0.bias", "scale")


@pytest.mark.parametrize(("accumulate", "is_only"), [(1, True), (2, False)])
def test_the_mean_of_a_single_micro_batch_has_weight_1(accumulate, is_only, monkeypatch):
    """Its gradients are those of the loss itself, with no rounding by a weight."""
    used = set()

    def recording(loss, n_rows, *where):
        used.add(n_rows)
        return as_sums(loss, n_rows, *where)

    monkeypatch.setattr(_task, "as_sums", recording)
    trainer = make_trainer(make_deployer(1), accumulate_grad_batches=accumulate)
    loss = trainer.update(make_examples(24))["loss"]
    assert (1 in used) == is_only
    model, batch = make_linear(), stack(make_examples(24))
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(mse))(model, batch, None)
    assert loss == pytest.approx(float(value), rel=1e-6)
    assert_close(trainer.model, jax.tree.map(lambda x, g: x - 0.1 * g, eqx.filter(model, eqx.is_array), grads))


def test_parts_recombine_to_the_model():
    model = Mixed()
    structure = Structure.of(model)
    assert structure.names == (FLOATS, ("count",))
    assert eqx.tree_equal(structure.put(*structure.take(model)), model)
    trained, frozen = structure.take(model)
    assert [leaf.shape for leaf in trained] == [(8, 4), (8,), (8, 8), (8,), (2,)]
    assert [leaf.shape for leaf in frozen] == [(3,)]
    tree = structure.trained_tree(trained)
    assert tuple(named_leaves(tree)) == FLOATS
    assert tree.count is None


def test_parts_of_shapes_equal_parts_of_the_model():
    shapes = eqx.filter_eval_shape(Mixed)
    assert Structure.of(shapes).names == Structure.of(Mixed()).names


def test_parts_set_inference_mode_and_cast():
    model = Mixed()
    structure = Structure.of(model)
    inference_model = structure.put(*structure.take(model), inference=True, compute_dtype=jnp.bfloat16)
    assert inference_model.layers[1].inference
    assert not model.layers[1].inference
    dtypes = {name: leaf.dtype for name, leaf in to_numpy(inference_model).items()}
    assert dtypes.pop("count") == np.int32
    assert dtypes.keys() <= set(FLOATS)
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}


def test_trainable_accepts_a_function_or_a_tree():
    model = Mixed()
    only_first = eqx.tree_at(lambda m: m.first.weight, jax.tree.map(lambda _: False, model), True)
    names, frozen = Structure.of(model, only_first).names
    assert names == ("first.weight",)
    assert set(frozen) == {"first.bias", "layers.0.weight", "layers.0.bias", "count", "scale"}
    matrices = Structure.of(model, lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2)
    assert matrices.names[0] == ("first.weight", "layers.0.weight")
    assert eqx.tree_equal(matrices.put(*matrices.take(model)), model)


def test_8_bit_weights_are_frozen():
    model = {"a": jnp.ones(3, jnp.float8_e4m3fn), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.ones(3, jnp.complex64)}
    assert Structure.of(model).names == (("b", "c"), ("a",))
    expected = (
        "`trainable`: expected floating leaves of 16 bits or more, which have gradients, got `a` (float8_e4m3fn). Pass"
    )
    assert message(ValueError, Structure.of, model, lambda leaf: True).startswith(expected)


EXPECTED_TRAINABLE = "`trainable`: expected a function of a leaf, or a PyTree of booleans in the model's structure,"


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (
            eqx.is_array,
            "`trainable`: expected floating leaves of 16 bits or more, which have gradients, got `count` (int32).",
        ),
        (
            "layers",
            "`trainable`: expected a function of a leaf, or a PyTree of booleans in the model's structure, got 'layers'",
        ),
        ([True], f"{EXPECTED_TRAINABLE} got [True]"),
    ],
)
def test_invalid_trainable_raises(trainable, expected):
    assert message(ValueError, Structure.of, Mixed(), trainable).startswith(expected)


# --- trainable leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shards"), [("function", (8, 1)), ("tree", (2, 2))])
def test_frozen_leaves_are_bitwise_unchanged(kind, shards):
    model = eqx.nn.MLP(4, 8, 8, 1, key=jax.random.key(0))
    tree = jax.tree.map(lambda _: False, model)
    tree = eqx.tree_at(lambda m: [layer.weight for layer in m.layers], tree, [True, True])
    trainable = tree if kind == "tree" else (lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2)
    # Weight decay would change any leaf that reaches the optimizer.
    trainer = make_trainer(
        make_deployer(*shards), model=model, optimizer=optax.adamw(0.1, weight_decay=0.5), trainable=trainable
    )
    trainer.train(make_examples(16), 2)
    before, after = to_numpy(model), to_numpy(trainer.model)
    for name in before:
        changed = before[name].tobytes() != after[name].tobytes()
        assert changed == name.endswith("weight"), name
    state_names = [name for name in named_leaves(trainer.opt_state) if "layers" in name]
    assert state_names == [f"0.{moment}.layers.{i}.weight" for moment in ("mu", "nu") for i in (0, 1)]


@pytest.mark.parametrize(
    ("made_on_the_mesh", "shards"),
    [(True, (2, 2)), *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((False, (2, 2)), (True, (1, 1))))],
)
def test_frozen_reference_may_have_the_arrays_of_the_trained_model(made_on_the_mesh, shards):
    """As in DPO: no warning by the plan, a prediction before the first step or training, and a step that donates the
    policy's arrays leaves the reference's."""
    make = lambda: eqx.nn.MLP(4, 4, 32, 2, key=jax.random.key(0))  # noqa: E731
    deployer = make_deployer(*shards)
    policy = deployer.init(make) if made_on_the_mesh else make()
    model = {"ref": policy, "policy": policy}
    trainable = {"ref": jax.tree.map(lambda _: False, policy), "policy": jax.tree.map(eqx.is_inexact_array, policy)}

    def loss_fn(model, batch, key):
        return -jax.nn.log_sigmoid((jax.vmap(model["policy"])(batch) - jax.vmap(model["ref"])(batch)).sum(-1)).mean()

    examples = list(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, trainable=trainable
    )
    deployer.plan(model, loss_fn, np.stack(examples))
    score = lambda model, batch, key: jax.vmap(model["policy"])(batch) - jax.vmap(model["ref"])(batch)  # noqa: E731
    assert not np.any(trainer.get_default_predictor(score).predict(examples, batch_size=16))
    losses = [trainer.update(examples)["loss"] for _ in range(3)]
    expected, batch = {"ref": make(), "policy": make()}, np.stack(examples)
    gradient = eqx.filter_jit(
        eqx.filter_value_and_grad(lambda policy, ref: loss_fn({"ref": ref, "policy": policy}, batch, None))
    )
    for loss in losses:
        value, grads = gradient(expected["policy"], expected["ref"])
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        step = jax.tree.map(lambda g: -0.1 * g, grads)
        expected["policy"] = eqx.apply_updates(expected["policy"], step)
    for new, old in zip(jax.tree.leaves(to_numpy(trainer.model["ref"])), jax.tree.leaves(to_numpy(make())), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(("n_trained", "more"), [(1, ""), (2, r" \(and 1 more\)")])
def test_two_trained_leaves_of_one_array_are_a_warning(n_trained, more):
    layer = make_linear()
    trainable = {name: eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: True, layer), n_trained == 2) for name in "ab"}
    with pytest.warns(UserWarning, match=rf"`b.weight`: the same array as `a.weight`.*{more}: training .* `trainable=`"):
        make_trainer(model={"a": layer, "b": layer}, trainable=trainable)


def test_leaf_unused_by_the_loss_keeps_its_value():
    class Model(eqx.Module):
        used: eqx.nn.Linear
        unused: eqx.nn.Linear

        def __call__(self, x):
            return self.used(x)

    model = Model(make_linear(), make_linear())
    trainer = make_trainer(model=model)
    trainer.train(make_examples(4), 2)
    assert_close(trainer.model.unused, model.unused, rtol=0, atol=0)
    assert trainer.plan["unused.weight"].reason.endswith("; the loss does not read it")
    assert trainer.plan["used.weight"].is_read


# --- dtypes -------------------------------------------------------------------------------------------------------------


def test_bfloat16_compute_keeps_float32_parameters():
    seen = {}

    def loss_fn(model, batch, key):
        seen.update(weight=model.weight.dtype, x=batch["x"].dtype)
        outputs = jax.vmap(model)(batch["x"].astype(model.weight.dtype))
        return jnp.mean((outputs.astype(jnp.float32) - batch["y"]) ** 2)

    examples = make_examples(64)
    trainer = make_trainer(
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-2),
        compute=redeqx.Precision("bfloat16", gradients=None),
    )
    trainer.train(examples, 8)
    assert seen == {"weight": jnp.bfloat16, "x": jnp.float32}
    assert trainer.model.weight.dtype == jnp.float32
    assert trainer.opt_state[0].mu.weight.dtype == jnp.float32
    exact, _, _ = plain_equinox_loop(make_linear(), optax.adam(1e-2), examples, 8)
    assert_close(trainer.model, exact, rtol=0, atol=2e-3)
    # The parameters hold values that bfloat16 would round.
    assert np.any(np.asarray(trainer.model.weight) != np.asarray(trainer.model.weight.astype(jnp.bfloat16), np.float32))


def test_parameters_keep_their_dtypes():
    model = eqx.tree_at(lambda m: m.bias, make_linear(), jnp.zeros(8, jnp.bfloat16))
    trainer = make_trainer(model=model, accumulate_grad_batches=3)
    trainer.train(make_examples(7), 1)
    assert (trainer.model.weight.dtype, trainer.model.bias.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.abs(np.asarray(trainer.model.bias, np.float32)).max() > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_summed_over_micro_batches_in_float32(dtype):
    """4,096 micro-batches with a gradient of 1 each; sums of 1 stop at 256 in bfloat16 and at 2,048 in float16."""

    def loss_fn(model, batch, key):
        return redeqx.Loss(jnp.sum(model[0] * batch["x"][:, 0]), len(batch["x"]))

    n, parameter = 4096, [jnp.zeros((), dtype)]
    trainer = make_trainer(model=parameter, loss_fn=loss_fn, optimizer=optax.sgd(1.0), accumulate_grad_batches=n)
    metrics = trainer.train([{"x": np.ones(1)}] * n, 1)
    assert trainer.step == 1
    assert metrics["grad_norm"] == 1.0
    assert trainer.model[0].dtype == dtype


def test_gradients_of_a_remainder_are_summed_in_float32():
    """256 rows and a remainder of one, with a gradient of 1 each: bfloat16 cannot represent 257. Not compiled, as XLA may
    keep excess precision."""
    groups, n_rows = number_rows([jnp.ones((1, n), jnp.bfloat16) for n in (256, 1)]), jnp.uint32(257)
    every = Rows(jnp.arange(257, dtype=jnp.uint32), n_rows, n_rows)
    sums, _ = accumulate(lambda state, batch, rows: (batch.sum(), state), (), groups, every)
    assert float(sums) == 257.0


# --- custom gradients ---------------------------------------------------------------------------------------------------


def mse_grad(model, batch, key):
    return eqx.filter_value_and_grad(mse)(model, batch, key)


def test_grad_fn_with_the_same_gradient_trains_identically():
    examples = make_examples(16)

    def run(**kwargs):
        optimizer = optax.sgd(0.1, momentum=0.9)
        trainer = make_trainer(make_deployer(2, 2), optimizer=optimizer, accumulate_grad_batches=2, **kwargs)
        return trainer.train(examples, 1), trainer.model

    (ours, model), (theirs, other) = run(), run(grad_fn=mse_grad)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(other, model)


def test_grad_fn_can_clip_gradients_per_example():
    def grad_fn(model, batch, key):
        def of_row(row):
            loss, grads = eqx.filter_value_and_grad(mse)(model, jax.tree.map(lambda x: x[None], row), key)
            scale = jnp.minimum(1.0, 0.1 / optax.tree.norm(grads))
            return loss, jax.tree.map(lambda g: g * scale, grads)

        losses, grads = jax.vmap(of_row)(batch)
        n = len(losses)
        return redeqx.Loss(jnp.sum(losses), n), jax.tree.map(lambda g: jnp.sum(g, axis=0) / n, grads)

    model, examples = make_linear(), make_examples(8)
    trainer = make_trainer(make_deployer(2, 2), grad_fn=grad_fn)
    metrics = trainer.train(examples, 2)
    batch = stack(examples)
    _, grads = eqx.filter_jit(grad_fn)(model, batch, None)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert metrics["grad_norm"] <= 0.1
    assert metrics["loss"] == pytest.approx(float(mse(model, batch, None)), rel=1e-5)
    assert_close(trainer.model, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)))


@pytest.mark.parametrize(
    ("change", "name", "shape", "found"),
    [
        (lambda grads: eqx.tree_at(lambda m: m.weight, grads, jnp.zeros((4, 8))), "weight", "(8, 4)", "(4, 8)"),
        (lambda grads: eqx.tree_at(lambda m: m.bias, grads, None), "bias", "(8,)", "none"),
        (lambda grads: {"weight": grads.weight}, "bias", "(8,)", "none"),
    ],
)
def test_grad_fn_must_return_a_gradient_for_every_leaf(change, name, shape, found):
    def grad_fn(model, batch, key):
        loss, grads = mse_grad(model, batch, key)
        return loss, change(grads)

    assert message(ValueError, make_trainer(grad_fn=grad_fn).train, make_examples(2), 2) == (
        f"`grad_fn` gradient `{name}`: expected shape {shape}, got {found}. "
        "Return a gradient for every trainable leaf, in the model's structure."
    )


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda loss, grads: loss, "an array"),
        (lambda loss, grads: grads, "Linear"),
        (lambda loss, grads: (loss, grads, 0), "3 values"),
    ],
)
def test_grad_fn_must_return_loss_and_gradients(returned, found):
    trainer = make_trainer(grad_fn=lambda *args: returned(*mse_grad(*args)))
    assert message(TypeError, trainer.train, make_examples(2), 2) == (
        f"`grad_fn`: expected `(loss, grads)`, got {found}. Return both."
    )


def test_invalid_loss_of_grad_fn_raises():
    trainer = make_trainer(grad_fn=lambda *args: (jnp.zeros(2), mse_grad(*args)[1]))
    assert message(ValueError, trainer.train, make_examples(2), 2) == (
        f"`grad_fn`: expected the loss to be a scalar, got shape (2,). {MEAN}"
    )


# --- model state --------------------------------------------------------------------------------------------------------


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(4, "batch", momentum=0.5, mode="batch")
        self.linear = make_linear()

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x), state


def run_normed(model, state, batch):
    outputs, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
    return jnp.mean((outputs - batch["y"]) ** 2), state


@pytest.mark.parametrize(("shards", "accumulate"), [pytest.param((8, 1), 2, marks=pytest.mark.sweep), ((2, 2), 2)])
def test_batch_norm_trains_and_updates_its_state(shards, accumulate):
    (model, state), (desired, desired_state) = (eqx.nn.make_with_state(Normed)() for _ in range(2))
    examples = make_examples(32)
    deployer = make_deployer(*shards)
    rows = 8 // accumulate
    trainer = make_trainer(
        deployer,
        model=model,
        model_state=state,
        loss_fn=lambda model, state, batch, key: run_normed(model, state, batch),
        accumulate_grad_batches=accumulate,
    )
    trainer.train(examples, rows // deployer.n_batch_shards)
    assert trainer.step == 4

    grad = eqx.filter_jit(eqx.filter_value_and_grad(run_normed, has_aux=True))
    for start in range(0, 32, 8):
        grads = []
        for micro in range(start, start + 8, rows):
            batch = stack(examples[micro : micro + rows])
            (_, desired_state), g = grad(desired, desired_state, batch)
            grads.append(g)
        desired = eqx.apply_updates(desired, jax.tree.map(lambda *g: -0.1 * sum(g) / len(g), *grads))
    assert_close(trainer.model, desired)
    assert_close(trainer.model_state, desired_state)
    assert np.abs(np.concatenate([np.ravel(x) for x in to_numpy(trainer.model_state).values()])).max() > 0

    # Evaluation reads the state without changing it, and rows do not affect each other.
    before = to_numpy(trainer.model_state)
    desired_loss = run_normed(eqx.nn.inference_mode(desired), desired_state, stack(examples[:8]))[0]
    assert trainer.eval_loss(examples[:8], 1) == pytest.approx(float(desired_loss), rel=1e-4)
    assert all(before[name].tobytes() == leaf.tobytes() for name, leaf in to_numpy(trainer.model_state).items())


class SetsConstants(eqx.nn.StatefulLayer):
    """Sets constants in its state, as `eqx.nn.BatchNorm` does in its default mode after its first call."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex((jnp.zeros((), jnp.bool_), jnp.zeros((), jnp.int8), jnp.zeros(3)))

    def __call__(self, x, state, *, key=None):
        is_initialised, _, _ = state.get(self.index)
        return jnp.where(is_initialised, x, 2 * x), state.set(self.index, (True, jnp.int8(7), jnp.ones(3)))


@pytest.mark.parametrize("shards", [*(pytest.param(x, marks=pytest.mark.sweep) for x in ((4, 1), (1, 8))), (2, 2)])
def test_layers_that_set_constants_match_a_plain_loop(shards):
    """`eqx.nn.BatchNorm(mode="ema")`, the default, sets a constant `False`."""

    def make_layers():
        keys = jax.random.split(jax.random.key(0), 2)
        norm = eqx.nn.BatchNorm(64, "batch", mode="ema")
        layers = [eqx.nn.Linear(64, 64, key=keys[0]), norm, SetsConstants(), eqx.nn.Linear(64, 64, key=keys[1])]
        return eqx.nn.Sequential(layers)

    (model, state), (desired, desired_state) = (eqx.nn.make_with_state(make_layers)() for _ in range(2))
    examples, deployer = make_examples(24, 64, 64), make_deployer(*shards)
    trainer = make_trainer(
        deployer, model=model, model_state=state, loss_fn=lambda model, state, batch, key: run_normed(model, state, batch)
    )
    trainer.train(examples, 8 // deployer.n_batch_shards)
    assert any("model" in str(leaf.spec) or "fsdp" in str(leaf.spec) for leaf in trainer.plan.leaves.values())
    grad = eqx.filter_jit(eqx.filter_value_and_grad(run_normed, has_aux=True))
    for start in range(0, 24, 8):
        (_, desired_state), grads = grad(desired, desired_state, stack(examples[start : start + 8]))
        desired = eqx.apply_updates(desired, jax.tree.map(lambda g: -0.1 * g, grads))
    assert_close(trainer.model, desired, rtol=1e-4, atol=1e-5)
    assert_close(trainer.model_state, desired_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("returned", "error", "expected"),
    [
        (
            lambda loss, state: loss,
            TypeError,
            "`loss_fn`: expected `(loss, state)`, as `model_state` was given, got an array. Return both.",
        ),
        (
            lambda loss, state: (loss, None),
            ValueError,
            "`loss_fn` state: expected the structure of `model_state`, got another one, which differs in `0`, `1.0`, `1.1`. "
            "Return the state that the model's call returned, or what else replaces each leaf.",
        ),
    ],
)
def test_loss_fn_must_return_the_model_state(returned, error, expected):
    model, state = eqx.nn.make_with_state(Normed)()
    trainer = make_trainer(model=model, model_state=state, loss_fn=lambda m, s, b, k: returned(*run_normed(m, s, b)))
    assert message(error, trainer.train, make_examples(4), 4) == expected


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (lambda n: {"n": 0.9 * n}, "`n`: expected int32[], as in `model_state`, got float32[]"),  # a cast would make it 0
        (lambda n: {"n": jnp.stack([n, n])}, "`n`: expected int32[], as in `model_state`, got int32[2]"),
        (lambda n: {"n": n, "activation": jax.nn.relu}, "got another one, which differs in `activation`"),
    ],
)
def test_loss_fn_must_return_a_state_of_the_same_leaves(after, problem):
    trainer = make_trainer(
        model_state={"n": jnp.array(1)}, loss_fn=lambda model, state, *rest: (mse(model, *rest), after(state["n"]))
    )
    assert problem in message(ValueError, trainer.train, make_examples(4), 4)


def test_a_model_loses_its_weak_types():
    """Else the batch would decide the dtype of the loss, until a resume. `deployer.init` places a model as it was made."""
    deployer = make_deployer()
    model = deployer.init(lambda: [jnp.full(3, 0.5)])
    dtypes = []

    def loss_fn(model, batch, key):
        dtypes.append((model[0] * jnp.bfloat16(1)).dtype)
        return (model[0] ** 2).sum() + 0 * jax.tree.leaves(batch)[0].sum()

    trainer = make_trainer(deployer, model=model, loss_fn=loss_fn)
    trainer.train(make_examples(8), 4)
    assert {*dtypes} == {jnp.dtype("float32")} and not trainer.model[0].weak_type


def test_the_model_state_keeps_its_dtypes():
    def loss_fn(model, state, batch, key):
        return mse(model, batch, key), {"mean": state["mean"] + jnp.float32(1), "n": state["n"] + jnp.int8(1)}

    state = {"mean": jnp.zeros(3, jnp.bfloat16), "n": jnp.array(0, jnp.int16)}
    trainer = make_trainer(model_state=state, loss_fn=loss_fn)
    trainer.train(make_examples(8), 4)
    assert {name: leaf.dtype for name, leaf in trainer.model_state.items()} == {"mean": jnp.bfloat16, "n": jnp.int16}


# --- optimizers, donation and remat -------------------------------------------------------------------------------------


def labels(tree):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", tree)


OPTIMIZERS = {
    "sharpness-aware": lambda: optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-3), sync_period=2),
    "sharpness-aware, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-3), sync_period=2)
    ),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, weight_decay=0.1)),
    "momentum": lambda: optax.sgd(optax.linear_schedule(1e-2, 1e-1, 3), momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, labels),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (i % 2)) for i, x in enumerate(OPTIMIZERS)])
def test_optimizers_on_a_mesh_match_a_plain_loop(name):
    model, examples = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), make_examples(24, 64, 64)
    optimizer = OPTIMIZERS[name]()
    desired, losses, norms = plain_equinox_loop(model, optimizer, examples, 8)
    deployer = make_deployer(2, 2, loggers=[log := Recorder()])
    trainer = make_trainer(deployer, model=model, optimizer=optimizer)
    with counted_compilations() as compiled:
        trainer.train(examples, 2)
    assert compiled["step_fn"] == 1
    assert_close(trainer.model, desired, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log.of("loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(log.of("grad_norm"), norms, rtol=1e-5)
    # State of a parameter's shape is sharded like the parameter; an update does not change shardings.
    params = named_leaves(eqx.filter(trainer.model, eqx.is_array))
    assert params["layers.0.weight"].sharding.spec == P("model", "fsdp")
    assert params["layers.1.weight"].sharding.spec == P("fsdp", "model")
    for state_name, leaf in named_leaves(trainer.opt_state).items():
        matching_params = [param for param_name, param in params.items() if state_name.endswith(f".{param_name}")]
        expected_sharding = (
            matching_params[0].sharding
            if matching_params and matching_params[0].shape == leaf.shape
            else replicated(deployer.mesh)
        )
        assert leaf.sharding == expected_sharding, state_name


@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_training_keeps_the_caller_s_arrays(shards):
    model, state = eqx.nn.make_with_state(Normed)()

    def loss_fn(model, state, batch, key):
        return run_normed(model, state, batch)

    trainer = make_trainer(make_deployer(*shards), model=model, model_state=state, loss_fn=loss_fn)
    trainer.train(make_examples(16), 2)
    assert not [name for name, leaf in named_leaves((model, state)).items() if eqx.is_array(leaf) and leaf.is_deleted()]


def test_arrays_created_by_init_are_donated():
    deployer = make_deployer(2, 2)
    model = deployer.init(make_linear)
    make_trainer(deployer, model=model).train(make_examples(4), 1)
    assert model.weight.is_deleted()  # the buffers are reused, not copied


def test_trainers_of_one_model_do_not_take_each_other_s_arrays():
    """As the clients of federated averaging, which begin a round with one model on the mesh."""
    deployer = make_deployer(2, 2)
    model = deployer.init(make_linear)
    clients = [make_trainer(deployer, model=model) for _ in range(2)]
    for client in clients:
        client.train(make_examples(4), 1)
    for a, b in zip(*(jax.tree.leaves(eqx.filter(client.model, eqx.is_array)) for client in clients), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shards", [pytest.param((1, 1), marks=pytest.mark.sweep), (2, 2)], ids=str)
@pytest.mark.sweep
def test_remat_of_loops_saves_memory_without_changing_results(shards):
    """`"matmuls"` recomputes no products: the FLOPs are those of `"none"`."""
    stack = eqx.filter_vmap(lambda key: eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=key))(
        jax.random.split(jax.random.key(0), 4)
    )

    def loss_fn(model, batch, key):
        arrays, static = eqx.partition(model, eqx.is_array)

        def block(x, arrays):
            return x + jax.vmap(eqx.combine(arrays, static))(jnp.tanh(x) ** 2), None

        return jnp.mean(jax.lax.scan(block, batch, arrays)[0] ** 2)

    examples = list(np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32))
    found = {}
    for remat in ("none", "matmuls", "full", "offload"):
        trainer = redeqx.Trainer(
            make_deployer(*shards),
            model=stack,
            optimizer=optax.sgd(0.1),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            compute=redeqx.Compute(remat=remat),
        )
        step = trainer.dry_run(examples, batch_size=256, search="none").steps["train"]
        trainer.train(examples, batch_size=256)
        found[remat] = step.temporaries, step.flops["float32"], jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    memory, flops, leaves = ({name: values[i] for name, values in found.items()} for i in range(3))
    assert memory["full"] < memory["matmuls"] < 0.8 * memory["none"]
    assert flops["matmuls"] == flops["none"] < flops["full"]
    for name in ("matmuls", "full", "offload"):
        for a, b in zip(leaves[name], leaves["none"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_default_remat_level_is_matmuls():
    assert redeqx.Compute().remat_level == "matmuls" and redeqx.Compute(remat="none").remat_level == "none"
    expected = "`remat`: expected 'auto', 'none', 'matmuls', 'full' or 'offload', got 'some'"
    with pytest.raises(ValueError, match=expected):
        redeqx.Compute(remat="some")
    with pytest.raises(ValueError, match=r"`memory`: expected 'auto' or None, got 'most'\. Pass one of the two\."):
        redeqx.Compute(memory="most")


def test_a_collate_fn_may_reuse_its_memory():
    """JAX keeps NumPy's memory where it is aligned to 64 bytes, and reads any other later."""
    memory = np.zeros(8 * 4096 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    reused = memory[start : start + 8 * 4096].reshape(8, 4096)

    def into_the_same(examples):
        reused[:] = np.stack(examples)
        return reused

    examples = [np.full(4096, i, np.float32) for i in range(64)]
    weights = []
    for collate_fn in (np.stack, into_the_same):
        loss = lambda model, batch, key: jnp.mean(model["w"] * batch)  # noqa: E731
        trainer = make_trainer(make_deployer(1), model={"w": jnp.ones(())}, collate_fn=collate_fn, loss_fn=loss)
        trainer.train(examples, batch_size=8)
        weights.append(float(trainer.model["w"]))
    assert weights[0] == weights[1]


def test_rules_are_in_order_and_change_nothing_that_needs_no_change():
    model = eqx.nn.Linear(256, 256, key=jax.random.key(0))
    structure, plan = Structure.of(model), make_deployer(1).plan(model)
    inputs = Inputs(n_weights=2, n_state=0, n_batch=1)
    rules = plan_rules(structure, plan, redeqx.Compute("bfloat16"), inputs, "training")
    assert [type(rule).__name__ for rule in rules] == [
        *("SplitVocabulary", "RematLoops", "FixLookups", "SplitFourier"),
        *("DequantiseAtUse", "ExchangeLookups", "GatherAtUse", "SplitRepeated", "FixConvolutions", "FixPads", "FixPools"),
        *("InCustomDerivatives", "Reshard", "GroupMatmuls", "FuseAttention"),
        *("WeightProducts", "PickByComparison"),
    ]
    without = plan_rules(structure, plan, redeqx.Compute("bfloat16", fuse_attention=False), inputs, "training")
    assert len(without) == len(rules) - 1

    def fn(weight, bias, x):
        return jnp.tanh(x @ weight.T + bias).sum()

    args = model.weight, model.bias, jnp.ones((8, 256))
    assert str(jax.make_jaxpr(transformed(fn, rules))(*args)) == str(jax.make_jaxpr(fn)(*args))
