"""Cumulative operations along split positions: values and gradients of one device, and only totals are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.compiled import Module, collectives

SIZE, D = 64, 4
RATE = 1024.0  # so that the gradients are read from the new parameters without loss of digits
NAMES = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
# All positive: no sum loses digits.
MODEL = {"scale": jnp.linspace(0.5, 1.5, D), "weights": jax.random.uniform(jax.random.key(0), (SIZE, D), minval=0.5)}
BATCH = np.random.default_rng(0).uniform(0.1, 1.0, size=(4, SIZE, D)).astype(np.float32)


def loss_of(names=NAMES, directions=(False, True), size=SIZE):
    def loss_fn(model, batch, key):
        x, weights = batch[:, :size].astype(model["scale"].dtype) * model["scale"], model["weights"][:size]
        found = [
            getattr(jax.lax, name)(1 + 0.1 * x if name == "cumprod" else x, axis=1, reverse=reverse)
            for name in names
            for reverse in directions
        ]
        return sum((jnp.log1p(y) * weights).mean(dtype=jnp.float32) for y in found)

    return loss_fn


def trainer_of(loss_fn, compute=None, **shards):
    deployer = redeqx.Deployer(0, verbose=False, **shards)
    return redeqx.Trainer(
        deployer, model=MODEL, optimizer=optax.sgd(RATE), collate_fn=np.stack, loss_fn=loss_fn, compute=compute
    )


@pytest.mark.parametrize(
    ("names", "shards", "rows", "size"),
    [
        (("cumsum", "cummax"), {"n_sequence_shards": 8}, 1, SIZE),
        pytest.param(NAMES, {"n_sequence_shards": 8}, 1, SIZE, marks=pytest.mark.sweep),
        *(
            pytest.param((name,), {"n_sequence_shards": 4}, rows, size, marks=pytest.mark.sweep)
            for name in NAMES
            for rows, size in ((4, SIZE), (2, SIZE - 1))  # rows that divide too; positions that are padded
        ),
        pytest.param(NAMES, {"n_sequence_shards": 2, "n_model_shards": 2}, 4, SIZE, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_values_and_what_is_sent(names, shards, rows, size):
    loss_fn, batch = loss_of(names, size=size), BATCH[:rows]
    trainer = trainer_of(loss_fn, **shards)
    sent = collectives(Module.of(trainer.compile(batch, batch_size=rows).as_text()))
    n = shards["n_sequence_shards"]
    how = f"split over {n} devices, which send each other the totals" if size % n == 0 else "XLA pads them"
    assert trainer.plan.positions and all(each.endswith(how) for each in trainer.plan.positions)
    assert max(np.prod(each.shape) for each in sent) <= max(rows * n * D, SIZE * D)  # totals, and gradients of the weights
    assert all(SIZE not in each.shape[1:] for each in sent if len(each.shape) == 3)
    loss = trainer.update(batch)["loss"]
    expected, grads = jax.jit(jax.value_and_grad(lambda model: loss_fn(model, batch, None)))(MODEL)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, grad in grads.items():
        found = (np.asarray(MODEL[name]) - np.asarray(trainer.model[name])) / RATE
        assert np.linalg.norm(found - grad) <= 1e-6 * np.linalg.norm(grad), name


def test_what_a_loss_masks_gives_no_gradient():
    """As on one device, also where the totals of parts are infinite."""

    def loss_fn(model, batch, key):
        x = jnp.where(jnp.arange(SIZE)[:, None] == SIZE // 2, jnp.inf, batch * model["scale"])
        y = jax.lax.cumlogsumexp(x, axis=1)
        return (jnp.where(jnp.isfinite(y), y, 0) * model["weights"]).mean()

    trainer = trainer_of(loss_fn, n_sequence_shards=8)
    trainer.update(BATCH[:1])
    grads = jax.jit(jax.grad(lambda model: loss_fn(model, BATCH[:1], None)))(MODEL)
    for leaf, grad in grads.items():
        np.testing.assert_allclose((np.asarray(MODEL[leaf]) - np.asarray(trainer.model[leaf])) / RATE, grad, atol=1e-6)


@pytest.mark.sweep
def test_in_bfloat16_sums_are_as_exact_as_on_one_device():
    loss_fn = loss_of(("cumsum", "cumlogsumexp"))
    exact = loss_fn(MODEL, BATCH[:1], None)
    of_one, of_eight = (
        abs(trainer_of(loss_fn, "bfloat16", n_sequence_shards=n).update(BATCH[:1])["loss"] - exact) for n in (1, 8)
    )
    assert of_eight <= max(1.1 * of_one, 2**-9 * exact)
