"""Each step compiles once: whatever is called first, and whatever the state of the optimizer is made of."""

from contextlib import contextmanager

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

DATA = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


class Net(eqx.Module):
    """Its plan without a loss has other reasons than that of the loss and, on one model shard, other specs."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first, self.second = (eqx.nn.Linear(16, 16, key=key) for key in keys)
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.second(x), state


def apply(model, state, batch):
    return jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(batch, state)


def loss_fn(model, state, batch, key):
    outputs, state = apply(model, state, batch)
    return (outputs**2).mean(), state


def make_trainer(optimizer=None, *, shards=(1, 1), **kwargs):
    model, state = eqx.nn.make_with_state(Net)()
    return redeqx.Trainer(
        redeqx.Deployer(0, *shards, verbose=False, **kwargs),
        model=model,
        model_state=state,
        optimizer=optax.adam(1e-2) if optimizer is None else optimizer,
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )


@contextmanager
def compiling(*expected):
    """A context in which exactly these steps compile."""
    compiled = []

    def count(event, seconds, fun_name="", **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.extend(name for name in ("predict", "eval", "step") if f"{name}_fn" in fun_name)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert compiled == [*expected]


def use(trainer, predictor):
    return predictor.predict(DATA, batch_size=8), trainer.eval_loss(DATA, batch_size=8)


@pytest.mark.sweep
def test_a_prediction_and_an_evaluation_compile_once_before_and_after_an_update():
    trainer = make_trainer()
    predictor = trainer.get_default_predictor(lambda model, state, batch, key: apply(model, state, batch)[0])
    with compiling("predict", "eval", "step"):
        before = use(trainer, predictor)
        trainer.update(DATA)
        after = use(trainer, predictor)
        trainer.update(DATA)
        use(trainer, predictor)
    assert before[1] != after[1] and not np.array_equal(before[0], after[0])


def test_a_prediction_compiles_once_if_only_the_reasons_of_the_plan_change():
    trainer = redeqx.Trainer(
        redeqx.Deployer(0, 2, 2, verbose=False),
        model=eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0)),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
    )
    predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch))
    with compiling("predict", "eval", "step"):
        use(trainer, predictor)
        trainer.update(DATA)
        use(trainer, predictor)


def weakly_typed(state=0.5):
    """An optimizer whose state is a weakly typed number."""
    step = lambda grads, scale, params=None: (jax.tree.map(lambda g: -scale * g, grads), scale * 0.5)  # noqa: E731
    return optax.GradientTransformation(lambda params: jnp.asarray(state), step)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", [weakly_typed(), optax.lbfgs()])
def test_a_step_compiles_once_if_the_optimizers_state_is_weakly_typed(optimizer, tmp_path):
    assert weakly_typed().init(None).weak_type
    trainer = make_trainer(optimizer, workdir=tmp_path)
    with compiling("step"):
        for _ in range(3):
            trainer.update(DATA)
        trainer.save_ckpt()
        trainer.load_ckpt()
        trainer.update(DATA)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(trainer.opt_state))
