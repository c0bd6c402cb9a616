"""Lists of equal blocks: finding them, and extrapolating the numbers of all blocks from a few."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.dry_run._blocks import Blocks, equal_blocks, with_fewer
from redeqx.training import in_order

D = 32


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    index: int = eqx.field(static=True)  # common in models; the blocks still count as equal

    def __init__(self, index, key):
        up, down = jax.random.split(key)
        self.up, self.down, self.index = eqx.nn.Linear(D, 4 * D, key=up), eqx.nn.Linear(4 * D, D, key=down), index

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Deep(eqx.Module):
    """A list of a first layer, `n` blocks and a last layer."""

    layers: list
    stacked: bool = eqx.field(static=True)
    counts: bool = eqx.field(static=True)
    n: int = eqx.field(static=True)

    def __init__(self, n, stacked=False, counts=False, *, key):
        keys = jax.random.split(key, n + 2)
        blocks = [Block(i, k) for i, k in enumerate(keys[2:])]
        self.layers = [eqx.nn.Linear(16, D, key=keys[0]), *blocks, eqx.nn.Linear(D, 16, key=keys[1])]
        self.stacked, self.counts, self.n = stacked, counts, n

    def __call__(self, x):
        first, *blocks, last = self.layers
        x = first(x)
        if self.stacked:
            stack = [jnp.stack(leaves) for leaves in zip(*map(jax.tree.leaves, blocks), strict=True)]
            stack = jax.tree.unflatten(jax.tree.structure(blocks[0]), stack)
            return last(jax.lax.scan(lambda x, block: (block(x), None), x, stack)[0])
        for i in range(self.n) if self.counts else range(len(blocks)):
            x = blocks[i](x)
        return last(x)


def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def make_trainer(model, **options):
    options = {"optimizer": optax.adam(1e-3), "loss_fn": loss_fn, "collate_fn": np.stack, **options}
    return redeqx.Trainer(redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2), model=model, **options)


def test_equal_blocks_are_found_by_path():
    model = {"a": Deep(13, key=jax.random.key(0)), "few": Deep(4, key=jax.random.key(1)), "arrays": [jnp.zeros(3)] * 20}
    assert equal_blocks(model) == [Blocks("a.layers", 1, 13)]
    assert equal_blocks(tuple(eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(12))) == [Blocks("value", 0, 12)]
    assert equal_blocks([eqx.nn.Identity()] * 20) == []


def test_model_with_fewer_blocks_keeps_its_other_layers():
    model = Deep(13, key=jax.random.key(0))
    (blocks,) = equal_blocks(model)
    fewer, names = with_fewer(model, {blocks: 2})
    assert [type(layer) for layer in fewer.layers] == [eqx.nn.Linear, Block, Block, eqx.nn.Linear]
    assert fewer.layers[3] is model.layers[14]
    assert names["layers.2.up.weight"] == "layers.2.up.weight" and names["layers.3.bias"] == "layers.14.bias"


@pytest.mark.sweep
def test_numbers_extrapolated_from_few_blocks_match_the_exact_ones():
    """Memory, traffic and FLOPs of 16 blocks, extrapolated from 2 and 4 of them, under FSDP and tensor parallelism."""
    with redeqx.described("cpu:8"):
        model = eqx.filter_eval_shape(Deep, 16, key=jax.random.key(0))
        trainable = jax.tree.map(lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), model)
        trainable = eqx.tree_at(lambda m: m.layers[-1].bias, trainable, False)  # a tree of the full model
        trainer, rows = make_trainer(model, trainable=trainable), np.zeros((512, 16), np.float32)
        run = trainer.dry_run(rows, 128)
        exact = trainer.dry_run(rows, 128, exact=True)
    found, expected = run.steps["train"], exact.steps["train"]
    assert run.extrapolated == "2 and 4 of the 16 of `layers`" and exact.extrapolated == ""
    assert "; extrapolated from 2 and 4 of the 16 of `layers`" in run.verdict()
    assert run.held == exact.held and found.flops == expected.flops and found.arguments == expected.arguments
    assert run.needs == pytest.approx(exact.needs, rel=0.03)
    assert found.bytes_moved == pytest.approx(expected.bytes_moved, rel=0.03)
    sent, expected_sent = (sum(each.moved for each in step.collectives) for step in (found, expected))
    assert sent == pytest.approx(expected_sent, rel=0.03)
    assert "layers.17.weight" in str(run)  # the last layer has its name in the full model


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"stacked": True}, None),
        ({"counts": True}, "equal blocks are computed one by one: the 12 of `layers`, "),
    ],
)
def test_scanned_and_counted_blocks_are_compiled_without_extrapolation(options, expected):
    from redeqx.dry_run import dry_run
    from redeqx.machine import describe

    messages = []
    with redeqx.described("cpu:8"):
        trainer = make_trainer(eqx.filter_eval_shape(Deep, 12, **options, key=jax.random.key(0)))
        size = trainer._engine.batch_size(2, None)
        job = trainer._job(in_order(np.zeros((64, 16), np.float32), size), size)
        run = dry_run(job, describe("cpu:8"), search=False, say=messages.append)
    assert run.extrapolated == "" and run.fits and "extrapolation" not in run.failed
    found = [line for line in messages if "one by one" in line]
    assert (found == []) if expected is None else (found[0].startswith(expected) and "IndexError" in found[0])


@pytest.mark.sweep
def test_fit_with_evaluation_is_extrapolated():
    with redeqx.described("cpu:8"):
        trainer = make_trainer(eqx.filter_eval_shape(Deep, 12, key=jax.random.key(0)))
        predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch))
        rows = np.zeros((16, 16), np.float32)
        with pytest.raises(SystemExit) as done:
            trainer.fit(rows, batch_size=16, n_epochs=1, eval_examples=rows, eval_predictor=predictor)
    run = done.value.run
    assert done.value.code == 0 and not run.failed and set(run.steps) == {"train", "eval", "predict"}
    assert run.extrapolated == "2 and 4 of the 12 of `layers`"
    held = run.held["parameters"]
    assert all(step.arguments >= held for step in run.steps.values())
    # The predict step holds the parameters and the batch.
    assert run.steps["predict"].arguments == pytest.approx(held, rel=0.05)
