"""Text readers of the examples: a table gives every row or an error that names it; tokenizers round-trip text."""

import json

import pytest

from examples._texts import BOS, EOS, PAD, learn_tokenizer, load_tokenizer, read_table, standard_library


def test_tables_of_three_formats_hold_the_same_rows(tmp_path):
    rows = [{"sentence": 'a "quoted" word', "label": "1"}, {"sentence": "ünï", "label": "0"}]
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + "".join(f"{r['sentence']}\t{r['label']}\n" for r in rows), "utf-8")
    quoted = ['"a ""quoted"" word",1', "ünï,0"]
    (tmp_path / "a.csv").write_text("sentence,label\n" + "\n".join(quoted) + "\n", "utf-8-sig")  # with a byte order mark
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    for name in ("a.tsv", "a.csv", "a.jsonl"):
        assert read_table(tmp_path / name, ["sentence", "label"]) == rows


def test_table_without_a_header_uses_the_given_names(tmp_path):
    (tmp_path / "a.tsv").write_text("gj04\t1\t\tIt works.\n")
    rows = read_table(tmp_path / "a.tsv", ["label"], names=["source", "label", "mark", "sentence"])
    assert rows == [{"source": "gj04", "label": "1", "mark": "", "sentence": "It works."}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "x", r"`.*a\.txt`: expected a \.tsv, \.csv or \.jsonl file, got a \.txt file\."),
        ("a.tsv", "sentence\tlable\nx\t1\n", r"`.*a\.tsv`: expected columns sentence, label, got sentence, lable\."),
        ("a.tsv", "", r"`.*a\.tsv`: expected columns sentence, label, got none\."),
        ("a.tsv", "sentence\tlabel\n", r"`.*a\.tsv`: expected rows, got none\."),
        ("a.tsv", "sentence\tlabel\nx\t1\ny\n", r"`.*a\.tsv` row 3: expected 2 columns \(sentence, label\), got 1\."),
        ("a.jsonl", '{"sentence": "x", "label": 1}\n{"sentence"\n', r"`.*a\.jsonl` row 2: expected a JSON object, got"),
        ("a.jsonl", '{"sentence": "x"}\n', r"`.*a\.jsonl` row 1: expected columns sentence, label, got sentence\."),
        ("a.jsonl", "[1]\n", r"`.*a\.jsonl` row 1: expected columns sentence, label, got none\."),
    ],
)
def test_invalid_table_is_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_table(tmp_path / name, ["sentence", "label"])


def test_missing_table_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`.*b\.tsv`: expected a \.tsv, \.csv or \.jsonl file, got none\."):
        read_table(tmp_path / "b.tsv", ["sentence"])


def test_learnt_tokenizer_round_trips_and_loads_from_a_folder(tmp_path):
    tokenizer = learn_tokenizer(["the cat sat on the mat"] * 4, 270)
    assert tokenizer.get_vocab_size() <= 270
    ids = tokenizer.encode("the cät", "mat").ids
    assert (ids[0], ids[-1], ids.count(EOS)) == (BOS, EOS, 2)
    assert tokenizer.decode(ids) == "the cätmat"
    assert tokenizer.token_to_id("<pad>") == PAD
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("the cät", "mat").ids == ids


def test_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`.*`: expected a tokenizer\.json, got none\. Write one with transformers"):
        load_tokenizer(tmp_path)


@pytest.mark.sweep
def test_standard_library_files_are_in_a_fixed_order():
    files = standard_library()
    assert files == standard_library()
    assert len(files) > 500
    assert {"threading.py", "inspect.py"} <= {file.name for file in files}
    assert not any({"site-packages", "test"} & set(file.parts) for file in files)
