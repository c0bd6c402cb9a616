"""Optimizers whose results are easily misread: weights that are not to be evaluated, and complex ones."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

DATA = np.ones((8, 4), np.float32)
TARGET = 1 + 2j


class Weights(eqx.Module):
    weight: jax.Array


def make_trainer(optimizer, dtype=jnp.float32, **kwargs):
    def loss_fn(model, batch, key):
        return (jnp.abs(model.weight - TARGET.real - (TARGET.imag * 1j if dtype == jnp.complex64 else 0)) ** 2).mean()

    deployer = redeqx.Deployer(verbose=False)
    kwargs = {"loss_fn": loss_fn, "collate_fn": np.stack, **kwargs}
    return redeqx.Trainer(deployer, model=Weights(jnp.zeros(3, dtype)), optimizer=optimizer, **kwargs)


def warned(act):
    """Returns the warnings of the library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught if "expected" in str(warning.message)]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: optax.chain(optax.clip(1.0), optimizer)])
def test_lookahead_is_refused_by_its_name(wrap):
    trainer = make_trainer(wrap(optax.lookahead(optax.sgd(0.1), 5, 0.5)))
    with pytest.raises(ValueError) as error:
        trainer.update(DATA)
    assert str(error.value) == (
        "`optimizer`: expected one of the model's parameters, got `optax.lookahead`, which trains pairs of a fast and a "
        "slow copy. Leave it out, and average the weights by the callback `redeqx.EMA`."
    )


# --- weights to evaluate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.contrib.schedule_free_sgd(0.1), "schedule_free"),
        (optax.chain(optax.clip(1.0), optax.contrib.schedule_free(optax.adam(0.1), 0.1)), "schedule_free"),
        (optax.inject_hyperparams(optax.contrib.schedule_free_adamw)(0.1), "schedule_free"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01)), "sam"),
    ],
)
def test_weights_that_are_not_to_be_evaluated_are_warned_about_once(optimizer, name):
    trainer = make_trainer(optimizer)
    [message] = warned(lambda: [trainer.update(DATA), trainer.update(DATA)])
    assert f"expected the trained weights to be those to evaluate, got `optax.contrib.{name}`" in message


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), opaque_mode=True),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.contrib.prodigy(),
    ],
)
def test_other_optimizers_are_not_warned_about(optimizer):
    trainer = make_trainer(optimizer)
    assert warned(lambda: trainer.update(DATA)) == []


class ScheduleFree(redeqx.Callback):
    def models(self, trainer):
        trained, rest = eqx.partition(trainer.model, eqx.is_inexact_array)
        return {"x": eqx.combine(optax.contrib.schedule_free_eval_params(trainer.opt_state, trained), rest)}


def test_the_way_out_evaluates_the_other_weights_without_a_warning():
    def fit(*callbacks):
        trainer = make_trainer(optax.contrib.schedule_free_sgd(0.1))
        options = {"batch_size": 8, "n_epochs": 5, "eval_examples": DATA}
        return trainer, trainer.fit(DATA, callbacks=list(callbacks), **options)

    trainer, metrics = fit(ScheduleFree())  # a warning is an error
    state = trainer.opt_state
    average = optax.contrib.schedule_free_eval_params(state, trainer.model).weight
    np.testing.assert_allclose(metrics["x_loss"], np.mean((np.asarray(average) - 1) ** 2), rtol=1e-6)
    assert abs(metrics["x_loss"] - metrics["loss"]) > 1e-3
    assert any("schedule_free" in message for message in warned(lambda: fit(redeqx.EMA(0.9))))


# --- complex weights ----------------------------------------------------------------------------------------------------

CONJUGATE = optax.stateless(lambda grads, params: jax.tree.map(jnp.conj, grads))
OPTIMIZERS = {
    "sgd": optax.sgd(0.2),
    "adam": optax.adam(0.2),
    "split": optax.contrib.split_real_and_imaginary(optax.adam(0.2)),
    "warm-up": optax.sgd(optax.linear_schedule(0.0, 0.2, 4)),
    "accumulated": optax.MultiSteps(optax.sgd(0.4), 2, accumulator_dtype=jnp.complex64),
    "injected": optax.inject_hyperparams(optax.adamw)(0.2, weight_decay=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_weights_that_climb_are_warned_about_and_the_wrapper_descends(name):
    trainer = make_trainer(OPTIMIZERS[name], jnp.complex64)
    [message] = warned(lambda: [trainer.update(DATA) for _ in range(20)])
    assert "got ones that climb along the imaginary part of `weight`" in message
    assert np.asarray(trainer.model.weight)[0].imag < -1
    wrapped = make_trainer(optax.chain(CONJUGATE, OPTIMIZERS[name]), jnp.complex64)  # a warning is an error
    for _ in range(200):
        wrapped.update(DATA)
    np.testing.assert_allclose(wrapped.model.weight, TARGET, atol=0.05)
    if name == "injected":
        wrapped.set_hyperparams(learning_rate=0.0)
        assert wrapped.update(DATA)["learning_rate"] == 0.0 == wrapped.hyperparams["learning_rate"]


def test_a_gradient_of_the_user_s_own_is_not_warned_about():
    def grad_fn(model, batch, key):
        return jnp.mean(jnp.abs(model.weight - TARGET) ** 2), Weights(2 / 3 * (model.weight - TARGET))

    trainer = make_trainer(optax.sgd(1.0), jnp.complex64, grad_fn=grad_fn)
    for _ in range(30):
        trainer.update(DATA)
    np.testing.assert_allclose(trainer.model.weight, TARGET, atol=0.01)
