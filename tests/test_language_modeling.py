"""The main job, small: it learns, resumes with the same bits, and refuses what it does not understand."""

import contextlib
import inspect
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from examples.language_modeling.main import Args, cut, is_matrix, load_tokenizer, main, pred_fn, read_texts
from redeqx.models.gpt2 import GPT2, GPT2Config

SCRIPT = Path(__file__).parents[1] / "examples" / "language_modeling" / "main.py"
N_STEPS, BATCH, SEQ = 60, 8, 64
SIZES = {
    "train_bytes": N_STEPS * BATCH * SEQ + 1,
    "held_out_bytes": 3000,
    "n_layers": 1,
    "d_model": 32,
    "n_heads": 2,
    "seq_len": SEQ,
    "batch_size": BATCH,
    "n_model_shards": 2,
    "eval_every_n_steps": 10,
    "save_every_n_steps": 7,
}


def start(*arguments):
    """The script in a process of its own, as a user starts it, on eight simulated devices."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Wide, so that no phrase is folded. That there are eight devices is the script's own doing.
        env={**{k: v for k, v in os.environ.items() if k != "NPROC"}, "COLUMNS": "200"},
    )


def arguments(data, workdir):
    pairs = {"data": data, "workdir": workdir, **SIZES}
    return [part for name, value in pairs.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(inspect.getsource(inspect), "utf-8")
    return path


def run(data, workdir):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        bits = main(Args(data=data, workdir=workdir, **SIZES))
    return bits, output.getvalue()


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run that nothing interrupted: its workdir, its bits per byte, and what it printed."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, *run(data, workdir)


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def checkpoint(workdir, tag):
    return workdir / "ckpts" / json.loads((workdir / "ckpts" / "index.json").read_text())[tag]


def test_learns_and_says_what_it_did(finished):
    workdir, bits, output = finished
    losses = [line["loss"] for line in metrics(workdir) if "loss" in line]
    held_out = [line["eval_loss"] for line in metrics(workdir) if "eval_loss" in line]
    assert len(losses) == N_STEPS
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert held_out[-1] < 0.75 * losses[0]
    assert bits == pytest.approx(held_out[-1] / math.log(2), rel=1e-2)  # bytes: a token each, but for the first

    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    best = checkpoint(workdir, "argmin_loss")
    assert best.name == f"step_{10 * (1 + int(np.argmin(held_out))):08}"
    last = checkpoint(workdir, "last")
    assert last.name == f"step_{N_STEPS:08}"
    for wanted in (
        "mesh data=4 x fsdp=1 x model=2",
        "stack.blocks.mlp.up.weight",
        f"GPT-2   {bits:.3f}",
        "zlib    ",
        "lzma    ",
        "sample: held-out text",
        str(workdir / "loss.png"),
        str(workdir / "metrics.jsonl"),
        str(best),
        str(last),
    ):
        assert wanted in output


def test_run_again_it_takes_no_step(data, finished):
    workdir, bits, _ = finished
    before = metrics(workdir)
    again, output = run(data, workdir)
    assert again == bits
    assert metrics(workdir) == before
    assert f"resuming from {checkpoint(workdir, 'last')}, step {N_STEPS}" in output
    assert str(workdir / "loss.png") in output


def test_killed_and_run_again_it_ends_with_the_same_bits(data, finished, tmp_path):
    process = start(*arguments(data, tmp_path))
    deadline = time.monotonic() + 120
    try:
        while not (tmp_path / "ckpts" / "step_00000014" / "trainer.json").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert checkpoint(tmp_path, "last").name < f"step_{N_STEPS:08}"

    process = start(*arguments(data, tmp_path))
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, output
    whole, resumed = checkpoint(finished[0], "last"), checkpoint(tmp_path, "last")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert metrics(tmp_path) == metrics(finished[0])


@pytest.mark.parametrize(
    ("flag", "status", "words"),
    [
        (
            "--help",
            0,
            ["--learning-rate FLOAT", "--data {None}|PATH", "A text file, or a folder of them.", "(default: 0.003)"],
        ),
        ("--leraning-rate=1", 2, ["--leraning-rate", "Perhaps you meant", "--learning-rate FLOAT"]),
        ("--n-layers=two", 2, ["--n-layers", "two"]),
    ],
)
def test_command_line(flag, status, words):
    process = start(flag)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, output
    for word in words:
        assert word in output


def test_reads_a_folder_by_file(tmp_path, capsys):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"file {i} " * 20)
    (tmp_path / "photo").write_bytes(b"\xff\xfe\xff")
    train, held_out = read_texts(tmp_path)
    assert (train, held_out) == read_texts(tmp_path)
    held_out_files = {i for i in range(40) if f"file {i} " in held_out}
    assert len(held_out_files) == 2
    assert all(f"file {i} " in train for i in set(range(40)) - held_out_files)
    assert not any(f"file {i} " in train for i in held_out_files)
    assert "photo: not UTF-8, left out" in capsys.readouterr().out


def test_reads_the_standard_library_and_nothing_installed_in_it():
    train, held_out = read_texts(None)
    assert 0.01 < len(held_out) / len(train) < 0.2  # by number it is one file in twenty
    assert "class Thread" in train + held_out
    assert "jaxtyping" not in train + held_out


def test_rejects_data_without_text(tmp_path):
    with pytest.raises(ValueError, match=r"`--data`: expected text to train on and to hold out, got 0 characters in .*"):
        read_texts(tmp_path / "missing")


def test_each_token_is_predicted_once():
    ids = list(range(1, 24))
    for seq_len in (5, 11, 22, 30):
        rows = cut(ids, seq_len)
        assert rows.shape[1] == seq_len + 1
        labels = rows[:, 1:].ravel()
        assert labels[labels >= 0].tolist() == ids[1:]
        assert rows[0, 0] == ids[0]


def test_bytes_and_tokenizer_files_give_the_text_back(tmp_path):
    text = "def f(x):\n    return 'ünï'\n"
    encode, decode, n_ids = load_tokenizer(None)
    assert decode(encode(text)) == text
    assert (n_ids, len(encode(text))) == (256, len(text.encode()))

    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([inspect.getsource(inspect)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode, decode, n_ids = load_tokenizer(tmp_path / "tokenizer.json")
    assert decode(encode(text)) == text
    assert len(encode(text)) < len(text)
    assert n_ids == 320


def test_only_weights_of_layers_decay():
    model = eqx.filter_eval_shape(GPT2, GPT2Config(64, 8, 16, 2, 2), key=jax.random.key(0))
    shapes = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    marked = jax.tree_util.tree_leaves_with_path(is_matrix(shapes))
    decaying = {jax.tree_util.keystr(path).removeprefix(".stack.blocks") for path, decays in marked if decays}
    layers = [f".attention.{name}" for name in ("query", "key", "value", "output")] + [".mlp.up", ".mlp.down"]
    assert decaying == {".embedding.weight", *(f"{layer}.weight" for layer in layers)}


def test_a_sample_depends_on_its_prompt_alone():
    config = GPT2Config(64, 48, 16, 1, 2, 0.0, 0.0, 0.0, init_std=0.3)
    ids = jax.random.randint(jax.random.key(1), (2, 48), 0, 64)

    @jax.jit
    def sample(ids):
        return pred_fn(GPT2(config, key=jax.random.key(0)), {"ids": ids}, jax.random.key(2))

    out = sample(ids)
    np.testing.assert_array_equal(out[:, :32], ids[:, :32])
    np.testing.assert_array_equal(out, sample(ids.at[:, 32:].set(0)))
    assert not np.array_equal(out, sample(ids.at[:, 31].add(1)))
