"""Checkpoints of a run that trains a small part of a folder's model: they hold that part, and name the rest."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import redeqx
from redeqx.__main__ import main
from redeqx.checkpoint import Base
from redeqx.models import from_pretrained, lora, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests._tree import named_leaves
from tests.models.families._case import random_model

CONFIG = GPT2Config(vocab_size=64, n_positions=16, d_model=32, n_layers=2, n_heads=4).without_dropout()
EXAMPLES = list(np.random.default_rng(0).integers(0, 64, (16, 8)).astype(np.int32))
ADAPTERS = {f"stack.blocks.attention.{layer}.{leaf}" for layer in ("query", "value") for leaf in ("lora_a", "lora_b")}


def loss_fn(model, batch, key):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch), jnp.roll(batch, 1, 1)).mean()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return save_pretrained(random_model(GPT2, CONFIG, std=0.1), CONFIG, tmp_path_factory.mktemp("published"))


@pytest.fixture
def base(published, tmp_path):
    return Path(shutil.copytree(published, tmp_path / "base"))


def adapted(folder, **options):
    model, _ = from_pretrained(folder, **options)
    return lora.add(model, rank=2, where=("*.query", "*.value"), key=jax.random.key(1))


def train(model, workdir, *, shards=(2, 2), max_steps=4, callbacks=(), trainable=lora.trainable, **options):
    deployer = redeqx.Deployer(0, *shards, workdir=workdir, verbose=options.pop("verbose", False))
    model = model if eqx.is_array(jax.tree.leaves(model)[0]) else model(deployer)
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=options.pop("optimizer", optax.adam(1e-2)),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        trainable=trainable(model),
    )
    trainer.fit(EXAMPLES, batch_size=8, n_epochs=None, max_steps=max_steps, callbacks=callbacks, **options)
    return trainer


def arrays(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)).items()}


def assert_same(found, expected):
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def newest(workdir):
    return workdir / "ckpts" / json.loads((workdir / "ckpts" / "index.json").read_text())["last"]


@pytest.mark.sweep
def test_a_checkpoint_holds_the_trained_leaves(tmp_path, base, capsys):
    optimizer = redeqx.optimizers.ema(optax.adam(1e-2), 0.5)
    trainer = train(adapted(base), tmp_path / "run", optimizer=optimizer, verbose=True)
    folder = newest(tmp_path / "run")
    for file, model in (("model", trainer.eval_model), ("trained", trainer.model)):
        held = load_file(folder / f"{file}.safetensors")
        assert held.keys() == ADAPTERS
        for name, tensor in held.items():
            np.testing.assert_array_equal(tensor, named_leaves(model)[name])
    ((at, sums),) = json.loads((folder / "trainer.json").read_text())["base"].items()
    assert at == str(base) and sums.keys() == arrays(trainer.model).keys() - ADAPTERS
    assert "checkpoints hold 4 leaves; the other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shards", "on_mesh"),
    [
        ((2, 2), True),
        ((4, 1), False),
    ],
)
@pytest.mark.sweep
def test_a_run_continues_from_it_on_any_mesh(tmp_path, base, shards, on_mesh):
    make = (lambda deployer: adapted(base, deployer=deployer)) if on_mesh else adapted(base)
    whole = train(make, tmp_path / "whole", max_steps=6)
    train(make, tmp_path / "run", max_steps=4)
    again = train(make, tmp_path / "run", max_steps=6, shards=shards)
    assert again.step == 6
    for name, leaf in arrays(whole.model).items():
        if shards == (2, 2) or name not in ADAPTERS:
            np.testing.assert_array_equal(arrays(again.model)[name], leaf, err_msg=name)
        else:
            np.testing.assert_allclose(arrays(again.model)[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
    assert load_file(newest(tmp_path / "run") / "model.safetensors").keys() == ADAPTERS


@pytest.mark.sweep
def test_it_is_loaded_over_the_base(tmp_path, base):
    trainer = train(adapted(base), tmp_path / "run")
    assert_same(redeqx.load(tmp_path / "run", adapted(base)), trainer.model)
    deployer = redeqx.Deployer(0, 4, verbose=False)
    loaded = redeqx.load(tmp_path / "run", adapted(base), deployer)
    assert_same(loaded, trainer.model)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(eqx.filter(loaded, eqx.is_array))} == {deployer.mesh}
    predict = {"collate_fn": np.stack, "pred_fn": lambda model, batch, key: jax.vmap(model)(batch)}
    outputs = redeqx.Predictor.load(tmp_path / "run", deployer, like=adapted(base), **predict).predict(
        EXAMPLES, batch_size=8
    )
    expected = trainer.get_default_predictor(predict["pred_fn"]).predict(EXAMPLES, batch_size=8)
    np.testing.assert_allclose(np.stack(outputs), np.stack(expected), rtol=1e-4, atol=1e-5)
    before = arrays(trainer.model)
    trainer.update(EXAMPLES)
    trainer.load_ckpt("last")
    assert_same(trainer.model, loaded)
    assert before.keys() == arrays(loaded).keys() and trainer.step == 4


@pytest.mark.sweep
def test_leaves_trained_beside_the_adapters_reach_an_adapter_from_a_checkpoint(tmp_path, base):
    trainer = train(adapted(base), tmp_path / "run", trainable=lambda model: lora.trainable(model, also="norm.*"))
    assert load_file(newest(tmp_path / "run") / "model.safetensors").keys() == {*ADAPTERS, "norm.weight", "norm.bias"}
    loaded = redeqx.load(tmp_path / "run", adapted(base))
    folder = lora.save_adapter(loaded, tmp_path / "adapter")
    assert_same(lora.load_adapter(from_pretrained(base)[0], folder), trainer.model)


@pytest.mark.sweep
def test_leaves_that_an_earlier_run_trained_reach_the_adapter_after_a_resume(tmp_path, base):
    first = train(adapted(base), tmp_path / "first", trainable=lambda model: lora.trainable(model, also="norm.*"))
    folder = lora.save_adapter(first.model, tmp_path / "first_adapter")
    for max_steps in (2, 4):  # norms are frozen now
        trainer = train(lora.load_adapter(from_pretrained(base)[0], folder), tmp_path / "second", max_steps=max_steps)
    assert trainer.step == 4
    found = lora.load_adapter(from_pretrained(base)[0], lora.save_adapter(trainer.model, tmp_path / "second_adapter"))
    assert_same(found, trainer.model)


def changed_base(base):
    model, config = from_pretrained(base)
    weight = model.stack.blocks.mlp.up.weight
    return save_pretrained(
        eqx.tree_at(lambda m: m.stack.blocks.mlp.up.weight, model, weight.at[0, 3, 5].add(1e-6)), config, base
    )


def message(fn, *args, **kwargs):
    with pytest.raises(ValueError) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


@pytest.mark.sweep
def test_another_base_is_refused(tmp_path, base):
    train(adapted(base), tmp_path / "run")
    like = eqx.filter_eval_shape(lambda model: model, adapted(base))
    text = message(redeqx.load, tmp_path / "run", like)
    assert "expected the values of the base, which this checkpoint of trained leaves does not hold, got a shape for" in text
    assert f"from `{base}`: `redeqx.models.from_pretrained`, then `lora.add`, for example." in text
    half = adapted(base, dtype="bfloat16")
    assert "got bfloat16 instead of float32 in `" in message(redeqx.load, tmp_path / "run", half)
    changed_base(base)
    text = message(redeqx.load, tmp_path / "run", adapted(base))
    assert f"expected the base that it was trained on, `{base}`, with the values of then, got others in" in text
    assert "`stack.blocks.mlp.up.weight`. Load that base" in text
    text = message(train, adapted(base), tmp_path / "run", max_steps=6)
    assert text.startswith("`workdir`: expected a run that this trainer can continue, got ")
    assert "got others in `stack.blocks.mlp.up.weight`" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_values_in_another_order_are_another_base(dtype):
    x = jnp.arange(24, dtype=dtype).reshape(2, 3, 4)
    swapped = x.at[0, 0, 1].set(x[0, 1, 0]).at[0, 1, 0].set(x[0, 0, 1])  # indices of one sum
    orders = [x, x[::-1], x[:, ::-1], x[:, :, ::-1], x[::-1, ::-1], swapped]
    sums = {Base.of({"weight": "folder"}, {"weight": each}).checksums["weight"] for each in orders}
    assert len(sums) == len(orders)


@pytest.mark.sweep
def test_it_holds_everything_where_the_base_is_unknown_or_small(tmp_path, base):
    model = adapted(base)
    copied = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model)
    everything = arrays(model).keys()
    train(copied, tmp_path / "copied")
    assert load_file(newest(tmp_path / "copied") / "model.safetensors").keys() == everything
    mostly = lambda model: jax.tree.map(lambda x: eqx.is_inexact_array(x) and x.ndim > 1, model)  # noqa: E731
    train(model, tmp_path / "mostly", trainable=mostly)
    assert load_file(newest(tmp_path / "mostly") / "model.safetensors").keys() == everything
    # A run whose checkpoints hold everything keeps what they hold.
    changed_base(base)
    train(adapted(base), tmp_path / "copied", max_steps=5)
    assert_same(
        redeqx.load(tmp_path / "copied", eqx.filter_eval_shape(lambda: model)).stack.blocks.mlp, copied.stack.blocks.mlp
    )


@pytest.mark.sweep
def test_the_command_line_inspects_it(tmp_path, base, capsys):
    train(adapted(base), tmp_path / "run")
    main(["inspect", str(tmp_path / "run")])
    out = " ".join(capsys.readouterr().out.split())
    assert "leaves of" in out and "which are not in these files" in out
