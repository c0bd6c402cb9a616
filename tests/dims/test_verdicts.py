"""The verdict about each loss of `losses.py`, against numbers: the loss and its gradient, whole and cut into parts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.dims import row_use
from redeqx.transforms import by_row
from tests.dims.losses import CASES, batch_of, row_losses, weights
from tests.dims.parts import part_of, rows_with_whole

ROWS = 16
KEY = jax.random.key(7)


def sums_of(name):
    """Returns `(weights, state, batch, key) -> (total, weight)` of a loss, whose quotient it is."""

    def fn(weights, state, batch, key):
        loss = CASES[name].loss_fn(weights, batch, key)
        if isinstance(loss, redeqx.Loss):
            return loss.total, jnp.asarray(loss.weight, jnp.float32)
        return loss * len(batch["x"]), jnp.float32(len(batch["x"]))

    return fn


@cache
def verdict(name):
    return row_use(sums_of(name), weights(), (), batch_of(ROWS), KEY)


@cache
def undivided(name):
    fn = jax.jit(jax.value_and_grad(lambda weights, batch: sums_of(name)(weights, (), batch, KEY), has_aux=True))
    (total, weight), grads = fn(weights(), batch_of(ROWS))
    return total / weight, jax.tree.map(lambda x: x / weight, grads)


def cuts(group):
    """Yields the rows of each part: every other group as they are split over devices, and consecutive ones."""
    yield np.arange(ROWS).reshape(-1, 2, group).swapaxes(0, 1).reshape(2, -1)
    yield np.split(np.arange(ROWS), [12])


def of_parts(fn, parts):
    """Returns, for each part, `fn(weights, batch, numbers) -> (total, weight)` and the gradient of the total."""
    of_part = jax.jit(jax.value_and_grad(fn, has_aux=True))
    found = []
    for rows in parts:
        batch = jax.tree.map(lambda x, rows=rows: x[rows], batch_of(ROWS))
        found.append(of_part(weights(), batch, jnp.asarray(rows, jnp.uint32)))
    return found


def added(*parts):
    return jax.tree.map(lambda *x: sum(x), *parts)


def error(name, loss, grads):
    """Returns the error of a loss or of its gradient, whichever is larger, relative to their size."""
    expected, expected_grads = undivided(name)
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True))
    off = np.sqrt(sum(np.sum(np.square(x - y, dtype=np.float64)) for x, y in pairs))
    size = np.sqrt(sum(np.sum(np.square(y, dtype=np.float64)) for _, y in pairs))
    return np.max([abs(loss - expected) / max(abs(expected), 1.0), off / size])  # NaN if one is


@cache
def whole(name):
    return rows_with_whole(sums_of(name), verdict(name), weights(), batch_of(ROWS), KEY)


def error_of_the_verdict(name, parts):
    """Returns the error of parts that are computed as the verdict says."""
    fn, use, every = sums_of(name), verdict(name), whole(name)

    def of_part(weights, batch, numbers):
        return by_row(fn, use)(weights, (), batch, KEY, part_of(every, numbers))

    (total, weight), grads = added(*of_parts(of_part, parts))
    return error(name, total / weight, jax.tree.map(lambda x: x / weight, grads))


def error_as_written(name, parts):
    """Returns the error if the parts are batches of their own: of their mean by rows or of their sum, whichever is less."""

    def of_part(weights, batch, numbers):
        return sums_of(name)(weights, (), batch, KEY)

    each = of_parts(of_part, parts)
    (total, weight), grads = added(*each)
    mean = error(name, total / weight, jax.tree.map(lambda x: x / weight, grads))
    loss, grads = added(*((t / w, jax.tree.map(lambda x, w=w: x / w, g)) for (t, w), g in each))
    return min(mean, error(name, loss, grads))


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_about_a_loss(name):
    case, use = CASES[name], verdict(name)
    assert use.kind == case.kind, use.text
    if use.is_exact:
        assert use.group == case.group and not use.draws
        assert use.degree == case.degree or use.kind == "after"  # the rest may be a mean or a sum


def sizes_of_other_dims():
    """Yields each loss with a number of rows that is a whole number of its groups: the three sizes in turn."""
    at_a_time = {"by_map_of_some_rows_at_a_time": 4, "halves_of_the_batch": 2}
    for i, name in enumerate(CASES):
        sizes = [n for n in (8, 6, 5) if n % at_a_time.get(name, CASES[name].group) == 0]
        yield name, sizes[i % len(sizes)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "n_rows"), [*sizes_of_other_dims()])
def test_a_size_that_is_also_one_of_another_dim_changes_no_verdict(name, n_rows):
    use = row_use(sums_of(name), weights(), (), batch_of(n_rows), KEY)
    assert (use.kind, use.group) == (CASES[name].kind, CASES[name].group), use.text


@pytest.mark.parametrize(
    "divisor", [lambda n: n - 1, lambda n: n + 1, lambda n: n + 6, lambda n: n**0.5, lambda n: np.log(n)]
)
@pytest.mark.parametrize("n_rows", [16, 4096])
def test_a_divisor_that_is_nearly_the_number_of_rows_is_no_mean(divisor, n_rows):
    def loss_fn(weights, state, batch, key):
        return row_losses(weights, batch).sum() / divisor(len(batch["x"]))

    assert row_use(loss_fn, weights(), (), batch_of(n_rows), KEY).kind == "mixed"


QUICK = (
    "mixup_in_nested_checkpoints",
    "masked_by_mean_where",
    "grpo_groups",
    "the_longest_mask",
)
EXACT = [name for name, case in CASES.items() if case.kind in ("separable", "after")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.sweep) for name in EXACT])
def test_what_is_called_exact_is_exact(name):
    """Loss and gradient of two parts are those of the whole batch; in the sweep, each loss is cut in one of the ways."""
    found = [*cuts(CASES[name].group)]
    for parts in found if name in QUICK else [found[EXACT.index(name) % len(found)]]:
        assert error_of_the_verdict(name, parts) < 1e-6


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in CASES if name not in EXACT])
def test_what_is_called_mixed_is_mixed(name):
    """Parts give another loss or gradient, unless the verdict is more cautious than it need be."""
    is_mixed = any(not error_as_written(name, parts) < 1e-5 for parts in cuts(CASES[name].group))  # also NaN
    assert is_mixed != CASES[name].is_cautious
