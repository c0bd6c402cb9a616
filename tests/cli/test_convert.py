"""`redeqx convert`: folders, runs and files become folders and files with the same values; and each of its errors."""

import os
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.models import from_pretrained, gpt2, lora, save_pretrained
from tests.cli.commands import error_of, output_of

CONFIG = gpt2.GPT2Config(vocab_size=32, n_positions=8, d_model=16, n_layers=2, n_heads=2)
QUERY = "*.attention.query"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "tokenizer.json").write_text("{}")
    return save_pretrained(gpt2.GPT2(CONFIG, key=jax.random.key(0)), CONFIG, folder)


@pytest.fixture(scope="module")
def adapted(base):
    """The base model with adapters that change its output."""
    model = lora.add(from_pretrained(base)[0], rank=2, alpha=6, where=QUERY, key=jax.random.key(1))
    return jax.tree.map(lambda leaf, is_of: leaf + 0.25 if is_of else leaf, model, lora.trainable(model))


def save_run(model, workdir):
    """Saves a run whose only checkpoint holds this model."""
    deployer = redeqx.Deployer(workdir=workdir, n_model_shards=2, verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.sum(jax.vmap(model.hidden)(batch)),
    )
    trainer.save_ckpt()
    return workdir


def is_same_tree(a, b):
    leaves = zip(*(jax.tree.leaves(eqx.filter(x, eqx.is_array_like)) for x in (a, b)), strict=True)
    return all(np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype for x, y in leaves)


def test_folder_in_another_dtype_keeps_its_tokenizer(base, tmp_path, capsys):
    out = output_of(capsys, "convert", base, tmp_path / "to" / "it", "--dtype", "bfloat16")
    assert out.splitlines()[0] == f"{tmp_path}/to/it" and out.count("KiB") == 1
    model, config = from_pretrained(tmp_path / "to" / "it")
    assert is_same_tree(model, from_pretrained(base, dtype="bfloat16")[0]) and config == CONFIG
    assert {path.name for path in (tmp_path / "to" / "it").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize(("dtype", "is_narrow"), [(None, False), ("bfloat16", False), ("bfloat16", True)])
def test_peft_adapter_is_merged_and_rounded_once(base, adapted, tmp_path, dtype, is_narrow, capsys):
    lora.save_adapter(adapted, tmp_path / "adapter")
    options = [] if dtype is None else ["--dtype", dtype]
    if is_narrow:
        output_of(capsys, "convert", base, tmp_path / "narrow", *options)
        base = tmp_path / "narrow"
    output_of(capsys, "convert", base, tmp_path / "to", "--adapter", tmp_path / "adapter", *options)
    wide = lora.merge(lora.load_adapter(from_pretrained(base, dtype="float32")[0], tmp_path / "adapter"))
    expected = jax.tree.map(lambda x: x.astype(dtype or "float32") if eqx.is_array(x) else x, wide)
    assert is_same_tree(from_pretrained(tmp_path / "to")[0], expected) and not is_same_tree(
        from_pretrained(base)[0], expected
    )


def test_run_becomes_a_folder(base, tmp_path, capsys):
    model = gpt2.GPT2(CONFIG, key=jax.random.key(3))
    run = save_run(model, tmp_path / "run")
    (base / "model.safetensors").rename(tmp_path / "away")  # the folder need not hold weights
    try:
        output_of(capsys, "convert", run, tmp_path / "to", "--config", base)
    finally:
        (tmp_path / "away").rename(base / "model.safetensors")
    assert is_same_tree(from_pretrained(tmp_path / "to")[0], model) and (tmp_path / "to" / "tokenizer.json").exists()


def test_trained_adapters_of_different_ranks_are_merged(base, adapted, tmp_path, capsys):
    model = lora.add(adapted, rank=3, alpha=6, where="*.attention.value", key=jax.random.key(2))
    model = eqx.tree_at(lambda m: m.stack.blocks.attention.value.lora_b, model, replace_fn=lambda x: x + 1)
    run = save_run(model, tmp_path / "run")
    output_of(capsys, "convert", run / "ckpts" / "last", tmp_path / "to", "--config", base, "--alpha", "6")
    assert is_same_tree(from_pretrained(tmp_path / "to")[0], lora.merge(model))


def test_one_kind_of_a_checkpoint_becomes_one_file(base, tmp_path, capsys):
    folder = save_run(from_pretrained(base)[0], tmp_path / "run") / "ckpts" / "step_00000000"
    output_of(capsys, "convert", folder, tmp_path / "to.safetensors", "--kind", "model", "--dtype", "float16")
    expected = {name: x.astype(np.float16) for name, x in load_file(folder / "model.safetensors").items()}
    found = load_file(tmp_path / "to.safetensors")
    assert found.keys() == expected.keys() and all(is_same_tree(found[name], expected[name]) for name in found)
    with safe_open(tmp_path / "to.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it


def test_shards_become_one_file(base, tmp_path, capsys):
    folder = save_pretrained(from_pretrained(base)[0], CONFIG, tmp_path / "shards", max_shard_size="4KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    save_file({"x": np.ones(2)}, folder / "adapter_model.safetensors")  # files beside the model are not part of it
    output_of(capsys, "convert", folder, tmp_path / "to.safetensors")
    found, expected = load_file(tmp_path / "to.safetensors"), load_file(base / "model.safetensors")
    assert found.keys() == expected.keys() and all(is_same_tree(found[name], expected[name]) for name in found)


def test_integers_keep_their_dtype(tmp_path, capsys):
    save_file({"ids": np.arange(3), "x": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    output_of(capsys, "convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--dtype", "bfloat16")
    assert {name: str(x.dtype) for name, x in load_file(tmp_path / "b.safetensors").items()} == {
        "ids": "int64",
        "x": "bfloat16",
    }


# --- errors ------------------------------------------------------------------------------------------------------------


def test_existing_paths_are_not_overwritten(base, tmp_path, capsys):
    for name in ("to", "to.safetensors"):
        (tmp_path / name).mkdir()
        assert error_of(capsys, "convert", base, tmp_path / name) == (
            f"`{tmp_path}/{name}`: expected a path that does not exist yet, got one that does. Remove it, or pass another."
        )


@pytest.mark.parametrize("name", ["to", "to.safetensors"])
def test_values_beyond_float16_are_refused(base, tmp_path, name, capsys):
    model, config = from_pretrained(base)
    model = eqx.tree_at(lambda m: m.stack.blocks.attention.output.bias, model, replace_fn=lambda x: x + 1e6)
    source = save_pretrained(model, config, tmp_path / "large")
    assert error_of(capsys, "convert", source, tmp_path / name, "--dtype", "float16") == (
        f"`--dtype`: expected numbers in the range of float16, got larger ones in {source}. Pass bfloat16, which has the "
        "range of float32."
    )
    assert os.listdir(tmp_path) == ["large"]


def test_folder_of_several_files_needs_a_kind(tmp_path, capsys):
    for name in ("a", "b"):
        save_file({"x": np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    to = tmp_path / "to.safetensors"
    assert error_of(capsys, "convert", tmp_path, to) == "`--kind`: expected one of a, b, got none. Pass one of them."
    output_of(capsys, "convert", tmp_path, to, "--kind", "b")


def test_invalid_option_combinations(base, adapted, tmp_path, capsys):
    run, of_adapters = save_run(from_pretrained(base)[0], tmp_path / "run"), save_run(adapted, tmp_path / "adapters")
    to = tmp_path / "to"
    errors = {
        (base, to, "--config", base): (
            f"`--config`: expected none with {base}, which has its own config.json, got {base}. Leave it out."
        ),
        (run, to): (
            f"`--config`: expected the Hugging Face folder that describes the model in {run}, got none. Pass the one that "
            "it was made from, or a DST that ends in .safetensors."
        ),
        (of_adapters, to, "--config", base): (
            f"`--alpha`: expected the `alpha` of `lora.add` for the 1 adapters in {of_adapters}, got none. Its default is "
            "the rank: here 2."
        ),
        (run, to, "--config", base, "--alpha", "4"): f"`--alpha`: expected adapters in {run}, got none. Leave it out.",
        (of_adapters, to, "--config", base, "--alpha", "4", "--adapter", base): (
            f"`--adapter`: expected weights without adapters, got 1 in {of_adapters}. Leave it out."
        ),
        (base, to, "--adapter", run): (
            f"`--adapter`: expected a folder with adapter_config.json, got {run}. Pass one of PEFT's."
        ),
        (base, f"{to}.safetensors", "--adapter", run): (
            f"`--adapter`: expected a folder as DST, got the file {to}.safetensors. Leave it out, or write `{to}`."
        ),
        (run, to, "--kind", "ema"): "`--kind`: expected one of model, optimizer, got 'ema'. Pass one of them.",
    }
    for argv, expected in errors.items():
        assert error_of(capsys, "convert", *argv) == expected
    assert not to.exists()


def test_checkpoint_of_another_model(base, tmp_path, capsys):
    config = gpt2.GPT2Config(vocab_size=32, n_positions=8, d_model=32, n_layers=2, n_heads=2)
    run = save_run(gpt2.GPT2(config, key=jax.random.key(0)), tmp_path / "run")
    reported = error_of(capsys, "convert", run, tmp_path / "to", "--config", base)
    assert reported.startswith(f"`{run}/ckpts/step_00000000/model.safetensors`: expected the tensors of this model, got ")
    assert "`embedding.weight`: expected float32 (32, 16), got float32 (32, 32)." in reported
    assert not (tmp_path / "to").exists()


def test_damaged_checkpoint_is_not_converted(base, tmp_path, capsys):
    run = save_run(from_pretrained(base)[0], tmp_path / "run")
    with open(run / "ckpts" / "step_00000000" / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    for to, options in (("to", ("--config", base)), ("to.safetensors", ())):
        assert "model.safetensors`: expected crc32 " in error_of(capsys, "convert", run, tmp_path / to, *options)
        assert not (tmp_path / to).exists()


def test_insufficient_disk_or_memory(base, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=2000))
        assert error_of(capsys, "convert", base, tmp_path / "to") == (
            f"`{tmp_path}/to`: expected 30.7 KiB free on its disk, got 1.95 KiB. Make room, or write elsewhere."
        )
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert error_of(capsys, "convert", base, tmp_path / "to") == (
        f"`{base}`: expected a model that fits this host's memory (9.77 KiB), got one of 30.7 KiB. Convert it on a larger "
        "host."
    )
