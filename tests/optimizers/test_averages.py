"""The parameters to evaluate: averages, schedule-free and SAM are evaluated, saved and resumed at the right point."""

import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import redeqx
from redeqx.optimizers import ema, eval_params, groups, with_eval_params

DATA = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)  # three steps per epoch, of one program
EVALUATED = DATA[:5]


def loss_fn(model, batch, key):
    return ((jax.vmap(model)(batch[:, :5])[:, 0] - batch[:, 5]) ** 2).mean()


def make_trainer(optimizer, workdir=None, **kwargs):
    return redeqx.Trainer(
        redeqx.Deployer(5, 2, 2, workdir=workdir, verbose=False),
        model=eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)),
        optimizer=optimizer,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        **kwargs,
    )


def fit(trainer, *callbacks, n_epochs=2, **kwargs):
    return trainer.fit(DATA, n_epochs=n_epochs, batch_size=8, callbacks=callbacks, **kwargs)


def arrays(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def bits(tree):
    return [leaf.tobytes() for leaf in arrays(tree)]


def assert_close(tree, expected):
    for actual, leaf in zip(arrays(tree), expected, strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)


class RecordModels(redeqx.Callback):
    """Records the trained weights at the start and after each step."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer):
        self.seen.append(arrays(trainer.model))

    def on_step(self, trainer, metrics):
        self.seen.append(arrays(trainer.model))


def exponential_average(decay, models):
    average = models[0]
    for model in models[1:]:
        average = [decay * a + (1 - decay) * x for a, x in zip(average, model, strict=True)]
    return average


class Killed(Exception):
    pass


class KillAt(redeqx.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            raise Killed


def schedule_free():
    return optax.contrib.schedule_free_adamw(1e-2)


# --- one average --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_average_is_evaluated_saved_and_predicts(tmp_path):
    trainer, models = make_trainer(ema(optax.adam(1e-2), 0.9), tmp_path), RecordModels()
    metrics = fit(trainer, models, eval_examples=EVALUATED, save_argmin_ckpt_by_metrics=["loss"])
    assert_close(trainer.eval_model, exponential_average(0.9, models.seen))
    assert trainer.eval_model.layers[0].weight.sharding == trainer.model.layers[0].weight.sharding
    assert bits(trainer.model) == [leaf.tobytes() for leaf in models.seen[-1]]
    expected = float(loss_fn(jax.device_get(trainer.eval_model), EVALUATED, None))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert metrics["loss"] == trainer.eval_loss(EVALUATED, batch_size=8)
    assert abs(trainer.eval_loss(EVALUATED, batch_size=8, model=trainer.model) - expected) > 1e-3
    outputs = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch[:, :5])).predict(DATA, 4)
    np.testing.assert_allclose(outputs, jax.vmap(jax.device_get(trainer.eval_model))(DATA[:, :5]), rtol=1e-4, atol=1e-6)

    path = tmp_path / "ckpts" / json.loads((tmp_path / "ckpts/index.json").read_text())["last"]
    assert sorted(x.tobytes() for x in load_file(path / "model.safetensors").values()) == sorted(bits(trainer.eval_model))
    assert sorted(x.tobytes() for x in load_file(path / "trained.safetensors").values()) == sorted(bits(trainer.model))
    assert bits(redeqx.load(tmp_path, trainer.model)) == bits(trainer.eval_model)


def test_a_plain_optimizer_saves_one_model(tmp_path):
    trainer = make_trainer(optax.adam(1e-2), tmp_path)
    fit(trainer, n_epochs=1)
    assert {path.stem for path in (tmp_path / "ckpts/step_00000003").glob("*.safetensors")} == {"model", "optimizer"}
    assert bits(trainer.eval_model) == bits(trainer.model)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda: ema(optax.adam(1e-2), 0.9), {}),
        pytest.param(schedule_free, {}, marks=pytest.mark.sweep),
        pytest.param(
            lambda: ema(optax.adam(1e-2), 0.9),
            {"compute": redeqx.Precision(parameters="bfloat16")},
            marks=pytest.mark.sweep,
        ),
        pytest.param(lambda: optax.MultiSteps(ema(optax.adam(1e-2), 0.9), 2), {}, marks=pytest.mark.sweep),
    ],
    ids=["ema", "schedule_free", "masters", "multi_steps"],
)
@pytest.mark.sweep
def test_a_resumed_run_is_equal_bit_by_bit(tmp_path, optimizer, options):
    whole = make_trainer(optimizer(), tmp_path / "whole", **options)
    fit(whole, eval_examples=EVALUATED)
    with pytest.raises(Killed):
        killed = make_trainer(optimizer(), tmp_path / "killed", **options)
        fit(killed, KillAt(4), eval_examples=EVALUATED, save_every_n_steps=1)
    again = make_trainer(optimizer(), tmp_path / "killed", **options)
    fit(again, eval_examples=EVALUATED)
    for one, other in ((again.model, whole.model), (again.opt_state, whole.opt_state), (again.eval_model, whole.eval_model)):
        assert bits(one) == bits(other)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_the_average_of_bfloat16_weights_is_kept_in_float32():
    """In bfloat16 a decay of 0.999 is 1: the average would stay where it began."""
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model={"w": jnp.ones(8, jnp.bfloat16)}, optimizer=ema(optax.sgd(1.0), 0.999),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (model["w"].astype(np.float32) ** 2).sum() / 2 + 0 * batch.sum(),
    )  # fmt: skip
    fit(trainer, n_epochs=None, max_steps=20)
    assert not np.any(trainer.model["w"])  # from the first step on
    assert trainer.eval_model["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(trainer.eval_model["w"], np.float32), 0.999**20, rtol=2**-8)


def test_skipped_steps_do_not_count():
    trainer, models = make_trainer(ema(optax.adam(1e-2), 0.9), on_nonfinite="skip"), RecordModels()
    examples = np.concatenate([DATA[:23], np.full((1, 6), np.nan, np.float32)])  # one of three steps is non-finite
    trainer.fit(examples, batch_size=8, callbacks=[models])
    assert trainer.n_skipped == 1
    pairs = itertools.pairwise(models.seen)
    kept = [models.seen[0], *(after for before, after in pairs if not np.array_equal(before[0], after[0]))]
    assert len(kept) == 3
    assert_close(trainer.eval_model, exponential_average(0.9, kept))


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (lambda average: optax.chain(optax.clip(1.0), average, optax.scale(0.5)), 1),  # the update changes after it
        (lambda average: optax.MultiSteps(average, 2), 2),
        (lambda average: optax.apply_if_finite(average, 3), 1),
    ],
    ids=["chain", "multi_steps", "apply_if_finite"],
)
def test_an_average_may_be_inside_of_other_transformations(optimizer, count):
    trainer, models = make_trainer(optimizer(ema(optax.adam(1e-2), 0.9))), RecordModels()
    fit(trainer, models)
    assert_close(trainer.eval_model, exponential_average(0.9, models.seen[::count]))


def test_hyperparameters_are_found_in_an_average():
    trainer, models = make_trainer(ema(optax.inject_hyperparams(optax.sgd)(1.0), 0.9)), RecordModels()
    trainer.set_hyperparams(learning_rate=0.01)
    fit(trainer, models)
    assert trainer.hyperparams["learning_rate"] == pytest.approx(0.01)
    assert_close(trainer.eval_model, exponential_average(0.9, models.seen))


def test_each_group_of_leaves_has_its_own_evaluated_weights():
    trainer, models = make_trainer(groups({"bias": ema(optax.adam(1e-2), 0.5)}, default=schedule_free())), RecordModels()
    fit(trainer, models)
    average = dict(zip(("w0", "b0", "w1", "b1"), exponential_average(0.5, models.seen), strict=True))
    model, trained = trainer.eval_model, trainer.model
    for layer, name, weight in zip(model.layers, ("b0", "b1"), trained.layers, strict=True):
        np.testing.assert_allclose(layer.bias, average[name], rtol=2e-5, atol=1e-7)
        assert not np.array_equal(layer.weight, weight.weight)


@pytest.mark.sweep
def test_load_ckpt_of_the_model_alone_begins_a_new_average(tmp_path):
    for optimizer in (ema(optax.sgd(0.1), 0.9), optax.contrib.schedule_free_sgd(0.1)):
        trainer = make_trainer(optimizer, tmp_path / type(optimizer.init({})).__name__)
        fit(trainer, n_epochs=1, max_steps=1)
        first = trainer.save_ckpt("first")
        expected = bits(trainer.eval_model)
        fit(trainer)
        assert bits(trainer.eval_model) != bits(trainer.model)
        trainer.load_ckpt(first, load_opt_states=False)
        assert bits(trainer.model) == expected
        assert_close(trainer.eval_model, arrays(trainer.model))
        fit(trainer, max_steps=1)  # a step donates the buffers of the weights and the average
        assert bits(trainer.eval_model) != bits(trainer.model)


@pytest.mark.sweep
def test_a_checkpoint_of_an_optimizer_with_or_without_an_average_is_another_one_s(tmp_path):
    plain, averaged = optax.adam(1e-2), ema(optax.adam(1e-2), 0.9)
    for i, (saved, loaded) in enumerate(((plain, averaged), (averaged, plain))):
        fit(make_trainer(saved, tmp_path / str(i)), n_epochs=1)
        trainer = make_trainer(loaded, tmp_path / str(i))
        before = bits((trainer.model, trainer.opt_state))
        with pytest.raises(ValueError, match=r"(?s)`inner\.0\.count`.*load_opt_states=False"):
            trainer.load_ckpt()
        assert bits((trainer.model, trainer.opt_state)) == before
        trainer.load_ckpt(load_opt_states=False)
        with pytest.raises(ValueError, match=r"(?s)optimizer.*another workdir"):
            fit(make_trainer(loaded, tmp_path / str(i)))


# --- other optimizers with parameters to evaluate -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "state_of"),
    [
        (schedule_free(), lambda state: state),
        (optax.chain(optax.clip(1.0), schedule_free()), lambda state: state[1]),
        (optax.inject_hyperparams(optax.contrib.schedule_free_adamw)(1e-2), lambda state: state.inner_state),
    ],
)
def test_schedule_free_is_evaluated_and_saved_at_its_average(tmp_path, optimizer, state_of):
    trainer = make_trainer(optimizer, tmp_path)
    metrics = fit(trainer, eval_examples=EVALUATED)
    expected = optax.contrib.schedule_free_eval_params(
        state_of(trainer.opt_state), eqx.filter(trainer.model, eqx.is_inexact_array)
    )
    assert_close(trainer.eval_model, arrays(expected))
    assert_close(redeqx.load(tmp_path, trainer.model), arrays(expected))
    weights = jax.device_get(trainer.eval_model)
    np.testing.assert_allclose(metrics["loss"], float(loss_fn(weights, EVALUATED, None)), rtol=1e-5)
    assert abs(metrics["loss"] - trainer.eval_loss(EVALUATED, batch_size=8, model=trainer.model)) > 1e-3


@pytest.mark.parametrize("opaque", [False, True])
def test_sam_is_evaluated_where_it_is_not_perturbed(opaque):
    trainer = make_trainer(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), opaque_mode=opaque))
    models = [arrays(trainer.model)]
    for _ in range(2):
        trainer.update(DATA[:8])
        models.append(arrays(trainer.eval_model))
    is_same = [np.array_equal(a[0], b[0]) for a, b in itertools.pairwise(models)]
    assert is_same == ([False, False] if opaque else [True, False])
    assert bits(trainer.eval_model) == bits(trainer.model)


def test_an_optimizer_may_have_its_own_parameters_to_evaluate(tmp_path):
    def doubled(state, params):
        assert isinstance(state[0], optax.ScaleByAdamState)
        return jax.tree.map(lambda x: 2 * x, params)

    trainer = make_trainer(groups({"bias": with_eval_params(optax.adam(1e-2), doubled)}, default=optax.sgd(0.1)), tmp_path)
    fit(trainer, n_epochs=1)
    for evaluated, trained in zip(trainer.eval_model.layers, trainer.model.layers, strict=True):
        np.testing.assert_array_equal(evaluated.bias, 2 * trained.bias)
        np.testing.assert_array_equal(evaluated.weight, trained.weight)
    assert bits(redeqx.load(tmp_path, trainer.model)) == bits(trainer.eval_model)


@pytest.mark.parametrize(
    "optimizer",
    [
        ema(ema(optax.adam(1e-2), 0.9), 0.99),
        ema(schedule_free()),
        optax.chain(ema(optax.adam(1e-2)), ema(optax.identity())),
    ],
)
def test_two_averages_of_a_leaf_are_refused_until_one_is_chosen(optimizer):
    with pytest.raises(ValueError, match=r"`optimizer`: expected one average .*layers\.0\.bias.*with_eval_params"):
        make_trainer(optimizer).update(DATA[:8])
    trainer = make_trainer(with_eval_params(optimizer, lambda state, params: params))
    trainer.update(DATA[:8])
    assert bits(trainer.eval_model) == bits(trainer.model)


# --- without a Trainer, and invalid arguments ---------------------------------------------------------------------------


def test_a_loop_without_a_trainer():
    optimizer, params = ema(optax.sgd(0.1), 0.9), {"w": jnp.ones(3)}
    state, expected = optimizer.init(params), np.ones(3)
    for _ in range(3):
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
        params = optax.apply_updates(params, updates)
        expected = 0.9 * expected + 0.1 * np.asarray(params["w"])
    np.testing.assert_allclose(eval_params(state, params)["w"], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`params`: expected the parameters, got None"):
        optimizer.update(params, state)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ema(optax.adam(1e-2), 1.0), ValueError, r"`decay`: expected a number from 0 to below 1, got 1\.0"),
        (lambda: ema(optax.adam(1e-2), "slow"), TypeError, r"`decay`: expected a number from 0 to below 1, got 'slow'"),
        (lambda: ema(0.999), TypeError, r"`optimizer`: expected an optax transformation"),
        (lambda: with_eval_params(optax.adam, lambda state, params: params), TypeError, r"`optimizer`: .*Call it"),
    ],
)
def test_invalid_arguments_raise(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
