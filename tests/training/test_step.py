"""The steps: what a loss may be, a model in parts, which leaves are trained, dtypes, own gradients, state, optimizers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx._tree import named_leaves
from redeqx.machine._mesh import replicated
from redeqx.training import _functions
from redeqx.training._functions import plan_rules
from redeqx.training._loss import as_sums
from redeqx.training._parts import Parts
from redeqx.training._step import _accumulate


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append(metrics)

    def of(self, name):
        return [row[name] for row in self.rows if name in row]


def deployer(n_model_shards=8, n_fsdp_shards=1, **kwargs):
    """By default of one batch shard, so that a micro-batch is as small as it gets."""
    return redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False, **kwargs)


def make_examples(n, n_in=4, n_out=8, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=n_in), "y": rng.normal(size=n_out)} for _ in range(n)]


def stack(examples):
    return {name: np.stack([example[name] for example in examples]).astype(np.float32) for name in examples[0]}


def mse(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def linear(n_in=4, n_out=8):
    return eqx.nn.Linear(n_in, n_out, key=jax.random.key(0))


def make_trainer(at=None, **kwargs):
    given = {"model": linear(), "optimizer": optax.sgd(0.1), "collate_fn": stack, "loss_fn": mse, **kwargs}
    return redeqx.Trainer(at or deployer(), **given)


def host(tree):
    """Arrays by name, in the host's memory."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)).items()}


def assert_close(got, wanted, rtol=1e-5, atol=1e-6):
    got, wanted = host(got), host(wanted)
    assert got.keys() == wanted.keys()
    for name, leaf in wanted.items():
        np.testing.assert_allclose(got[name], leaf, rtol=rtol, atol=atol, err_msg=name)


def by_hand(model, optimizer, examples, batch_size, loss_fn=mse):
    """The plain Equinox loop: the model, and the losses and gradient norms on the way."""
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


# --- what a loss may be -------------------------------------------------------------------------------------------------


def plain(sums):
    total, weight, metrics = sums
    assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(sums))
    return float(total), float(weight), {name: tuple(map(float, pair)) for name, pair in metrics.items()}


@pytest.mark.parametrize("mean", [0.5, np.float64(0.5), jnp.bfloat16(0.5), jnp.float32(0.5)])
def test_a_scalar_is_a_mean_over_the_rows(mean):
    assert plain(as_sums(mean, 6)) == (3.0, 6.0, {})


def test_a_loss_is_a_sum_and_its_weight():
    loss = redeqx.Loss(jnp.float32(3), 4, {"hits": jnp.int32(2), "of_its_own": (jnp.bfloat16(1), 5)})
    assert plain(as_sums(loss, 6)) == (3.0, 4.0, {"hits": (2.0, 4.0), "of_its_own": (1.0, 5.0)})


SCALAR = "Return a scalar or `redeqx.Loss(total, weight)`; with `model_state`, `(loss, state)`."
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
def test_what_is_no_loss_is_named(loss, error, expected):
    assert message(error, as_sums, loss, 6) == expected


@pytest.mark.parametrize(
    ("metrics", "found"),
    [(None, "NoneType"), (["mse"], "list"), ({1: 0.0}, "names [1]")],
)
def test_metrics_are_a_dict_by_name(metrics, found):
    expected = f'`Loss.metrics`: expected a dict of sums by name, got {found}. Write {{"correct": n_correct}}.'
    assert message(TypeError, redeqx.Loss, 1.0, 1.0, metrics) == expected


def test_a_list_of_two_is_a_pair_too():
    assert plain(as_sums(redeqx.Loss(3.0, 4.0, {"a": [1.0, 5.0]}), 6))[2] == {"a": (1.0, 5.0)}


def weighted(model, batch, key):
    """Rows weigh as much as their `w`; `seen` has its own weight."""
    errors = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=1)
    weight = jnp.sum(batch["w"])
    seen = (jnp.sum(batch["y"][:, 0]), len(batch["x"]))
    return redeqx.Loss(jnp.sum(errors * batch["w"]), weight, {"error": jnp.sum(errors * batch["w"]), "seen": seen})


@pytest.mark.parametrize(("shards", "accumulate"), [((1, 1), 1), ((2, 2), 1), ((8, 1), 4)])
def test_sums_are_divided_once_however_the_work_is_cut(shards, accumulate):
    """11 rows of unequal weight as one step: on eight devices, on four, in micro-batches with a remainder."""
    examples = [{**e, "w": np.asarray(i % 4 + 1)} for i, e in enumerate(make_examples(11))]
    batch = stack(examples)
    weights = batch["w"] / batch["w"].sum()

    def whole(model):
        errors = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=1)
        return jnp.sum(errors * weights)

    model = linear()
    loss, grads = eqx.filter_value_and_grad(whole)(model)
    at = deployer(*shards, loggers=[log := Recorder()])
    trainer = make_trainer(at, loss_fn=weighted, accumulate_grad_batches=accumulate)
    per_device = -(-11 // (at.n_batch_shards * accumulate))
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
    after = whole(jax.device_get(trainer.model))
    np.testing.assert_allclose([evaluated["loss"], again["loss"], evaluated["error"]], after, rtol=1e-5)
    np.testing.assert_allclose([evaluated["seen"], again["seen"]], metrics["seen"], rtol=1e-5)


# --- a model in parts ---------------------------------------------------------------------------------------------------


class Mixed(eqx.Module):
    """Arrays of several kinds, functions, strings, a static field."""

    first: eqx.nn.Linear
    layers: list
    count: jax.Array
    scale: np.ndarray
    name: str
    activation: object
    size: int = eqx.field(static=True)

    def __init__(self):
        self.first = linear()
        self.layers = [linear(8, 8), eqx.nn.Dropout(0.5), None]
        self.count = jnp.arange(3)
        self.scale = np.ones(2, np.float16)
        self.name = "mixed"
        self.activation = jax.nn.relu
        self.size = 4


FLOATS = ("first.weight", "first.bias", "layers.0.weight", "layers.0.bias", "scale")


@pytest.mark.parametrize(("accumulate", "weights"), [(1, {1}), (2, {8})])
def test_the_mean_of_a_single_micro_batch_has_weight_1(accumulate, weights, monkeypatch):
    """Its gradients are those of the loss itself, with no rounding by a weight."""
    used = set()

    def recording(loss, n_rows, *where):
        used.add(n_rows)
        return as_sums(loss, n_rows, *where)

    monkeypatch.setattr(_functions, "as_sums", recording)
    made = make_trainer(deployer(1), accumulate_grad_batches=accumulate)
    loss = made.update(make_examples(24))["loss"]
    assert used == weights
    model, batch = linear(), stack(make_examples(24))
    value, grads = eqx.filter_value_and_grad(mse)(model, batch, None)
    assert loss == pytest.approx(float(value), rel=1e-6)
    assert_close(made.model, jax.tree.map(lambda x, g: x - 0.1 * g, eqx.filter(model, eqx.is_array), grads))


def test_parts_round_trip():
    model = Mixed()
    parts = Parts.of(model)
    assert parts.names == (FLOATS, ("count",))
    assert eqx.tree_equal(parts.put(*parts.take(model)), model)
    trained, frozen = parts.take(model)
    assert [leaf.shape for leaf in trained] == [(8, 4), (8,), (8, 8), (8,), (2,)]
    assert [leaf.shape for leaf in frozen] == [(3,)]
    tree = parts.trained_tree(trained)
    assert tuple(named_leaves(tree)) == FLOATS
    assert tree.count is None


def test_parts_of_shapes_are_those_of_the_model():
    shapes = eqx.filter_eval_shape(Mixed)
    assert Parts.of(shapes).names == Parts.of(Mixed()).names


def test_parts_switch_to_inference_and_cast():
    model = Mixed()
    parts = Parts.of(model)
    made = parts.put(*parts.take(model), inference=True, compute_dtype=jnp.bfloat16)
    assert made.layers[1].inference
    assert not model.layers[1].inference
    dtypes = {name: leaf.dtype for name, leaf in host(made).items()}
    assert dtypes.pop("count") == np.int32
    assert dtypes.keys() <= set(FLOATS)
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}


def test_trainable_is_a_function_or_a_tree():
    model = Mixed()
    only_first = eqx.tree_at(lambda m: m.first.weight, jax.tree.map(lambda _: False, model), True)
    names, frozen = Parts.of(model, only_first).names
    assert names == ("first.weight",)
    assert set(frozen) == {"first.bias", "layers.0.weight", "layers.0.bias", "count", "scale"}
    matrices = Parts.of(model, lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2)
    assert matrices.names[0] == ("first.weight", "layers.0.weight")
    assert eqx.tree_equal(matrices.put(*matrices.take(model)), model)


def test_weights_in_8_bits_are_frozen():
    model = {"a": jnp.ones(3, jnp.float8_e4m3fn), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.ones(3, jnp.complex64)}
    assert Parts.of(model).names == (("b", "c"), ("a",))
    expected = (
        "`trainable`: expected floating leaves of 16 bits or more, which have gradients, got `a` (float8_e4m3fn). Pass"
    )
    assert message(ValueError, Parts.of, model, lambda leaf: True).startswith(expected)


A_TREE = "`trainable`: expected a function of a leaf, or a PyTree of booleans in the model's structure,"


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
        ([True], f"{A_TREE} got [True]"),
    ],
)
def test_what_cannot_be_trained_is_named(trainable, expected):
    assert message(ValueError, Parts.of, Mixed(), trainable).startswith(expected)


# --- which leaves are trained -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shards"), [("function", (8, 1)), ("tree", (2, 2))])
def test_frozen_leaves_do_not_move_by_a_bit(kind, shards):
    model = eqx.nn.MLP(4, 8, 8, 1, key=jax.random.key(0))
    tree = jax.tree.map(lambda _: False, model)
    tree = eqx.tree_at(lambda m: [layer.weight for layer in m.layers], tree, [True, True])
    trainable = tree if kind == "tree" else (lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2)
    # Weight decay moves whatever the optimizer sees.
    trainer = make_trainer(deployer(*shards), model=model, optimizer=optax.adamw(0.1, weight_decay=0.5), trainable=trainable)
    trainer.train(make_examples(16), 2)
    before, after = host(model), host(trainer.model)
    for name in before:
        moved = before[name].tobytes() != after[name].tobytes()
        assert moved == name.endswith("weight"), name
    held = [name for name in named_leaves(trainer.opt_state) if "layers" in name]
    assert held == [f"0.{moment}.layers.{i}.weight" for moment in ("mu", "nu") for i in (0, 1)]


def test_a_leaf_that_the_loss_does_not_read_keeps_its_value():
    class Model(eqx.Module):
        used: eqx.nn.Linear
        unused: eqx.nn.Linear

        def __call__(self, x):
            return self.used(x)

    model = Model(linear(), linear())
    trainer = make_trainer(model=model)
    trainer.train(make_examples(4), 2)
    assert_close(trainer.model.unused, model.unused, rtol=0, atol=0)
    assert trainer.plan["unused.weight"].reason.endswith("; the loss does not read it")
    assert trainer.plan["used.weight"].is_read


# --- dtypes -------------------------------------------------------------------------------------------------------------


def test_bf16_compute_keeps_fp32_parameters():
    seen = {}

    def loss_fn(model, batch, key):
        seen.update(weight=model.weight.dtype, x=batch["x"].dtype)
        outputs = jax.vmap(model)(batch["x"].astype(model.weight.dtype))
        return jnp.mean((outputs.astype(jnp.float32) - batch["y"]) ** 2)

    examples = make_examples(64)
    trainer = make_trainer(loss_fn=loss_fn, optimizer=optax.adam(1e-2), compute_dtype=jnp.bfloat16)
    trainer.train(examples, 8)
    assert seen == {"weight": jnp.bfloat16, "x": jnp.float32}
    assert trainer.model.weight.dtype == jnp.float32
    assert trainer.opt_state[0].mu.weight.dtype == jnp.float32
    exact, _, _ = by_hand(linear(), optax.adam(1e-2), examples, 8)
    assert_close(trainer.model, exact, rtol=0, atol=2e-3)
    # The parameters keep what bf16 would round off.
    assert np.any(np.asarray(trainer.model.weight) != np.asarray(trainer.model.weight.astype(jnp.bfloat16), np.float32))


def test_parameters_keep_their_own_dtypes():
    model = eqx.tree_at(lambda m: m.bias, linear(), jnp.zeros(8, jnp.bfloat16))
    trainer = make_trainer(model=model, accumulate_grad_batches=3)
    trainer.train(make_examples(7), 1)
    assert (trainer.model.weight.dtype, trainer.model.bias.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.abs(np.asarray(trainer.model.bias, np.float32)).max() > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_summed_in_float32(dtype):
    """4,096 micro-batches with a gradient of 1 each: bfloat16 counts to 256, float16 to 2,048."""

    def loss_fn(model, batch, key):
        return redeqx.Loss(jnp.sum(model[0] * batch["x"][:, 0]), 1)

    n, parameter = 4096, [jnp.zeros((), dtype)]
    trainer = make_trainer(model=parameter, loss_fn=loss_fn, optimizer=optax.sgd(1.0), accumulate_grad_batches=n)
    metrics = trainer.train([{"x": np.ones(1)}] * n, 1)
    assert trainer.step == 1
    assert metrics["grad_norm"] == 1.0
    assert trainer.model[0].dtype == dtype


def test_gradients_of_a_remainder_are_summed_in_float32_too():
    """256 rows, and one that is left over, with a gradient of 1 each: bfloat16 has no 257. Uncompiled, as XLA may keep more
    than a dtype holds."""
    groups = [jnp.ones((1, n), jnp.bfloat16) for n in (256, 1)]
    sums, _ = _accumulate(lambda state, rows, key: (rows.sum(), state), (), groups, jax.random.key(0))
    assert float(sums) == 257.0


# --- own gradients ------------------------------------------------------------------------------------------------------


def same_grad(model, batch, key):
    return eqx.filter_value_and_grad(mse)(model, batch, key)


def test_the_same_gradient_trains_the_same():
    examples = make_examples(16)

    def run(**kwargs):
        optimizer = optax.sgd(0.1, momentum=0.9)
        trainer = make_trainer(deployer(2, 2), optimizer=optimizer, accumulate_grad_batches=2, **kwargs)
        return trainer.train(examples, 1), trainer.model

    (ours, model), (theirs, other) = run(), run(grad_fn=same_grad)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(other, model)


def test_gradients_are_clipped_by_example():
    def grad_fn(model, batch, key):
        def of_row(row):
            loss, grads = eqx.filter_value_and_grad(mse)(model, jax.tree.map(lambda x: x[None], row), key)
            scale = jnp.minimum(1.0, 0.1 / optax.tree.norm(grads))
            return loss, jax.tree.map(lambda g: g * scale, grads)

        losses, grads = jax.vmap(of_row)(batch)
        n = len(losses)
        return redeqx.Loss(jnp.sum(losses), n), jax.tree.map(lambda g: jnp.sum(g, axis=0) / n, grads)

    model, examples = linear(), make_examples(8)
    trainer = make_trainer(deployer(2, 2), grad_fn=grad_fn)
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
def test_a_gradient_for_every_leaf_is_needed(change, name, shape, found):
    def grad_fn(model, batch, key):
        loss, grads = same_grad(model, batch, key)
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
def test_grad_fn_returns_two_things(returned, found):
    trainer = make_trainer(grad_fn=lambda *args: returned(*same_grad(*args)))
    assert message(TypeError, trainer.train, make_examples(2), 2) == (
        f"`grad_fn`: expected `(loss, grads)`, got {found}. Return both."
    )


def test_grad_fn_s_loss_is_checked_under_its_name():
    trainer = make_trainer(grad_fn=lambda *args: (jnp.zeros(2), same_grad(*args)[1]))
    assert message(ValueError, trainer.train, make_examples(2), 2) == (
        f"`grad_fn`: expected the loss to be a scalar, got shape (2,). {MEAN}"
    )


# --- state --------------------------------------------------------------------------------------------------------------


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(4, "batch", momentum=0.5, mode="batch")
        self.linear = linear()

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x), state


def run_normed(model, state, batch):
    outputs, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
    return jnp.mean((outputs - batch["y"]) ** 2), state


@pytest.mark.parametrize(("shards", "accumulate"), [pytest.param((8, 1), 2, marks=pytest.mark.sweep), ((2, 2), 2)])
def test_batch_norm_trains_and_keeps_its_state(shards, accumulate):
    (model, state), (wanted, wanted_state) = (eqx.nn.make_with_state(Normed)() for _ in range(2))
    examples = make_examples(32)
    at = deployer(*shards)
    rows = 8 // accumulate
    trainer = make_trainer(
        at,
        model=model,
        model_state=state,
        loss_fn=lambda model, state, batch, key: run_normed(model, state, batch),
        accumulate_grad_batches=accumulate,
    )
    trainer.train(examples, rows // at.n_batch_shards)
    assert trainer.step == 4

    grad = eqx.filter_jit(eqx.filter_value_and_grad(run_normed, has_aux=True))
    for start in range(0, 32, 8):
        grads = []
        for micro in range(start, start + 8, rows):
            batch = stack(examples[micro : micro + rows])
            (_, wanted_state), g = grad(wanted, wanted_state, batch)
            grads.append(g)
        wanted = eqx.apply_updates(wanted, jax.tree.map(lambda *g: -0.1 * sum(g) / len(g), *grads))
    assert_close(trainer.model, wanted)
    assert_close(trainer.model_state, wanted_state)
    assert np.abs(np.concatenate([np.ravel(x) for x in host(trainer.model_state).values()])).max() > 0

    # Evaluation reads the state, does not change it, and does not mix rows.
    before = host(trainer.model_state)
    wanted_eval = run_normed(eqx.nn.inference_mode(wanted), wanted_state, stack(examples[:8]))[0]
    assert trainer.eval_loss(examples[:8], 1) == pytest.approx(float(wanted_eval), rel=1e-4)
    assert all(before[name].tobytes() == leaf.tobytes() for name, leaf in host(trainer.model_state).items())


class Constant(eqx.nn.StatefulLayer):
    """Sets constants, as `eqx.nn.BatchNorm` does in its default mode once it has begun."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex((jnp.zeros((), jnp.bool_), jnp.zeros((), jnp.int8), jnp.zeros(3)))

    def __call__(self, x, state, *, key=None):
        begun, _, _ = state.get(self.index)
        return jnp.where(begun, x, 2 * x), state.set(self.index, (True, jnp.int8(7), jnp.ones(3)))


@pytest.mark.parametrize("shards", [*(pytest.param(x, marks=pytest.mark.sweep) for x in ((4, 1), (1, 8))), (2, 2)])
def test_layers_that_set_constants_train_as_they_do_by_hand(shards):
    """`eqx.nn.BatchNorm(mode="ema")`, its default, sets a `False`."""

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        norm = eqx.nn.BatchNorm(64, "batch", mode="ema")
        layers = [eqx.nn.Linear(64, 64, key=keys[0]), norm, Constant(), eqx.nn.Linear(64, 64, key=keys[1])]
        return eqx.nn.Sequential(layers)

    (model, state), (wanted, wanted_state) = (eqx.nn.make_with_state(make)() for _ in range(2))
    examples, at = make_examples(24, 64, 64), deployer(*shards)
    trainer = make_trainer(
        at, model=model, model_state=state, loss_fn=lambda model, state, batch, key: run_normed(model, state, batch)
    )
    trainer.train(examples, 8 // at.n_batch_shards)
    assert any("model" in str(leaf.spec) or "fsdp" in str(leaf.spec) for leaf in trainer.plan.leaves.values())
    grad = eqx.filter_jit(eqx.filter_value_and_grad(run_normed, has_aux=True))
    for start in range(0, 24, 8):
        (_, wanted_state), grads = grad(wanted, wanted_state, stack(examples[start : start + 8]))
        wanted = eqx.apply_updates(wanted, jax.tree.map(lambda g: -0.1 * g, grads))
    assert_close(trainer.model, wanted, rtol=1e-4, atol=1e-5)
    assert_close(trainer.model_state, wanted_state, rtol=1e-4, atol=1e-5)


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
            "`loss_fn` state: expected the structure of `model_state`, got another one. "
            "Return the state that the model's call returned.",
        ),
    ],
)
def test_a_state_must_come_back(returned, error, expected):
    model, state = eqx.nn.make_with_state(Normed)()
    trainer = make_trainer(model=model, model_state=state, loss_fn=lambda m, s, b, k: returned(*run_normed(m, s, b)))
    assert message(error, trainer.train, make_examples(4), 4) == expected


# --- optimizers ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_on_a_mesh_what_they_do_by_hand(name):
    model, examples = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), make_examples(24, 64, 64)
    optimizer = OPTIMIZERS[name]()
    wanted, losses, norms = by_hand(model, optimizer, examples, 8)
    at = deployer(2, 2, loggers=[log := Recorder()])
    trainer = make_trainer(at, model=model, optimizer=optimizer)
    trainer.train(examples, 2)
    assert_close(trainer.model, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log.of("loss"), losses, rtol=1e-5)
    np.testing.assert_allclose(log.of("grad_norm"), norms, rtol=1e-5)
    # What has a parameter's shape lives where the parameter does; an update moves nothing.
    params = named_leaves(eqx.filter(trainer.model, eqx.is_array))
    assert params["layers.0.weight"].sharding.spec == P("model", "fsdp")
    assert params["layers.1.weight"].sharding.spec == P("fsdp", "model")
    for state_name, leaf in named_leaves(trainer.opt_state).items():
        twins = [param for param_name, param in params.items() if state_name.endswith(f".{param_name}")]
        home = twins[0].sharding if twins and twins[0].shape == leaf.shape else replicated(at.mesh)
        assert leaf.sharding == home, state_name
    assert trainer._engine.state.program.train_step._cache_size() == 1


@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_the_caller_s_arrays_survive_training(shards):
    model, state = eqx.nn.make_with_state(Normed)()

    def loss_fn(model, state, batch, key):
        return run_normed(model, state, batch)

    trainer = make_trainer(deployer(*shards), model=model, model_state=state, loss_fn=loss_fn)
    trainer.train(make_examples(16), 2)
    assert not [name for name, leaf in named_leaves((model, state)).items() if eqx.is_array(leaf) and leaf.is_deleted()]


def test_arrays_that_init_made_are_taken_over():
    at = deployer(2, 2)
    model = at.init(linear)
    make_trainer(at, model=model).train(make_examples(4), 1)
    assert model.weight.is_deleted()  # not held twice


@pytest.mark.parametrize("shards", [pytest.param((1, 1), marks=pytest.mark.sweep), (2, 2)], ids=str)
@pytest.mark.sweep
def test_remat_of_loops_saves_memory_and_changes_no_number(shards):
    """`"matmuls"` computes no product twice: as many FLOPs as without."""
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
            deployer(*shards), model=stack, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, remat=remat
        )
        step = trainer.dry_run(examples, batch_size=256, search=False).steps["train"]
        trainer.train(examples, batch_size=256)
        found[remat] = step.temporaries, step.flops["float32"], jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    memory, flops, leaves = ({name: values[i] for name, values in found.items()} for i in range(3))
    assert memory["full"] < memory["matmuls"] < 0.8 * memory["none"]
    assert flops["matmuls"] == flops["none"] < flops["full"]
    for name in ("matmuls", "full", "offload"):
        for a, b in zip(leaves[name], leaves["none"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_loops_recompute_all_but_products_by_default():
    assert make_trainer(deployer())._engine.recipe.remat_level == "matmuls"
    assert make_trainer(deployer(), remat="none")._engine.recipe.remat_level == "none"
    expected = "`remat`: expected 'auto', 'none', 'matmuls', 'full' or 'offload', got 'some'"
    with pytest.raises(ValueError, match=expected):
        make_trainer(deployer(), remat="some")
    with pytest.raises(ValueError, match=r"`memory`: expected 'auto' or None, got 'most'\. Pass one of the two\."):
        make_trainer(deployer(), memory="most")


@pytest.mark.parametrize(
    ("n_model_shards", "n_fsdp_shards", "expected"),
    [
        (1, 1, ["FuseAttention"]),
        (1, 8, ["GatherAtUse", "FuseAttention"]),
        (4, 1, ["FixGroupedConvolutions", "Reshard", "FuseAttention"]),
        (2, 2, ["GatherAtUse", "FixGroupedConvolutions", "Reshard", "FuseAttention"]),
    ],
)
def test_a_mesh_has_the_rules_that_it_needs_in_their_order(n_model_shards, n_fsdp_shards, expected):
    """Without any the step traces the loss itself."""
    model = eqx.nn.Linear(256, 256, key=jax.random.key(0))
    plan = deployer(n_model_shards, n_fsdp_shards).plan(model)
    assert [type(rule).__name__ for rule in plan_rules(Parts.of(model), plan)] == expected
    assert [type(rule).__name__ for rule in plan_rules(Parts.of(model), plan, fuse_attention=False)] == expected[:-1]
