"""Optimizers that are refused, and complex weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

DATA = np.ones((8, 4), np.float32)
TARGET = 1 + 2j


class Weights(eqx.Module):
    weight: jax.Array


def make_trainer(optimizer, dtype=jnp.float32, **kwargs):
    def loss_fn(model, batch, key):
        return (jnp.abs(model.weight - TARGET.real - (TARGET.imag * 1j if dtype == jnp.complex64 else 0)) ** 2).mean()

    deployer = redeqx.Deployer(verbose=False)
    kwargs = {"loss_fn": loss_fn, "collate_fn": np.stack, **kwargs}
    return redeqx.Trainer(deployer, model=Weights(jnp.zeros(3, dtype)), optimizer=optimizer, **kwargs)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: optax.chain(optax.clip(1.0), optimizer)])
def test_lookahead_is_refused_by_its_name(wrap):
    trainer = make_trainer(wrap(optax.lookahead(optax.sgd(0.1), 5, 0.5)))
    with pytest.raises(ValueError) as error:
        trainer.update(DATA)
    assert str(error.value) == (
        "`optimizer`: expected one of the model's parameters, got `optax.lookahead`, which trains pairs of a fast and a "
        "slow copy. Average the weights instead: `redeqx.optimizers.ema(optimizer)`."
    )


def test_sophia_is_given_the_loss():
    trainer = make_trainer(optax.contrib.sophia(0.1))
    losses = [trainer.update(DATA)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


def by_curvature():
    """Returns an optimizer that divides by the curvature along all ones: a derivative of the loss's derivative."""

    def update(updates, state, params=None, *, obj_fn=None, **kwargs):
        assert obj_fn is not None
        _, curvature = jax.jvp(jax.grad(obj_fn), (params,), (jax.tree.map(jnp.ones_like, params),))
        return jax.tree.map(lambda g, h: -0.1 * g / (1 + jnp.abs(h)), updates, curvature), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_an_optimizer_may_differentiate_the_gradient_of_the_loss(compute):
    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        linear: eqx.nn.Linear

        def __call__(self, token):
            return self.linear(self.embedding(token))

    model = Model(eqx.nn.Embedding(64, 16, key=jax.random.key(0)), eqx.nn.Linear(16, 16, key=jax.random.key(1)))
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False, n_model_shards=2), model=model, optimizer=by_curvature(), collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (jax.vmap(model)(batch).astype(jnp.float32) ** 2).mean(), compute=compute,
    )  # fmt: skip
    losses = [trainer.update(np.arange(16))["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


# --- complex weights ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": optax.sgd(0.2),
    "adam": optax.adam(0.2),
    "split": optax.contrib.split_real_and_imaginary(optax.adam(0.2)),
    "warm-up": optax.sgd(optax.linear_schedule(0.0, 0.2, 4)),
    "accumulated": optax.MultiSteps(optax.sgd(0.4), 2, accumulator_dtype=jnp.complex64),
    "injected": optax.inject_hyperparams(optax.adamw)(0.2, weight_decay=0.0),
    "line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "sharpness-aware": optax.contrib.sam(optax.sgd(0.2), optax.sgd(0.01), opaque_mode=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.sweep] * (i % 3 > 0)) for i, x in enumerate(OPTIMIZERS)]
)
def test_complex_weights_descend(name):
    trainer = make_trainer(OPTIMIZERS[name], jnp.complex64)
    first = trainer.update(DATA)
    assert first["grad_norm"] == pytest.approx(2 / 3 * abs(TARGET) * 3**0.5)
    for _ in range(199):
        trainer.update(DATA)
    np.testing.assert_allclose(trainer.model.weight, TARGET, atol=0.05)
    if name == "injected":
        trainer.set_hyperparams(learning_rate=0.0)
        assert trainer.update(DATA)["learning_rate"] == 0.0 == trainer.hyperparams["learning_rate"]


def test_an_optimizer_is_also_given_the_gradient_as_jax_returns_it():
    """The conjugate of the updates, of which line searches compute the slope. Here an update is their difference."""

    def update(updates, state, params=None, *, grad, **extra):
        return jax.tree.map(lambda g, u: jnp.conj(g) - u, grad, updates), state

    trainer = make_trainer(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), jnp.complex64)
    trainer.update(DATA)
    np.testing.assert_allclose(trainer.model.weight, 0, atol=1e-6)


def test_a_gradient_of_the_user_s_own_is_the_direction_of_ascent():
    def grad_fn(model, batch, key):
        return jnp.mean(jnp.abs(model.weight - TARGET) ** 2), Weights(2 / 3 * (model.weight - TARGET))

    trainer = make_trainer(optax.sgd(1.0), jnp.complex64, grad_fn=grad_fn)
    for _ in range(30):
        trainer.update(DATA)
    np.testing.assert_allclose(trainer.model.weight, TARGET, atol=0.01)


def test_a_tree_of_labels_that_optax_calls_gets_a_note():
    """`optax.multi_transform` calls whatever can be called, such as labels in the structure of a module."""
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    labels = jax.tree.map(lambda x: "train" if x.ndim == 2 else "freeze", model)
    options = {"deployer": redeqx.Deployer(verbose=False), "model": model, "collate_fn": np.stack}
    options["loss_fn"] = lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean()
    transforms = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    with pytest.raises(TypeError) as error:
        redeqx.Trainer(optimizer=optax.multi_transform(transforms, labels), **options).update(DATA)
    assert any("Pass the tree as `lambda params: labels`." in note for note in error.value.__notes__)
    trainer = redeqx.Trainer(optimizer=optax.multi_transform(transforms, lambda params: labels), **options)
    trainer.update(DATA)
    assert (trainer.model.bias == model.bias).all() and (trainer.model.weight != model.weight).any()


def test_parameters_keep_their_dtypes():
    """optax makes float32 updates of a schedule in `inject_hyperparams`, and complex ones of a complex rate."""

    def loss_fn(model, batch, key):
        return jnp.square(model["narrow"].astype(jnp.float32) * model["wide"]).mean()

    model = {"narrow": jnp.ones(3, jnp.bfloat16), "wide": jnp.ones(3)}
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda step: 0.5)
    by_complex = optax.stateless(lambda updates, params: jax.tree.map(lambda g: (-0.5 + 0j) * g, updates))
    for optimizer in (injected, by_complex):
        trainer = redeqx.Trainer(
            redeqx.Deployer(verbose=False), model=model, optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn
        )
        for _ in range(2):
            trainer.update(DATA)
        assert {name: leaf.dtype for name, leaf in trainer.model.items()} == {"narrow": jnp.bfloat16, "wide": jnp.float32}
        assert trainer.model["wide"][0] < 0.6


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"n": 0.5}, r"`optimizer` state `n`: expected int32\[\], as from `optimizer.init`, got float32\[\]"),
        ({"n": jnp.ones(3, int)}, r"`optimizer` state `n`: expected int32\[\], as from `optimizer.init`, got int32\[3\]"),
        ({"n": 0, "more": 0}, "`optimizer` state: expected the structure of `optimizer.init`, .* differs in `more`"),
    ],
)
def test_a_state_that_an_update_changes_in_form_is_refused(new, message):
    optimizer = optax.GradientTransformation(lambda params: {"n": jnp.array(0)}, lambda grads, state, params: (grads, new))
    with pytest.raises(ValueError, match=f"{message}.* Return from `optimizer.update` a state like that"):
        make_trainer(optimizer).update(DATA)


@pytest.mark.parametrize(
    "optimizer",
    [optax.inject_hyperparams(optax.adam)(learning_rate=0.1), optax.contrib.prodigy(estim_lr0=0.1)],
    ids=["inject_hyperparams", "prodigy"],
)
def test_a_state_that_is_wider_for_parameters_of_several_dtypes_is_so_from_the_start(optimizer, tmp_path):
    """The rates of `inject_hyperparams` are float32 arrays, so optax makes float32 moments of bfloat16 ones."""

    def loss_fn(model, batch, key=None):
        return jnp.square(model["narrow"].astype(jnp.float32) * model["wide"] - 0.5).mean() * batch.mean()

    def make():
        return {"narrow": jnp.ones(4, jnp.bfloat16), "wide": jnp.ones(4)}

    def trainer(**options):
        deployer = redeqx.Deployer(n_fsdp_shards=2, workdir=tmp_path / str(len(options)), verbose=False)
        options |= {"collate_fn": np.stack, "loss_fn": loss_fn}
        return redeqx.Trainer(deployer, model=make(), optimizer=optimizer, **options)

    def plain(state):
        model = make()
        for _ in range(3):
            updates, state = optimizer.update(jax.grad(loss_fn)(model, DATA), state, model)
            model = optax.apply_updates(model, updates)
        return model, state

    first = optimizer.init(make())
    model, state = plain(jax.tree.map(lambda x, after: jnp.asarray(x, after.dtype), first, plain(first)[1]))
    for n_steps in (2, 3):  # the second resumes
        resumed = trainer()
        resumed.fit(DATA, batch_size=8, max_steps=n_steps, n_epochs=3)
    for name, expected in model.items():
        np.testing.assert_allclose(resumed.model[name], expected, rtol=2e-6 if name == "wide" else 0)
    for leaf, expected in zip(jax.tree.leaves(resumed.opt_state), jax.tree.leaves(state), strict=True):
        assert leaf.dtype == jnp.asarray(expected).dtype
    stored = trainer(compute="bfloat16")
    stored.update(DATA)
    assert stored.model["narrow"].dtype == jnp.float32
