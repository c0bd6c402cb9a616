"""Each step, micro-batch and evaluation batch draws new random numbers: no two of them use the same.

The model has one slot for each example. The gradient of a slot is the number that was drawn with its example.
"""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

ROWS = 2  # rows of a micro-batch


class Slots(eqx.Module):
    draws: jax.Array


def loss_fn(model, slots, key):
    drawn = jax.random.uniform(key)
    # A metric for each slot: the number that was drawn with its example.
    seen = {f"slot {i}": (jnp.sum(drawn * (slots == i)), jnp.sum(slots == i)) for i in range(len(model.draws))}
    return redeqx.Loss(jnp.sum(model.draws[slots] * drawn), len(slots), seen)


class Counts:
    """A tracker that records, for each step, the draw of each of its examples."""

    def __init__(self):
        self.seen = []

    def log(self, metrics, step):
        draws = {int(name.split()[1]): draw for name, draw in metrics.items() if name.startswith("slot")}
        self.seen.append({slot: draw for slot, draw in draws.items() if draw > 0})


def make_trainer(n_slots, *, seed=0, accumulate=3):
    """A trainer on one batch shard, so that a micro-batch has `ROWS` rows."""
    counts = Counts()
    deployer = redeqx.Deployer(seed, n_model_shards=8, verbose=False, loggers=[counts])
    trainer = redeqx.Trainer(
        deployer,
        model=Slots(jnp.zeros(n_slots)),
        optimizer=optax.sgd(1.0),
        collate_fn=np.array,
        loss_fn=loss_fn,
        accumulate_grad_batches=accumulate,
    )
    return trainer, counts


def drawn(trainer, counts):
    """Returns the draw of each example, after one step on it, from the gradient of its slot; compares it with its metric."""
    found = [-len(step) * float(trainer.model.draws[slot]) for step in counts.seen for slot in sorted(step)]
    np.testing.assert_allclose(found, [step[slot] for step in counts.seen for slot in sorted(step)], rtol=1e-5)
    return found


def assert_none_twice(draws, n_rows=ROWS):
    """Checks that only examples of the same micro-batch share a draw, and that no draw is missing."""
    counts = Counter(float(np.float32(round(draw, 5))) for draw in draws)
    assert all(0 < draw < 1 for draw in counts)
    assert max(counts.values()) <= n_rows, counts
    assert len(counts) >= len(draws) / n_rows


@pytest.mark.parametrize("n_left", [4, pytest.param(5, marks=pytest.mark.sweep)])
def test_each_step_and_micro_batch_draws_new_numbers(n_left):
    """Two steps of three micro-batches, then one of two micro-batches, or of two and another row."""
    trainer, counts = make_trainer(12 + n_left)
    trainer.train(list(range(12 + n_left)), ROWS)
    assert [len(step) for step in counts.seen] == [6, 6, n_left]
    draws = drawn(trainer, counts)
    assert_none_twice(draws)
    np.testing.assert_allclose(draws[0:12:2], draws[1:12:2], rtol=1e-5)  # the rows of a micro-batch share a draw


@pytest.mark.parametrize("n_rows", [33, 36, 37])
def test_rows_that_do_not_divide_over_the_devices_draw_numbers_of_their_own(n_rows):
    """32 rows in two micro-batches, then the rest in micro-batches of at most two rows, which each device computes."""
    counts = Counts()
    deployer = redeqx.Deployer(verbose=False, loggers=[counts])
    options = {"model": Slots(jnp.zeros(n_rows)), "optimizer": optax.sgd(1.0), "collate_fn": np.array, "loss_fn": loss_fn}
    trainer = redeqx.Trainer(deployer, accumulate_grad_batches=3, **options)
    trainer.train(list(range(n_rows)), 2)
    draws = drawn(trainer, counts)
    assert len(draws) == n_rows  # none is dropped
    assert_none_twice(draws, 16)
    assert_none_twice(draws[32:])
    assert not {round(draw, 5) for draw in draws[:32]} & {round(draw, 5) for draw in draws[32:]}


def test_passes_and_epochs_draw_new_numbers():
    trainer, counts = make_trainer(24)
    trainer.train(list(range(6)), ROWS)
    trainer.train(list(range(6, 12)), ROWS)
    trainer.fit(lambda epoch: list(range(12 + 6 * epoch, 18 + 6 * epoch)), ROWS, 2)
    assert_none_twice(drawn(trainer, counts))


def test_each_evaluation_batch_draws_numbers_that_differ_from_training():
    trainer, counts = make_trainer(12)
    evaluated = trainer.eval_metrics(list(range(12)), ROWS)
    draws = [evaluated[f"slot {i}"] for i in range(12)]
    assert_none_twice(draws)
    trainer.train(list(range(12)), ROWS)
    trained = drawn(trainer, counts)
    assert_none_twice(trained)
    assert not {round(draw, 5) for draw in draws} & {round(draw, 5) for draw in trained}
    # Repeated evaluations draw the same numbers.
    assert trainer.eval_metrics(list(range(12)), ROWS)["slot 5"] == evaluated["slot 5"]


def test_the_seed_and_the_trainer_determine_the_random_numbers():
    first, same, other = (drawn(*pair) for pair in map(_trained, (0, 0, 1)))
    assert first == same
    assert not {round(draw, 5) for draw in first} & {round(draw, 5) for draw in other}


def _trained(seed):
    trainer, counts = make_trainer(6, seed=seed)
    trainer.train(list(range(6)), ROWS)
    return trainer, counts
