"""Names of Redco: an error says what they are called here."""

import inspect

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.errors import REDCO_DEPLOYER, REDCO_PREDICTOR, REDCO_PREDICTOR_ARGUMENTS, REDCO_TRAINER, REDCO_TRAINER_ARGUMENTS


@pytest.fixture(scope="module")
def made():
    deployer = redeqx.Deployer(verbose=False)
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jax.vmap(model)(batch).mean(),
    )
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch))
    return {"Deployer": deployer, "Trainer": trainer, "Predictor": predictor}


NAMES = {"Deployer": REDCO_DEPLOYER, "Trainer": REDCO_TRAINER, "Predictor": REDCO_PREDICTOR}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in NAMES.items() for name in names])
def test_a_name_of_redco_is_an_error_that_says_ours(made, cls, name):
    with pytest.raises(AttributeError) as caught:
        getattr(made[cls], name)
    assert str(caught.value) == f"`{cls}.{name}`: expected a name of redeqx, got one of Redco. {NAMES[cls][name]}"
    assert name not in dir(type(made[cls]))  # or it would be ours


@pytest.mark.parametrize("name", REDCO_TRAINER_ARGUMENTS)
def test_an_argument_of_redcos_trainer_is_an_error_that_says_ours(made, name):
    message = f"`Trainer({name}=)`: expected an argument of redeqx, got one of Redco. {REDCO_TRAINER_ARGUMENTS[name]}"
    with pytest.raises(TypeError) as caught:
        redeqx.Trainer(made["Deployer"], collate_fn=np.stack, optimizer=optax.sgd(1.0), **{name: None})
    assert str(caught.value) == message
    assert name not in inspect.signature(redeqx.Trainer).parameters


@pytest.mark.parametrize("name", REDCO_PREDICTOR_ARGUMENTS)
def test_an_argument_of_redcos_predictor_is_an_error_that_says_ours(made, name):
    message = f"`Predictor({name}=)`: expected an argument of redeqx, got one of Redco. {REDCO_PREDICTOR_ARGUMENTS[name]}"
    with pytest.raises(TypeError) as caught:
        redeqx.Predictor(made["Deployer"], collate_fn=np.stack, pred_fn=print, **{name: None})
    assert str(caught.value) == message
    assert name not in inspect.signature(redeqx.Predictor).parameters


@pytest.mark.parametrize(
    ("cls", "name", "meant"),
    [
        ("Deployer", "n_model_shard", "n_model_shards"),
        ("Trainer", "optimiser", "optimizer"),
        ("Predictor", "pred", "pred_fn"),
    ],
)
def test_an_unknown_argument_is_an_error_that_names_the_nearest(cls, name, meant):
    message = rf"`{cls}\({name}=\)`: expected an argument of redeqx, got an unknown one\. Did you mean `{meant}`\?"
    with pytest.raises(TypeError, match=message):
        getattr(redeqx, cls)(**{name: None})


def test_a_subclass_has_arguments_of_its_own(made):
    class Mine(redeqx.Predictor):
        def __init__(self, deployer, params):
            super().__init__(deployer, collate_fn=np.stack, pred_fn=lambda model, batch, key: batch)
            self.params = params

    assert Mine(made["Deployer"], params=3).params == 3


def test_other_names_are_missing_as_ever(made):
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'modle'"):
        _ = made["Trainer"].modle
    assert not hasattr(made["Deployer"], "gen_rng") and hasattr(made["Deployer"], "next_key")


def test_an_error_inside_of_a_property_keeps_its_words(made, monkeypatch):
    def broken(self):
        raise AttributeError("from inside")

    monkeypatch.setattr(redeqx.Trainer, "plan", property(broken))
    with pytest.raises(AttributeError, match="from inside"):
        _ = made["Trainer"].plan
