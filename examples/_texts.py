"""Reads texts for several examples: tables, tokenizers, and the source of Python's standard library."""

import ast
import csv
import json
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BOS, EOS = range(3)  # the ids of padding, begin and end in a tokenizer that is trained here


def read_table(
    path: Path, columns: Sequence[str], *, names: Sequence[str] | None = None, broken: list[int] | None = None
) -> list[dict[str, str]]:
    """Returns the rows of a table: .tsv (without quoting, as in GLUE), .csv, or .jsonl with one object on each line.

    **Arguments:**

    - `columns`: the required columns. Other columns are kept too.
    - `names`: the column names of a file without a header, such as CoLA's.
    - `broken`: receives the numbers of the rows with more or fewer columns, which are then skipped. Without it, such a row
        is an error.

    Raises ValueError with the file, the row and what was expected.
    """
    if path.suffix not in (".tsv", ".csv", ".jsonl") or not path.is_file():
        found = f"a {path.suffix or 'nameless'} file" if path.is_file() else "none"
        raise ValueError(f"`{path}`: expected a .tsv, .csv or .jsonl file, got {found}. Pass the path of one.")
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:  # some of GLUE's files begin with a byte order mark
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"`{path}` row {number}: expected a JSON object, got {line[:40]!r}. {error}.") from None
                _check_columns(path, columns, row if isinstance(row, dict) else [], f" row {number}")
                rows.append(row)
        else:
            form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
            reader = csv.reader(file, **form)
            header = list(names or next(reader, []))
            _check_columns(path, columns, header, "")
            for number, fields in enumerate(reader, start=1 if names else 2):
                if len(fields) != len(header) and broken is not None:
                    broken.append(number)
                    continue
                if len(fields) != len(header):
                    raise ValueError(
                        f"`{path}` row {number}: expected {len(header)} columns ({', '.join(header)}), got {len(fields)}. "
                        "Fix that row, or write the file as .jsonl."
                    )
                rows.append(dict(zip(header, fields, strict=True)))
    if not rows:
        raise ValueError(f"`{path}`: expected rows, got none. Pass a file with examples.")
    return rows


def read_pairs(path: Path, first: str, second: str) -> list[tuple[str, str]]:
    """Returns the texts of two columns of a table. Raises ValueError for a row without a text."""
    rows = read_table(path, [first, second])
    for number, row in enumerate(rows, start=1 if path.suffix == ".jsonl" else 2):
        for column in (first, second):
            if not isinstance(row[column], str) or not row[column].strip():
                raise ValueError(
                    f"`{path}` row {number}: `{column}`: expected a text, got {row[column]!r}. "
                    "Fill it in, remove the row, or pass another column."
                )
    return [(row[first], row[second]) for row in rows]


def _check_columns(path: Path, columns: Sequence[str], found: Iterable[str], where: str) -> None:
    if missing := [name for name in columns if name not in found]:
        raise ValueError(
            f"`{path}`{where}: expected columns {', '.join(columns)}, got {', '.join(found) or 'none'}. "
            f"Add {', '.join(missing)}, or pass the names of these columns."
        )


def standard_library() -> list[Path]:
    """Returns the source files of Python's standard library, ordered by a hash of their names, so that the first ones are a
    fair sample."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Exclude installed packages, and the tests, which not every machine has.
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [file for file in root.rglob("*.py") if not foreign & set(file.relative_to(root).parts)]
    return sorted(files, key=lambda file: (zlib.crc32(file.relative_to(root).as_posix().encode()), file))


def parse(files: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yields source files with their syntax trees. Files that contain Python 2 code, for conversion, are skipped."""
    for file in files:
        try:
            with warnings.catch_warnings(action="ignore"):  # about escapes in old code
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield file, tree


def load_tokenizer(path: Path, n_ids: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder or of a tokenizer.json, with truncation and padding turned off.

    **Arguments:**

    - `n_ids`: the number of ids of the model. Raises ValueError for a tokenizer with more.
    """
    path = path / "tokenizer.json" if path.suffix != ".json" else path
    if not path.is_file():
        raise ValueError(
            f"`{path.parent}`: expected a {path.name}, got none. "
            "Write one with transformers: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
        )
    tokenizer = Tokenizer.from_file(str(path))
    if n_ids is not None and tokenizer.get_vocab_size() > n_ids:
        raise ValueError(
            f"`{path}`: expected at most {n_ids} ids, as in the model, got {tokenizer.get_vocab_size()}. "
            "Use the tokenizer that the model was trained with."
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def embedding_rows(n_ids: int) -> int:
    """Returns the number of ids, rounded up to a multiple of 64 so that it can be sharded."""
    return -(-n_ids // 64) * 64


def learn_tokenizer(texts: Iterable[str], n_ids: int, *, split_digits: bool = False) -> Tokenizer:
    """Trains a byte-level BPE of at most `n_ids` ids on the texts. Its templates are `<s> text </s>` and `<s> text </s> pair
    </s>`.

    **Arguments:**

    - `split_digits`: whether each digit is a token, with which arithmetic is easier to learn.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    return tokenizer


def fixed_length(tokenizer: Tokenizer, length: int, pad: int) -> Tokenizer:
    """Returns a copy of a tokenizer that truncates or pads all texts to `length` tokens."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(length)
    copy.enable_padding(length=length, pad_id=pad, pad_token=tokenizer.id_to_token(pad) or "<pad>")
    return copy
