"""The gradient of a head that its loss makes in the forward pass is summed into shards there, once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.models import cross_entropy
from tests.transforms.updates import check_update

VOCAB, D, T, ROWS, RATE = 512, 64, 40, 16, 0.5  # more tokens than the vocabulary: the head is not split by it
MESHES = {"fsdp": {"n_fsdp_shards": 8}, "all": {"n_model_shards": 2, "n_fsdp_shards": 2}}


class Model(eqx.Module):
    mix: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        one, two = jax.random.split(jax.random.key(0))
        self.mix, self.head = eqx.nn.Linear(VOCAB, D, key=one), eqx.nn.Linear(D, VOCAB, key=two)

    def hidden(self, ids):
        return jnp.tanh(jax.vmap(self.mix)(jax.nn.one_hot(ids, VOCAB)))

    def logits(self, x):
        return x @ self.head.weight.T + self.head.bias


def loss_fn(model, batch, key):
    hidden = jax.vmap(model.hidden)(batch["ids"])
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=4)


def collate(rows):
    return {"ids": np.stack(rows)[:, :-1], "labels": np.stack(rows)[:, 1:]}


EXAMPLES = list(np.random.default_rng(0).integers(0, VOCAB, (ROWS, T + 1)).astype(np.int32))


def trainer_on(mesh):
    return redeqx.Trainer(
        redeqx.Deployer(verbose=False, **mesh),
        model=Model(),
        optimizer=optax.sgd(RATE),
        collate_fn=collate,
        loss_fn=loss_fn,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_that_of_one_device(mesh):
    check_update(trainer_on(MESHES[mesh]), EXAMPLES, model=Model(), loss_fn=loss_fn, collate=collate, rate=RATE)


@pytest.mark.sweep
def test_a_tpu_sends_each_gradient_once():
    """CPUs have no reduce-scatter: there it is an all-reduce and a slice."""
    with redeqx.described("v5e:2x4"):
        report = trainer_on(MESHES["fsdp"]).dry_run(EXAMPLES, batch_size=ROWS, search="none")
    of_head = [each.kind for each in report.steps["train"].collectives if each.shape == (VOCAB, D)]
    assert of_head == ["all-gather", "reduce-scatter"]
