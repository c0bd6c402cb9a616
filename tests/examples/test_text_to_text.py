"""Text to text at a small size: it learns and saves on a mesh, data and scores are correct, and bad input is refused."""

import json
import shutil
from functools import partial

import pytest
from tokenizers import Tokenizer

import redeqx
from examples._texts import fixed_length, learn_tokenizer, read_pairs
from examples.text_to_text.main import IGNORED, Args, collate_fn, load_pretrained, main, pred_fn
from examples.text_to_text.pairs import (
    METRICS,
    best_copies,
    common_opening,
    copy_scores,
    denoising_pairs,
    docstring_pairs,
    first_sentence,
    rouge,
    split,
    words,
)
from tests.examples._run import run_example

NOUNS = ("file", "name", "size", "list", "path", "node", "time", "code")
SIZES = {"n_source": 8, "n_target": 8, "n_beams": 2, "vocab_size": 320, "d_model": 32, "n_heads": 2, "n_decoder_layers": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs that are easy to learn: the target contains the first word of the source."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    pairs = [(f"{noun} {other} {i}", f"Return the {noun}.") for i in range(10) for noun in NOUNS for other in NOUNS]
    path.write_text("".join(json.dumps({"code": s, "text": t}) + "\n" for s, t in pairs))
    return path


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    flags = ["--n-denoising-epochs", 1, "--n-epochs", 3, "--n-validation", 32, "--n-test", 32]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    columns = ["--data", data, "--source-column", "code", "--target-column", "text"]
    return workdir, run_example("text_to_text", *columns, *flags, workdir=workdir)


@pytest.mark.sweep
def test_learns(finished):
    workdir, outcome = finished
    losses = outcome.series("loss")
    assert losses[-1] < losses[0] / 2
    assert outcome.metrics[-1]["test_rouge2"] > 40 > outcome.series("eval_rouge2")[0]
    assert {f"test_{kind}{name}" for kind in ("", "copy_", "opening_copy_") for name in METRICS} < outcome.metrics[-1].keys()
    assert "512 pairs for training" in outcome.output
    assert (workdir / "rouge.png").stat().st_size > 10_000
    index = json.loads((workdir / "ckpts/index.json").read_text())
    assert {"argmax_rouge2", "argmax_rougeL"} < index.keys()


@pytest.mark.sweep
def test_saved_folder_generates_the_same_outputs(finished):
    workdir, _ = finished
    deployer = redeqx.Deployer(verbose=False)
    model, tokenizer = load_pretrained(workdir / "model", deployer)
    sources, targets = (fixed_length(tokenizer, SIZES[name], 0) for name in ("n_source", "n_target"))
    predictor = redeqx.Predictor(
        deployer,
        model=model,
        collate_fn=partial(collate_fn, sources=sources, targets=targets),
        pred_fn=partial(pred_fn, n_tokens=SIZES["n_target"], n_beams=SIZES["n_beams"], length_penalty=1.0),
        output_fn=lambda ids: tokenizer.decode_batch(ids.tolist()),
    )
    saved = [json.loads(line) for line in (workdir / "outputs/test.jsonl").read_text().splitlines()]
    assert predictor.predict([(line["source"], line["target"]) for line in saved], 8) == [line["output"] for line in saved]


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_pretrained_folder_keeps_its_tokenizer_files(data, finished, tmp_path):
    shutil.copytree(finished[0] / "model", tmp_path / "base")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(config))
    fewer = {"n_source": 8, "n_target": 8, "n_beams": 1, "n_train": 16, "n_validation": 8, "n_test": 8, "n_epochs": 1}
    columns = {"source_column": "code", "target_column": "text", "learning_rate": 1e-3}
    args = Args(data=data, pretrained=tmp_path / "base", workdir=tmp_path / "run", **fewer, **columns)
    for _ in range(2):  # a second run saves over the first one's folder
        main(args)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "run/model" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


def test_code_is_split_into_words():
    assert words("self.ZipFile.read_all(x, HTTPServer2)") == "zip file read all x http server 2"


def test_first_sentence():
    assert first_sentence("\n  Read e.g. a file,\n  or two. Then stop.\n\nMore.") == "Read e.g. a file, or two."
    assert first_sentence("  \n") == ""


CODE = '''
class ReadFile(Base):
    """Reads. And more."""

    def get_size(self, unit=1):
        """Return the size."""
        return self.size // unit

    def undocumented(self):
        return 1
'''


def test_docstring_pairs_are_not_repeated(tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    # The same code with another sentence, the same sentence in another case, and a new pair.
    second = CODE.replace("Reads", "Writes") + '\ndef get():\n    """return the SIZE"""\n\ndef close():\n    """Close."""\n'
    (tmp_path / "b.py").write_text(second)
    (tmp_path / "c.py").write_text("print 'of Python 2'")
    pairs, n_repeated = docstring_pairs([tmp_path / name for name in ("a.py", "b.py", "c.py")])
    assert n_repeated == 3
    assert pairs == [
        ("read file (base) , a: get size undocumented", "Reads."),
        ("get size (unit 1) read file, a: return size unit", "Return the size."),
        ("close () , b: ", "Close."),
    ]


def test_parts_share_no_source():
    pairs = [(f"source {i % 37}", f"target {i}") for i in range(200)]
    parts = split(pairs)
    assert all(20 <= len(part) <= 25 for part in parts[1:])
    assert sorted(pair for part in parts for pair in part) == sorted(pairs)
    sources = [{source for source, _ in part} for part in parts]
    assert len(set.union(*sources)) == sum(map(len, sources)) == 37
    assert split(pairs[::-1]) == parts


def test_pairs_from_a_table(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text('source\ttarget\na\tone\nb\t"two\n')
    assert read_pairs(path, "source", "target") == [("a", "one"), ("b", '"two')]


def test_denoising_drops_words():
    pairs = [(" ".join(f"word{i}" for i in range(40)), "target")] * 50
    noised = denoising_pairs(pairs, (0, 1))
    assert {target for _, target in noised} == {" ".join(f"word{i}" for i in range(32))}
    lengths = [len(source.split()) for source, _ in noised]
    assert 0.8 < sum(lengths) / (32 * 50) < 0.9
    assert all(set(source.split()) < set(target.split()) for source, target in noised if source != target)
    assert denoising_pairs(pairs, (0, 1)) == noised != denoising_pairs(pairs, (0, 2))


def test_padding_has_no_label():
    tokenizer = learn_tokenizer(["read the file"] * 3, 300)
    texts = partial(fixed_length, tokenizer, pad=0)
    batch = collate_fn([("read the file", "read"), ("read", "read the file")], sources=texts(4), targets=texts(5))
    assert {name: array.shape for name, array in batch.items()} == {"ids": (2, 4), "mask": (2, 4), "labels": (2, 5)}
    whole = tokenizer.encode("read").ids
    assert batch["ids"][1, : len(whole)].tolist() == whole
    assert batch["mask"][1].sum() == len(whole) < 4
    assert batch["labels"][0].tolist() == whole + [IGNORED] * (5 - len(whole))


# --- scores -----------------------------------------------------------------------------------------------------------


def test_rouge():
    # First pair: word precision 2/2 and recall 2/4, bigrams 1/1 and 1/3, common subsequence of 2. Second: no match.
    scores = rouge([("", "close the open files"), ("", "read")], ["Closing the", "write"])
    assert scores == pytest.approx({"rouge1": 100 / 3, "rouge2": 25, "rougeL": 100 / 3})


def test_best_copies():
    pairs = [("open the big file now or never", "Return the open the big file"), ("a b c d e f", "Return the a b c d")]
    assert common_opening([*pairs, ("", "Close it")]) == "Return the"
    best = best_copies(pairs, "Return the")
    assert {copy.name for copy in best.values()} == {"first 4 words"}
    assert best["rouge2"].score == pytest.approx(100)
    assert best["rouge2"].rule("x y z (u) v") == "Return the x y z u"
    named = [("find all (path root) finder", "Find all")]
    assert best_copies(named)["rouge1"].score == pytest.approx(100)
    assert best_copies([(f"{source}: rest of it", source) for source in ("a b", "c d e")])["rouge1"].name == "first clause"
    # The rule chosen on some pairs is scored on others.
    assert copy_scores([("a b c d e", "a b c d")], best)["rouge1"] == pytest.approx(100 * 2 * 4 / (6 + 4))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_missing_columns_are_named(data, tmp_path):
    with pytest.raises(ValueError, match=r"pairs\.jsonl` row 1: expected columns source, target, got code, text\. Add"):
        main(Args(data=data, workdir=tmp_path))


@pytest.mark.parametrize("value", ["  ", None, ["a"]])
def test_target_that_is_not_text_is_refused(tmp_path, value):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n' + json.dumps({"source": "a", "target": value}))
    with pytest.raises(ValueError, match=r"pairs\.jsonl` row 2: `target`: expected a text, got .*Fill it in"):
        read_pairs(path, "source", "target")


def test_too_few_pairs_are_refused(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("source,target\n" + "".join(f"{i},text\n" for i in range(10)))
    with pytest.raises(ValueError, match=r"pairs\.csv`: expected a batch of 16 pairs .* got 10 in all.*`--batch-size`"):
        main(Args(data=path, workdir=tmp_path))


def test_model_that_is_not_an_encoder_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    known = "bart, mt5, t5, vision-encoder-decoder, whisper"
    expected = rf"config\.json`: `model_type`: expected one of {known} \(EncoderDecoder\), got 'gpt2'"
    with pytest.raises(ValueError, match=expected):
        load_pretrained(tmp_path, redeqx.Deployer(verbose=False))


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere`: expected a folder, got nothing there"):
        load_pretrained(tmp_path / "nowhere", redeqx.Deployer(verbose=False))


@pytest.mark.sweep
def test_tokenizer_of_another_model_is_refused(finished):
    folder = finished[0] / "model"
    good = (folder / "tokenizer.json").read_text()
    larger = Tokenizer.from_str(good)
    larger.add_tokens([f"word{i}" for i in range(500)])
    try:
        larger.save(str(folder / "tokenizer.json"))
        with pytest.raises(ValueError, match=r"tokenizer\.json`: expected at most 320 ids, as in the model, got \d+\. Use"):
            load_pretrained(folder, redeqx.Deployer(verbose=False))
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match=r"model`: expected a tokenizer\.json, got none\. Write one"):
            load_pretrained(folder, redeqx.Deployer(verbose=False))
    finally:
        (folder / "tokenizer.json").write_text(good)
