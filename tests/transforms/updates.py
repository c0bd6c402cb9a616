"""An update on several devices, compared with that of one device by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def check_update(trainer, rows, *, model, loss_fn, collate, rate):
    """Trains for one step of SGD on the rows, and compares the leaves with those of a step from the model by hand."""
    trainer.train(rows, batch_size=len(rows))

    def by_hand(model):
        loss = loss_fn(model, jax.tree.map(jnp.asarray, collate(rows)), None)
        return loss.total / loss.weight

    grads = eqx.filter_grad(by_hand)(model)
    for new, old, grad in zip(*map(jax.tree.leaves, (trainer.model, model, grads)), strict=True):
        expected = old - rate * grad
        np.testing.assert_allclose(new, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
