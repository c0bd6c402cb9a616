"""Adapters on layers with a state, also on a quantised base: training on a mesh, the folder, and merged weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import lora
from redeqx.models.falcon_h1 import FalconH1, FalconH1Config
from redeqx.models.granite_hybrid import GraniteMoeHybrid, GraniteMoeHybridConfig
from tests._tree import named_leaves

SIZES = {"vocab_size": 48, "n_positions": 16, "d_model": 64, "d_mlp": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
SIZES |= {"state_groups": 2, "state_heads": 4, "state_size": 32, "state_value_size": 32, "init_std": 0.1}
EXPERTS = {"d_shared": 64, "n_experts": 4, "n_chosen": 2, "d_expert": 64}
GRANITE = GraniteMoeHybridConfig(mixer_layers=(0,), attention_scale=0.3, **EXPERTS, **SIZES)
MODELS = {"granite-4-h": (GraniteMoeHybrid, GRANITE), "falcon-h1": (FalconH1, FalconH1Config(**SIZES))}
EXAMPLES = list(np.random.default_rng(0).integers(0, 48, (8, 13)).astype(np.int32))
LAYERS = tuple(f"stack.*.{name}" for name in ("query", "key", "value", "gate", "decay", "output", "up", "down"))


def loss_fn(model, batch, key):
    del key
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch[:, :-1]), batch[:, 1:]).mean()


def trained(model, *mesh):
    trainer = redeqx.Trainer(
        redeqx.Deployer(0, *mesh, verbose=False),
        model=model,
        optimizer=optax.sgd(0.5),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        trainable=lora.trainable(model),
    )
    for _ in range(2):
        trainer.update(EXAMPLES)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if eqx.is_array(x) else x, trainer.model)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "kind"), [("granite-4-h", None), ("granite-4-h", "nf4"), ("falcon-h1", "int8")])
def test_adapters_of_mixers_train_on_a_mesh_and_are_saved(name, kind, tmp_path):
    cls, config = MODELS[name]
    base = cls(config, key=jax.random.key(0))
    base = base if kind is None else lora.quantise(base, where=LAYERS, kind=kind)
    model = lora.add(base, rank=4, where=LAYERS, key=jax.random.key(1))
    single, meshed = trained(model, 1, 1), trained(model, 2, 2)
    found, expected = named_leaves(meshed), named_leaves(single)
    for path, leaf in expected.items():
        if ".lora_" in path:
            np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)
            assert np.any(leaf), path
        elif eqx.is_array(leaf):
            np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    lora.save_adapter(single, tmp_path)
    run = eqx.filter_jit(lambda model: model(jnp.asarray(EXAMPLES[0])))
    np.testing.assert_array_equal(run(lora.load_adapter(base, tmp_path)), run(single))
    merged = lora.merge(single if kind is None else lora.dequantise(single))
    np.testing.assert_allclose(run(merged), run(single), atol=1e-4)
