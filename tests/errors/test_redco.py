"""Names from Redco: the error gives the redeqx equivalent."""

import inspect

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.errors import REDCO_DEPLOYER, REDCO_PREDICTOR, REDCO_PREDICTOR_ARGUMENTS, REDCO_TRAINER, REDCO_TRAINER_ARGUMENTS


@pytest.fixture(scope="module")
def instances():
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
def test_redco_attribute_names_the_replacement(instances, cls, name):
    with pytest.raises(AttributeError) as caught:
        getattr(instances[cls], name)
    assert str(caught.value) == f"`{cls}.{name}`: expected a name of redeqx, got one of Redco. {NAMES[cls][name]}"
    assert name not in dir(type(instances[cls]))  # otherwise it would be a redeqx attribute


@pytest.mark.parametrize("name", REDCO_TRAINER_ARGUMENTS)
def test_redco_trainer_argument_names_the_replacement(instances, name):
    message = f"`Trainer({name}=)`: expected an argument of redeqx, got one of Redco. {REDCO_TRAINER_ARGUMENTS[name]}"
    with pytest.raises(TypeError) as caught:
        redeqx.Trainer(instances["Deployer"], collate_fn=np.stack, optimizer=optax.sgd(1.0), **{name: None})
    assert str(caught.value) == message
    assert name not in inspect.signature(redeqx.Trainer).parameters


@pytest.mark.parametrize("name", REDCO_PREDICTOR_ARGUMENTS)
def test_redco_predictor_argument_names_the_replacement(instances, name):
    message = f"`Predictor({name}=)`: expected an argument of redeqx, got one of Redco. {REDCO_PREDICTOR_ARGUMENTS[name]}"
    with pytest.raises(TypeError) as caught:
        redeqx.Predictor(instances["Deployer"], collate_fn=np.stack, pred_fn=print, **{name: None})
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
def test_unknown_argument_suggests_the_nearest(cls, name, meant):
    message = (
        rf"`{cls}`: expected the arguments `\(.*\b{meant}\b.*`, got an unknown one: `{name}`\. Did you mean `{meant}`\?"
    )
    with pytest.raises(TypeError, match=message):
        getattr(redeqx, cls)(**{name: None})


def test_subclass_may_have_its_own_arguments(instances):
    class Mine(redeqx.Predictor):
        def __init__(self, deployer, params):
            super().__init__(deployer, collate_fn=np.stack, pred_fn=lambda model, batch, key: batch)
            self.params = params

    assert Mine(instances["Deployer"], params=3).params == 3


def test_other_missing_attributes_raise_as_usual(instances):
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'modle'"):
        _ = instances["Trainer"].modle
    assert not hasattr(instances["Deployer"], "gen_rng") and hasattr(instances["Deployer"], "next_key")


def test_attribute_error_inside_a_property_is_unchanged(instances, monkeypatch):
    def broken(self):
        raise AttributeError("from inside")

    monkeypatch.setattr(redeqx.Trainer, "plan", property(broken))
    with pytest.raises(AttributeError, match="from inside"):
        _ = instances["Trainer"].plan
