"""Dropout, embeddings and experts: against formulas written out, as folders, and on a mesh."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.mistral import Mixtral, MixtralConfig
from tests._tree import named_leaves
from tests.models.families._case import random_model

CONFIG = GPT2Config(vocab_size=48, n_positions=16, d_model=32, n_layers=2, n_heads=4, is_tied=False).without_dropout()
KEY = jax.random.key(0)


def filled(model):
    """The model with random values in all of its adapters' entries."""
    rng = np.random.default_rng(0)
    fill = lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(lambda is_own, x: fill(x) if is_own else x, lora.trainable(model), model)


@pytest.fixture(scope="module")
def gpt2():
    return random_model(GPT2, CONFIG)


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_drops_inputs_of_the_adapter(use_dora):
    layer = eqx.nn.Linear(6, 4, key=KEY)
    model = filled(lora.add([layer], rank=2, alpha=6, where="0", dropout=0.5, use_dora=use_dora, key=jax.random.key(1)))
    x = jax.random.normal(jax.random.key(2), (3, 6))
    with pytest.raises(
        RuntimeError, match=r"`key`: expected one for the dropout of adapters, got None\. Call `lora.with_keys"
    ):
        model[0](x)
    own = lora.with_keys(model, jax.random.key(3))[0]
    weight, a, b, out = *map(np.asarray, (own.weight, own.lora_a, own.lora_b)), own(x)
    kept = np.asarray(eqx.nn.Dropout(0.5)(x, key=own.key))
    assert {*np.unique(np.round(kept / x, 5))} == {0.0, 2.0}
    expected = x @ weight.T + layer.bias + 3.0 * kept @ a.T @ b.T
    if use_dora:
        factor = own.magnitude / np.linalg.norm(weight + 3.0 * b @ a, axis=1)
        expected = x @ weight.T + layer.bias + (factor - 1) * (kept @ weight.T) + factor * (3.0 * kept @ a.T @ b.T)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model[0](x, key=own.key), out)
    quiet = eqx.nn.inference_mode(model)[0](x)
    np.testing.assert_allclose(quiet, jax.vmap(lora.merge(model)[0])(x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(quiet, out, atol=1e-3)


@pytest.mark.sweep
def test_each_layer_of_a_stack_draws_its_own(gpt2, tmp_path):
    model = filled(lora.add(gpt2, rank=2, where=("*.up", "*.query"), dropout=0.25, key=KEY))
    keyed = lora.with_keys(model, jax.random.key(1))
    keys = [jax.random.key_data(leaf) for name, leaf in named_leaves(keyed).items() if name.endswith(".key")]
    assert len({tuple(row) for pair in keys for row in np.asarray(pair)}) == 4
    lora.save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.25
    again, ids = lora.load_adapter(gpt2, tmp_path), jnp.arange(8)  # which is in inference mode
    run = eqx.filter_jit(lambda model: model(ids))
    np.testing.assert_allclose(run(again), run(eqx.nn.inference_mode(model)), atol=1e-5)
    dropped = run(lora.with_keys(eqx.nn.inference_mode(again, value=False), KEY))
    assert not np.allclose(dropped, run(again), atol=1e-3)
    other = lora.add(model, rank=2, where="*.down", key=KEY)
    with pytest.raises(ValueError, match=r"down`: expected a dropout rate of 0.25, as in other layers, got 0.0\. Make them"):
        lora.save_adapter(other, tmp_path)
    with pytest.raises(ValueError, match=r"`dropout`: expected a rate in \[0, 1\), got 1"):
        lora.add(gpt2, rank=2, where="*.up", dropout=1, key=KEY)


@pytest.mark.sweep
def test_an_adapter_of_an_embedding(gpt2, tmp_path):
    new = lora.add(gpt2, rank=3, alpha=6, where="*.query", embeddings="embedding", key=KEY)
    ids = jnp.array([5, 0, 47, 5])
    run = eqx.filter_jit(lambda model, ids=ids: model(ids))
    np.testing.assert_array_equal(run(new), run(gpt2))  # nothing changes at first
    assert float(jnp.std(new.embedding.lora_b)) == pytest.approx(1, rel=0.2)
    model = filled(new)
    table = model.embedding.weight + 2.0 * (model.embedding.lora_b @ model.embedding.lora_a).T
    np.testing.assert_allclose(jax.vmap(model.embedding)(ids), table[ids], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(model), run(lora.merge(model)), atol=1e-4)
    assert np.all(np.isnan(run(model, jnp.array([48, -1, 2, 3]))[0]))  # outside of the vocabulary
    lora.save_adapter(model, tmp_path)
    np.testing.assert_allclose(run(lora.load_adapter(gpt2, tmp_path)), run(model), atol=1e-5)
    with pytest.raises(ValueError, match=r"`embedding`: expected a layer without an adapter, got one of rank 3\."):
        lora.load_adapter(model, tmp_path)
    with pytest.raises(
        ValueError, match=r"`embeddings`: expected the path of an embedding, got 'embeding'.* embeddings: embed"
    ):
        lora.add(gpt2, rank=3, embeddings="embeding", key=KEY)
    updates = jax.tree.map(jnp.ones_like, eqx.filter(model, lora.trainable(model)))
    plus = lora.plus(optax.sgd(1.0), ratio=8)
    scaled, _ = plus.update(updates, plus.init(updates))
    assert float(scaled.embedding.lora_b[0, 0]) == -1 and float(scaled.stack.blocks.attention.query.lora_b[0, 0, 0]) == -8


def test_a_tied_embedding_is_not_merged():
    config = GPT2Config(vocab_size=16, n_positions=8, d_model=8, n_layers=1, n_heads=2)
    model = lora.add(random_model(GPT2, config), rank=2, embeddings="embedding", key=KEY)
    with pytest.raises(
        ValueError, match=r"`embedding`: expected an embedding of its own, got one whose weight another layer"
    ):
        lora.merge(model)


@pytest.mark.sweep
def test_the_folder_of_experts(tmp_path):
    config = MixtralConfig(
        vocab_size=16, n_positions=8, d_model=8, d_mlp=12, n_layers=2, n_heads=2, n_kv_heads=2, n_experts=3, n_chosen=2
    )
    base = random_model(Mixtral, config)
    model = filled(lora.add(base, rank=2, where=("*.experts.gate", "*.experts.down"), key=KEY))
    lora.save_adapter(model, tmp_path)
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert keys["target_modules"] == [] and keys["target_parameters"][1] == "model.layers.0.mlp.experts.gate_up_proj"
    again = lora.load_adapter(base, tmp_path)
    run = eqx.filter_jit(lambda model: model(jnp.arange(6)))
    np.testing.assert_allclose(run(again), run(model), atol=1e-5)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**keys, "r": 3, "rank_pattern": {}}))
    with pytest.raises(ValueError, match=r"experts.base_layer.lora_A.weight`: expected \(9, 8\), got \(6, 8\)"):
        lora.load_adapter(base, tmp_path)
    dropped = lora.add(base, rank=2, where="*.experts.up", dropout=0.1, key=KEY)
    with pytest.raises(TypeError, match="`layer`: expected an adapter of experts without dropout, got one"):
        run(dropped)


def loss_fn(model, batch, key):
    keys = jax.random.split(key, len(batch))
    logits = jax.vmap(lambda ids, key: lora.with_keys(model, key)(ids))(batch[:, :-1], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@pytest.mark.sweep
def test_training_on_a_mesh_equals_training_on_one_device(gpt2):
    examples = list(np.random.default_rng(0).integers(0, 48, (8, 9)).astype(np.int32))
    trained = []
    for n_model_shards, n_fsdp_shards in ((1, 1), (2, 2)):
        model = lora.add(gpt2, rank=4, where=("*.query", "*.up"), embeddings="embedding", dropout=0.3, key=KEY)
        trainer = redeqx.Trainer(
            redeqx.Deployer(0, n_model_shards, n_fsdp_shards, verbose=False),
            model=model,
            optimizer=optax.sgd(1.0),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            trainable=lora.trainable(model),
        )
        for _ in range(2):
            trainer.update(examples)
        trained.append(named_leaves(trainer.model))
    for name in trained[0]:
        if ".lora_" in name:
            single, sharded = (np.asarray(found[name]) for found in trained)
            np.testing.assert_allclose(sharded, single, rtol=1e-4, atol=1e-6, err_msg=name)
            assert np.any(single), name
