"""The Deployer: schedules, sizes, keys, models made in place, what is recorded, and each error's words."""

import io
import json
import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx._tree import named_leaves


def deployer(**kwargs):
    return redeqx.Deployer(verbose=False, **kwargs)


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


# --- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "shape"),
    [
        ({}, (8, 1, 1)),
        ({"n_model_shards": 2}, (4, 1, 2)),
        ({"n_fsdp_shards": 4}, (2, 4, 1)),
        ({"n_model_shards": 2, "n_fsdp_shards": 2}, (2, 2, 2)),
        ({"n_model_shards": 8}, (1, 1, 8)),
    ],
)
def test_the_mesh_is_what_was_asked_and_the_rest_is_data(shards, shape):
    made = deployer(**shards)
    assert made.mesh.axis_names == ("data", "fsdp", "model")
    assert tuple(made.mesh.shape.values()) == shape
    assert made.n_batch_shards == shape[0] * shape[1]


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
        ({"n_local_devices": 4}, "`n_local_devices`: expected with several processes, got 4 on one. Leave it out."),
        (
            {"n_processes": 2, "host0_address": "127.0.0.1", "process_id": 2},
            "`process_id`: expected 0 to 1, got 2. Number the processes from 0.",
        ),
        (
            {"n_processes": 2, "host0_address": "127.0.0.1", "host0_port": 70000, "process_id": 0},
            "`host0_port`: expected 1 to 65535, got 70000. Pass a port of process 0's host.",
        ),
        (
            {"run_tensorboard": True},
            "`run_tensorboard`: expected a `workdir` to write to, got None. Pass `workdir=`.",
        ),
    ],
)
def test_what_cannot_be_is_refused(kwargs, expected, tmp_path):
    assert message(ValueError, redeqx.Deployer, **kwargs) == expected


def test_one_process_may_be_said():
    assert deployer(n_processes=1).mesh.size == 8


def test_a_workdir_is_made_by_its_deployer_and_not_by_one_that_fails(tmp_path):
    message(ValueError, deployer, workdir=tmp_path / "a" / "b", n_model_shards=3)
    assert not (tmp_path / "a").exists()
    assert deployer(workdir=str(tmp_path / "a" / "b")).workdir == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


# --- keys ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 + 3, 2**62])
@pytest.mark.parametrize("x64", [False, True])
def test_the_nth_key_is_folded_from_the_seed(seed, x64):
    with jax.enable_x64(x64):
        made = redeqx.Deployer(jax_seed=seed, verbose=False)
        for n in (1, 2):
            expected = jax.random.fold_in(jax.random.key(seed), n)
            assert jax.random.key_data(made.next_key()).tolist() == jax.random.key_data(expected).tolist()


def test_keys_are_those_of_the_seed_and_all_distinct():
    def keys(seed):
        made = deployer(jax_seed=seed)
        return [tuple(jax.random.key_data(made.next_key()).tolist()) for _ in range(20)]

    first, again, other = keys(0), keys(0), keys(1)
    assert first == again
    assert len({*first, *other}) == 40


# --- models made in place -----------------------------------------------------------------------------------------------


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
def test_init_makes_on_each_device_its_own_shards_of_the_same_values(shards):
    made = deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1])
    key = jax.random.key(7)
    model, eager = made.init(lambda: Model(key)), Model(key)
    plan = made.plan(eager)
    assert eqx.tree_equal(eqx.filter(model, eqx.is_array, inverse=True), eqx.filter(eager, eqx.is_array, inverse=True))
    wanted = named_leaves(eqx.filter(eager, eqx.is_array))
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items():
        assert leaf.dtype == wanted[name].dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted[name]))
        sizes = [math.prod(made.mesh.shape[a] for a in ([axes] if axes else [])) for axes in plan[name].spec]
        held = tuple(n // size for n, size in zip(leaf.shape, sizes, strict=True))
        assert {shard.data.shape for shard in leaf.addressable_shards} == {held}
        assert leaf.sharding == plan.sharding(name)
    n_split = {(1, 1): 0, (8, 1): 4, (2, 2): 4}
    assert sum(leaf.n_shards > 1 for leaf in plan.leaves.values()) == n_split[shards]


def test_init_takes_a_plan():
    made = deployer(n_model_shards=2)
    make = lambda: eqx.nn.Linear(4, 4, key=jax.random.key(0))  # noqa: E731
    plan = made.plan(eqx.filter_eval_shape(make), overrides={"weight": (None, "model")})
    assert made.init(make, plan).weight.sharding.spec == P(None, "model")


def test_a_key_of_the_deployer_gives_the_same_model_on_every_mesh():
    def weights(**shards):
        made = deployer(**shards)
        return np.asarray(made.init(lambda: eqx.nn.Linear(4, 4, key=made.next_key())).weight)

    np.testing.assert_array_equal(weights(), weights(n_model_shards=2, n_fsdp_shards=2))


# --- plans --------------------------------------------------------------------------------------------------------------


def test_a_plan_with_a_loss_marks_what_it_does_not_read():
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))

    def loss_fn(model, batch, key):
        return jnp.mean(jax.vmap(model.layers[0])(batch["x"]))

    plan = deployer(n_model_shards=2).plan(model, loss_fn, {"x": np.zeros((2, 4), np.float32)})
    assert {name: leaf.is_read for name, leaf in plan.leaves.items()} == {
        "layers.0.weight": True,
        "layers.0.bias": True,
        "layers.1.weight": False,
        "layers.1.bias": False,
    }
    assert plan["layers.1.weight"].reason.endswith("; the loss does not read it")


def test_a_loss_and_a_batch_come_together():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    expected = "`{}`: expected both `loss_fn` and `batch`, or neither, got None. Pass both."
    plan = deployer().plan
    assert message(ValueError, plan, model, loss_fn=lambda m, b, k: 0.0) == expected.format("batch")
    assert message(ValueError, plan, model, batch={"x": np.zeros(2)}) == expected.format("loss_fn")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"weigth": None},
            "`overrides['weigth']`: expected a path of the model. Did you mean `weight`?",
        ),
        (
            {"weight": ("modle", None)},
            "`overrides['weight']`: expected mesh axes among ('data', 'fsdp', 'model'), got 'modle'. Did you mean `model`?",
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
def test_overrides_are_checked(overrides, expected):
    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    assert message(ValueError, deployer(n_model_shards=2).plan, model, overrides=overrides) == expected


def test_a_large_leaf_left_replicated_is_a_warning():
    class Raw(eqx.Module):
        table: jax.Array

    shapes = eqx.filter_eval_shape(lambda: Raw(jnp.zeros((1025, 1025))))
    with pytest.warns(UserWarning, match=r"`table`: \(1025, 1025\), 4\.01 MiB, is replicated on every device"):
        deployer(n_model_shards=2).plan(shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deployer(n_model_shards=2).plan(shapes, overrides={"table": None})  # said to be wanted


# --- sizes and schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "global_batch_size", "per_device_batch_size", "n"),
    [((1, 1), 8, 1, 1), ((1, 1), 64, 2, 4), ((2, 1), 64, 2, 8), ((2, 2), 12, 1, 3), ((8, 1), 7, 1, 7)],
)
def test_micro_batches_make_up_the_global_batch(shards, global_batch_size, per_device_batch_size, n):
    made = deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1])
    assert made.get_accumulate_grad_batches(global_batch_size, per_device_batch_size) == n
    assert n * per_device_batch_size * made.n_batch_shards == global_batch_size


@pytest.mark.parametrize(("global_batch_size", "per_device_batch_size"), [(20, 2), (4, 1), (0, 1)])
def test_a_global_batch_that_does_not_divide_is_refused(global_batch_size, per_device_batch_size):
    micro = per_device_batch_size * 8
    found = message(ValueError, deployer().get_accumulate_grad_batches, global_batch_size, per_device_batch_size)
    assert found == (
        f"`global_batch_size`: expected a multiple of {per_device_batch_size} rows per device x 8 shards = {micro}, got "
        f"{global_batch_size}. Change one of the two."
    )


def test_rows_a_device_are_at_least_one():
    found = message(ValueError, deployer().get_accumulate_grad_batches, 8, 0)
    assert found == "`per_device_batch_size`: expected at least 1, got 0. Pass a positive number."


@pytest.mark.parametrize(
    ("shards", "global_batch_size", "accumulate_grad_batches", "rows"),
    [((1, 1), 8, 1, 1), ((1, 1), 64, 4, 2), ((2, 2), 12, 3, 1), ((8, 1), 7, 1, 7)],
)
def test_rows_a_device_follow_from_the_global_batch(shards, global_batch_size, accumulate_grad_batches, rows):
    made = deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1])
    assert made.get_per_device_batch_size(global_batch_size, accumulate_grad_batches) == rows
    assert made.get_accumulate_grad_batches(global_batch_size, rows) == accumulate_grad_batches


@pytest.mark.parametrize(("global_batch_size", "n_micro"), [(20, 1), (8, 2), (0, 1)])
def test_a_global_batch_that_the_shards_do_not_divide_is_refused(global_batch_size, n_micro):
    found = message(ValueError, deployer().get_per_device_batch_size, global_batch_size, n_micro)
    assert found == (
        f"`global_batch_size`: expected a multiple of 8 shards x {n_micro} micro-batches = {8 * n_micro}, got "
        f"{global_batch_size}. Change one of the three."
    )


def test_micro_batches_are_at_least_one():
    found = message(ValueError, deployer().get_per_device_batch_size, 8, 0)
    assert found == "`accumulate_grad_batches`: expected at least 1, got 0. Pass a positive number."


def schedule(made=None, *, train_size=100, per_device_batch_size=1, n_epochs=1, learning_rate=1.0, **kwargs):
    return (made or deployer()).get_lr_schedule_fn(train_size, per_device_batch_size, n_epochs, learning_rate, **kwargs)


def values(lr, steps):
    return [float(lr(step)) for step in steps]


def test_linear_warm_up_then_linear_decay_to_the_end():
    # 8 rows a step: 50 steps, of them 10 of warm-up.
    lr = schedule(train_size=400, warmup_ratio=0.2, init_learning_rate=0.1, end_learning_rate=0.2)
    np.testing.assert_allclose(values(lr, [0, 5, 10, 30, 50, 60]), [0.1, 0.55, 1.0, 0.6, 0.2, 0.2], rtol=1e-6)
    # In steps it wins over the share.
    same = schedule(train_size=400, warmup_ratio=0.5, warmup_steps=10, init_learning_rate=0.1, end_learning_rate=0.2)
    assert values(same, range(60)) == values(lr, range(60))


def test_cosine_decay():
    lr = schedule(train_size=400, schedule_type="cosine", warmup_steps=10, end_learning_rate=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    np.testing.assert_allclose(values(lr, [0, 5, 10, 20, 30, 50]), [0.0, 0.5, 1.0, quarter, 0.6, 0.2], rtol=1e-6)


@pytest.mark.parametrize("schedule_type", ["linear", "cosine"])
def test_a_decay_ends_at_the_rate_that_was_given(schedule_type):
    lr = schedule(train_size=400, learning_rate=0.02, schedule_type=schedule_type, warmup_steps=10, end_learning_rate=0.005)
    # Half of the way down both decays are in the middle between the two rates.
    np.testing.assert_allclose(values(lr, [10, 30, 50, 60]), [0.02, 0.0125, 0.005, 0.005], rtol=1e-6)


def test_constant_after_the_warm_up():
    lr = schedule(train_size=400, schedule_type="constant", warmup_steps=10)
    np.testing.assert_allclose(values(lr, [0, 5, 10, 49]), [0.0, 0.5, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("schedule_type", ["linear", "cosine", "constant"])
def test_without_warm_up_it_begins_at_the_top(schedule_type):
    lr = schedule(train_size=400, schedule_type=schedule_type)
    assert values(lr, [0]) == [1.0]
    assert values(lr, [50]) == [1.0 if schedule_type == "constant" else 0.0]


@pytest.mark.parametrize("schedule_type", ["linear", "cosine"])
def test_a_fit_that_is_all_warm_up(schedule_type):
    lr = schedule(train_size=80, schedule_type=schedule_type, warmup_ratio=1.0)
    np.testing.assert_allclose(values(lr, [0, 5, 9, 10]), [0.0, 0.5, 0.9, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("train_size", "per_device", "n_epochs", "accumulate", "shards", "n_steps"),
    [
        (100, 1, 1, 1, 1, 13),  # 12 full steps of 8, and one of the 4 rows left
        (100, 1, 3, 1, 1, 39),
        (100, 1, 1, 4, 1, 4),  # updates of 32 rows, not micro-steps
        (100, 1, 2, 4, 2, 14),  # half the batch shards: updates of 16
        (96, 3, 1, 1, 1, 4),
        (1, 1, 5, 1, 1, 5),
    ],
)
def test_it_counts_updates(train_size, per_device, n_epochs, accumulate, shards, n_steps):
    made = deployer(n_model_shards=shards)
    lr = schedule(
        made,
        train_size=train_size,
        per_device_batch_size=per_device,
        n_epochs=n_epochs,
        accumulate_grad_batches=accumulate,
    )
    np.testing.assert_allclose(values(lr, range(n_steps + 1)), np.linspace(1, 0, n_steps + 1), atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_takes_the_steps_that_its_schedule_counts(accumulate):
    made = deployer(n_model_shards=2, loggers=[recorded := Recorder()])
    examples = np.ones((29, 3), np.float32)
    lr = made.get_lr_schedule_fn(len(examples), 1, 2, 0.5, accumulate_grad_batches=accumulate, warmup_steps=1)
    trainer = redeqx.Trainer(
        made,
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
    logged = [metrics["learning_rate"] for metrics, _ in recorded.rows]
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
            "`schedule_type`: expected 'linear', 'cosine' or 'constant', got 'step'. "
            "Any optax schedule can be given to the optimizer instead.",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(kwargs, expected):
    assert message(ValueError, schedule, **kwargs) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("start_timeout", 0, "`start_timeout`: expected a number above 0, got 0. Pass seconds."),
        ("hang_timeout", "60", "`hang_timeout`: expected a number above 0 or None, got '60'. Pass seconds."),
        ("heartbeat_timeout", float("nan"), "`heartbeat_timeout`: expected a number above 0, got nan. Pass seconds."),
        ("heartbeat_timeout", None, "`heartbeat_timeout`: expected a number above 0, got None. Pass seconds."),
    ],
)
def test_a_timeout_is_a_number_of_seconds(name, value, expected):
    error = ValueError if isinstance(value, int | float) else TypeError
    assert message(error, redeqx.Deployer, **{name: value}) == expected


# --- what is said and recorded ------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append((metrics, step))


def test_metrics_go_to_the_file_and_to_every_logger(tmp_path):
    loggers = [Recorder(), Recorder()]
    made = deployer(workdir=tmp_path, loggers=loggers)
    made.log_metrics({"loss": jnp.float32(0.5), "n": 3}, step=7)
    made.log_metrics({"loss": 0.25}, step=8)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 7, "loss": 0.5, "n": 3.0}, {"step": 8, "loss": 0.25}]
    assert loggers[0].rows == loggers[1].rows == [({"loss": 0.5, "n": 3.0}, 7), ({"loss": 0.25}, 8)]


def test_records_are_rewound_once_and_to_the_step_of_the_resume(tmp_path):
    """What a process has recorded itself stays, also where a second trainer begins at step 0."""
    for step in range(1, 6):
        deployer(workdir=tmp_path).log_metrics({"run": 1}, step)
    made = deployer(workdir=tmp_path)
    made.begin_records(3)
    made.log_metrics({"run": 2}, 4)
    made.begin_records(0)
    made.log_metrics({"run": 2}, 1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["run"], line["step"]) for line in lines] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 1)]


@pytest.mark.parametrize("verbose", [True, False])
def test_info_is_printed_where_wanted(verbose, capsys):
    redeqx.Deployer(verbose=verbose).log_info("hello [world]", title="greeting")
    assert capsys.readouterr().out == ("greeting\n  hello [world]\n" if verbose else "")


def test_outputs_are_a_json_line_each(tmp_path):
    made = deployer(workdir=tmp_path)
    outputs = [
        {"text": "ä", "ids": np.arange(3), "score": np.float32(0.5)},
        [jnp.ones((2, 1)), jnp.bfloat16(1.5), None],
        "plain",
    ]
    path = made.save_outputs(outputs)
    assert path == tmp_path / "outputs" / "outputs.jsonl"
    assert [json.loads(line) for line in io.StringIO(path.read_text("utf-8"))] == [
        {"text": "ä", "ids": [0, 1, 2], "score": 0.5},
        [[[1.0], [1.0]], 1.5, None],
        "plain",
    ]
    assert made.save_outputs([], "other/none.jsonl").read_text() == ""


def test_outputs_that_cannot_be_saved(tmp_path):
    made = deployer(workdir=tmp_path)
    path = made.save_outputs(["earlier"])
    assert message(TypeError, made.save_outputs, [1, {"a": {1, 2}}]) == (
        "`outputs`: expected values that JSON can hold, got set. Convert it first."
    )
    assert json.loads(path.read_text()) == "earlier"  # nothing lost
    assert message(ValueError, deployer().save_outputs, [1]) == (
        "`workdir`: expected a folder, got None. Pass `Deployer(workdir=...)` to save outputs."
    )
