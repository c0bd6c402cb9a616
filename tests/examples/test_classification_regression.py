"""One script for images, tables and texts: training, GLUE's scores, and refused input."""

import json
import math
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.stats import rankdata

import redeqx
from examples._texts import PAD, learn_tokenizer
from examples.classification_regression.cnn import CNN, Shift
from examples.classification_regression.glue import read_glue
from examples.classification_regression.main import Args, apply, collate_fn, main, make_bert
from examples.classification_regression.tasks import Task, encode, measure, read_task, ridge
from redeqx.models import save_pretrained
from redeqx.models.bert import Bert, BertConfig
from redeqx.models.gpt2 import GPT2Config
from tests.examples._run import run_example

STSB = ("sentence1", "sentence2", "score")
SMALL: Any = {"n_model_shards": 2, "batch_size": 32, "max_tokens": 12}
PNG = b"\x89PNG"


def write(path, rows, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in ([header] if header else []) + rows), "utf-8")
    return path.parent


@pytest.fixture(scope="module")
def cola(tmp_path_factory):
    """Sentences that are acceptable if they begin with `the`."""
    folder, draw = tmp_path_factory.mktemp("cola"), random.Random(0)
    words = ["cat", "dog", "sees", "a", "is", "big"]
    for name, n in (("train.tsv", 320), ("dev.tsv", 64)):
        labels = [i % 3 != 0 for i in range(n)]
        rows = [["x", int(y), "", " ".join(["the" if y else "of", *draw.choices(words, k=4)])] for y in labels]
        write(folder / name, rows)
    return folder


@pytest.fixture(scope="module")
def stsb(tmp_path_factory):
    """Pairs with score 4 if both words are the same, else 1."""
    folder, draw = tmp_path_factory.mktemp("stsb"), random.Random(0)
    for name, n in (("train.tsv", 160), ("dev.tsv", 32)):
        firsts = [draw.choice(["cat", "dog"]) for _ in range(n)]
        rows = [[first, (second := draw.choice(["cat", "dog"])), 4.0 if first == second else 1.0] for first in firsts]
        write(folder / name, rows, STSB)
    return folder


def metrics(workdir, name):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_learns_digits(tmp_path):
    flags = ("--n-epochs", 3, "--width", 8, "--learning-rate", 0.01)
    outcome = run_example("classification_regression", *flags, workdir=tmp_path)
    losses = outcome.series("loss")
    assert losses[0] == pytest.approx(math.log(10), abs=0.4)
    assert losses[-1] < 0.6 * losses[0]
    assert outcome.series("test_accuracy")[-1] > 0.5
    assert "data=2 x fsdp=1 x model=2" in outcome.output
    for picture in ("test.png", "mistakes.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
        assert str(tmp_path / picture) in outcome.output
    best = json.loads((tmp_path / "ckpts/index.json").read_text())["argmin_loss"]
    assert str(tmp_path / "ckpts" / best) in outcome.output


@pytest.mark.sweep
def test_learns_a_table_and_reports_ridge(tmp_path):
    scores = main(Args("diabetes", workdir=tmp_path, n_epochs=10, learning_rate=3e-3, n_model_shards=2))
    assert scores["test_r2"] > 0.1
    assert scores["test_pearson"] > 0.4
    assert metrics(tmp_path, "test_r2") == [scores["test_r2"]]
    assert (tmp_path / "test.png").read_bytes().startswith(PNG)
    assert metrics(tmp_path, "test_ridge_r2")[0] > 0.2
    # Another run can start from its checkpoint.
    best = tmp_path / "ckpts" / json.loads((tmp_path / "ckpts/index.json").read_text())["argmin_loss"]
    main(Args("diabetes", pretrained=best, workdir=tmp_path / "again", n_epochs=1, n_model_shards=2))
    assert metrics(tmp_path / "again", "loss")[0] < 0.8 * metrics(tmp_path, "loss")[0]


def save_bert(folder, texts):
    """Saves a BERT with random weights, without a pooler, and with a tokenizer for these texts."""
    tokenizer = learn_tokenizer(texts, 300)
    config = BertConfig(tokenizer.get_vocab_size(), 16, 2, 16, 32, 1, 2, n_classes=3, has_pooler=False)
    saved = eqx.filter_jit(Bert)(config, key=jax.random.key(0))
    save_pretrained(saved, config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return saved, tokenizer


@pytest.mark.sweep
def test_learns_sentences(cola, tmp_path):
    save_bert(tmp_path / "bert", [text for (text,), _ in read_glue("cola", cola / "train.tsv")])
    scores = main(Args("cola", cola, tmp_path / "bert", tmp_path / "run", n_epochs=12, learning_rate=1e-2, **SMALL))
    assert scores["test_matthews"] > 0.9
    assert (tmp_path / "run" / "test.png").read_bytes().startswith(PNG)


@pytest.mark.sweep
def test_published_bert_gets_a_new_head(stsb, tmp_path):
    folder = tmp_path / "bert"
    saved, tokenizer = save_bert(folder, ["cat dog"])
    deployer, task = redeqx.Deployer(0, n_model_shards=2, verbose=False), read_task("stsb", stsb, 8, 1)
    model, read = make_bert(task, folder, deployer)
    assert read.to_str() == tokenizer.to_str()
    for wanted, leaf in zip(jax.tree.leaves(saved.stack), jax.tree.leaves(model.encoder.stack), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
    assert model.encoder.pooler.weight.shape == (16, 16)  # new: the folder has none
    batch = collate_fn(encode(task, read, 12, PAD).test[:5])
    numbers, _ = eqx.filter_jit(apply)(model, eqx.nn.State(model), batch, jax.random.key(0))
    assert numbers.shape == (5, 1)


# --- parts of the example --------------------------------------------------------------------------------------------


def test_scores_match_their_formulas():
    draw = np.random.default_rng(0)
    targets, outputs = draw.integers(0, 2, 50), draw.normal(size=(50, 2))
    predictions = outputs.argmax(1)
    counts = [[np.sum((targets == i) & (predictions == j)) for j in range(2)] for i in range(2)]
    (tn, fp), (fn, tp) = counts
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    examples = [({}, target) for target in targets]
    cola = measure(Task("cola", (), (), (), ("no", "yes")), examples, outputs)
    assert cola == pytest.approx({"matthews": (tp * tn - fp * fn) / root, "accuracy": (tp + tn) / 50})
    mrpc = measure(Task("mrpc", (), (), (), ("no", "yes")), examples, outputs)
    assert mrpc == pytest.approx({"f1": 2 * tp / (2 * tp + fp + fn), "accuracy": (tp + tn) / 50})

    numbers, outputs = draw.normal(size=50), draw.normal(size=(50, 1))
    examples = [({}, number) for number in numbers]
    pearson = np.corrcoef(numbers, outputs[:, 0])[0, 1]
    spearman = np.corrcoef(rankdata(numbers), rankdata(outputs))[0, 1]
    assert measure(Task("stsb", (), (), ()), examples, outputs) == pytest.approx({"pearson": pearson, "spearman": spearman})
    r2 = 1 - np.sum((numbers - outputs[:, 0]) ** 2) / np.sum((numbers - numbers.mean()) ** 2)
    assert measure(Task("diabetes", (), (), ()), examples, outputs) == pytest.approx({"r2": r2, "pearson": pearson})
    assert measure(Task("stsb", (), (), ()), examples, np.ones((50, 1))) == {"pearson": 0, "spearman": 0}


def test_ridge_fits_a_linear_rule():
    features = np.random.default_rng(0).normal(size=(60, 3))
    examples = [({"x": x}, x @ [1.0, -2.0, 0.5]) for x in features]
    assert ridge(Task("diabetes", examples[:40], (), examples[40:]))["r2"] > 0.999


def test_glue_folders_are_read_without_changes(tmp_path):
    """Each task has its own folder and labels."""
    rte = ("index", "sentence1", "sentence2", "label")
    for name in ("train.tsv", "dev.tsv"):
        write(tmp_path / "RTE" / name, [[i, "a", "b", ("entailment", "not_entailment")[i % 2]] for i in range(10)], rte)
    task = read_task("rte", tmp_path, 8, 1)
    assert task.classes == ("not_entailment", "entailment")
    assert [label for _, label in task.test[:3]] == [1, 0, 1]
    assert read_task("rte", tmp_path / "RTE", 8, 1) == task

    mnli = ("sentence1", "sentence2", "label1", "gold_label")
    rows = [["a", "b", "x", ("contradiction", "neutral", "entailment")[i % 3]] for i in range(12)]
    for name in ("train.tsv", "dev_matched.tsv"):
        write(tmp_path / "MNLI" / name, rows, mnli)
    assert [label for _, label in read_task("mnli", tmp_path, 8, 1).test[:3]] == [0, 1, 2]
    write(tmp_path / "MNLI" / "dev_matched.tsv", [["a", "b", "x", "-"]], mnli)
    expected = r"row 2: expected a gold_label of contradiction, neutral or entailment, got '-'\. Fix"
    with pytest.raises(ValueError, match=expected):
        read_task("mnli", tmp_path, 8, 1)

    qqp = ("question1", "question2", "is_duplicate")
    rows = [["a", "b", 0], ["a"], ["c", "d", 1], ["a", "b", "c", "d"]] * 3
    for name in ("train.tsv", "dev.tsv"):
        write(tmp_path / "QQP" / name, rows, qqp)
    with pytest.warns(UserWarning, match=r"\.tsv`: 6 rows of other lengths are skipped, the first row 3"):
        task = read_task("qqp", tmp_path, 8, 1)
    assert [label for _, label in task.test] == [0, 1] * 3
    write(tmp_path / "QQP" / "dev.tsv", [["a"], ["a", "b", "x"]], qqp)
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"dev\.tsv` row 3: expected a is_duplicate of 0 or 1, got 'x'"),
    ):
        read_task("qqp", tmp_path, 8, 1)


def test_glue_is_split_into_three_parts(cola, stsb):
    task = read_task("cola", cola, 8, 1)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [288, 32, 64]
    assert task.test == read_glue("cola", cola / "dev.tsv")
    assert sorted([*task.train, *task.validation]) == sorted(read_glue("cola", cola / "train.tsv"))
    assert task.test[0][0][0].startswith("of ")
    assert task.test[0][1] == 0

    task = read_task("stsb", stsb, 8, 1)
    targets = np.array([target for _, target in task.train])
    assert targets.mean() == pytest.approx(0, abs=1e-6)
    assert targets.std() == pytest.approx(1, abs=1e-6)
    wanted = [label for _, label in read_glue("stsb", stsb / "dev.tsv")]
    assert [task.mean + task.deviation * target for _, target in task.test] == pytest.approx(wanted)


def test_pair_is_encoded_with_token_types():
    tokenizer = learn_tokenizer(["ab"], 300)
    part = [(("a", "bcd"), 1)]
    ((inputs, target),) = encode(Task("mrpc", part, part, part), tokenizer, 10, PAD).train
    assert target == 1
    a, b, c, d = (tokenizer.token_to_id(letter) for letter in "abcd")
    assert inputs["ids"].tolist() == [1, a, 2, b, c, d, 2, 0, 0, 0]
    assert inputs["token_types"][:7].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert inputs["mask"].tolist() == [True] * 7 + [False] * 3
    ((cut, _),) = encode(Task("mrpc", part, part, part), tokenizer, 6, PAD).train
    assert cut["ids"].shape == (6,)


@pytest.mark.sweep
def test_shift_moves_the_image_only_in_training():
    image = jnp.zeros((1, 5, 5)).at[0, 2, 2].set(1)
    shift = Shift(1)
    places = {tuple(map(int, jnp.argwhere(shift(image, key=jax.random.key(i)))[0, 1:])) for i in range(60)}
    assert places == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}
    resting = eqx.nn.inference_mode(shift)
    np.testing.assert_array_equal(resting(image, key=jax.random.key(0)), image)


@pytest.mark.parametrize("size", [4, 8, 30, 32])
def test_images_of_several_sizes(size):
    model, image = eqx.filter_eval_shape(lambda: CNN(1, size, 4, 7, key=jax.random.key(0))), jnp.zeros((2, 1, size, size))
    batch = {"inputs": {"image": image}, "targets": jnp.zeros(2, int)}
    state = eqx.filter_eval_shape(eqx.nn.State, model)
    assert eqx.filter_eval_shape(apply, model, state, batch, jax.random.key(0))[0].shape == (2, 7)


def test_batch_norm_statistics_are_kept_in_the_state():
    model = eqx.filter_jit(CNN)(3, 8, 4, 7, key=jax.random.key(0))
    state = eqx.nn.State(model)
    images = np.random.default_rng(0).normal(2, 1, (6, 3, 8, 8)).astype(np.float32)
    batch = collate_fn([({"image": image}, 0) for image in images])
    outputs, trained = eqx.filter_jit(apply)(model, state, batch, jax.random.key(0))
    assert outputs.shape == (6, 7)
    before, after = jax.tree.leaves(state), jax.tree.leaves(trained)
    assert not any(np.allclose(x, y) for x, y in zip(before, after, strict=True))
    _, same = eqx.filter_jit(apply)(eqx.nn.inference_mode(model), trained, batch, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, after, jax.tree.leaves(same))


# --- refused input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "label", "row", "rule", "found"),
    [("cola", "2", 2, "label of 0 or 1", "'2'"), ("stsb", "7.0", 3, "score of from 0 to 5", "'7.0'"),
     ("stsb", "nan", 3, "score of from 0 to 5", "'nan'"), ("cola", "label", 2, "label of 0 or 1", "'label'")],
)  # fmt: skip
def test_label_out_of_range_is_named(task, label, row, rule, found, tmp_path):
    good, bad = (["x", 1, "", "a"], ["x", label, "", "b"]) if task == "cola" else (["a", "b", 5.0], ["a", "b", label])
    write(tmp_path / "dev.tsv", [good, bad], None if task == "cola" else STSB)
    with pytest.raises(ValueError, match=f"dev.tsv` row {row}: expected a {rule}, got {found}"):
        read_task(task, tmp_path, 8, 1)


def test_table_with_other_columns_is_named(cola, stsb):
    with pytest.raises(ValueError, match=r"dev.tsv`: expected columns #1 String, #2 String, Quality, got sentence1"):
        read_task("mrpc", stsb, 8, 1)
    with pytest.raises(ValueError, match=r"dev.tsv` row 1: expected 4 columns \(source, label, mark, sentence\), got 3"):
        read_task("cola", stsb, 8, 1)
    with pytest.raises(ValueError, match=r"dev.tsv`: expected columns sentence, label, got x, 0"):
        read_task("sst2", cola, 8, 1)


def test_missing_or_unexpected_data_is_reported(tmp_path):
    for task, wanted in (("cola", "train.tsv and dev.tsv"), ("images", "subfolders of images")):
        with pytest.raises(ValueError, match=f"`--data`: expected a folder for `--task {task}` with {wanted}"):
            read_task(task, None, 8, 1)
    with pytest.raises(ValueError, match="`--data`: expected none with `--task digits`"):
        read_task("digits", tmp_path, 8, 1)
    with pytest.raises(ValueError, match=r"dev.tsv`: expected a .tsv, .csv or .jsonl file, got none"):
        read_task("sst2", tmp_path, 8, 1)


def test_empty_image_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"`{tmp_path}`: expected two or more subfolders with images.*got 0"):
        read_task("images", tmp_path, 8, 1)
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"cats`: expected at least 5 images.*got 0"):
        read_task("images", tmp_path, 8, 1)
    for name in ("cats", "dogs"):
        for i in range(5):
            Image.new("RGB", (6, 4), "red").save(tmp_path / name / f"{i}.png")
    task = read_task("images", tmp_path, 8, 3)
    assert task.classes == ("cats", "dogs")
    assert [len(part) for part in (task.train, task.validation, task.test)] == [6, 2, 2]
    assert task.train[0][0]["image"].shape == (3, 8, 8)


@pytest.mark.sweep
def test_folders_without_bert_are_named(cola, tmp_path):
    folder = tmp_path / "folder"
    write(folder / "config.json", [[json.dumps(GPT2Config(64, 16, 16, 1, 2).to_hf())]])
    args = Args("cola", cola, folder, workdir=tmp_path / "run", **SMALL)
    with pytest.raises(ValueError, match=r"folder/config\.json`: `model_type`: expected bert for Bert, got 'gpt2'"):
        main(args)
    config = BertConfig(64, 16, 2, 16, 32, 1, 2)
    save_pretrained(Bert(config, key=jax.random.key(0)), config, folder)
    with pytest.raises(ValueError, match=r"folder`: expected a tokenizer\.json, got none"):
        main(args)
    with pytest.raises(ValueError, match="`--pretrained`: expected the folder of a BERT for `--task cola`, got none"):
        main(Args("cola", cola, workdir=tmp_path / "run", **SMALL))
