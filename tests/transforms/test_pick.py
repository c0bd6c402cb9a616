"""One entry of each row, picked by comparison: the same values and gradients, and no scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redeqx.tracing import equations, transformed
from redeqx.transforms import PickByComparison

ROWS, SEQ, VOCAB = 2, 3, 11
rng = np.random.default_rng(0)
LOGITS = jnp.asarray(rng.normal(size=(ROWS, SEQ, VOCAB)), jnp.float32)
LABELS = jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ)), jnp.int32)


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def along_axis(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).sum()


def along_another_axis(logits, labels):
    return jnp.sum(jnp.take_along_axis(jnp.sin(logits), labels[:, None, :] % SEQ, axis=1) ** 2)


def indexed(logits, labels):
    return jax.vmap(jax.vmap(lambda logits, label: -jax.nn.log_softmax(logits)[label]))(logits, labels).sum()


def in_a_scan(logits, labels):
    return jax.lax.scan(lambda total, row: (total + along_axis(*row), None), jnp.zeros(()), (logits, labels))[0]


def clipped(logits, labels):
    return jnp.sum(jnp.take_along_axis(jnp.sin(logits), labels[..., None], axis=-1, mode="clip"))


CASES = [of_optax, along_axis, indexed, in_a_scan, clipped]


def lookups(fn, *args):
    """The gathers and scatters of logits."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name in ("gather", "scatter-add")]
    return {eqn.primitive.name for eqn in found if VOCAB in eqn.invars[0].aval.shape}


@pytest.mark.parametrize("labels", [LABELS, LABELS - VOCAB, LABELS.at[1, 2].set(VOCAB), LABELS.astype(jnp.int8)])
@pytest.mark.parametrize("fn", CASES)
def test_the_same_values_and_gradients(fn, labels):
    """Also for labels that count from the end, or that are none: NaN, or the last, as written."""
    changed = transformed(fn, [PickByComparison()])
    gradient = jax.grad(changed)
    assert "scatter-add" in lookups(jax.grad(fn), LOGITS, labels)
    assert not lookups(gradient, LOGITS, labels)
    for found, wanted in ((changed, fn), (gradient, jax.grad(fn))):
        np.testing.assert_allclose(jax.jit(found)(LOGITS, labels), jax.jit(wanted)(LOGITS, labels), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
@pytest.mark.parametrize("mode", [None, "fill", "clip"])
def test_labels_may_be_narrower_than_the_number_of_entries(dtype, mode):
    """As bytes are that index a vocabulary with a few more entries."""
    logits = jnp.asarray(rng.normal(size=(ROWS, 300)), jnp.float32)
    labels = jnp.asarray([3, 120], dtype)

    def picked(logits, labels):
        return jax.vmap(lambda row, label: row.at[label].get(mode=mode, wrap_negative_indices=False))(logits, labels)

    changed = transformed(picked, [PickByComparison()])
    assert not any(eqn.primitive.name == "gather" for eqn in equations(jax.make_jaxpr(changed)(logits, labels)))
    np.testing.assert_array_equal(changed(logits, labels), logits[jnp.arange(ROWS), labels.astype(jnp.int32)])


def test_what_is_not_picked_may_be_anything():
    """Entries of minus infinity, as of a masked vocabulary, change no other row's value and no gradient."""
    logits = LOGITS.at[..., 4].set(-jnp.inf)
    labels = jnp.where(LABELS == 4, 5, LABELS)
    found, wanted = (
        jax.value_and_grad(fn)(logits, labels) for fn in (transformed(of_optax, [PickByComparison()]), of_optax)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.all(np.isfinite(a))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i % ROWS],  # whole rows, as of an embedding
        lambda x, i: x[:, :, i[0, 0]],  # one index for all
        lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i], -1), axis=-1),  # two of each row
        lambda x, i: jnp.take_along_axis(i, i % SEQ, axis=-1),  # integers have no gradient
    ],
)
def test_other_gathers_are_left_alone(fn):
    changed = transformed(fn, [PickByComparison()])
    assert str(jax.make_jaxpr(changed)(LOGITS, LABELS)) == str(jax.make_jaxpr(fn)(LOGITS, LABELS))
