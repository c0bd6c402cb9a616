"""The README's fine-tuning workflow on a tiny model: load, add LoRA, train, generate and save, on a mesh with all axes."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import cross_entropy, from_pretrained, generate, lora, save_pretrained
from redeqx.models.llama import Llama, LlamaConfig
from tests._tree import named_leaves

CONFIG = LlamaConfig(vocab_size=64, n_positions=32, d_model=32, d_mlp=64, n_layers=2, n_heads=4, n_kv_heads=2, init_std=0.2)
EXAMPLES = list(np.random.default_rng(0).integers(0, 64, (32, 13)).astype(np.int32))
EXAMPLES = [np.where(np.arange(13) % 2, row[0], row[1]) for row in EXAMPLES]  # two alternating tokens: easy to learn


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    model = eqx.filter_jit(Llama)(CONFIG, key=jax.random.key(0))
    return save_pretrained(model, CONFIG, tmp_path_factory.mktemp("llama"), max_shard_size="20KB")


def collate_fn(rows):
    ids = np.stack(rows)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "mask": np.ones_like(ids[:, :-1], bool)}


def loss_fn(model, batch, key):
    hidden = jax.vmap(model.hidden)(batch["ids"])
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=5)


def pred_fn(model, batch, key):
    return generate(model, batch["ids"], mask=batch["mask"], max_new_tokens=4, num_beams=2, eos_token_id=())


class RecordLosses:
    def __init__(self):
        self.losses = []

    def log(self, metrics, step):
        self.losses.append(metrics["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_fine_tuning_from_pretrained_to_saved_model(dtype, checkpoint_folder, tmp_path):
    log = RecordLosses()
    deployer = redeqx.Deployer(0, n_model_shards=2, n_fsdp_shards=2, verbose=False, loggers=[log])
    base, config = from_pretrained(checkpoint_folder, deployer=deployer, dtype=dtype, remat=True)
    frozen = {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(base, eqx.is_array)).items()}
    model = lora.add(base, rank=4, where=("*.attention.query", "*.attention.value", "*.mlp.*"), key=deployer.next_key())
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.adam(3e-2),
        trainable=lora.trainable(model),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
    )
    trainer.fit(EXAMPLES, 4, 4)
    assert log.losses[-1] < 0.7 * log.losses[0]
    for name, leaf in named_leaves(eqx.filter(trainer.model, eqx.is_array)).items():
        if name in frozen:
            np.testing.assert_array_equal(np.asarray(leaf), frozen[name], err_msg=name)

    predictor = trainer.get_default_predictor(pred_fn)
    tokens = np.stack(predictor.predict(EXAMPLES[:8], 2))
    assert tokens.shape == (8, 4)

    lora.save_adapter(trainer.model, tmp_path / "adapter")
    merged = lora.merge(trainer.model)
    save_pretrained(merged, config, tmp_path / "tuned")
    reloaded, _ = from_pretrained(tmp_path / "tuned")
    for found, wanted in zip(
        jax.tree.leaves(eqx.filter(reloaded, eqx.is_array)), jax.tree.leaves(eqx.filter(merged, eqx.is_array)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    with_adapter = lora.load_adapter(from_pretrained(checkpoint_folder, dtype=dtype)[0], tmp_path / "adapter")
    ids = jnp.stack([row[:-1] for row in EXAMPLES[:4]])
    logits = [eqx.filter_jit(lambda m: jax.vmap(m)(ids).astype(jnp.float32))(m) for m in (with_adapter, reloaded)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4 if dtype is None else 0.3)
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.sweep
def test_loss_is_the_same_on_every_mesh(checkpoint_folder):
    losses = []
    for n_model, n_fsdp in ((1, 1), (2, 2), (4, 2)):
        deployer = redeqx.Deployer(0, n_model, n_fsdp, verbose=False)
        model, _ = from_pretrained(checkpoint_folder, deployer=deployer)
        trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=collate_fn, loss_fn=loss_fn)
        losses.append(trainer.eval_loss(EXAMPLES, 1))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
