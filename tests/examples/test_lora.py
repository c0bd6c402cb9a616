"""The LoRA example at a small size: both methods learn, saved models compute the same, and bad input is refused."""

import json
import math

import equinox as eqx
import jax
import numpy as np
import pytest

from examples._texts import learn_tokenizer
from examples.lora.main import Args, main
from examples.lora.sentences import documentation_sentences, encode, is_plain, read_sentences, sentences_of, split
from redeqx.models import from_pretrained, lora, save_pretrained
from redeqx.models.t5 import T5, T5Config
from tests.examples._run import run_example

SIZES = {
    "words": ("bad", "good"),
    "max_examples": 240,
    "n_base_epochs": 1,
    "base_tokens": 8193,
    "n_ids": 320,
    "n_layers": 1,
    "d_model": 32,
    "n_heads": 2,
    "seq_len": 32,
    "batch_size": 8,
    "n_epochs": 6,
    "learning_rate": 1e-2,
    "lora_learning_rate": 3e-2,
    "eval_every_n_steps": 20,
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table like SST-2's, in which every word of a sentence determines its label."""
    rng = np.random.default_rng(0)
    rows = ["sentence\tlabel"]
    for i in range(240):
        letters = rng.choice(list(("abcd", "wxyz")[i % 2]), 5)
        rows.append(f"{' '.join(letters)}.\t{i % 2}")
    path = tmp_path_factory.mktemp("table") / "train.tsv"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def finished(table, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lora")
    flags = []
    for name, value in {"data": table, **SIZES}.items():
        flags += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [value])]
    return workdir, run_example("lora", *flags, workdir=workdir)


def series(workdir, name):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.sweep
def test_both_methods_learn_and_saved_models_compute_the_same(finished):
    workdir, outcome = finished
    base = series(workdir / "base_run", "loss")
    assert base[0] == pytest.approx(math.log(320), abs=0.5) and base[-1] < 0.9 * base[0]
    for name in ("full", "lora"):
        assert series(workdir / name, "loss")[-1] < 0.5 * series(workdir / name, "loss")[0]
        index = json.loads((workdir / name / "ckpts" / "index.json").read_text("utf-8"))
        assert (workdir / name / "ckpts" / index["argmax_accuracy"] / "model.safetensors").is_file()
    scores = outcome.metrics[-1]
    assert scores["test_full_accuracy"] >= 0.9 and scores["test_lora_accuracy"] >= 0.9
    assert 0 < scores["test_trained_share"] < 0.1
    assert scores["test_merged_agreement"] == 1
    assert (workdir / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    for wanted in ("120 test sentences", f"{scores['test_trained_share']:.2%}", "120 of 120 predictions are the same"):
        assert wanted in outcome.output

    merged, _ = from_pretrained(workdir / "lora" / "model")
    adapted = lora.load_adapter(from_pretrained(workdir / "base")[0], workdir / "lora" / "adapter")
    np.testing.assert_allclose(merged.stack.blocks.mlp.up.weight, lora.merge(adapted).stack.blocks.mlp.up.weight, atol=1e-6)
    assert (workdir / "lora" / "model" / "tokenizer.json").read_bytes() == (workdir / "base" / "tokenizer.json").read_bytes()


@pytest.mark.sweep
def test_rerun_takes_no_step_and_keeps_its_base(table, finished):
    workdir, outcome = finished
    before = (workdir / "base" / "model.safetensors").stat().st_mtime_ns
    scores = main(Args(data=table, workdir=workdir, **SIZES))
    assert scores == {name: value for name, value in outcome.metrics[-1].items() if name.startswith("test_")}
    assert (workdir / "base" / "model.safetensors").stat().st_mtime_ns == before


def test_documentation_sentences_are_balanced_and_parts_are_disjoint():
    examples, corpus = documentation_sentences(400)
    texts, labels = [text for text, _ in examples], [label for _, label in examples]
    assert len(set(texts)) == len(texts) >= 300 and np.mean(labels) == 0.5
    assert set(texts) <= set(corpus) and all(map(is_plain, texts))
    parts = split(examples, 300, 100)
    assert [len(part) for part in parts] == [100, 45, 150]
    assert len(set().union(*map(set, parts))) == 295
    assert [np.mean([label for _, label in part]) for part in parts] == pytest.approx([0.5] * 3, abs=0.1)


def test_sentence_splitting():
    assert list(sentences_of("A b.  C\nd!\n\nE e.g. f\n")) == ["A b.", "C d!", "E e.g.", "f"]
    assert is_plain("It is what it always was.")
    assert not any(map(is_plain, ["Too short.", "without an end of its own as it is", "word " * 80 + "."]))


def test_long_sentence_is_truncated_but_not_its_prompt():
    tokenizer = learn_tokenizer(["Label: language or library.", "Some words to cut."] * 3, 300)
    examples = [("Some words to cut. " * 20, 1), ("Some", 0)]
    rows = encode(examples, ("fine", "wrong"), tokenizer, 1, 24)
    prompt = tokenizer.encode("\nLabel: ", add_special_tokens=False).ids
    for row, (_, label) in zip(rows, examples, strict=True):
        ids = row["ids"][row["mask"]].tolist()
        assert ids[0] == 1 and row["ids"].shape == (24,) and row["label"] == label
        assert tokenizer.decode(ids[1:]).startswith("Some") and tokenizer.decode(ids).endswith("\nLabel: ")
        assert tokenizer.decode(row["answers"].tolist()).strip() == "fw"
    assert rows[0]["mask"].all() and rows[1]["mask"].sum() == 1 + len(prompt) + 1
    with pytest.raises(ValueError, match=r"`--words`: expected words that begin with different tokens, got same, same\. "):
        encode(examples, ("same", "same"), tokenizer, 1, 24)


def error_message(fn, *args):
    with pytest.raises(ValueError) as raised:
        fn(*args)
    return str(raised.value)


def test_invalid_tables_are_refused(tmp_path):
    path = tmp_path / "sst.tsv"
    path.write_text("text\tlabel\nfine\t1\n", "utf-8")
    assert error_message(read_sentences, path, 2).startswith(
        f"`{path}`: expected columns sentence, label, got text, label. "
    )
    for label in ("2", "-1", "good", ""):
        path.write_text(f"sentence\tlabel\nfine\t1\nodd\t{label}\n", "utf-8")
        text = error_message(read_sentences, path, 2)
        assert text.startswith(f"`{path}` row 3: expected a label from 0 to 1, got {label!r}. ")
    path.write_text("sentence\tlabel\nfine\t1\nodd\t2\n", "utf-8")
    assert read_sentences(path, 3) == [("fine", 1), ("odd", 2)]


@pytest.mark.sweep
def test_folder_of_another_model_is_refused(table, tmp_path):
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, n_layers=1, n_decoder_layers=1, n_heads=2)
    folder = save_pretrained(eqx.filter_jit(T5)(config, key=jax.random.key(0)), config, tmp_path / "t5")
    learn_tokenizer(["a b"], 300).save(str(folder / "tokenizer.json"))
    text = error_message(main, Args(data=table, pretrained=folder, workdir=tmp_path / "run", words=("bad", "good")))
    assert text.startswith(f"`{folder / 'config.json'}`: `model_type`: expected one of ") and " llama, " in text
    assert "(Decoder), got 't5'. " in text
