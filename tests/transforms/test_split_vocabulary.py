"""A head is split by its vocabulary where that sends no more than gathering it, or little more beside the other weights."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.models import cross_entropy
from tests.transforms.updates import check_update

VOCAB, D, ROWS, CHUNK, RATE = 512, 32, 16, 4, 0.5
N_IDS = 256  # so that no other matrix has the shape of the head
MESHES = {"fsdp": {"n_fsdp_shards": 8}, "all": {"n_model_shards": 2, "n_fsdp_shards": 2}}


class Model(eqx.Module):
    mix: jax.Array
    scale: jax.Array
    head: jax.Array
    bias: jax.Array
    rest: jax.Array

    def __init__(self, n_of_rest=1):
        mix, head = jax.random.split(jax.random.key(0))
        self.mix, self.head = jax.random.normal(mix, (N_IDS, D)), jax.random.normal(head, (VOCAB, D)) / D**0.5
        self.scale, self.bias = jnp.full(D, 0.7), jnp.linspace(-1, 1, VOCAB)
        self.rest = jnp.ones((n_of_rest, D))

    def logits(self, x):
        """A norm, a product, a bias and a soft cap: the norm's weight has no vocabulary."""
        x = self.scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return 5 * jnp.tanh((x @ self.head.T + self.bias) / 5)


def loss_fn(model, batch, key):
    hidden = jnp.tanh(jax.nn.one_hot(batch["ids"], N_IDS) @ model.mix) + model.rest.sum(0)
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=CHUNK, z_loss=1e-2)


def collate(rows):
    return {"ids": np.stack(rows)[:, :-1], "labels": np.stack(rows)[:, 1:]}


def examples(n_tokens):
    return list(np.random.default_rng(0).integers(0, N_IDS, (ROWS, n_tokens + 1)).astype(np.int32))


def trainer_on(mesh, n_of_rest=1, **kwargs):
    deployer, model = redeqx.Deployer(verbose=False, **mesh), Model(n_of_rest)
    return redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(RATE), collate_fn=collate, loss_fn=loss_fn, **kwargs
    )  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_that_of_one_device(mesh):
    rows = examples(18)  # the last chunk is padded
    trainer = trainer_on(MESHES[mesh], accumulate_grad_batches=2 if mesh == "all" else 1)
    check_update(trainer, rows, model=Model(), loss_fn=loss_fn, collate=collate, rate=RATE)


# Two rows of 16 tokens for each of 8 devices are fewer than the vocabulary, and of 80 tokens more: 768 of them, which other
# weights of 20 times as many rows as that outweigh.
@pytest.mark.parametrize("n_tokens, n_of_rest, is_whole", [(16, 1, False), (80, 1, True), (80, 20 * 768, False)])
def test_no_device_has_the_whole_head_or_its_gradient(n_tokens, n_of_rest, is_whole):
    whole = re.compile(rf"f32\[(?:{VOCAB},{D}|{D},{VOCAB})\]")
    text = str(trainer_on(MESHES["fsdp"], n_of_rest).compile(examples(n_tokens), batch_size=ROWS).as_text())
    assert bool(whole.search(text)) == is_whole
    # The norm of a chunk of hidden states is gathered for the product with the head, and what it is made of is not.
    chunks = [each for each in collectives(Module.of(text)) if each.kind == "all-gather" and each.shape[-2:] == (CHUNK, D)]
    assert sum(each.n_executions for each in chunks) == (0 if is_whole else n_tokens // CHUNK)
