"""Losses with unusual operations train as a hand-written step does, on any mesh, and no rule on the step fails on them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

ROWS, RATE = 16, 0.1
# `jax.grad` returns the conjugate of the direction of ascent.
X = np.random.default_rng(0).normal(size=(ROWS, 8, 16)).astype(np.float32)  # rows, positions, features


def normal(i, *shape):
    return jnp.asarray(0.1 * np.random.default_rng(i).normal(size=shape), jnp.float32)


def rows(fn):
    """The loss of a function of one row."""
    return lambda model, batch, key: jnp.square(jax.vmap(lambda x: fn(model, x))(batch)).mean()


FUSED = {"qkv": normal(0, 16, 96), "out": normal(1, 32, 16)}


def fused(model, x, change=lambda y: y, take=lambda y: jnp.split(y, 3, -1)):
    q, k, v = take(change(x @ model["qkv"]))
    return (q * k + v) @ model["out"]


def literal_reshaped(model, x):
    return fused(model, x) * jax.lax.reshape(jnp.float32(2), (1, 1))


def literal_raveled(model, x):
    return fused(model, x) + jnp.ravel(1.5)


def literal_outer(model, x):
    return fused(model, x) * jnp.outer(2.0, jnp.ones(16))


def literal_repeated(model, x):
    return fused(model, x) * jnp.repeat(3.0, 16)


def literal_split(model, x):
    scale, shift = jnp.split(jax.lax.broadcast(0.5, (2,)), 2)
    return scale * fused(model, x) + shift


def literal_in_einsum(model, x):
    return jnp.einsum(",tf,->tf", 2.0, fused(model, x), 0.5)


def halves_and_pairs(model, x):
    y = x @ model["qkv"]
    first, second = y[..., :48], y[..., 48:]
    pairs = y.reshape(*y.shape[:-1], 48, 2)
    return (first * second + pairs[..., 0] * pairs[..., 1])[..., :32] @ model["out"]


def parts_of_different_sizes(model, x):
    y = x @ model["qkv"]
    return (y[..., :32] * y[..., 32:64] + y[..., 64:].reshape(*y.shape[:-1], 2, 16).repeat(2, -1)[..., 1, :]) @ model["out"]


def associative_scan(model, x):
    inputs = x @ model["qkv"]
    decay = jnp.broadcast_to(jax.nn.sigmoid(model["decay"]), inputs.shape)
    joined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    return jax.lax.associative_scan(joined, (decay, inputs))[1] @ model["mix"]


def gated_recurrence(model, x):
    """As in minGRU: a gate for each position, with the decay of the layer."""
    gate = jax.nn.sigmoid(x @ model["qkv"] + model["decay"])
    joined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    return jax.lax.associative_scan(joined, (1 - gate, gate * (x @ model["qkv"])))[1] @ model["mix"]


def complex_recurrence(model, x):
    """As in the LRU: complex eigenvalues, given by two real vectors."""
    decay = jnp.exp(-jnp.exp(model["decay"]) + 1j * model["decay"])
    inputs = (x @ model["qkv"]).astype(jnp.complex64)
    joined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    states = jax.lax.associative_scan(joined, (jnp.broadcast_to(decay, inputs.shape), inputs))[1]
    return states.real @ model["mix"]


RECURRENT = {"qkv": normal(0, 16, 64), "decay": normal(1, 64), "mix": normal(2, 64, 16)}


def complex_loop(model, x):
    def layer(h, weight):
        return jnp.tanh(h @ jax.lax.complex(weight, 0.5 * weight)), None

    return jnp.abs(jax.lax.scan(layer, x.astype(jnp.complex64), model)[0])


def spectral(model, x):
    """As in FNet and FNO: products in frequency space."""
    frequencies = jnp.fft.rfft(x @ model["qkv"], axis=0)
    return jnp.fft.irfft(frequencies * jax.lax.complex(model["decay"], model["decay"]), axis=0) @ model["mix"]


def cumulative(model, x):
    y = x @ model["qkv"]
    return (jnp.cumsum(y, -1) + jnp.cumprod(jnp.tanh(y), 0) + jax.lax.cummax(y, 1) + jnp.sort(y, -1)) @ model["mix"]


def branches(model, x):
    y = x @ model["qkv"]
    y = jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: jnp.full_like(y, 0.5), y)
    y = jax.lax.switch(jnp.int32(1), [lambda y: y, jnp.tanh, lambda y: 0 * y], y)
    return jax.lax.select_n(x[0, 0] > 0, y, 2 * y) @ model["mix"]


def python_carries(model, x):
    def body(carry, weight):
        i, scale, h = carry
        return (i + 1, scale * 0.5, h + scale * jnp.tanh(h @ weight)), i * h.sum()

    (_, scale, h), sums = jax.lax.scan(body, (0, 1.0, x), model)
    n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return h * scale + sums.sum() * 1e-3 + jax.lax.fori_loop(0, 3, lambda i, s: s + i, 0) + n


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_jvp
def _softened(x):
    return jnp.maximum(x, 0.0)


_softened.defjvp(lambda primals, tangents: (_softened(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


def custom_derivatives(model, x):
    return _softened(_clipped(fused(model, x)))


def empty_arrays(model, x):
    y = fused(model, x)
    return jnp.concatenate([y, y[:, :0], jnp.zeros((8, 0))], -1) + jnp.zeros((0, 16)).sum(0)


def weak_constants(model, x):
    return fused(model, x, change=lambda y: jnp.where(y > 0, y, 0.0) + jnp.full((96,), 0.1) * 2)


def first_gate_is_constant(model, batch, key):
    x, mean = batch, batch.mean()
    for i, weight in enumerate(model):
        x = x + (mean if i else jnp.float32(1)) * jnp.tanh(x @ weight)
    return jnp.square(x).mean()


def complex_weights(model, x):
    return jnp.abs(jnp.tanh((x @ model) @ model.T))


class Tables(eqx.Module):
    """Integer, boolean, 0-d and empty leaves beside the weights."""

    weight: jax.Array
    order: jax.Array
    keep: jax.Array
    scale: jax.Array
    empty: jax.Array

    def __call__(self, x):
        y = (x @ self.weight)[:, self.order]
        return jnp.where(self.keep, y, 0.0) * self.scale + self.empty.sum()


TABLES = Tables(normal(0, 16, 32), jnp.arange(32)[::-1], jnp.arange(32) % 3 > 0, jnp.float32(1.5), jnp.zeros((0, 4)))

LAYERS = normal(0, 6, 16, 16)
CASES = {
    **{
        fn.__name__: (FUSED, rows(fn))
        for fn in (
            literal_reshaped,
            literal_raveled,
            literal_outer,
            literal_repeated,
            literal_split,
            literal_in_einsum,
            halves_and_pairs,
            parts_of_different_sizes,
            custom_derivatives,
            empty_arrays,
            weak_constants,
        )
    },
    **{
        fn.__name__: (RECURRENT, rows(fn))
        for fn in (associative_scan, gated_recurrence, complex_recurrence, spectral, cumulative, branches)
    },
    **{fn.__name__: (LAYERS, rows(fn)) for fn in (complex_loop, python_carries)},
    "first_gate_is_constant": (list(LAYERS), first_gate_is_constant),
    "complex_weights": (jax.lax.complex(normal(3, 16, 32), normal(4, 16, 32)), rows(complex_weights)),
    "tables": (TABLES, rows(lambda model, x: model(x))),
}
# Each failed once, on this mesh.
QUICK = [
    *((name, (2, 1)) for name in ("literal_reshaped", "associative_scan", "complex_loop")),
    ("halves_and_pairs", (8, 1)),
    ("first_gate_is_constant", (1, 1)),
]
# Meshes of one axis or of none, and of several, in turn.
COVERING = [
    (name, [(2, 1), (8, 1), (1, 1)][i % 3] if i % 4 < 2 else [(2, 2), (4, 2)][i % 2]) for i, name in enumerate(CASES)
]


def trained(model, loss_fn, mesh, **options):
    n_model, n_fsdp = mesh
    deployer = redeqx.Deployer(n_model_shards=n_model, n_fsdp_shards=n_fsdp, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(RATE), collate_fn=np.stack, loss_fn=loss_fn, **options
    )
    trainer.fit(list(X), batch_size=ROWS, n_epochs=1)
    return trainer.model


def by_hand(model, loss_fn):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    grads = jax.jit(jax.grad(lambda p: loss_fn(eqx.combine(p, static), X, jax.random.key(0))))(params)
    return eqx.combine(jax.tree.map(lambda p, g: p - RATE * jnp.conj(g), params, grads), static)


def check(name, mesh, **options):
    model, loss_fn = CASES[name]
    expected = by_hand(model, loss_fn)
    found = trained(model, loss_fn, mesh, **options)
    moved = 0.0
    for before, one, other in zip(*map(jax.tree.leaves, (model, expected, found)), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)
        moved += float(np.abs(np.asarray(one) - np.asarray(before)).sum()) if eqx.is_inexact_array(one) else 0
    assert moved > 0, "the loss must have a gradient"


@pytest.mark.parametrize(("name", "mesh"), QUICK)
def test_a_step_equals_a_hand_written_one(name, mesh):
    check(name, mesh, compute=redeqx.Compute(stack_blocks=True))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mesh"), COVERING)
def test_a_step_equals_a_hand_written_one_on_some_mesh(name, mesh):
    check(name, mesh, compute=redeqx.Compute(stack_blocks=True))


class Counting(eqx.nn.StatefulLayer):
    """Counts its calls and sums its inputs, in states whose types are weak."""

    linear: eqx.nn.Linear
    count: eqx.nn.StateIndex
    total: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(16, 1, key=key)
        self.count = eqx.nn.StateIndex(jnp.array(0.0))
        self.total = eqx.nn.StateIndex(jnp.full((1,), 0.0))

    def __call__(self, x, state):
        total = state.get(self.total)
        state = state.set(self.count, state.get(self.count) + 1.0)
        return self.linear(x) + 0 * total, state.set(self.total, total + 2.0)


def counting_loss(model, state, batch, key):
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(batch[:, 0], state)
    return jnp.square(out).mean(), state


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weakly_typed_state_of_a_layer_is_carried_saved_and_used(tmp_path, accumulate):
    def fit(n_epochs):
        model, state = eqx.nn.make_with_state(Counting)(jax.random.key(0))
        deployer = redeqx.Deployer(n_model_shards=2, workdir=tmp_path, verbose=False)
        trainer = redeqx.Trainer(
            deployer,
            model=model,
            model_state=state,
            optimizer=optax.sgd(RATE),
            collate_fn=np.stack,
            loss_fn=counting_loss,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(list(X), batch_size=ROWS, n_epochs=n_epochs, eval_examples=list(X), save_last_ckpt=True)
        outputs = trainer.get_default_predictor(lambda *args: args[2][:, 0, 0] + counting_loss(*args)[0]).predict(
            list(X), batch_size=ROWS
        )
        assert len(outputs) == ROWS
        return sorted(float(leaf.sum()) for leaf in jax.tree.leaves(trainer.model_state))

    assert fit(2) == [2 * accumulate, 4 * accumulate]
    assert fit(3) == [3 * accumulate, 6 * accumulate]  # a resumed run


def test_a_backend_without_hlo_text_trains(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: None)
    check("weak_constants", (2, 1))


def attending(model, batch, key):
    attended = jax.vmap(lambda x: model(x, x, x, mask=jnp.tril(jnp.ones((32, 32), bool))))(batch)
    return jnp.square(attended).mean()


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("jax_numpy_rank_promotion", "raise", "allow"), ("jax_numpy_dtype_promotion", "strict", "standard")],
)
def test_a_script_that_forbids_promotions_trains_and_is_told_of_its_own(name, value, default):
    """Optimizers and kernels need not follow what a script asks of its own code."""
    x = np.random.default_rng(0).normal(size=(8, 32, 16)).astype(np.float32)

    def trained(loss_fn):
        trainer = redeqx.Trainer(
            redeqx.Deployer(n_model_shards=2, verbose=False),
            model=eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0)),
            optimizer=optax.adamw(1e-2),
            collate_fn=np.stack,
            loss_fn=loss_fn,
        )
        metrics = trainer.train(list(x), 1)
        predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(lambda x: model(x, x, x))(batch))
        return metrics, np.stack(predictor.predict(list(x), 1))

    expected, outputs = trained(attending)
    jax.config.update(name, value)
    try:
        metrics, again = trained(attending)
        with pytest.raises((ValueError, TypeError), match=name):
            trained(lambda model, batch, key: (attending(model, batch, key) + jnp.ones(3) * jnp.arange(3)[:, None]).mean())
    finally:
        jax.config.update(name, default)
    assert metrics == expected
    np.testing.assert_array_equal(again, outputs)
