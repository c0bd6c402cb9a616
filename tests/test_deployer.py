"""`Deployer`: mesh, keys, sharded initialisation, plans, batch sizes, schedules, recorded metrics and error messages."""

import copy
import io
import json
import math
import re
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from tests._tree import named_leaves


def make_deployer(**kwargs):
    return redeqx.Deployer(verbose=False, **kwargs)


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


# --- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "shape"),
    [
        ({}, (8, 1, 1, 1)),
        ({"n_model_shards": 2}, (4, 1, 1, 2)),
        ({"n_fsdp_shards": 4}, (2, 4, 1, 1)),
        ({"n_model_shards": 2, "n_fsdp_shards": 2}, (2, 2, 1, 2)),
        ({"n_model_shards": 2, "n_sequence_shards": 4}, (1, 1, 4, 2)),
        ({"n_model_shards": 8}, (1, 1, 1, 8)),
    ],
)
def test_mesh_shape_follows_the_shard_counts(shards, shape):
    deployer = make_deployer(**shards)
    assert deployer.mesh.axis_names == ("data", "fsdp", "sequence", "model")
    assert tuple(deployer.mesh.shape.values()) == shape
    assert deployer.n_batch_shards == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (
            {"n_model_shards": 3},
            "`n_model_shards`=3 x `n_fsdp_shards`=1 = 3: expected a product that divides the 8 devices, got a remainder of "
            "2. Choose a product among 1, 2, 4, 8.",
        ),
        (
            {"n_model_shards": 4, "n_fsdp_shards": 4},
            "`n_model_shards`=4 x `n_fsdp_shards`=4 = 16: expected a product that divides the 8 devices, got a remainder of "
            "8. Choose a product among 1, 2, 4, 8.",
        ),
        ({"n_model_shards": 0}, "`n_model_shards`: expected at least 1, got 0. Pass 1 to leave that axis unused."),
        ({"n_fsdp_shards": -1}, "`n_fsdp_shards`: expected at least 1, got -1. Pass 1 to leave that axis unused."),
        ({"n_processes": 2}, "`host0_address`: expected with `n_processes`=2, got None. Pass it in every process."),
        *(
            ({name: value}, f"`{name}`: expected with `n_processes`, got {value!r} alone. Pass both, or leave it out.")
            for name, value in {"host0_address": "host", "host0_port": 1234, "process_id": 0}.items()
        ),
        ({"n_local_devices": 4}, "`n_local_devices`: expected with `n_processes`, got 4 alone. Pass both, or leave it out."),
        (
            {"n_processes": 2, "host0_address": "127.0.0.1", "process_id": 2},
            "`process_id`: expected 0 to 1, got 2. Number the processes from 0.",
        ),
        (
            {"n_processes": 2, "host0_address": "127.0.0.1", "host0_port": 70000, "process_id": 0},
            "`host0_port`: expected 1 to 65535, got 70000. Pass a port of process 0's host.",
        ),
        (
            {"loggers": ["tensorboard"]},
            "`loggers`: expected a `workdir` to write to, got None. Pass `workdir=`.",
        ),
    ],
)
def test_invalid_arguments_raise(kwargs, expected, tmp_path):
    assert message(ValueError, redeqx.Deployer, **kwargs) == expected


def test_accepts_a_single_process():
    assert make_deployer(n_processes=1).mesh.size == 8


def test_creates_workdir_unless_construction_fails(tmp_path):
    message(ValueError, make_deployer, workdir=tmp_path / "a" / "b", n_model_shards=3)
    assert not (tmp_path / "a").exists()
    assert make_deployer(workdir=str(tmp_path / "a" / "b")).workdir == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


# --- keys ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 + 3, 2**62])
@pytest.mark.parametrize("x64", [False, True])
def test_the_nth_key_is_folded_from_the_seed(seed, x64):
    with jax.enable_x64(x64):
        deployer = make_deployer(jax_seed=seed)
        for n in (1, 2):
            expected = jax.random.fold_in(jax.random.key(seed), n)
            assert jax.random.key_data(deployer.next_key()).tolist() == jax.random.key_data(expected).tolist()


def test_keys_are_distinct_and_determined_by_the_seed():
    def keys(seed):
        deployer = make_deployer(jax_seed=seed)
        return [tuple(jax.random.key_data(deployer.next_key()).tolist()) for _ in range(20)]

    first, again, other = keys(0), keys(0), keys(1)
    assert first == again
    assert len({*first, *other}) == 40


# --- sharded initialisation ---------------------------------------------------------------------------------------------


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    n_calls: jax.Array
    name: str
    activation: object = jax.nn.gelu

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(64, 64, key=a)
        self.up = eqx.nn.Linear(64, 128, key=b)
        self.down = eqx.nn.Linear(128, 64, dtype=jnp.bfloat16, key=c)
        self.n_calls = jnp.zeros((), jnp.int32)
        self.name = "model"


@pytest.mark.parametrize("shards", [*(pytest.param(x, marks=pytest.mark.sweep) for x in ((1, 1), (8, 1))), (2, 2)])
def test_init_creates_each_shard_on_its_device_with_eager_values(shards):
    deployer = make_deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1])
    key = jax.random.key(7)
    model, eager = deployer.init(lambda: Model(key)), Model(key)
    plan = deployer.plan(eager)
    assert eqx.tree_equal(eqx.filter(model, eqx.is_array, inverse=True), eqx.filter(eager, eqx.is_array, inverse=True))
    expected = named_leaves(eqx.filter(eager, eqx.is_array))
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items():
        assert leaf.dtype == expected[name].dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[name]))
        sizes = [math.prod(deployer.mesh.shape[a] for a in ([axes] if axes else [])) for axes in plan[name].spec]
        shard_shape = tuple(n // size for n, size in zip(leaf.shape, sizes, strict=True))
        assert {shard.data.shape for shard in leaf.addressable_shards} == {shard_shape}
        assert leaf.sharding == plan.sharding(name)
    n_split = {(1, 1): 0, (8, 1): 3, (2, 2): 3}  # not the bias, which is small
    assert sum(leaf.n_shards > 1 for leaf in plan.leaves.values()) == n_split[shards]


def test_init_uses_the_given_plan():
    deployer = make_deployer(n_model_shards=2)
    make_linear = lambda: eqx.nn.Linear(4, 4, key=jax.random.key(0))  # noqa: E731
    plan = deployer.plan(eqx.filter_eval_shape(make_linear), overrides={"weight": (None, "model")})
    assert deployer.init(make_linear, plan).weight.sharding.spec == P(None, "model")


def test_init_with_a_deployer_key_is_identical_on_every_mesh():
    def weights(**shards):
        deployer = make_deployer(**shards)
        return np.asarray(deployer.init(lambda: eqx.nn.Linear(4, 4, key=deployer.next_key())).weight)

    np.testing.assert_array_equal(weights(), weights(n_model_shards=2, n_fsdp_shards=2))


@pytest.mark.parametrize("trains", ["all", "none but biases"])
def test_a_trainer_moves_what_init_placed(trains):
    """Until a loss is known both weights are split by their first dim; the loss splits the second one by the other dim. No
    device holds two models, although the caller keeps the first one. Frozen arrays stay the caller's."""
    deployer = make_deployer(n_model_shards=2, n_fsdp_shards=2)
    model = deployer.init(lambda: [eqx.nn.Linear(64, 64, key=key) for key in jax.random.split(jax.random.key(0))])
    given = [layer.weight for layer in model]
    values = [np.asarray(leaf) for leaf in given]
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(0.0),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(lambda x: model[1](jnp.tanh(model[0](x))))(batch) ** 2),
        trainable=eqx.is_inexact_array if trains == "all" else lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 1,
    )
    trainer.update(list(np.ones((8, 64), np.float32)))
    specs = [P("model", "fsdp"), P("fsdp", "model")]
    assert [layer.weight.sharding.spec for layer in trainer.model] == specs
    assert [leaf.is_deleted() for leaf in given] == [trains == "all"] * 2
    for layer, value in zip(trainer.model, values, strict=True):
        np.testing.assert_array_equal(layer.weight, value)


def test_a_trainer_moves_no_array_that_another_leaf_keeps():
    """A student begins as its frozen teacher: both leaves are one array, of which overrides store only one elsewhere."""
    deployer = make_deployer(n_model_shards=2)
    student = deployer.init(lambda: eqx.nn.Linear(64, 64, key=jax.random.key(0)))
    model, batch = [student, student], np.ones((8, 64), np.float32)
    value = np.asarray(student.weight)

    def loss_fn(model, batch, key):
        return jnp.mean(jax.vmap(lambda x: jax.lax.stop_gradient(model[0](x)) - 2 * model[1](x))(batch) ** 2)

    overrides = {"0.weight": ("model", None), "1.weight": (None, "model")}
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(0.0),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        plan=deployer.plan(model, loss_fn, batch, overrides),
        trainable=[False, True],
    )
    trainer.update(list(batch))
    assert [layer.weight.sharding.spec for layer in trainer.model] == [P("model", None), P(None, "model")]
    for layer in trainer.model:
        np.testing.assert_array_equal(layer.weight, value)


def test_a_model_that_keeps_an_array_in_a_function_is_made_without_init():
    """As flowjax does: a layer keeps a function that another one's initial weights are in."""

    def make():
        initial, unravel = jax.flatten_util.ravel_pytree(
            eqx.filter(eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.is_array)
        )
        return [eqx.nn.Linear(4, 20, key=jax.random.key(1)), lambda values: unravel(values + initial)]

    trainer = redeqx.Trainer(
        make_deployer(),
        model=make(),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(lambda x: model[1](model[0](x)).weight)(batch) ** 2),
    )
    assert trainer.update(list(np.ones((8, 4), np.float32)))["loss"] > 0


# --- plans --------------------------------------------------------------------------------------------------------------


def test_plan_marks_leaves_unused_by_the_loss():
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))

    def loss_fn(model, batch, key):
        return jnp.mean(jax.vmap(model.layers[0])(batch["x"]))

    plan = make_deployer(n_model_shards=2).plan(model, loss_fn, {"x": np.zeros((2, 4), np.float32)})
    assert {name: leaf.is_read for name, leaf in plan.leaves.items()} == {
        "layers.0.weight": True,
        "layers.0.bias": True,
        "layers.1.weight": False,
        "layers.1.bias": False,
    }
    assert plan["layers.1.weight"].reason.endswith("; the loss does not read it")


def test_plan_holds_what_the_loss_does_with_rows_and_can_be_copied():
    def loss_fn(model, batch, key):
        y = batch @ model["w"]
        return -jax.nn.log_softmax(y @ y.T).diagonal().mean()

    plan = make_deployer(n_model_shards=2).plan({"w": jnp.ones((8, 8))}, loss_fn, jnp.ones((16, 8)))
    assert plan.row_use.kind == "mixed" and re.search(r"test_deployer\.py:\d+$", plan.row_use.line)
    assert plan.explain().splitlines()[-1] == f"rows: {plan.row_use.text}"
    assert copy.deepcopy(plan) == plan


def test_plan_requires_both_loss_fn_and_batch():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    expected = "`{}`: expected both `loss_fn` and `batch`, or neither, got None. Pass both."
    plan = make_deployer().plan
    assert message(ValueError, plan, model, loss_fn=lambda m, b, k: 0.0) == expected.format("batch")
    assert message(ValueError, plan, model, batch={"x": np.zeros(2)}) == expected.format("loss_fn")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"weigth": None},
            "`overrides['weigth']`: expected a path of the model, got none of that name. Did you mean `weight`?",
        ),
        (
            {"weight": ("modle", None)},
            "`overrides['weight']`: expected mesh axes among ('data', 'fsdp', 'sequence', 'model'), got 'modle'. "
            "Did you mean `model`?",
        ),
        (
            {"weight": (None, "model")},
            "`overrides['weight']`: expected dim 1 of `weight` to divide over 2 shards, got (4, 3). "
            "Choose another dim, or None.",
        ),
        (
            {"bias": ("model", None)},
            "`overrides['bias']`: expected at most 1 entries for `bias` of shape (4,), got ('model', None). "
            "Give one mesh axis or None for each dim.",
        ),
    ],
)
def test_invalid_overrides_raise(overrides, expected):
    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    assert message(ValueError, make_deployer(n_model_shards=2).plan, model, overrides=overrides) == expected


def test_large_replicated_leaf_warns_unless_overridden():
    class Raw(eqx.Module):
        table: jax.Array

    shapes = eqx.filter_eval_shape(lambda: Raw(jnp.zeros((1025, 1025))))
    with pytest.warns(UserWarning, match=r"`table`: \(1025, 1025\), 4\.01 MiB, is replicated on every device"):
        make_deployer(n_model_shards=2).plan(shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_deployer(n_model_shards=2).plan(shapes, overrides={"table": None})  # explicitly replicated: no warning


# --- batch sizes and schedules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "global_batch_size", "per_device_batch_size", "n_micro_batches"),
    [((1, 1), 8, 1, 1), ((1, 1), 64, 2, 4), ((2, 1), 64, 2, 8), ((2, 2), 12, 1, 3), ((8, 1), 7, 1, 7)],
)
def test_micro_batches_add_up_to_the_global_batch(shards, global_batch_size, per_device_batch_size, n_micro_batches):
    deployer = make_deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1])
    assert deployer.get_accumulate_grad_batches(global_batch_size, per_device_batch_size) == n_micro_batches
    assert n_micro_batches * per_device_batch_size * deployer.n_batch_shards == global_batch_size


@pytest.mark.parametrize(("global_batch_size", "per_device_batch_size"), [(20, 2), (4, 1), (0, 1)])
def test_indivisible_global_batch_raises(global_batch_size, per_device_batch_size):
    n_rows = per_device_batch_size * 8
    error_text = message(ValueError, make_deployer().get_accumulate_grad_batches, global_batch_size, per_device_batch_size)
    assert error_text == (
        f"`global_batch_size`: expected a multiple of {per_device_batch_size} rows per device x 8 shards = {n_rows}, got "
        f"{global_batch_size}. Change one of the two."
    )


def test_zero_rows_per_device_raises():
    error_text = message(ValueError, make_deployer().get_accumulate_grad_batches, 8, 0)
    assert error_text == "`per_device_batch_size`: expected at least 1, got 0. Pass a positive number."


def schedule(deployer=None, *, train_size=100, per_device_batch_size=1, n_epochs=1, learning_rate=1.0, **kwargs):
    deployer = deployer or make_deployer()
    return deployer.get_lr_schedule_fn(train_size, per_device_batch_size, n_epochs, learning_rate, **kwargs)


def values(lr, steps):
    return [float(lr(step)) for step in steps]


def test_linear_warmup_then_linear_decay():
    # 8 rows per step: 50 steps, 10 of them warm-up.
    lr = schedule(train_size=400, warmup_ratio=0.2, init_learning_rate=0.1, end_learning_rate=0.2)
    np.testing.assert_allclose(values(lr, [0, 5, 10, 30, 50, 60]), [0.1, 0.55, 1.0, 0.6, 0.2, 0.2], rtol=1e-6)
    # `warmup_steps` takes precedence over `warmup_ratio`.
    from_steps = schedule(train_size=400, warmup_ratio=0.5, warmup_steps=10, init_learning_rate=0.1, end_learning_rate=0.2)
    assert values(from_steps, range(60)) == values(lr, range(60))


def test_cosine_decay_values():
    lr = schedule(train_size=400, schedule_type="cosine", warmup_steps=10, end_learning_rate=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    np.testing.assert_allclose(values(lr, [0, 5, 10, 20, 30, 50]), [0.0, 0.5, 1.0, quarter, 0.6, 0.2], rtol=1e-6)


@pytest.mark.parametrize("schedule_type", ["linear", "cosine"])
def test_decay_ends_at_end_learning_rate(schedule_type):
    lr = schedule(train_size=400, learning_rate=0.02, schedule_type=schedule_type, warmup_steps=10, end_learning_rate=0.005)
    # Halfway through, both decays are at the mean of the two rates.
    np.testing.assert_allclose(values(lr, [10, 30, 50, 60]), [0.02, 0.0125, 0.005, 0.005], rtol=1e-6)


def test_constant_schedule_after_warmup():
    lr = schedule(train_size=400, schedule_type="constant", warmup_steps=10)
    np.testing.assert_allclose(values(lr, [0, 5, 10, 49]), [0.0, 0.5, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("schedule_type", ["linear", "cosine", "constant"])
def test_schedule_without_warmup_starts_at_the_peak(schedule_type):
    lr = schedule(train_size=400, schedule_type=schedule_type)
    assert values(lr, [0]) == [1.0]
    assert values(lr, [50]) == [1.0 if schedule_type == "constant" else 0.0]


@pytest.mark.parametrize("schedule_type", ["linear", "cosine"])
def test_warmup_over_the_whole_fit(schedule_type):
    lr = schedule(train_size=80, schedule_type=schedule_type, warmup_ratio=1.0)
    np.testing.assert_allclose(values(lr, [0, 5, 9, 10]), [0.0, 0.5, 0.9, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("train_size", "per_device", "n_epochs", "accumulate", "shards", "n_steps"),
    [
        (100, 1, 1, 1, 1, 13),  # 12 full steps of 8 rows, then one step with the 4 remaining rows
        (100, 1, 3, 1, 1, 39),
        (100, 1, 1, 4, 1, 4),  # updates of 32 rows, not micro-steps
        (100, 1, 2, 4, 2, 14),  # half as many batch shards: updates of 16 rows
        (96, 3, 1, 1, 1, 4),
        (1, 1, 5, 1, 1, 5),
    ],
)
def test_schedule_length_counts_updates(train_size, per_device, n_epochs, accumulate, shards, n_steps):
    deployer = make_deployer(n_model_shards=shards)
    lr = schedule(
        deployer,
        train_size=train_size,
        per_device_batch_size=per_device,
        n_epochs=n_epochs,
        accumulate_grad_batches=accumulate,
    )
    np.testing.assert_allclose(values(lr, range(n_steps + 1)), np.linspace(1, 0, n_steps + 1), atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_takes_as_many_steps_as_its_schedule(accumulate):
    deployer = make_deployer(n_model_shards=2, loggers=[recorder := Recorder()])
    examples = np.ones((29, 3), np.float32)
    lr = deployer.get_lr_schedule_fn(len(examples), 1, 2, 0.5, accumulate_grad_batches=accumulate, warmup_steps=1)
    trainer = redeqx.Trainer(
        deployer,
        model=eqx.nn.Linear(3, 1, key=jax.random.key(0)),
        optimizer=optax.sgd(lr),
        collate_fn=lambda rows: {"x": np.stack(rows)},
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch["x"]) ** 2),
        lr_schedule_fn=lr,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(examples, 1, 2)
    n_steps = 2 * math.ceil(29 / (4 * accumulate))
    assert trainer.step == n_steps
    logged = [metrics["learning_rate"] for metrics, _ in recorder.rows]
    np.testing.assert_allclose(logged, values(lr, range(n_steps)), rtol=1e-6)
    assert float(lr(n_steps)) == 0.0
    if accumulate == 1:
        with pytest.warns(UserWarning, match=f"expected a learning rate above 0 until step {2 * n_steps}, the last of"):
            trainer.fit(examples, 1, 2)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"train_size": 0}, "`train_size`: expected at least 1, got 0. Pass a positive number."),
        ({"per_device_batch_size": 0}, "`per_device_batch_size`: expected at least 1, got 0. Pass a positive number."),
        ({"n_epochs": -1}, "`n_epochs`: expected at least 1, got -1. Pass a positive number."),
        (
            {"accumulate_grad_batches": 0},
            "`accumulate_grad_batches`: expected at least 1, got 0. Pass a positive number.",
        ),
        (
            {"warmup_steps": 14},
            "`warmup_steps`: expected a warm-up of 0 to the 13 updates of the fit, got 14. Choose another length.",
        ),
        (
            {"warmup_steps": -1},
            "`warmup_steps`: expected at least 0 or None, got -1. Pass 0 or more.",
        ),
        (
            {"warmup_ratio": 1.5},
            "`warmup_ratio`: expected a warm-up of 0 to the 13 updates of the fit, got 1.5. Choose another length.",
        ),
        (
            {"schedule_type": "step"},
            "`schedule_type`: expected 'linear', 'cosine' or 'constant', got 'step'. Pass one of them.",
        ),
    ],
)
def test_invalid_schedule_arguments_raise(kwargs, expected):
    assert message(ValueError, schedule, **kwargs) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("start", 0, "`timeouts.start`: expected a finite number above 0, got 0. Pass seconds."),
        ("start", math.inf, "`timeouts.start`: expected a finite number above 0, got inf. Pass seconds."),
        ("hang", "60", "`timeouts.hang`: expected a number above 0 or None, got '60'. Pass seconds."),
        ("heartbeat", float("nan"), "`timeouts.heartbeat`: expected a finite number above 0, got nan. Pass seconds."),
        ("heartbeat", None, "`timeouts.heartbeat`: expected a finite number above 0, got None. Pass seconds."),
    ],
)
def test_invalid_timeouts_raise(name, value, expected):
    error = ValueError if isinstance(value, int | float) else TypeError
    assert message(error, redeqx.Timeouts, **{name: value}) == expected


# --- logged and saved output --------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append((metrics, step))


def test_metrics_are_written_to_the_file_and_every_logger(tmp_path):
    loggers = [Recorder(), Recorder()]
    deployer = make_deployer(workdir=tmp_path, loggers=loggers)
    deployer.log_metrics({"loss": jnp.float32(0.5), "n": 3}, step=7)
    deployer.log_metrics({"loss": 0.25}, step=8)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 7, "loss": 0.5, "n": 3.0}, {"step": 8, "loss": 0.25}]
    assert loggers[0].rows == loggers[1].rows == [({"loss": 0.5, "n": 3.0}, 7), ({"loss": 0.25}, 8)]


def test_decide_returns_in_one_process_what_it_returns_in_several():
    deployer = make_deployer()
    assert deployer.decide({"is_late": True, "at": (1, 2.5, None)}) == {"is_late": True, "at": [1, 2.5, None]}
    with pytest.raises(TypeError) as raised:
        deployer.decide(np.float32(1) < 2)
    assert re.fullmatch(
        r"`decide`: expected a value that JSON can hold, got bool_?\. Convert it first, as by `bool` or `float`\.",
        str(raised.value),
    )


def test_metrics_file_is_rewound_once_to_the_resumed_step(tmp_path):
    """Steps recorded by this process are kept, even if a second trainer starts at step 0."""
    for step in range(1, 6):
        make_deployer(workdir=tmp_path).log_metrics({"run": 1}, step)
    deployer = make_deployer(workdir=tmp_path)
    deployer.begin_records(3)
    deployer.log_metrics({"run": 2}, 4)
    deployer.begin_records(0)
    deployer.log_metrics({"run": 2}, 1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["run"], line["step"]) for line in lines] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 1)]


@pytest.mark.parametrize("verbose", [True, False])
def test_info_is_printed_only_if_verbose(verbose, capsys):
    redeqx.Deployer(verbose=verbose).log_info("hello [world]", title="greeting")
    assert capsys.readouterr().out == ("greeting\n  hello [world]\n" if verbose else "")


def test_a_message_that_is_not_a_string_raises():
    text = message(TypeError, make_deployer().log_info, 3)
    assert text == "`message`: expected a string, got int. Pass `str(message)`."


def test_outputs_are_saved_as_json_lines(tmp_path):
    deployer = make_deployer(workdir=tmp_path)
    outputs = [
        {"text": "ä", "ids": np.arange(3), "score": np.float32(0.5)},
        [jnp.ones((2, 1)), jnp.bfloat16(1.5), None],
        "plain",
    ]
    path = deployer.save_outputs(outputs)
    assert path == tmp_path / "outputs" / "outputs.jsonl"
    assert [json.loads(line) for line in io.StringIO(path.read_text("utf-8"))] == [
        {"text": "ä", "ids": [0, 1, 2], "score": 0.5},
        [[[1.0], [1.0]], 1.5, None],
        "plain",
    ]
    for name in ("other/none.jsonl", Path("other/none.jsonl")):
        assert deployer.save_outputs([], name).read_text() == ""


def test_outputs_that_are_not_finite_are_saved_as_valid_json(tmp_path):
    outputs = [np.nan, {"NaN": [np.float32(np.inf), 1.5, 2]}, jnp.array([[-jnp.inf, 0.1]], jnp.float32), "Infinity"]
    text = make_deployer(workdir=tmp_path).save_outputs(outputs).read_text()

    def refuse(constant):
        raise AssertionError(constant)

    read = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert read == ["NaN", {"NaN": ["Infinity", 1.5, 2]}, [["-Infinity", float(np.float32(0.1))]], "Infinity"]
    assert np.isnan(float(read[0])) and float(read[2][0][0]) == -np.inf


def test_unsavable_outputs_raise(tmp_path):
    deployer = make_deployer(workdir=tmp_path)
    path = deployer.save_outputs(["earlier"])
    assert message(TypeError, deployer.save_outputs, [1, {"a": {1, 2}}]) == (
        "`outputs`: expected values that JSON can hold, got set. Convert it first."
    )
    assert json.loads(path.read_text()) == "earlier"  # the earlier file is intact
    assert message(ValueError, make_deployer().save_outputs, [1]) == (
        "`workdir`: expected a folder, got None. Pass `Deployer(workdir=...)` to save outputs."
    )
    for name in ("../outputs.jsonl", str(tmp_path / "outputs.jsonl"), ""):
        assert message(ValueError, deployer.save_outputs, [1], name).startswith("`name`: expected a file in `outputs`, got ")
    assert sorted(file.name for file in tmp_path.rglob("outputs.jsonl")) == ["outputs.jsonl"]
