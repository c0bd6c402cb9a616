"""The language-modeling example at a small size: it learns, resumes with the same bits, and refuses invalid input."""

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

from examples._texts import learn_tokenizer
from examples.language_modeling.main import Args, collate_fn, loss_fn, main, pred_fn
from examples.language_modeling.texts import cut, first_bytes, load_vocabulary, pack_apart, prompt_of, read_files, read_texts
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.t5 import T5, T5Config
from tests.examples._run import refusal

ROOT = Path(__file__).parents[2]
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
    """Starts the example in a process of its own, as a user does, on eight simulated devices."""
    return subprocess.Popen(
        [sys.executable, "-m", "examples.language_modeling", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Wide, so that no phrase is wrapped. The example itself simulates the eight devices.
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


def run(data, workdir, **changes):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        scores = main(Args(data=data, workdir=workdir, **SIZES, **changes))
    assert metrics(workdir)[-1] == {"step": N_STEPS, **scores}
    return scores["test_bits_per_byte"], output.getvalue()


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """An uninterrupted run: its workdir, its bits per byte, and its output."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, *run(data, workdir)


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def steps(workdir):
    """The recorded lines of training, without the result that each run appends."""
    return [line for line in metrics(workdir) if "test_bits_per_byte" not in line]


def checkpoint(workdir, tag):
    return workdir / "ckpts" / json.loads((workdir / "ckpts" / "index.json").read_text())[tag]


@pytest.mark.sweep
def test_learns_and_reports_its_results(finished):
    workdir, bits, output = finished
    losses = [line["loss"] for line in metrics(workdir) if "loss" in line]
    held_out = [line["eval_loss"] for line in metrics(workdir) if "eval_loss" in line]
    assert len(losses) == N_STEPS
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert held_out[-1] < 0.75 * losses[0]
    # Each byte is a token, and the first is not predicted.
    assert bits == pytest.approx(held_out[-1] / math.log(2), rel=1e-2)

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


@pytest.mark.sweep
def test_rerun_takes_no_step(data, finished):
    workdir, bits, _ = finished
    before = steps(workdir)
    again, output = run(data, workdir)
    assert again == bits
    assert steps(workdir) == before
    assert f"resuming from {checkpoint(workdir, 'last')}, step {N_STEPS}" in output
    assert str(workdir / "loss.png") in output


@pytest.mark.sweep
def test_killed_run_resumes_with_the_same_bits(data, finished, tmp_path):
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
    assert steps(tmp_path) == steps(finished[0])


@pytest.mark.sweep
def test_adamw_learns_at_the_same_learning_rate(data, finished, tmp_path):
    """Its optimizer state differs: Muon's has no second moments for the blocks' matrices."""
    bits, _ = run(data, tmp_path, optimizer="adamw")
    assert bits < 5  # an untrained model needs 8 bits per byte
    sizes = [(checkpoint(workdir, "last") / "optimizer.safetensors").stat().st_size for workdir in (finished[0], tmp_path)]
    assert sizes[0] < 0.9 * sizes[1]


@pytest.mark.parametrize(
    ("flag", "status", "words"),
    [
        (
            "--help",
            0,
            ["--learning-rate FLOAT", "--data {None}|PATH", "A text file, or a folder of them", "(default: 0.003)"],
        ),
        ("--leraning-rate=1", 2, ["--leraning-rate", "Perhaps you meant", "--learning-rate FLOAT"]),
        ("--n-layers=two", 2, ["--n-layers", "two"]),
    ],
)
@pytest.mark.sweep
def test_command_line(flag, status, words):
    outcome = refusal("language_modeling", flag)
    assert outcome.status == status, outcome.output
    for word in words:
        assert word in outcome.output


def test_reads_a_folder_split_by_files(tmp_path, capsys):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"file {i} " * 20)
    (tmp_path / "photo").write_bytes(b"\xff\xfe\xff")
    train, held_out = read_texts(tmp_path)
    assert (train, held_out) == read_texts(tmp_path)
    held_out_files = {i for i in range(40) if f"file {i} " in held_out}
    assert len(held_out_files) == 2
    assert all(f"file {i} " in train for i in set(range(40)) - held_out_files)
    assert not any(f"file {i} " in train for i in held_out_files)
    assert "photo: not UTF-8, skipped" in capsys.readouterr().out


def test_reads_the_standard_library_without_installed_packages():
    train, held_out = read_texts(None)
    assert 0.01 < len(held_out) / len(train) < 0.2  # one file in twenty, but files differ in size
    assert "class Thread" in train + held_out
    assert "jaxtyping" not in train + held_out


def test_rejects_data_without_text(tmp_path):
    with pytest.raises(ValueError, match=r"`--data`: expected text for training and evaluation, got 0 characters in .*"):
        read_texts(tmp_path / "missing")


def test_each_token_is_predicted_once():
    ids = list(range(1, 24))
    for seq_len in (5, 11, 22, 30):
        examples = cut(ids, seq_len)
        assert all(array.shape == (seq_len,) for row in examples for array in row.values())
        given, labels = (np.concatenate([row[name] for row in examples]) for name in ("tokens", "labels"))
        assert labels[labels >= 0].tolist() == ids[1:]
        assert given[labels >= 0].tolist() == ids[:-1]


def test_packed_texts_are_predicted_apart():
    texts = ["ünï" * n for n in (1, 9, 2, 3, 30)]
    assert first_bytes(texts, 5 + 45) == texts[:2] and first_bytes(texts, 9) == [texts[0], "ün"]
    ids = [list(range(100 * i, 100 * i + len(text))) for i, text in enumerate(texts, start=1)]
    rows = pack_apart(ids, 16)
    assert sum(row["segments"].max() for row in rows) > len(rows)
    pairs = []
    for row in rows:
        segments = row["segments"]
        assert all(len(set(row["tokens"][segments == i] // 100)) == 1 for i in range(1, segments.max() + 1))
        has_label = row["labels"] >= 0
        pairs += zip(row["tokens"][has_label].tolist(), row["labels"][has_label].tolist(), strict=True)
    assert sorted(pairs) == [(token, token + 1) for text in ids for token in text[:-1]]


@pytest.mark.sweep
def test_learns_from_packed_files(tmp_path):
    folder, source = tmp_path / "texts", inspect.getsource(inspect)
    folder.mkdir()
    for i in range(120):
        (folder / f"{i}.txt").write_text(source[i * 300 : i * 300 + 20 + 7 * (i % 20)], "utf-8")
    scores = main(Args(data=folder, workdir=tmp_path / "run", pack=True, **{**SIZES, "train_bytes": 10**6, "n_epochs": 2}))
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    rows = pack_apart([list(text.encode()) for text in read_files(folder)[0]], SEQ)
    assert len(losses) == 2 * (len(rows) // BATCH)
    assert losses[-1] < 0.8 * losses[0] and 0 < scores["test_bits_per_byte"] < 8


def test_bytes_and_tokenizer_files_round_trip(tmp_path):
    text = "def f(x):\n    return 'ünï'\n"
    byte_vocabulary = load_vocabulary(None)
    assert byte_vocabulary.decode(byte_vocabulary.encode(text)) == text
    assert (byte_vocabulary.n_ids, len(byte_vocabulary.encode(text))) == (256, len(text.encode()))

    learn_tokenizer([inspect.getsource(inspect)], 300).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        learnt = load_vocabulary(path)
        assert learnt.decode(learnt.encode(text)) == text
        assert len(learnt.encode(text)) < len(text)
        assert learnt.n_ids == 320


@pytest.mark.parametrize(("seq_len", "length"), [(128, 32), (32, 16)])
@pytest.mark.sweep
def test_sample_leaves_room_in_short_rows(seq_len, length):
    (row, *_) = cut(range(1, 2 * seq_len), seq_len)
    prompt = prompt_of(row)
    assert prompt == list(range(1, 1 + length))
    model = GPT2(GPT2Config(2 * seq_len, seq_len, 8, 1, 1).without_dropout(), key=jax.random.key(0))
    assert pred_fn(model, np.array([prompt]), jax.random.key(0)).shape == (1, min(96, seq_len - length))


# --- published models ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_folder_is_trained_on_more_text_and_saved(data, tmp_path, capsys):
    tokenizer = learn_tokenizer([data.read_text("utf-8")], 300)
    sizes = {"n_positions": 48, "d_model": 32, "d_mlp": 64, "n_layers": 1, "n_heads": 2, "init_std": 0.1}
    config = LlamaConfig(vocab_size=320, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    folder = save_pretrained(eqx.filter_jit(Llama)(config, key=jax.random.key(0)), config, tmp_path / "llama")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {**SIZES, "seq_len": 32, "optimizer": "adamw", "learning_rate": 1e-2}
    scores = main(Args(data=data, pretrained=folder, workdir=tmp_path / "run", **settings))
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert f"llama   {scores['test_bits_per_byte']:.3f}" in capsys.readouterr().out
    after, _ = from_pretrained(tmp_path / "run" / "model")  # a complete folder
    assert load_vocabulary(tmp_path / "run" / "model").n_ids == 320
    assert not np.array_equal(after.embedding.weight, from_pretrained(folder)[0].embedding.weight)


@pytest.mark.sweep
def test_loss_is_summed_over_labelled_tokens():
    model = eqx.filter_jit(GPT2)(GPT2Config(64, 32, 16, 1, 2, init_std=0.3).without_dropout(), key=jax.random.key(0))
    batch = collate_fn(cut(list(range(1, 55)), 32))  # the last row is padded
    found = eqx.filter_jit(loss_fn)(model, batch, jax.random.key(0))
    log_probs = jax.nn.log_softmax(jax.vmap(model)(batch["tokens"]).astype(np.float32))
    expected = -sum(log_probs[i, t, batch["labels"][i, t]] for i, t in np.argwhere(batch["labels"] >= 0))
    assert found.weight == (batch["labels"] >= 0).sum() == 53
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)


@pytest.mark.sweep
def test_invalid_input_is_refused(tmp_path):
    def refused(fn, *args):
        with pytest.raises(ValueError) as raised:
            fn(*args)
        return str(raised.value)

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, n_layers=1, n_decoder_layers=1, n_heads=2)
    t5 = save_pretrained(eqx.filter_jit(T5)(config, key=jax.random.key(0)), config, tmp_path / "t5")
    text = refused(main, Args(pretrained=t5, workdir=tmp_path))
    assert text.startswith(f"`{t5 / 'config.json'}`: `model_type`: expected one of ") and " llama, " in text
    assert (
        ", gpt2, gpt_bigcode, gpt_neo, gpt_neox, gpt_oss, gptj, " in text
        and "(Decoder), got 't5'. Pass the folder of such a model." in text
    )
    text = refused(main, Args(pretrained=tmp_path / "none", workdir=tmp_path))
    assert text.startswith(f"`{tmp_path / 'none'}`: expected a folder, got nothing there. ")
