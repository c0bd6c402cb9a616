"""The numbers of rows are those of the whole update, evaluation or prediction, for any split of it.

A loss sees them as `jnp.arange` over its rows.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from tests._memory import divide_micro_batches

MOST = 48  # rows of an update


class Model(eqx.Module):
    """A slot for each example: its gradient is the number of the row that had the example, counted from 1."""

    slots: jax.Array


def loss_fn(model, batch, key):
    return redeqx.Loss(((1.0 + jnp.arange(len(batch))) * model.slots[batch]).sum(), len(batch))


def seen_loss(model, batch, key):
    """A metric for each row, for an evaluation."""
    numbers = jnp.arange(len(batch))
    seen = {f"row {i}": (jnp.sum(numbers * (batch == i)), jnp.sum(batch == i)) for i in range(MOST)}
    return redeqx.Loss(model.slots[batch].sum(), len(batch), seen)


def make_trainer(shards=(1, 1), accumulate=1, loss_fn=loss_fn, **options):
    deployer = redeqx.Deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1], verbose=False)
    return redeqx.Trainer(
        deployer,
        model=Model(jnp.zeros(MOST)),
        optimizer=optax.sgd(1.0),
        collate_fn=np.array,
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
        **options,
    )


# Micro-batches, rows of a step and of the last one; and in how many parts each micro-batch is computed.
CASES = [
    (1, 37, 0, 1),  # 32 + 5
    (1, 44, 0, 2),  # 40 + 4
    (2, 37, 0, 2),  # 2 x 16 + 5 x 1
    (2, 45, 0, 1),  # 2 x 16 + 8 + 5 x 1
    (4, 32, 8, 2),  # the last step has one of four micro-batches, and runs in the program of the first
    (3, 48, 37, 1),  # the last one has two of three, and more rows
]
SWEPT = [(accumulate, n_rows, n_last, 3 - n_parts) for accumulate, n_rows, n_last, n_parts in CASES]


@pytest.mark.parametrize(
    ("accumulate", "n_rows", "n_last", "n_parts", "shards"),
    [
        *((*CASES[i], (1, 1)) for i in (0, 2, 5)),
        *(pytest.param(*CASES[i], (1, 1), marks=pytest.mark.sweep) for i in (1, 3, 4)),
        *(pytest.param(*case, (2, 2), marks=pytest.mark.sweep) for case in SWEPT),
    ],
)
def test_rows_of_an_update_are_numbered_in_order(shards, accumulate, n_rows, n_last, n_parts, monkeypatch):
    options = {}
    if n_parts > 1:
        divide_micro_batches(monkeypatch, n_parts)
        options = {"compute": redeqx.Compute(memory="auto")}
    trainer = make_trainer(shards, accumulate, **options)
    trainer.train([*range(n_rows), *range(n_last)], batch_size=n_rows)
    expected = np.zeros(MOST)
    for n in filter(None, (n_rows, n_last)):
        expected[:n] -= np.arange(1, n + 1) / n
    np.testing.assert_allclose(trainer.model.slots, expected, atol=1e-5)


@pytest.mark.sweep
def test_rows_of_an_evaluation_are_numbered_through_all_batches():
    def numbers_in(metrics):
        found = [metrics[f"row {i}"] for i in range(MOST)]
        return [int(number) for number in found if not np.isnan(number)]

    trainer = make_trainer(loss_fn=seen_loss)
    for n_batch in (8, 20, 37):
        assert numbers_in(trainer.eval_metrics(list(range(37)), batch_size=n_batch)) == list(range(37))
    assert numbers_in(trainer.eval_metrics(iter(range(37)), batch_size=8)) == list(range(37))


def test_rows_of_a_prediction_are_numbered_through_all_batches():
    trainer = make_trainer()
    predictor = trainer.get_default_predictor(lambda model, batch, key: (batch, jnp.arange(len(batch))))
    for n_batch in (8, 20, 37):
        outputs = predictor.predict(list(range(37)), batch_size=n_batch)
        assert [tuple(map(int, row)) for row in outputs] == [(i, i) for i in range(37)]
