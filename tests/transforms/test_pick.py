"""Picking one entry of each row by comparison: values and gradients are unchanged, and there is no scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redeqx.tracing import equations, transformed
from redeqx.transforms import PickByComparison
from tests._programs import assert_all_close, computed

ROWS, SEQ, VOCAB = 2, 3, 11
rng = np.random.default_rng(0)
LOGITS = jnp.asarray(rng.normal(size=(ROWS, SEQ, VOCAB)), jnp.float32)
LABELS = jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ)), jnp.int32)


def optax_cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def along_axis(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).sum()


def along_another_axis(logits, labels):
    return jnp.sum(jnp.take_along_axis(jnp.sin(logits), labels[:, None, :] % SEQ, axis=1) ** 2)


def vmapped_index(logits, labels):
    return jax.vmap(jax.vmap(lambda logits, label: -jax.nn.log_softmax(logits)[label]))(logits, labels).sum()


def in_a_scan(logits, labels):
    return jax.lax.scan(lambda total, row: (total + along_axis(*row), None), jnp.zeros(()), (logits, labels))[0]


def clipped(logits, labels):
    return jnp.sum(jnp.take_along_axis(jnp.sin(logits), labels[..., None], axis=-1, mode="clip"))


CASES = [optax_cross_entropy, along_axis, vmapped_index, in_a_scan, clipped]


def lookups(fn, *args):
    """The gathers and scatters of logits."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name in ("gather", "scatter-add")]
    return {eqn.primitive.name for eqn in found if VOCAB in eqn.invars[0].aval.shape}


@pytest.mark.parametrize("labels", [LABELS, LABELS - VOCAB, LABELS.at[1, 2].set(VOCAB), LABELS.astype(jnp.int8)])
def test_values_and_gradients_are_unchanged(labels):
    """Also for negative labels, which count from the end, and for labels out of range (NaN or the last entry)."""
    plain, changed = {}, {}
    for fn in CASES:
        ruled = transformed(fn, [PickByComparison()])
        assert "scatter-add" in lookups(jax.grad(fn), LOGITS, labels)
        assert not lookups(jax.grad(ruled), LOGITS, labels)
        name, args = fn.__name__, (LOGITS, labels)
        plain |= {name: (fn, args), f"gradient of {name}": (jax.grad(fn), args)}
        changed |= {name: (ruled, args), f"gradient of {name}": (jax.grad(ruled), args)}
    assert_all_close(computed(changed), computed(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
@pytest.mark.parametrize("mode", [None, "fill", "clip"])
def test_label_dtype_may_be_too_narrow_for_the_number_of_entries(dtype, mode):
    """For example, bytes that index a vocabulary of 300 entries."""
    logits = jnp.asarray(rng.normal(size=(ROWS, 300)), jnp.float32)
    labels = jnp.asarray([3, 120], dtype)

    def picked(logits, labels):
        return jax.vmap(lambda row, label: row.at[label].get(mode=mode, wrap_negative_indices=False))(logits, labels)

    changed = transformed(picked, [PickByComparison()])
    assert not any(eqn.primitive.name == "gather" for eqn in equations(jax.make_jaxpr(changed)(logits, labels)))
    np.testing.assert_array_equal(changed(logits, labels), logits[jnp.arange(ROWS), labels.astype(jnp.int32)])


def test_infinite_entries_that_are_not_picked_have_no_effect():
    """Entries of minus infinity, as in a masked vocabulary, must give no NaN in values or gradients."""
    logits = LOGITS.at[..., 4].set(-jnp.inf)
    labels = jnp.where(LABELS == 4, 5, LABELS)
    found, wanted = (
        jax.jit(jax.value_and_grad(fn))(logits, labels)
        for fn in (transformed(optax_cross_entropy, [PickByComparison()]), optax_cross_entropy)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.all(np.isfinite(a))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i % ROWS],  # complete rows, as in an embedding
        lambda x, i: x[:, :, i[0, 0]],  # one index for all rows
        lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i], -1), axis=-1),  # two entries of each row
        lambda x, i: jnp.take_along_axis(i, i % SEQ, axis=-1),  # integers have no gradient
    ],
)
def test_other_gathers_are_unchanged(fn):
    changed = transformed(fn, [PickByComparison()])
    assert str(jax.make_jaxpr(changed)(LOGITS, LABELS)) == str(jax.make_jaxpr(fn)(LOGITS, LABELS))


def test_a_scatter_still_needs_more_memory():
    """What the rule saves: the zeros that a scatter fills (jax 0.10.2, 2026-11-25). Once this fails, delete the rule."""
    x, weight, labels = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
                         (((64, 32, 16), "float32"), ((16, 512), "float32"), ((64, 32), "int32")))  # fmt: skip

    def loss(weight, x, labels):
        return along_axis(x @ weight, labels)

    def peak(fn):
        return jax.jit(jax.grad(fn)).lower(weight, x, labels).compile().memory_analysis().temp_size_in_bytes

    logits = 64 * 32 * 512 * 4  # bytes
    assert peak(loss) - peak(transformed(loss, [PickByComparison()])) > 0.9 * logits
