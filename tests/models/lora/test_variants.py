"""DoRA, rsLoRA and LoRA+, against their papers' formulas written out, and as folders."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests._tree import named_leaves
from tests.models.families._case import random_model

CONFIG = GPT2Config(vocab_size=48, n_positions=16, d_model=32, n_layers=2, n_heads=4).without_dropout()


def filled(model):
    """The model with random values in all of its adapters' entries."""
    rng = np.random.default_rng(0)
    fill = lambda x: jnp.asarray(1 + 0.3 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(lambda is_own, x: fill(x) if is_own else x, lora.trainable(model), model)


def test_dora_scales_each_output_to_its_magnitude():
    layer = eqx.nn.Linear(6, 4, key=jax.random.key(0))
    new = lora.add([layer], rank=2, alpha=6, where="0", use_dora=True, key=jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (3, 6))
    np.testing.assert_allclose(new[0](x), jax.vmap(layer)(x), rtol=1e-5, atol=1e-6)  # nothing changes at first
    own = filled(new)[0]
    scale, weight, a, b, m = 3.0, *map(np.asarray, (own.weight, own.lora_a, own.lora_b, own.magnitude))
    adapted = weight + scale * b @ a
    norm = np.sqrt((adapted**2).sum(axis=1, keepdims=True))
    expected = x @ (m[:, None] * adapted / norm).T + layer.bias
    np.testing.assert_allclose(own(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(lora.merge([own])[0])(x), expected, rtol=1e-5, atol=1e-6)

    def by_hand(a, b, m):  # the norm is a constant (section 4.3)
        return jnp.sum(jnp.sin(x @ ((m[:, None] / norm) * (weight + scale * b @ a)).T + layer.bias))

    grads = eqx.filter_grad(lambda own: jnp.sum(jnp.sin(own(x))))(own)
    wanted = jax.jit(jax.grad(by_hand, (0, 1, 2)))(a, b, m)
    for found, own_wanted in zip((grads.lora_a, grads.lora_b, grads.magnitude), wanted, strict=True):
        np.testing.assert_allclose(found, own_wanted, rtol=1e-4, atol=1e-5)


def test_rslora_divides_by_the_root_of_the_rank():
    layer = eqx.nn.Linear(6, 4, key=jax.random.key(0))
    own = lora.add([layer], rank=4, alpha=6, where="0", use_rslora=True, key=jax.random.key(1))[0]
    assert own.scale == 3.0 and own.magnitude is None


def test_lora_plus_updates_b_with_another_learning_rate():
    params = {"layer": {"lora_a": jnp.ones(3), "lora_b": jnp.ones(3)}}
    grads = {"layer": {"lora_a": jnp.array([1.0, -2, 0.5]), "lora_b": jnp.array([1.0, -2, 0.5])}}
    fast, slow = lora.plus(optax.adamw(0.1), ratio=8), {"lora_a": optax.adamw(0.1), "lora_b": optax.adamw(0.8)}
    updates, _ = fast.update(grads, fast.init(params), params)
    for name, optimizer in slow.items():
        leaf = params["layer"][name]
        expected, _ = optimizer.update(grads["layer"][name], optimizer.init(leaf), leaf)
        np.testing.assert_allclose(updates["layer"][name], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`ratio`: expected a finite number above 0, got 0"):
        lora.plus(optax.sgd(0.1), ratio=0)


@pytest.mark.sweep
def test_the_folder_of_dora_round_trips(tmp_path):
    base = random_model(GPT2, CONFIG)
    model = lora.add(base, rank=2, where=("*.attention.query", "*.up"), use_dora=True, key=jax.random.key(1))
    model = filled(model)
    lora.save_adapter(model, tmp_path)
    again = lora.load_adapter(base, tmp_path)
    ids = jnp.arange(8)
    np.testing.assert_allclose(eqx.filter_jit(again)(ids), eqx.filter_jit(model)(ids), atol=2e-5)
    found, expected = named_leaves(again), named_leaves(model)
    for name in expected:
        if name.endswith("magnitude"):
            np.testing.assert_array_equal(found[name], expected[name])
    other = lora.add(model, rank=2, where="*.down", key=jax.random.key(2))
    with pytest.raises(ValueError, match="down`: expected DoRA, as other layers have, got none"):
        lora.save_adapter(other, tmp_path)


def test_dora_of_embeddings_is_refused(tmp_path):
    """PEFT has it. Its magnitudes would be dropped if the embedding is square."""
    config = GPT2Config(vocab_size=8, n_positions=16, d_model=8, n_layers=1, n_heads=2).without_dropout()
    base = random_model(GPT2, config)
    table = lora.add(base, rank=2, embeddings="embedding", key=jax.random.key(1))
    lora.save_adapter(table, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(tensors)).partition(".lora_")[0]
    save_file({**tensors, f"{name}.lora_magnitude_vector": np.ones(8, "f")}, tmp_path / "adapter_model.safetensors")
    message = r"`use_dora`: expected false with an adapter of the embedding `transformer\.wte`, .* got True\. Merge"
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(base, tmp_path)
    both = lora.add(table, rank=2, where="*.up", use_dora=True, key=jax.random.key(2))
    with pytest.raises(ValueError, match="`embedding`: expected DoRA, as other layers have, got none"):
        lora.save_adapter(both, tmp_path)
