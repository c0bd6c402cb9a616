"""Compares the cross-entropy with optax's in float64, at once and in chunks, and checks a sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.models import cross_entropy
from redeqx.models.generation import shift_right
from redeqx.tracing import matmul_flops, transformed
from redeqx.transforms import GatherAtUse, Shardings
from tests._programs import computed

BATCH, SEQ, D, VOCAB = 4, 10, 16, 64
rng = np.random.default_rng(0)
HIDDEN = jnp.asarray(rng.normal(size=(BATCH, SEQ, D)), jnp.float32)
WEIGHT = jnp.asarray(rng.normal(size=(VOCAB, D)), jnp.float32)
LABELS = jnp.asarray(np.where(rng.random((BATCH, SEQ)) < 0.3, -100, rng.integers(0, VOCAB, (BATCH, SEQ))), jnp.int32)


def expected(hidden, weight, z_loss=0.0):
    logits = hidden @ weight.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(LABELS, 0))
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(LABELS != -100, losses, 0).sum()


# One program for all logits and labels of a shape.
of_logits = jax.jit(cross_entropy, static_argnames=("z_loss", "ignore_index"))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_optax_in_value_and_gradients(z_loss):
    def gradient(chunk_size):
        def total(hidden, weight):
            loss = cross_entropy(hidden, LABELS, head=lambda x: x @ weight.T, chunk_size=chunk_size, z_loss=z_loss)
            return loss.total, loss.weight

        return jax.value_and_grad(total, (0, 1), has_aux=True), (HIDDEN, WEIGHT)

    found = computed({f"chunks of {size}": gradient(size) for size in (None, 1, 4, 5, 10, 99)})
    value, wanted = jax.jit(jax.value_and_grad(expected, (0, 1)))(HIDDEN, WEIGHT, z_loss)
    for name, ((total, weight), grads) in found.items():
        np.testing.assert_allclose(total, value, rtol=1e-6, err_msg=name)
        assert weight == (LABELS != -100).sum()
        for a, b in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def of_head(hidden, weight, chunk_size):
    return cross_entropy(hidden, LABELS, head=lambda x: x @ weight.T, chunk_size=chunk_size, z_loss=1e-2).total


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.sweep
def test_forward_mode_and_second_derivatives(chunk_size):
    """The gradient that is computed with the value can be differentiated again."""
    along = jnp.asarray(rng.normal(size=HIDDEN.shape), jnp.float32), jnp.asarray(rng.normal(size=WEIGHT.shape), jnp.float32)

    def second(fn):
        return jax.jvp(jax.grad(fn, (0, 1)), (HIDDEN, WEIGHT), along)[1]

    found = jax.jvp(lambda *args: of_head(*args, chunk_size), (HIDDEN, WEIGHT), along)[1]
    wanted = jax.jvp(lambda *args: expected(*args, 1e-2), (HIDDEN, WEIGHT), along)[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    pairs = zip(second(lambda *args: of_head(*args, chunk_size)), second(lambda *args: expected(*args, 1e-2)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_gradients_of_each_example():
    def gradient(total):
        return jax.jit(jax.vmap(jax.grad(total, (0, 1)), in_axes=(0, None, 0)))(HIDDEN, WEIGHT, LABELS)

    found = gradient(lambda x, w, labels: cross_entropy(x, labels, head=lambda x: x @ w.T, chunk_size=4).total)
    wanted = gradient(lambda x, w, labels: cross_entropy(x @ w.T, labels).total)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("varied", "products"), [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)], ids=str)
def test_no_product_is_computed_twice(varied, products):
    """Also for a frozen head, and for hidden states without a gradient, as in LoRA."""

    def fn(hidden, weight):
        return jax.grad(of_head, varied)(hidden, weight, 5) if varied else of_head(hidden, weight, 5)

    jaxpr = jax.make_jaxpr(fn)(HIDDEN, WEIGHT).jaxpr
    assert matmul_flops(jaxpr)["float32"] == products * 2 * BATCH * SEQ * D * VOCAB


def test_a_gathered_head_is_not_recomputed():
    """With FSDP, the backward pass gathers weights and recomputes the operations that used them."""
    mesh = redeqx.Deployer(n_fsdp_shards=8, verbose=False).mesh
    shardings = Shardings(NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P(None, None)))
    fn = transformed(lambda weight, hidden: of_head(hidden, weight, 5), [GatherAtUse([shardings])])
    jaxpr = jax.make_jaxpr(jax.grad(fn, (0, 1)))(WEIGHT, HIDDEN).jaxpr
    assert matmul_flops(jaxpr)["float32"] == 3 * 2 * BATCH * SEQ * D * VOCAB
    found = jax.jit(jax.grad(fn, (0, 1)))(WEIGHT, HIDDEN)
    for a, b in zip(found, jax.jit(jax.grad(expected, (1, 0)))(HIDDEN, WEIGHT, 1e-2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_mean_is_rounded_once():
    """The cotangent, here 1 / weight, is not rounded to the dtype of the model before it multiplies."""
    hidden, weight = HIDDEN.astype(jnp.bfloat16), WEIGHT.astype(jnp.bfloat16)

    def gradient(scale):
        return jax.jit(jax.grad(lambda x, scale: scale * of_head(x, weight, 4)))(hidden, scale).astype(jnp.float32)

    np.testing.assert_array_equal(gradient(1 / 3), (gradient(1.0) / 3).astype(jnp.bfloat16).astype(jnp.float32))


def test_logits_without_a_head_give_the_same_loss():
    loss = of_logits(HIDDEN @ WEIGHT.T, LABELS)
    np.testing.assert_allclose(loss.total, expected(HIDDEN, WEIGHT), rtol=1e-6)
    assert loss.metrics == {}


def test_the_penalty_is_a_metric():
    penalty, weight = of_logits(HIDDEN @ WEIGHT.T, LABELS, z_loss=1e-4).metrics["z_loss"]
    np.testing.assert_allclose(penalty, expected(HIDDEN, WEIGHT, 1e-4) - expected(HIDDEN, WEIGHT), rtol=1e-3)
    assert weight == (LABELS != -100).sum()


def test_bfloat16_logits_are_summed_in_float32():
    logits = (100 + HIDDEN @ WEIGHT.T).astype(jnp.bfloat16)
    loss = of_logits(logits, LABELS)
    assert loss.total.dtype == jnp.float32
    exact = of_logits(logits.astype(jnp.float32), LABELS)
    np.testing.assert_array_equal(loss.total, exact.total)


def test_one_example_and_another_ignored_label():
    loss = of_logits(HIDDEN[0] @ WEIGHT.T, jnp.where(LABELS[0] == -100, 7, LABELS[0]), ignore_index=7)
    assert loss.weight == ((LABELS[0] != -100) & (LABELS[0] != 7)).sum()


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_the_vocabulary_gives_nan(label):
    assert np.isnan(of_logits(HIDDEN @ WEIGHT.T, LABELS.at[1, 2].set(label)).total)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32])
def test_labels_of_any_integer_width_give_the_same_loss(dtype, chunk_size):
    labels = jnp.maximum(LABELS, 0)
    losses = [
        cross_entropy(HIDDEN, x, head=lambda x: x @ WEIGHT.T, chunk_size=chunk_size) for x in (labels, labels.astype(dtype))
    ]
    np.testing.assert_array_equal(losses[0].total, losses[1].total)
    assert losses[1].weight == labels.size


def test_the_uint8_label_156_is_not_ignored():
    logits = jnp.asarray(rng.normal(size=(3, 256)), jnp.float32)
    loss = of_logits(logits, jnp.array([156, 3, 255], jnp.uint8))
    np.testing.assert_array_equal(loss.total, of_logits(logits, jnp.array([156, 3, 255])).total)
    assert loss.weight == 3
    small = of_logits(logits, jnp.array([-100, 3, 100], jnp.int8))
    assert small.weight == 2 and small.total == of_logits(logits, jnp.array([-100, 3, 100])).total


def test_uint8_labels_are_shifted_right():
    shifted = shift_right(jnp.array([156, 7, 200], jnp.uint8), 300, 5)
    np.testing.assert_array_equal(shifted, [300, 156, 7])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, bool])
def test_labels_that_are_not_integers(dtype):
    with pytest.raises(TypeError, match=r"`labels`: expected integers, got (float32|bfloat16|bool)\. Cast them with"):
        cross_entropy(HIDDEN @ WEIGHT.T, LABELS.astype(dtype))


def test_a_huge_logit_does_not_give_nan_without_a_penalty():
    logits = jnp.array([[1e20, 0.0], [3e38, 0.0]], jnp.float32)
    (total, grads) = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, jnp.zeros(2, jnp.int32)).total))(logits)
    assert total == 0 and np.all(np.asarray(grads) == 0)


def test_all_labels_ignored():
    loss = of_logits(HIDDEN @ WEIGHT.T, jnp.full_like(LABELS, -100))
    assert loss.total == 0 and loss.weight == 0


def lowered(chunk_size, *, split):
    """Compiles the loss and its gradients, with the vocabulary sharded over four devices if `split`."""
    mesh = redeqx.Deployer(n_model_shards=4, verbose=False).mesh
    hidden, labels = (jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp")))) for x in (HIDDEN, LABELS))
    weight = jax.device_put(WEIGHT, NamedSharding(mesh, P("model" if split else None)))

    def total(hidden, weight, labels):
        return cross_entropy(hidden, labels, head=lambda x: x @ weight.T, chunk_size=chunk_size).total

    step = jax.jit(jax.value_and_grad(total, (0, 1)), out_shardings=(None, (hidden.sharding, weight.sharding)))
    return step.lower(hidden, weight, labels).compile(), step(hidden, weight, labels)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_sharded_vocabulary_stays_sharded(chunk_size):
    compiled, (value, grads) = lowered(chunk_size, split=True)
    np.testing.assert_allclose(value, expected(HIDDEN, WEIGHT), rtol=1e-6)
    wanted = jax.jit(jax.grad(expected, (0, 1)))(HIDDEN, WEIGHT)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # A device has two rows of ten tokens: it exchanges one number per token, or the gradients.
    assert VOCAB // 4 * D >= 2 * SEQ * 1
    for collective in collectives(Module.of(compiled.as_text())):
        assert collective.kind == "all-reduce", collective
        assert collective.bytes <= 4 * max(2 * SEQ * D, VOCAB // 4 * D), collective


def test_chunks_never_allocate_the_full_logits():
    def peak(chunk_size):
        hidden, labels = jnp.ones((4, 512, D)), jnp.zeros((4, 512), jnp.int32)
        weight = jnp.ones((2048, D))

        def total(hidden, weight):
            return cross_entropy(hidden, labels, head=lambda x: x @ weight.T, chunk_size=chunk_size).total

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole, chunked = peak(None), peak(32)
    assert whole > 4 * 512 * 2048 * 4
    assert chunked < whole / 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": LABELS[:, 1:]}, r"`labels`: expected the shape of `x` without its last dim, \(4, 10\), got \(4, 9\)"),
        ({"chunk_size": 0, "head": lambda x: x}, r"`chunk_size`: expected at least 1, got 0"),
        ({"chunk_size": 4}, r"`head`: expected a function with `chunk_size`, got None. Pass hidden states"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(HIDDEN @ WEIGHT.T, **{"labels": LABELS, **arguments})
