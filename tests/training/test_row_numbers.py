"""The numbers of rows are those of the whole update, evaluation or prediction, for any split of it.

A loss sees them as `jnp.arange` over its rows.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

MOST = 48  # rows of an update


class Rows:
    """A tracker that records, for each step, the number that each of its rows was given."""

    def __init__(self):
        self.steps = []

    def log(self, metrics, step):
        self.steps.append(numbers_in(metrics))


def numbers_in(metrics):
    """Returns the number of each row that was seen, in the order of the rows."""
    found = [metrics[f"row {i}"] for i in range(MOST)]
    return [int(number) for number in found if not np.isnan(number)]


def loss_fn(model, batch, key):
    numbers, losses = jnp.arange(len(batch)), jax.vmap(model)(batch[:, None])
    seen = {f"row {i}": (jnp.sum(numbers * (batch == i)), jnp.sum(batch == i)) for i in range(MOST)}
    return redeqx.Loss(losses.sum(), len(batch), seen)


def make_trainer(shards=(1, 1), accumulate=1, n_parts=1):
    deployer = redeqx.Deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1], verbose=False, loggers=[rows := Rows()])
    trainer = redeqx.Trainer(
        deployer,
        model=eqx.nn.Linear(1, 1, key=jax.random.key(0)),
        optimizer=optax.sgd(0.1),
        collate_fn=np.array,
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
    )
    trainer._engine.recipe = replace(trainer._engine.recipe, n_parts=n_parts)
    return trainer, rows


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(
    ("accumulate", "n_rows", "n_last"),
    [
        (1, 37, 0),  # 32 + 5
        (1, 44, 0),  # 40 + 4
        (2, 37, 0),  # 2 x 16 + 5 x 1
        (2, 45, 0),  # 2 x 16 + 8 + 5 x 1
        (4, 32, 8),  # the last step has one of four micro-batches, and runs in the program of the first
        (3, 48, 37),  # the last one has two of three, and more rows
    ],
)
@pytest.mark.parametrize("shards", [(1, 1), pytest.param((2, 2), marks=pytest.mark.sweep)])
def test_rows_of_an_update_are_numbered_in_order(shards, accumulate, n_rows, n_last, n_parts):
    trainer, rows = make_trainer(shards, accumulate, n_parts)
    trainer.train([*range(n_rows), *range(n_last)], batch_size=n_rows)
    assert rows.steps == [list(range(n)) for n in (n_rows, n_last) if n]


def test_rows_of_an_evaluation_are_numbered_through_all_batches():
    trainer, _ = make_trainer()
    for n_batch in (8, 20, 37):
        assert numbers_in(trainer.eval_metrics(list(range(37)), batch_size=n_batch)) == list(range(37))
    assert numbers_in(trainer.eval_metrics(iter(range(37)), batch_size=8)) == list(range(37))


def test_rows_of_a_prediction_are_numbered_through_all_batches():
    trainer, _ = make_trainer()
    predictor = trainer.get_default_predictor(lambda model, batch, key: (batch, jnp.arange(len(batch))))
    for n_batch in (8, 20, 37):
        outputs = predictor.predict(list(range(37)), batch_size=n_batch)
        assert [tuple(map(int, row)) for row in outputs] == [(i, i) for i in range(37)]
