"""The arrays of a trainer that is deleted are freed at once: nothing that a fit makes refers back to it."""

import gc
import weakref

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx

DATA = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def loss_fn(model, batch, key):
    return (jax.vmap(model)(batch) ** 2).mean()


def fit(trainer):
    callbacks = [redeqx.EarlyStopping("loss", 3), redeqx.SaveEvery(minutes=10)]
    trainer.fit(DATA, batch_size=8, eval_examples=DATA, save_argmin_ckpt_by_metrics=["loss"], callbacks=callbacks)


def update(trainer):
    trainer.update(DATA[:8])
    trainer.eval_loss(DATA, batch_size=8)


def save_and_load(trainer):
    trainer.update(DATA[:8])
    trainer.save_ckpt()
    trainer.load_ckpt()


def predict(trainer):
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch))
    predictor.predict(DATA, batch_size=8)


def resume(trainer):
    trainer.resume()
    trainer.update(DATA[:8])


@pytest.mark.parametrize("use", [fit, update, save_and_load, predict, resume])
def test_arrays_are_freed_with_their_trainer(use, tmp_path):
    deployer = redeqx.Deployer(0, 2, 2, verbose=False, workdir=tmp_path)
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.adam(1e-2), collate_fn=np.stack, loss_fn=loss_fn)
    gc.collect()
    gc.disable()
    try:
        use(trainer)
        array = weakref.ref(jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))[0])
        del trainer
        assert array() is None
    finally:
        gc.enable()
