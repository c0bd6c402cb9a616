"""`Predictor`: one output per example, in order, yielded batch by batch, on every mesh."""

import threading
import weakref
from contextlib import nullcontext
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import generate
from tests.models.families._case import collect

SHARDS = [(1, 1), (2, 2), (8, 1)]  # sizes of the model and fsdp axes, on eight devices


def stack(examples):
    return {"x": np.stack(examples).astype(np.float32)}


def apply(model, batch, key):
    return jax.vmap(model)(batch["x"])


def make_linear(seed=0):
    return eqx.nn.Linear(4, 8, key=jax.random.key(seed))


def make_examples(n, seed=1):
    return list(np.random.default_rng(seed).normal(size=(n, 4)))


def expected(model, examples):
    return [np.asarray(model(jnp.asarray(x, jnp.float32))) for x in examples]


def assert_outputs(actual, desired):
    assert isinstance(actual, list)
    assert len(actual) == len(desired)
    for a, b in zip(actual, desired, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def make_deployer(n_model_shards=8, n_fsdp_shards=1, **kwargs):
    """Return a deployer, by default with one batch shard, which allows the smallest batches."""
    return redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False, **kwargs)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("redeqx-prefetch")]


# --- one output per example -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS)
def test_returns_one_output_per_example_in_order(shards):
    model = make_linear()
    predictor = redeqx.Predictor(make_deployer(*shards), model=model, collate_fn=stack, pred_fn=apply)
    examples = make_examples(17)
    desired = expected(model, examples)
    for n in (0, 1, 3, 8, 13, 16, 17):
        for per_device_batch_size in (1, 3):
            assert_outputs(predictor.predict(examples[:n], per_device_batch_size), desired[:n])


def test_batch_size_is_respected_and_reduced_for_few_examples():
    batch_shapes = []

    def pred_fn(model, batch, key):
        batch_shapes.append(batch["x"].shape)
        return apply(model, batch, key)

    sizes = []

    def collate_fn(examples):
        sizes.append(len(examples))
        return stack(examples)

    predictor = redeqx.Predictor(make_deployer(2), model=make_linear(), collate_fn=collate_fn, pred_fn=pred_fn)
    predictor.predict(make_examples(21), 2)
    assert sizes == [8, 8, 5]  # 2 rows on each of 4 batch shards
    assert set(batch_shapes) == {(8, 4), (16, 4)}  # with twice the rows it is only traced; the last batch has the same shape
    batch_shapes.clear()
    predictor.predict(make_examples(3), 1000)
    assert set(batch_shapes) == {(4, 4)}  # the smallest batch that divides over four shards


@pytest.mark.parametrize("kind", ["array", "columns"])
def test_examples_need_only_len_and_integer_items(kind):
    class Columns:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            assert type(i) is int
            return {"x": np.full(4, i)}

    if kind == "columns":
        examples, collate_fn = Columns(), lambda rows: stack([row["x"] for row in rows])
        desired = [np.full(4, i) for i in range(5)]
    else:
        examples, collate_fn = np.stack(make_examples(5)), stack
        desired = list(examples)
    model = make_linear()
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=collate_fn, pred_fn=apply)
    assert_outputs(predictor.predict(examples, 2), expected(model, desired))


@pytest.mark.parametrize("change", [list.extend, lambda buffer, rows: buffer.__delitem__(slice(3, None))])
def test_a_list_that_changes_after_the_call_is_no_shorter_or_longer_one(change):
    """The number of examples was compared between processes, and draws are numbered by it."""
    buffer = make_examples(5)
    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=apply)
    outputs = predictor.iterate(buffer, 2)
    change(buffer, make_examples(4))
    with nullcontext() if len(buffer) > 5 else pytest.raises(IndexError):
        assert sum(map(len, outputs)) == 5


def test_outputs_can_be_any_pytree():
    def pred_fn(model, batch, key):
        y = apply(model, batch, key)
        return {"logits": y, "best": (jnp.argmax(y, axis=1), y.astype(jnp.bfloat16))}

    model, examples = make_linear(), make_examples(5)
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=stack, pred_fn=pred_fn)
    outputs = predictor.predict(examples, 2)
    assert_outputs([output["logits"] for output in outputs], expected(model, examples))
    assert [int(output["best"][0]) for output in outputs] == [int(np.argmax(output["logits"])) for output in outputs]
    assert outputs[0]["best"][1].dtype == jnp.bfloat16


def test_an_output_may_have_no_entries():
    deployer = make_deployer(1)
    predictor = redeqx.Predictor(
        deployer, model=make_linear(), collate_fn=stack, pred_fn=lambda model, batch, key: apply(model, batch, key)[:, :0]
    )
    assert [x.shape for x in predictor.predict(make_examples(5), batch_size=8)] == [(0,)] * 5
    rows = jax.NamedSharding(deployer.mesh, jax.P("data"))
    alone = jax.jit(lambda x: x[:, :0], out_shardings=rows)(jax.device_put(np.ones((8, 4)), rows))
    is_mended = jax.__version_info__ >= (0, 12)  # `_on_host` is for those before
    with nullcontext() if is_mended else pytest.raises(ValueError, match="broadcast"):
        np.asarray(alone)


def test_output_fn_receives_numpy_arrays_without_padding():
    batches = []

    def output_fn(outputs):
        batches.append(outputs)
        return [float(row.sum()) for row in outputs]

    model, examples = make_linear(), make_examples(5)
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=stack, pred_fn=apply, output_fn=output_fn)
    np.testing.assert_allclose(predictor.predict(examples, 3), [y.sum() for y in expected(model, examples)], rtol=1e-5)
    assert [batch.shape for batch in batches] == [(3, 8), (2, 8)]
    assert all(isinstance(batch, np.ndarray) for batch in batches)


# --- the model argument -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_default_model", [True, False])
@pytest.mark.parametrize("shards", [(2, 1), (2, 4)])
def test_predict_accepts_another_model(has_default_model, shards):
    first, second, examples = make_linear(0), make_linear(1), make_examples(5)
    model_argument = {"model": first} if has_default_model else {}
    predictor = redeqx.Predictor(make_deployer(*shards), collate_fn=stack, pred_fn=apply, **model_argument)
    assert_outputs(predictor.predict(examples, 1, model=second), expected(second, examples))
    assert_outputs(predictor.predict(examples, 1, model=first), expected(first, examples))
    if has_default_model:
        assert_outputs(predictor.predict(examples, 1), expected(first, examples))


def test_models_that_differ_only_in_a_function_are_distinguished():
    def model(activation):
        return eqx.nn.MLP(4, 8, 8, 1, activation=activation, key=jax.random.key(0))

    examples = make_examples(3)
    predictor = redeqx.Predictor(make_deployer(), model=model(jax.nn.relu), collate_fn=stack, pred_fn=apply)
    for activation in (jnp.tanh, jax.nn.relu):
        model_argument = model(activation)
        assert_outputs(predictor.predict(examples, 1, model=model_argument), expected(model_argument, examples))
    assert_outputs(predictor.predict(examples, 1), expected(model(jax.nn.relu), examples))


def test_compiles_once_for_models_of_the_same_structure():
    traces = []

    def pred_fn(model, batch, key):
        traces.append(1)
        return apply(model, batch, key)

    predictor = redeqx.Predictor(make_deployer(2, 2), collate_fn=stack, pred_fn=pred_fn)
    examples = make_examples(16)
    predictor.predict(examples, 2, model=make_linear(0))
    n_traces = len(traces)
    predictor.predict(examples, 2, model=make_linear(1))
    assert len(traces) == n_traces


def test_accepts_models_with_numpy_leaves_or_without_arrays():
    class Scale(eqx.Module):
        scale: np.ndarray
        label: str = "scale"

        def __call__(self, x):
            return x * self.scale

    class Double(eqx.Module):
        def __call__(self, x):
            return 2 * x

    examples = make_examples(5)
    for model in (Scale(np.arange(4, dtype=np.float32)), Double()):
        predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=stack, pred_fn=apply)
        assert_outputs(predictor.predict(examples, 2), expected(model, examples))


def test_accepts_a_model_created_by_init():
    deployer = make_deployer(2, 2)
    model = deployer.init(lambda: make_linear(3))
    predictor = redeqx.Predictor(deployer, model=model, collate_fn=stack, pred_fn=apply)
    examples = make_examples(5)
    assert_outputs(predictor.predict(examples, 1), expected(make_linear(3), examples))


def test_uses_the_given_plan():
    deployer, model, examples = make_deployer(8), make_linear(), make_examples(3)
    plan = deployer.plan(model, overrides={"weight": (None, None), "bias": None})
    predictor = redeqx.Predictor(deployer, model=model, collate_fn=stack, pred_fn=apply, plan=plan)
    assert_outputs(predictor.predict(examples, 1), expected(model, examples))
    assert {shard.data.shape for shard in predictor._placed[0].weight.addressable_shards} == {(8, 4)}


# --- the plan -----------------------------------------------------------------------------------------------------------


class Arrays(eqx.Module):
    """Layers of arrays, the last one declared first."""

    down: jax.Array
    up: jax.Array

    def __init__(self):
        self.down, self.up = jnp.ones((64, 32)) / 64, jnp.arange(32.0 * 64).reshape(32, 64) / 2048

    def __call__(self, x):
        return jax.nn.relu(x @ self.up) @ self.down


def specs_of(plan):
    return {name: tuple(leaf.spec) for name, leaf in plan.leaves.items()}


def bytes_by_device(arrays):
    held = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


@pytest.mark.parametrize("shards", SHARDS)
def test_plan_is_in_the_order_in_which_pred_fn_computes(shards):
    deployer, examples = make_deployer(*shards), [np.full(32, i / 8, np.float32) for i in range(5)]
    model = Arrays()
    desired = [np.asarray(model(x)) for x in examples]
    predictor = redeqx.Predictor(deployer, model=model, collate_fn=stack, pred_fn=apply)
    assert predictor.plan is None
    assert_outputs(predictor.predict(examples, 2), desired)
    assert specs_of(predictor.plan) == {"down": ("model", None), "up": (None, "model")}
    assert predictor.plan["down"].reason == "row: its input arrives split by `up`"
    assert predictor.plan.n_bytes_per_device == 2 * 32 * 64 * 4 // shards[0]


def test_devices_hold_only_their_shards_and_the_given_model_is_released():
    deployer, before = make_deployer(), jax.live_arrays()  # kept, so that no other array gets the id of one
    model = Arrays()
    given = weakref.ref(model.up)
    predictor = redeqx.Predictor(deployer, model=model, collate_fn=stack, pred_fn=apply)
    del model
    predictor.predict([np.ones(32, np.float32)], 1)
    assert given() is None
    old = set(map(id, before))
    shape = [array for array in jax.live_arrays() if id(array) not in old and array.shape in ((32, 64), (64, 32))]
    assert set(bytes_by_device(shape).values()) == {predictor.plan.n_bytes_per_device} == {2 * 32 * 64 * 4 // 8}


def test_plan_is_kept_for_other_batches_and_models():
    predictor = redeqx.Predictor(make_deployer(), collate_fn=stack, pred_fn=apply)
    model, examples = Arrays(), [np.full(32, i / 8, np.float32) for i in range(9)]
    predictor.predict(examples, 2, model=model)
    plan = predictor.plan
    for given in (model, eqx.tree_at(lambda m: m.up, model, model.up + 1)):
        assert_outputs(predictor.predict(examples, 4, model=given), [np.asarray(given(x)) for x in examples])
    assert predictor.plan is plan


def test_plan_of_a_layered_model_with_state_in_a_tree_of_outputs():
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential(
            [make_linear(), eqx.nn.BatchNorm(8, "batch", mode="batch"), eqx.nn.Linear(8, 16, key=jax.random.key(1))]
        )
    )()

    def pred_fn(model, state, batch, key):
        y, _ = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
        return {"y": y, "best": y.argmax(-1)}

    examples = make_examples(5)
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=stack, pred_fn=pred_fn, model_state=state)
    outputs = predictor.predict(examples, 2)
    desired = pred_fn(eqx.nn.inference_mode(model), state, stack(examples), None)
    assert_outputs([output["y"] for output in outputs], list(np.asarray(desired["y"])))
    assert [int(output["best"]) for output in outputs] == desired["best"].tolist()
    specs = specs_of(predictor.plan)
    assert specs["layers.0.weight"] == ("model", None) and specs["layers.2.weight"] == (None, "model")
    assert specs["layers.1.weight"] == specs["layers.0.bias"] == ("model",) and specs["layers.2.bias"] == (None,)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
@pytest.mark.sweep
def test_generation_has_the_plan_of_the_loss(family):
    """Its loop, the caches that it writes at a position, and its first token, which is a constant, change nothing."""
    training = next(case for case in collect("TRAININGS") if case.name == family)
    model, ids = training.make(jax.random.key(3)), np.random.default_rng(0).integers(3, 60, (3, 6)).astype(np.int32)

    def pred_fn(model, batch, key):
        return generate(model, batch, max_new_tokens=4)

    deployer = make_deployer(2, 2)
    predictor = redeqx.Predictor(deployer, model=model, collate_fn=np.stack, pred_fn=pred_fn)
    outputs = predictor.predict(list(ids), 1)
    np.testing.assert_array_equal(outputs, pred_fn(eqx.nn.inference_mode(model), ids, None))
    batch = jax.tree.map(lambda *rows: np.stack(rows), *training.examples)
    specs, of_loss = map(specs_of, (predictor.plan, deployer.plan(model, training.loss_fn, batch)))
    # No position bias is computed for a single position, so its table may stay whole.
    assert {name for name in specs if specs[name] != of_loss[name]} <= {"decoder.positions.table"}
    blocks = "stack.blocks" if family == "gpt2" else "decoder.stack.blocks"
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        assert specs[f"{blocks}.{name}.weight"][:2] == (None, "model"), name
    for name in ("attention.output", "mlp.down"):
        assert specs[f"{blocks}.{name}.weight"][2] == "model", name


def test_an_operation_that_is_not_followed_is_named_in_the_reason():
    def pred_fn(model, batch, key):
        return jax.vmap(model)(batch["x"] / jnp.linalg.svd(model.up, compute_uv=False).max())

    examples = [np.full(32, i / 8, np.float32) for i in range(3)]
    predictor = redeqx.Predictor(make_deployer(), model=Arrays(), collate_fn=stack, pred_fn=pred_fn)
    assert_outputs(predictor.predict(examples, 2), list(np.asarray(pred_fn(Arrays(), stack(examples), None))))
    assert specs_of(predictor.plan) == {"down": (None, "model"), "up": (None, None)}
    assert predictor.plan["up"].reason.startswith("replicated: `svd` computes with it, which is not followed")


# --- inference mode, keys, dtypes and state -----------------------------------------------------------------------------


def test_disables_dropout():
    model = eqx.nn.Sequential([make_linear(), eqx.nn.Dropout(0.9)])

    def pred_fn(model, batch, key):
        keys = jax.random.split(key, len(batch["x"]))
        return jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)

    examples = make_examples(5)
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=stack, pred_fn=pred_fn)
    assert_outputs(predictor.predict(examples, 2), expected(make_linear(), examples))


def test_each_batch_has_its_own_key_and_calls_are_repeatable():
    def pred_fn(model, batch, key):
        return jax.random.uniform(key, (len(batch["x"]),))

    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    first = predictor.predict(make_examples(6), 2)
    assert len({float(x) for x in first}) == 6
    assert predictor.predict(make_examples(6), 2) == first
    other = redeqx.Predictor(make_deployer(jax_seed=1), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    assert other.predict(make_examples(6), 2) != first


@pytest.mark.parametrize("shards", [(8, 1), (2, 2)])
def test_draws_of_a_loop_that_runs_until_all_rows_have_ended_do_not_depend_on_the_batch_size(shards):
    def pred_fn(model, batch, key):
        def advance(state):
            i, total, has_ended = state
            draw = jax.random.uniform(jax.random.fold_in(key, i), total.shape)
            return i + 1, jnp.where(has_ended, total, total + draw), has_ended | (draw > 0.7)

        def goes_on(state):
            return (state[0] < 9) & ~state[2].all()

        n = len(batch["x"])
        return jax.lax.while_loop(goes_on, advance, (0, jnp.zeros(n), jnp.zeros(n, bool)))[1]

    examples, key = make_examples(9), jax.random.key(3)
    predictor = redeqx.Predictor(make_deployer(*shards), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    for batch_size in (2, 9):
        found = predictor.predict(examples, batch_size=batch_size, key=key)
        np.testing.assert_allclose(found, pred_fn(None, stack(examples), key), rtol=1e-6)


def test_random_draws_follow_the_key_argument():
    def pred_fn(model, batch, key):
        return jax.random.uniform(key, (len(batch["x"]),))

    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    draws = [predictor.predict(make_examples(6), 2, key=jax.random.key(seed)) for seed in (5, 6, 5)]
    assert len({float(x) for x in draws[0] + draws[1]}) == 12
    assert draws[0] == draws[2]
    iterated = predictor.iterate(make_examples(6), 2, key=jax.random.key(5))
    assert [row for batch in iterated for row in batch] == draws[0]


def test_a_derivative_of_the_users_own_is_not_taken():
    """Rounding whose gradient is that of the identity, as in quantised models, outside of the packages that are known."""
    rounded = jax.custom_vjp(lambda x: jnp.round(x))
    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def pred_fn(model, batch, key):
        outputs = rounded(apply(model, batch, key))
        return {"values": outputs, "best": outputs.argmax(-1)}

    predictor = redeqx.Predictor(make_deployer(2, 2), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    examples = make_examples(13)
    outputs = predictor.predict(examples, batch_size=4)
    assert_outputs([each["values"] for each in outputs], [np.round(each) for each in expected(make_linear(), examples)])


def halved(model, batch, key, goes_on=lambda x: jnp.abs(x).mean() > 0.1):
    return jax.lax.while_loop(goes_on, lambda x: x / 2, batch["x"])


def any_in_a_loop(x):
    return jax.lax.fori_loop(0, 2, lambda i, found: found | (jnp.abs(x) > 0.1 * i).any(), False)


@pytest.mark.parametrize(
    ("pred_fn", "said"),
    [
        (
            lambda model, batch, key: apply(model, batch, key) - apply(model, batch, key).mean(0),
            "mixed at tests/test_predictor",
        ),
        (
            lambda model, batch, key: jax.random.gamma(key, 2.0, (len(batch["x"]),)),
            "`random_gamma` draws for all rows at once",
        ),
        (lambda model, batch, key: jax.random.normal(key, (len(batch["x"]),)) + batch["x"].sum(1), None),
        (halved, "mixed at tests/test_predictor"),
        (partial(halved, goes_on=lambda x: (jnp.abs(x) > 0.1).any()), "mixed at tests/test_predictor"),
        (partial(halved, goes_on=any_in_a_loop), "mixed at tests/test_predictor"),
    ],
)
def test_outputs_that_depend_on_the_batch_size_are_named_once(pred_fn, said, capsys):
    predictor = redeqx.Predictor(redeqx.Deployer(), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    for batch_size in (8, 16):
        predictor.predict(make_examples(20), batch_size=batch_size)
    out = " ".join(capsys.readouterr().out.split())
    text = "prediction: the outputs depend on the batch size. Rows: "
    assert out.count(text) == (said is not None)
    assert said is None or f"{text}{said}" in out


def test_outputs_that_may_depend_on_the_batch_size_are_named(capsys):
    def pred_fn(model, batch, key):
        return jax.vmap(model)(batch["x"]).sum(1) + jnp.linspace(0, 1, len(batch["x"]))

    predictor = redeqx.Predictor(redeqx.Deployer(), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    predictor.predict(make_examples(20), batch_size=8)
    out = " ".join(capsys.readouterr().out.split())
    assert "prediction: the outputs may depend on the batch size. Rows: unknown at tests/test_predictor.py" in out


def test_another_model_has_the_same_arrays():
    predictor, given = redeqx.Predictor(make_deployer(), collate_fn=stack, pred_fn=apply), make_linear()
    predictor.predict(make_examples(4), 2, model=given)  # the first one may be any
    with pytest.raises(
        ValueError, match=r"`model`: `bias`: expected shape \(8,\), as in the Predictor's model, got no array"
    ):
        predictor.predict(make_examples(4), 2, model=eqx.nn.Linear(4, 8, use_bias=False, key=jax.random.key(0)))
    predictor = redeqx.Predictor(make_deployer(), model=given, collate_fn=stack, pred_fn=apply)
    with pytest.raises(ValueError, match=r"`model`: `weight`: expected shape \(8, 4\), as in .*, got shape \(7, 4\)\. Pass"):
        predictor.iterate(make_examples(4), 2, model=eqx.nn.Linear(4, 7, key=jax.random.key(0)))


def test_iterate_checks_its_arguments_immediately():
    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=apply)
    with pytest.raises(TypeError, match=r"`key`: expected a PRNG key, got 5\. Pass"):
        predictor.iterate(make_examples(4), 2, key=5)
    with pytest.raises(TypeError, match=r"`examples`: expected"):
        predictor.iterate(iter(make_examples(4)), 2)
    with pytest.raises(TypeError, match=r"`model`: expected an Equinox module, got the function"):
        predictor.iterate(make_examples(4), 2, model=apply)
    with pytest.raises(ValueError, match=r"`model`: expected a model, got None\. Pass it"):
        redeqx.Predictor(make_deployer(), collate_fn=stack, pred_fn=apply).iterate(make_examples(4), 2)
    assert list(predictor.iterate([], 2)) == []


def test_compute_dtype_casts_floating_leaves():
    class Model(eqx.Module):
        weight: jax.Array
        table: jax.Array

        def __call__(self, x):
            return x.astype(self.weight.dtype) * self.weight + self.table

    model = Model(jnp.arange(4.0), jnp.arange(4))
    predictor = redeqx.Predictor(
        make_deployer(),
        model=model,
        collate_fn=stack,
        pred_fn=apply,
        compute=redeqx.Precision("bfloat16", gradients=None),
    )
    assert predictor.predict(make_examples(2), 1)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("shards", [(8, 1), (2, 2)])
def test_passes_model_state_to_pred_fn(shards):
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    mean, var = jnp.arange(4.0), jnp.arange(1.0, 5.0)
    state = state.set(model.batch_state_index, (mean, var))

    def pred_fn(model, state, batch, key):
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)[0]

    examples = make_examples(5)
    predictor = redeqx.Predictor(make_deployer(*shards), model=model, collate_fn=stack, pred_fn=pred_fn, model_state=state)
    desired = [np.asarray((x - mean) / np.sqrt(var + model.eps), np.float32) for x in examples]
    for actual, row in zip(predictor.predict(examples, 2), desired, strict=True):
        np.testing.assert_allclose(actual, row, rtol=1e-5, atol=1e-6)


# --- streaming ----------------------------------------------------------------------------------------------------------


def test_iterate_yields_outputs_before_all_batches_are_collated():
    n_collated = 0

    def collate_fn(examples):
        nonlocal n_collated
        n_collated += 1
        return stack(examples)

    model, examples = make_linear(), make_examples(40)
    predictor = redeqx.Predictor(make_deployer(), model=model, collate_fn=collate_fn, pred_fn=apply)
    outputs = predictor.iterate(examples, 2)
    assert n_collated == 0
    first = next(outputs)
    assert_outputs(first, expected(model, examples[:2]))
    assert n_collated <= 6  # of 20: two on the device, the prefetched ones and the one just returned
    rest = [output for batch in outputs for output in batch]
    assert n_collated == 20
    assert_outputs(rest, expected(model, examples[2:]))


def test_an_error_comes_after_the_outputs_before_it():
    examples = make_examples(10)
    examples[5] = np.full(3, 1.0)
    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=apply)
    seen = []
    with pytest.raises(ValueError, match="same shape"):
        seen.extend(predictor.iterate(examples, 2))
    assert [len(batch) for batch in seen] == [2, 2]


def test_at_most_two_outputs_stay_on_the_device():
    alive = []
    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=apply)
    predictor.predict(make_examples(2), 2)
    structure, model_parts, compiled = predictor._step

    def tracked_step(*args):
        outputs = compiled(*args)
        alive.append(weakref.ref(outputs))
        return outputs

    tracked_step.trace = compiled.trace
    predictor._step = (structure, model_parts, tracked_step)
    for i, _ in enumerate(predictor.iterate(make_examples(40), 2)):
        assert sum(ref() is not None for ref in alive) <= 2, i
    assert len(alive) == 20


def test_prefetch_thread_ends_on_early_exit_and_on_errors():
    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=apply)
    for _ in predictor.iterate(make_examples(40), 2):
        break
    assert not prefetch_threads()

    def pred_fn(model, batch, key):
        raise RuntimeError("of the user")

    predictor = redeqx.Predictor(make_deployer(), model=make_linear(), collate_fn=stack, pred_fn=pred_fn)
    with pytest.raises(RuntimeError, match="of the user") as raised:
        predictor.predict(make_examples(40), 2)
    assert not prefetch_threads()  # although the traceback still references every frame
    assert raised.value.__traceback__ is not None


# --- errors -------------------------------------------------------------------------------------------------------------


def predict_error(error, n=5, model=None, examples=None, per_device_batch_size=4, **kwargs):
    model_argument = {"model": make_linear(), "collate_fn": stack, "pred_fn": apply, **kwargs}
    with pytest.raises(error) as raised:
        examples = make_examples(n) if examples is None else examples
        redeqx.Predictor(make_deployer(), **model_argument).predict(examples, per_device_batch_size, model)
    return str(raised.value)


@pytest.mark.parametrize(
    ("output_fn", "found"),
    [
        (lambda y: list(y)[:3], "3 entries"),
        (lambda y: [], "0 entries"),
        (lambda y: "four", "str"),
        (lambda y: y, "ndarray"),
        (lambda y: None, "NoneType"),
    ],
)
def test_output_fn_must_return_one_entry_per_example(output_fn, found):
    assert predict_error(ValueError, output_fn=output_fn) == (
        f"`output_fn`: expected a list of 4 entries, one for each example, got {found}. "
        "Return a list with an entry for each row of the batch."
    )


@pytest.mark.parametrize(
    ("pred_fn", "name", "found"),
    [
        (lambda m, b, k: {"y": apply(m, b, k).T}, "y", "(8, 2)"),
        (lambda m, b, k: apply(m, b, k).sum(), "value", "()"),
        (lambda m, b, k: (apply(m, b, k), 3), "1", "int"),
    ],
)
def test_pred_fn_must_return_one_row_per_example(pred_fn, name, found):
    assert predict_error(ValueError, pred_fn=pred_fn, per_device_batch_size=2) == (
        f"`pred_fn` output `{name}`: expected 2 rows, one for each of the batch, got {found}. "
        "Return arrays whose leading dim is the batch."
    )


def test_pred_fn_must_not_return_random_keys():
    assert predict_error(TypeError, pred_fn=lambda m, b, k: {"keys": jax.random.split(k, len(b["x"]))}) == (
        "`pred_fn` output `keys`: expected numbers, got random keys. Return `jax.random.key_data(keys)`."
    )


def test_pred_fn_without_outputs_raises():
    assert predict_error(ValueError, pred_fn=lambda m, b, k: {}) == (
        "`pred_fn`: expected arrays with one row per example, got {}. Return a PyTree of arrays."
    )


def test_predict_without_a_model_raises():
    with pytest.raises(ValueError) as raised:
        redeqx.Predictor(make_deployer(), collate_fn=stack, pred_fn=apply).predict(make_examples(2), 1)
    assert str(raised.value) == "`model`: expected a model, got None. Pass it to `Predictor` or to `predict`."


def test_invalid_batch_size_and_examples_raise():
    assert predict_error(ValueError, per_device_batch_size=0) == (
        "`per_device_batch_size`: expected at least 1, got 0. Pass a positive number."
    )
    assert predict_error(TypeError, examples=iter(make_examples(2))) == (
        "`examples`: expected `len()` and integer items, got list_iterator. Pass a list of them."
    )
    assert predict_error(TypeError, examples="text") == (
        "`examples`: expected `len()` and integer items, got str. Pass a list of them."
    )
    columns = predict_error(TypeError, examples={"x": [1, 2]})
    assert columns.startswith("`examples`: expected one item per example, got a dict, whose items have names. Pass a list")


def test_wrong_number_of_collated_rows_raises():
    message = predict_error(ValueError, collate_fn=lambda examples: {"x": np.zeros((2, 4))})
    assert message.startswith("`collate_fn` output `x`: expected 4 rows, one for each example, got shape (2, 4).")


# --- predictors of a Trainer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [(8, 1), (2, 2)])
def test_predictor_of_a_trainer_uses_its_current_weights(shards):
    def loss_fn(model, batch, key):
        return jnp.mean(apply(model, batch, key) ** 2)

    trainer = redeqx.Trainer(
        make_deployer(*shards), model=make_linear(), optimizer=optax.sgd(0.1), collate_fn=stack, loss_fn=loss_fn
    )
    predictor = trainer.get_default_predictor(apply)
    examples = make_examples(8)
    before = predictor.predict(examples, 1)  # works before the first step too
    assert_outputs(before, expected(make_linear(), examples))
    for _ in range(2):
        trainer.fit(examples, 1, 1)
        after = predictor.predict(examples, 1)
        assert_outputs(after, expected(jax.device_get(trainer.model), examples))
        assert np.abs(np.stack(after) - np.stack(before)).max() > 1e-3
        before = after
    assert_outputs(predictor.predict(examples, 1, model=make_linear(5)), expected(make_linear(5), examples))


def make_trainer():
    return redeqx.Trainer(
        make_deployer(2, 2),
        model=make_linear(),
        optimizer=optax.sgd(0.1),
        collate_fn=stack,
        loss_fn=lambda model, batch, key: jnp.mean(apply(model, batch, key) ** 2),
    )


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_predictor_of_arrays_that_a_trainer_has_deleted_raises(is_placed):
    """jaxlib crashes if a compiled step is called with deleted arrays."""
    trainer, examples = make_trainer(), make_examples(8)
    trainer.update(examples)
    predictor = redeqx.Predictor(trainer.deployer, model=trainer.model, collate_fn=stack, pred_fn=apply)
    if is_placed:
        assert_outputs(predictor.predict(examples, 2), expected(jax.device_get(trainer.model), examples))
    trainer.update(examples)
    with pytest.raises(ValueError, match=r"`model`.*`weight`, `bias`.*use `trainer.get_default_predictor`"):
        predictor.predict(examples, 2)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_iteration_across_an_update_raises_unless_its_model_is_newer(given, has_begun):
    trainer, examples = make_trainer(), make_examples(32)
    trainer.update(examples)
    predictor = trainer.get_default_predictor(apply)
    outputs = predictor.iterate(examples, 2, trainer.model if given else None)
    n_done = len(next(outputs)) if has_begun else 0
    trainer.update(examples)
    if not (given or has_begun):
        after = [row for batch in outputs for row in batch]
        assert_outputs(after, expected(jax.device_get(trainer.model), examples))
        return
    with pytest.raises(ValueError, match=r"`model`.*`weight`, `bias`.*read all of `iterate` before the next update"):
        for batch in outputs:
            n_done += len(batch)
    assert n_done < len(examples)
    assert not prefetch_threads()


def test_predictor_of_a_trainer_uses_its_compute_dtype():
    trainer = redeqx.Trainer(
        make_deployer(),
        model=make_linear(),
        optimizer=optax.sgd(0.1),
        collate_fn=stack,
        loss_fn=lambda model, batch, key: jnp.mean(apply(model, batch, key) ** 2),
        compute=redeqx.Precision("bfloat16", gradients=None),
    )
    batch_shapes = []

    def pred_fn(model, batch, key):
        batch_shapes.append(model.weight.dtype)
        return apply(model, batch, key)

    trainer.get_default_predictor(pred_fn).predict(make_examples(2), 2)
    assert batch_shapes and all(dtype == jnp.bfloat16 for dtype in batch_shapes)
    assert trainer.model.weight.dtype == jnp.float32


def test_predictor_of_a_trainer_accepts_its_own_collate_fn():
    """The trainer's examples are (x, y) pairs, the predictor's are x alone."""

    def collate_fn(pairs):
        return {"x": np.stack([x for x, _ in pairs]), "y": np.stack([y for _, y in pairs])}

    def loss_fn(model, batch, key):
        return jnp.mean((apply(model, batch, key) - batch["y"]) ** 2)

    examples = [x.astype(np.float32) for x in make_examples(8)]
    trainer = redeqx.Trainer(
        make_deployer(), model=make_linear(), optimizer=optax.sgd(0.1), collate_fn=collate_fn, loss_fn=loss_fn
    )
    trainer.train([(x, np.ones(8, np.float32)) for x in examples], 8)
    predictor = trainer.get_default_predictor(lambda model, x, key: jax.vmap(model)(x), collate_fn=np.stack)
    assert_outputs(predictor.predict(examples, 8), expected(jax.device_get(trainer.model), examples))
