"""Several adapters on one base in one step: each row of the batch chooses its own."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import lora
from redeqx.models.llama import Llama, LlamaConfig
from tests._tree import named_leaves

N, ROWS, TOKENS = 8, 8, 64
CONFIG = LlamaConfig(vocab_size=64, n_positions=TOKENS, d_model=128, d_mlp=256, n_layers=2, n_heads=4)
KEYS = jax.random.split(jax.random.key(1), N)
RNG = np.random.default_rng(0)
BATCH = {
    "ids": RNG.integers(0, 64, (ROWS, TOKENS)).astype(np.int32),
    "adapter": np.array([3, 0, 7, 1, 5, 2, 6, 4], np.int32),
}


@pytest.fixture(scope="module")
def models():
    """The same base with eight adapters."""

    @eqx.filter_jit
    def adapted():
        return lora.add(Llama(CONFIG, key=KEYS[0]), rank=4, where=("*.attention.*", "*.mlp.*"), key=KEYS[1])

    def filled(seed):
        rng = np.random.default_rng(seed)
        leaves = [
            jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype) if ".lora_" in name else leaf
            for name, leaf in named_leaves(model).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(model), leaves)

    model = adapted()
    return [filled(seed) for seed in range(N)]


def loss_of(model, ids):
    logits = model(ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:-1].astype(jnp.float32), ids[1:]).mean()


def loss_fn(model, batch, key):
    return jax.vmap(lambda ids, i: loss_of(lora.choose(model, i), ids))(batch["ids"], batch["adapter"]).mean()


def one_loss_fn(model, batch, key):
    return jax.vmap(lambda ids: loss_of(model, ids))(batch["ids"]).mean()


def trainer_of(model, fn, *mesh):
    return redeqx.Trainer(
        redeqx.Deployer(0, *mesh, verbose=False),
        model=model,
        trainable=lora.trainable(model),
        optimizer=optax.sgd(1.0),
        collate_fn=lambda examples: {key: np.stack([example[key] for example in examples]) for key in examples[0]},
        loss_fn=fn,
    )


EXAMPLES = [{key: leaf[i] for key, leaf in BATCH.items()} for i in range(ROWS)]


def adapters(model):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items() if ".lora_" in name}


@pytest.mark.sweep
def test_a_step_of_many_adapters_is_a_step_of_each(models):
    model = lora.combine(models)
    trainer = trainer_of(model, loss_fn, 2, 2)
    trainer.fit(EXAMPLES, n_epochs=1, batch_size=ROWS)
    found, start = adapters(trainer.model), adapters(model)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def gradient(params, static, ids):
        return loss_of(eqx.combine(params, static), ids)

    for row, i in enumerate(BATCH["adapter"]):
        own = models[i]
        params, static = eqx.partition(own, lora.trainable(own))
        _, grads = gradient(params, static, jnp.asarray(BATCH["ids"][row]))
        for name, grad in adapters(grads).items():
            np.testing.assert_allclose(found[name][:, i], start[name][:, i] - grad / ROWS, atol=1e-6, err_msg=name)
            assert np.any(grad)
    # The layers' splits are those of one adapter.
    specs = {name: tuple(leaf.spec) for name, leaf in trainer.plan.leaves.items()}
    path = "stack.blocks.mlp"
    assert specs[f"{path}.up.lora_b"][2] == specs[f"{path}.down.lora_a"][3] == "model"


@pytest.mark.sweep
def test_predictions_and_choices_are_those_of_the_models(models):
    model = lora.combine(models)
    run = eqx.filter_jit(lambda model, ids: model(ids))
    outputs = jax.jit(jax.vmap(lambda ids, i: lora.choose(model, i)(ids)))(BATCH["ids"], BATCH["adapter"])
    for row in (0, 2):
        expected = run(models[BATCH["adapter"][row]], jnp.asarray(BATCH["ids"][row]))
        np.testing.assert_allclose(outputs[row], expected, atol=1e-5)
    one = lora.choose(model, 5)
    for name, leaf in adapters(one).items():
        np.testing.assert_array_equal(leaf, adapters(models[5])[name])
    assert jax.tree.structure(lora.merge(one)) == jax.tree.structure(lora.merge(models[5]))
    of = jax.jit(lambda i: lora.choose(model, i)(jnp.asarray(BATCH["ids"][0])))
    assert np.isnan(of(N)).all() and np.isnan(of(-1)).all()


@pytest.mark.sweep
def test_eight_adapters_read_little_more_than_one(models):
    def n_bytes(model, fn):
        def step(params, static, batch):
            return eqx.filter_value_and_grad(lambda params: fn(eqx.combine(params, static), batch, None))(params)

        params, static = eqx.partition(model, lora.trainable(model))
        compiled = eqx.filter_jit(step).lower(params, static, BATCH).compile()
        return compiled.compiled.cost_analysis()["bytes accessed"]

    ratio = n_bytes(lora.combine(models), loss_fn) / n_bytes(models[0], one_loss_fn)
    assert ratio < 1.15, ratio


def test_errors(models):
    model = lora.combine(models[:2])
    base = lora.merge(models[0])
    other = lora.add(base, rank=2, where="*.query", key=KEYS[0])
    for fn, message in [
        (lambda: lora.combine([]), "`models`: expected at least one model, got none."),
        (lambda: lora.combine([models[0], other]), "`models[1]`: `stack.blocks.attention.key`: expected rank 4"),
        (lambda: lora.combine([model, model]), "expected one adapter, got 2. Select one: `lora.choose(model, 0)`."),
        (lambda: lora.choose(models[0], 0), "`model`: expected several adapters, got one. Stack them with `lora.combine`"),
        (lambda: lora.choose(model, 2), "`index`: expected an adapter from 0 to 1, got 2."),
        (lambda: lora.merge(model), "expected one adapter, got 2. Select one: `lora.choose(model, 0)`."),
        (lambda: model(jnp.zeros(4, jnp.int32)), "`model`: expected one adapter for each layer, got several. Choose one"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            fn()
