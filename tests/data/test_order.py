"""The order of an epoch's examples: a permutation that looks random, drawn by the seed, the fit and the epoch."""

import itertools
import math

import numpy as np
import pytest

from redeqx.data import slices


def order(n, seed, count=None):
    """Return the first `count` indices of an epoch; all by default."""
    steps = slices(range(n), min(n, count or n), seed=seed)
    return np.array(next(steps).places if count else [place for step in steps for place in step.places])


def assert_uniform(counts):
    """Check by a chi-square of counts, as a normal distribution, that they differ from their mean by chance."""
    counts, mean = np.asarray(counts), np.mean(counts)
    freedom = counts.size - 1
    deviations = (((counts - mean) ** 2 / mean).sum() - freedom) / math.sqrt(2 * freedom)
    assert abs(deviations) < 5


@pytest.mark.parametrize("seed", [(0, 0, 0), (7, 1, 3)])
def test_order_is_a_permutation_for_every_small_number_of_examples(seed):
    for n in range(1, 300):
        assert sorted(order(n, seed)) == list(range(n))


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 99_991, 316**2, 316 * 317])
def test_order_is_a_permutation_for_many_examples(n):
    assert np.array_equal(np.sort(order(n, (n, 0, 0))), np.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**40])
def test_first_indices_of_a_huge_order_differ_and_lie_in_all_of_it(n):
    epochs = [order(n, (0, 0, epoch), 20_000) for epoch in range(2)]
    for indices in epochs:
        assert len(set(indices)) == 20_000 and indices.min() >= 0 and indices.max() < n
        assert_uniform(np.bincount(indices * 100 // n, minlength=100))
    assert len(np.intersect1d(epochs[0], epochs[1])) < 10


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.sweep
def test_every_order_of_few_examples_is_equally_likely(n):
    counts = dict.fromkeys(itertools.permutations(range(n)), 0)
    for epoch in range(50 * len(counts)):
        counts[tuple(order(n, (0, 0, epoch)))] += 1
    assert_uniform(list(counts.values()))


@pytest.mark.parametrize("n", [23, 1000])
def test_orders_are_uncorrelated_between_epochs_and_neighbours(n):
    n_epochs = 40_000 // n
    orders = np.array([order(n, (3, 1, epoch)) for epoch in range(n_epochs)])

    def assert_uncorrelated(x, y):
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 5 / math.sqrt(x.size) + 2 / n

    assert_uncorrelated(orders[1:], orders[:-1])
    assert_uncorrelated(orders[:, 1:], orders[:, :-1])
    assert_uncorrelated(orders, np.tile(np.arange(n), (n_epochs, 1)))
    steps = np.diff(orders, axis=1) % n  # between neighbours; never 0
    assert_uniform(np.bincount(steps.ravel(), minlength=n)[1:])


@pytest.mark.parametrize("n", [9, 25])  # 3 x 3 and 5 x 5: rounds of odd sizes would make only even permutations
def test_even_and_odd_permutations_are_equally_likely(n):
    def is_odd(permutation):
        return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2

    assert 0.4 < np.mean([is_odd(order(n, (0, 0, epoch))) for epoch in range(400)]) < 0.6


def test_order_depends_on_each_part_of_the_seed_and_not_on_the_batch_size():
    seeds = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({tuple(order(50, seed)) for seed in seeds}) == 4
    in_small_steps = [place for step in slices(range(5000), 3, seed=(0, 0, 0)) for place in step.places]
    assert np.array_equal(in_small_steps, order(5000, (0, 0, 0)))


def test_order_stays_the_same():
    """A resumed run computes it again, so a release must not change it."""
    assert order(12, (5, 0, 1)).tolist() == [2, 3, 1, 7, 9, 4, 10, 5, 6, 11, 0, 8]
