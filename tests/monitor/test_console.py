"""Console output, on a terminal and elsewhere, and recorded metrics."""

import io
import json
import math
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import redeqx
from redeqx.monitor import Console

METRICS = {"loss": 2.34512, "learning_rate": 3e-4, "grad_norm": 1.2345}


class Recorder:
    def __init__(self):
        self.seen = []

    def log(self, metrics: dict, step: int) -> None:
        self.seen.append((metrics, step))


class Clock:
    """Replaces `time.perf_counter`, so that rates and remaining times are exact."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def lines(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def screen(written: str, width: int = 80, height: int = 50) -> list[str]:
    """The terminal's contents after the escape codes of rich's live display: cursor visibility, moves and erasures."""
    rows, row, column = [""] * height, 0, 0
    for code, char in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|([\s\S])", written):
        if char == "\n":
            row, column = row + 1, 0
        elif char == "\r":
            column = 0
        elif char:
            rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
            column += 1
        elif code == "2K":
            rows[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1] or 1)
        else:
            assert code.endswith("m") or code in ("?25l", "?25h"), code
        assert column <= width, rows[row]
    return [line.rstrip() for line in rows if line.strip()]


def wait_for(pattern: str, out: io.StringIO) -> None:
    """Waits until the drawing thread has written `pattern`."""
    until = time.monotonic() + 30
    while not re.search(pattern, out.getvalue()):
        assert time.monotonic() < until, out.getvalue()
        time.sleep(0.01)


# Recorded metrics


def test_metrics_round_trip_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    values = [struct.unpack("d", rng.bytes(8))[0] for _ in range(500)]
    values += [0.1, -0.0, 5e-324, 1.7976931348623157e308, float(np.float32(0.1)), math.nan, math.inf, -math.inf]
    console = Console(tmp_path / "new" / "run")
    for i, value in enumerate(values):
        console.records.metrics({"x": value}, i)
    console.records.close()
    read = lines(tmp_path / "new" / "run")
    assert [line["step"] for line in read] == list(range(len(values)))
    for line, value in zip(read, values, strict=True):
        if math.isnan(value):
            assert line["x"] == "NaN"
        else:
            assert struct.pack("d", float(line["x"])) == struct.pack("d", value)
    assert [line["x"] for line in read[-2:]] == ["Infinity", "-Infinity"]


def test_metrics_are_written_immediately_and_appended(tmp_path):
    console = Console(tmp_path)
    console.records.metrics({"loss": 2.5}, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'
    console.records.close()
    console.records.metrics({"loss": np.float32(0.5), "n": 3}, 2)
    assert lines(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 0.5, "n": 3.0}]
    console.records.close()


def test_two_that_record_in_one_folder_keep_each_others_lines(tmp_path):
    """As in a notebook, whose cell that makes the Deployer is run again."""
    first, second = (Console(tmp_path, verbose=False).records for _ in range(2))
    first.metrics({"a": 1.0}, 1)
    second.metrics({"b": 1234567.0}, 1)
    first.metrics({"a": 2.0}, 2)
    second.metrics({"b": 2.0}, 2)
    rows = [{"step": 1, "a": 1.0}, {"step": 1, "b": 1234567.0}, {"step": 2, "a": 2.0}, {"step": 2, "b": 2.0}]
    assert lines(tmp_path) == rows
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 9, "a": 1.0}) + "\n" + json.dumps(rows[0]) + "\n")
    second.rewind(1)  # replaces the file, as a line before the last is dropped
    first.metrics({"a": 2.5}, 2)
    second.metrics({"b": 2.5}, 2)
    assert lines(tmp_path) == [rows[0], {"step": 2, "a": 2.5}, {"step": 2, "b": 2.5}]


def test_invalid_metrics_are_refused(tmp_path):
    console = Console(tmp_path)
    with pytest.raises(ValueError, match=r"`step`: expected another name for a metric, .* Rename it\."):
        console.records.metrics({"step": 1.0}, 1)
    with pytest.raises(
        TypeError,
        match=r"`loss`: expected one number as a metric, got an array of shape \(3,\)\. Reduce it to one\.",
    ):
        console.records.metrics({"ok": 1.0, "loss": np.zeros(3)}, 1)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rewind_drops_later_lines_and_an_incomplete_one(tmp_path):
    console = Console(tmp_path)
    for step in range(1, 6):
        console.records.metrics({"loss": step / 3}, step)
    console.records.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before) + '{"step": 6, "lo')
    resumed = Console(tmp_path)
    resumed.records.rewind(3)
    assert path.read_text() == "".join(before[:3])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    for step in (4, 5):
        resumed.records.metrics({"loss": step / 3}, step)
    assert path.read_text() == "".join(before)
    resumed.records.rewind(4)  # while the file is open
    resumed.records.metrics({"loss": 5 / 3}, 5)
    assert path.read_text() == "".join(before)
    resumed.records.close()


def test_rewind_warns_about_unreadable_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n\0\0\0\n[3]\n{"step": 2, "loss": 1.0}\n')
    with pytest.warns(UserWarning) as caught:
        Console(tmp_path).records.rewind(2)
    assert [str(w.message) for w in caught] == [
        rf"`{path}`: expected JSON with a `step` in line 2, got '\x00\x00\x00'. It is left out.",
        f"`{path}`: expected JSON with a `step` in line 3, got '[3]'. It is left out.",
    ]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_rewind_without_records(tmp_path):
    Console(None).records.rewind(3)
    Console(tmp_path).records.rewind(3)
    assert not list(tmp_path.iterdir())


def test_resuming_without_rewind_drops_only_the_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    console = Console(tmp_path)
    console.records.metrics({"loss": 2.0}, 2)
    console.records.close()
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_each_logger_gets_its_own_dict(tmp_path):
    first, second = Recorder(), Recorder()
    console = Console(None, loggers=[first, second])
    console.records.metrics({"loss": np.float32(0.5), "bad": math.nan}, 7)
    (metrics, step), (other, _) = first.seen[0], second.seen[0]
    assert step == 7 and metrics["loss"] == 0.5 and type(metrics["loss"]) is float and math.isnan(metrics["bad"])
    assert other is not metrics


def test_invalid_loggers_are_refused():
    class Own:
        def log(self, metrics, step):
            pass

    for loggers, message in (
        (
            [Own],
            r"`loggers\[0\]`: expected an object with `log\(metrics, step\)`, got the class Own\. Pass an instance of it",
        ),
        (Own(), r"`loggers`: expected a list of trackers, got Own\. Pass `loggers=\[logger\]`"),
        (None, r"`loggers`: expected a list of trackers, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            redeqx.Deployer(loggers=loggers, verbose=False)


def test_steps_texts_and_names_of_wrong_types(tmp_path):
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    deployer.log_metrics({"a": 1.0}, np.int64(3))
    deployer.log_text("note", "of a numpy step", step=np.int64(4))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 3
    for call, message in (
        (lambda: deployer.log_metrics({"a": 1.0}, 7.0), r"`step`: expected an integer, got 7\.0\. Pass `trainer\.step`"),
        (lambda: deployer.log_metrics({"a": 1.0}, None), "`step`: expected an integer, got None"),
        (lambda: deployer.log_text("note", 5), "`text`: expected a string, got int"),
        (lambda: deployer.log_text(3, "x"), "`name`: expected a string, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_names_with_the_same_file_at_one_step_are_refused(tmp_path):
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    for _ in range(2):  # a name may record a step again
        deployer.log_text("a/b", "first", step=1)
    deployer.log_text("a_b", "later", step=2)
    with pytest.raises(ValueError, match=r"`name`: .* got 'a_b', whose file step_00000001_a_b\.txt .* that of 'a/b'\."):
        deployer.log_text("a_b", "second", step=1)
    assert (tmp_path / "media" / "step_00000001_a_b.txt").read_text() == "first"


def test_a_text_with_lone_surrogates_is_recorded(tmp_path):
    redeqx.Deployer(workdir=tmp_path, verbose=False).log_text("sample", b"a\xff".decode(errors="surrogateescape"), step=1)
    assert (tmp_path / "media" / "step_00000001_sample.txt").read_text() == "a\\udcff"


def test_logger_without_log():
    with pytest.raises(
        TypeError,
        match=r"`loggers\[1\]`: expected an object with `log\(metrics, step\)`, got dict\. Wrap it in a class",
    ):
        Console(None, loggers=iter([Recorder(), {}]))  # an iterator, because beartype checks the items of a list


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars in TensorBoard event files, with purges applied as TensorBoard does."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # a record: length, its crc, the event, its crc
            n = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + n])
            data = data[16 + n :]
            if event.session_log.status == SessionLog.START:
                found = [scalar for scalar in found if scalar[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    console = Console(tmp_path, loggers=["tensorboard"])
    for step in (1, 2, 3):
        console.records.metrics({"loss": step / 2, "eval/bleu": 1.0}, step)
    console.records.close()
    kept = [(step, name, step / 2 if name == "loss" else 1.0) for step in (1, 2) for name in ("loss", "eval/bleu")]
    assert scalars(tmp_path / "tensorboard")[:4] == kept
    # TensorBoard orders event files by the second in their names.
    time.sleep(1.1)
    resumed = Console(tmp_path, loggers=["tensorboard"])
    resumed.records.rewind(2)
    resumed.records.metrics({"loss": 7.0}, 3)
    resumed.records.metrics({"loss": math.nan}, 4)
    resumed.records.close()
    *again, (step, name, value) = scalars(tmp_path / "tensorboard")
    assert again == [*kept, (3, "loss", 1.5), (3, "eval/bleu", 1.0)]  # what it has is not sent again
    assert (step, name) == (4, "loss") and math.isnan(value)


def test_tensorboard_keeps_the_rows_of_other_trainers(tmp_path):
    pytest.importorskip("tensorboardX")
    console = Console(tmp_path, loggers=["tensorboard"])
    for step in (1, 2, 3):
        for name in ("critic", "actor"):
            console.records.metrics({f"{name}/loss": step / 2, f"{name}/grad_norm": 1.0}, step)
    console.records.close()
    time.sleep(1.1)
    resumed = Console(tmp_path, loggers=["tensorboard"])
    resumed.records.rewind(1, "critic")
    resumed.records.metrics({"critic/loss": 7.0}, 2)
    resumed.records.close()
    steps = {(tag, step): x for step, tag, x in scalars(tmp_path / "tensorboard") if not tag.endswith("grad_norm")}
    assert steps == {
        **{("actor/loss", step): step / 2 for step in (1, 2, 3)},
        **{("critic/loss", step): step / 2 for step in (1, 2, 3)},
    }
    owners = [[*line][1].partition("/")[0] + str(line["step"]) for line in lines(tmp_path)]
    assert owners == ["critic1", "actor1", "actor2", "actor3", "critic2"]


def test_tensorboard_keeps_the_images_of_a_trainer_when_another_begins(tmp_path):
    pytest.importorskip("tensorboardX")
    records = Console(tmp_path, loggers=["tensorboard"]).records
    for name in ("teacher", "student"):
        records.rewind_once(0, name)
        for step in (1, 2):
            records.metrics({"loss": step / 2, "grad_norm": 1.0}, step, name=name)
        records.text(f"{name} says", "a text", 2)
        time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    records.close()
    found = [(tag.partition("/")[0], step) for step, tag, _ in scalars(tmp_path / "tensorboard") if "grad" not in tag]
    assert found == [
        ("teacher", 1),
        ("teacher", 2),
        ("teacher says", 2),
        ("student", 1),
        ("student", 2),
        ("student says", 2),
    ]


@pytest.mark.parametrize(
    ("name", "at", "left"),
    [
        ("critic", 1, ["critic1", "loss1", "env1", "loss2", "env2", "actor3", "actor4"]),
        ("actor", 3, ["critic1", "loss1", "env1", "critic2", "loss2", "env2", "actor3"]),
        (None, 1, ["critic1", "loss1", "env1", "critic2", "actor3", "actor4"]),
        (None, -1, []),
    ],
)
@pytest.mark.parametrize("has_unnamed", [True, False])
def test_a_rewind_keeps_the_rows_of_other_trainers(tmp_path, name, at, left, has_unnamed):
    """Metrics of the user's own may be called `env/reward`: the trainer without a name records them again. Without such a
    trainer no other one keeps them."""
    records = Console(tmp_path).records
    for step in (1, 2):
        records.metrics({"critic/loss": 1.0, "critic/grad_norm": 2.0}, step)
        if has_unnamed:
            records.metrics({"loss": 1.0, "grad_norm": 2.0, "env/reward": 3.0}, step)
        records.metrics({"env/reward": 3.0, "env/length": 4.0}, step)
    if not has_unnamed:
        left = [row for row in left if not row.startswith("loss") and (row != "env2" or at > 2)]
    for step in (3, 4):
        records.metrics({"actor/loss": 1.0, "actor/grad_norm": 2.0}, step)
    records.close()
    Console(tmp_path).records.rewind(at, name)
    assert [[*line][1].partition("/")[0] + str(line["step"]) for line in lines(tmp_path)] == left


def test_the_line_shortens_the_metrics_of_a_trainer_with_a_name(clock):
    out = io.StringIO()
    with Console(None, file=out).progress() as line:
        line.update(1, metrics={"critic/loss": 0.5, "critic/learning_rate": 3e-4}, n_examples=1)
    assert out.getvalue() == "step 1  critic/loss 0.5000  critic/lr 3.00e-04  0.0s so far\n"


def test_tensorboard_continues_its_run(tmp_path):
    pytest.importorskip("tensorboardX")
    console = Console(tmp_path, loggers=["tensorboard"])
    console.records.rewind(0)
    console.records.metrics({"loss": 1.0}, 1)
    console.records.close()
    time.sleep(1.1)
    console.records.metrics({"loss": 2.0}, 2)
    console.records.close()
    assert scalars(tmp_path / "tensorboard") == [(1, "loss", 1.0), (2, "loss", 2.0)]


def test_tensorboard_keeps_what_was_written_within_the_same_second(tmp_path):
    pytest.importorskip("tensorboardX")
    console = Console(tmp_path, loggers=["tensorboard"])
    console.records.metrics({"parameters": 9.0}, 0)  # before a fit
    console.records.rewind(0)
    for step in (1, 2, 3):
        console.records.metrics({"loss": 1.0}, step)
    console.records.rewind(1)
    for step in (2, 3, 4):
        console.records.metrics({"loss": 1.0}, step)
    console.records.close()
    assert scalars(tmp_path / "tensorboard") == [(0, "parameters", 9.0), *((step, "loss", 1.0) for step in (1, 2, 3, 4))]


def test_tensorboard_missing_or_without_a_workdir(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"`loggers`: expected a `workdir` to write to, got None\. Pass"):
        Console(None, loggers=["tensorboard"])
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"expected tensorboardX, .* Run `pip install \"redeqx\[tensorboard\]\"`"):
        Console(tmp_path, loggers=["tensorboard"])


def test_tensorboard_is_imported_only_on_request(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    Console(tmp_path).records.metrics({"loss": 1.0}, 1)


def print_everything(console: Console) -> None:
    console.header({"mesh": "data=4"})
    console.table("plan", ["leaf"], [["a"]])
    console.info("hello", title="title")
    with console.progress(n_steps=2) as progress, progress.compiling("the step"):
        for step in (1, 2):
            console.records.metrics(METRICS, step)
            progress.update(step, metrics=METRICS, n_examples=8)
    console.header({"best": "1"}, title="done")
    console.records.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_only_the_main_process_prints_and_records(tmp_path, terminal):
    out, recorder = io.StringIO(), Recorder()
    console = Console(tmp_path, is_main=False, file=out, terminal=terminal, loggers=[recorder])
    print_everything(console)
    console.records.rewind(1)
    assert out.getvalue() == "" and not list(tmp_path.iterdir()) and not recorder.seen


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_console_records_without_printing(tmp_path, terminal):
    out, recorder = io.StringIO(), Recorder()
    print_everything(Console(tmp_path, verbose=False, file=out, terminal=terminal, loggers=[recorder]))
    assert out.getvalue() == ""
    assert [line["step"] for line in lines(tmp_path)] == [1, 2] == [step for _, step in recorder.seen]


# Printed output


def test_plain_header_and_info():
    out = io.StringIO()
    console = Console(None, file=out)
    path = "/a/folder" * 20
    console.header({"mesh": "data=4, model=2", "workdir": path, "plan": "16 leaves\n12 split"})
    console.info("[bold]not markup[/bold] :smile:")
    console.info("one\ntwo", title="a title")
    console.header({"best": path}, title="done")
    assert out.getvalue().splitlines() == [
        "redeqx",
        "  mesh     data=4, model=2",
        f"  workdir  {path}",
        "  plan     16 leaves",
        "           12 split",
        "[bold]not markup[/bold] :smile:",
        "a title",
        "  one",
        "  two",
        "done",
        f"  best  {path}",
    ]


def test_plain_table_is_aligned_and_not_truncated():
    out = io.StringIO()
    long = "blocks." * 20 + "weight"
    Console(None, file=out).table("plan", ["leaf", "shape", "why"], [["a", "[3]", ""], [long, "[4, 4]", "rule 1"]])
    pad = " " * (len(long) - 4)
    assert out.getvalue().splitlines() == [
        "plan",
        f"  leaf{pad}  shape   why",
        f"  a   {pad}  [3]",
        f"  {long}  [4, 4]  rule 1",
    ]


def test_table_without_rows():
    out = io.StringIO()
    Console(None, file=out).table("plan", ["leaf", "why"], [])
    assert out.getvalue() == "plan\n  leaf  why\n"


def test_terminal_gets_the_lines_of_a_file(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    outs = [io.StringIO(), io.StringIO()]
    for out, terminal in zip(outs, (False, True), strict=True):
        console = Console(None, file=out, terminal=terminal)
        console.header({"workdir": "/a/folder" * 20})  # the terminal wraps it, so it can be copied in one piece
        console.table("plan", ["leaf", "shape", "why"], [["blocks." * 9, "[4, 4]", "[bold]whole[/bold]"]])
    assert re.sub(r"\x1b\[[0-9;]*m", "", outs[1].getvalue()) == outs[0].getvalue() != outs[1].getvalue()


def test_plain_line_has_every_field(clock):
    out = io.StringIO()
    console = Console(None, file=out)
    with console.progress(n_epochs=3, n_steps=5000, first_step=1232, title="fit") as progress:
        with progress.compiling("the train step"):
            clock.now += 12.3
        clock.now += 5
        progress.update(1233, epoch=2, metrics=METRICS, n_examples=8, n_tokens=2048)
        clock.now += 2
        progress.update(1234, epoch=2, metrics={**METRICS, "accuracy": 0.5}, n_examples=8, n_tokens=2048)
    assert out.getvalue().splitlines() == [
        "compiling the train step",
        "compiled the train step in 0:12",
        "fit  epoch 2/3  step 1,233/5,000  loss 2.3451  lr 3.00e-04  grad norm 1.2345  0:17 so far",
        "fit  epoch 2/3  step 1,234/5,000  loss 2.3451  lr 3.00e-04  grad norm 1.2345  accuracy 0.5000"
        "  4 examples/s  1,024 tokens/s  2:05:32 left",
    ]


def test_unknown_fields_are_omitted(clock):
    out = io.StringIO()
    with Console(None, file=out).progress() as progress:
        for step in (1, 2):
            clock.now += 2
            progress.update(step, metrics={"loss": math.nan}, n_examples=8)
    assert out.getvalue().splitlines() == [
        "step 1  loss nan  2.0s so far",
        "step 2  loss nan  4 examples/s  4.0s so far",
    ]


def test_plain_lines_at_growing_intervals(clock):
    out = io.StringIO()
    with Console(None, file=out).progress(n_steps=2000) as progress:
        for step in range(1, 1251):
            clock.now += 0.1
            progress.update(step, metrics={}, n_examples=1)
    text = out.getvalue()
    assert "\x1b" not in text
    steps = [int(re.search(r"step ([\d,]+)", line)[1].replace(",", "")) for line in text.splitlines()]
    seconds = np.diff(np.array(steps) / 10)
    np.testing.assert_allclose(seconds[:-1], [1, 2, 5, 10, 20, 30, 30], atol=0.11)
    assert steps[0] == 1 and steps[-1] == 1250


def test_last_step_is_printed_once_and_before_later_output(clock):
    out = io.StringIO()
    console = Console(None, file=out)
    with console.progress(n_steps=3) as progress:
        for step in (1, 2, 3):
            clock.now += 0.1
            progress.update(step, metrics={}, n_examples=1)
        console.info("evaluated")
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/3", "step 3/3", "evaluated"]
    assert "0.3s in all" in out.getvalue()


def test_compiling_and_pauses_are_excluded_from_rates(clock):
    out = io.StringIO()
    console = Console(None, file=out)
    with console.progress(n_steps=100) as progress:
        with progress.compiling("the train step"):
            clock.now += 100
        for step in range(1, 11):
            clock.now += 0.5
            if step == 5:
                with progress.pause("evaluating"), progress.pause("saving"):
                    clock.now += 60
            if step == 7:
                with progress.compiling("another shape"):
                    clock.now += 60
            progress.update(step, metrics={}, n_examples=2)
    assert out.getvalue().splitlines()[-1] == "step 10/100  4 examples/s  0:45 left"


def test_loop_longer_than_its_total_has_a_full_bar_and_no_time_left():
    out = io.StringIO()
    with Console(None, file=out, terminal=True).progress(n_steps=4) as line:
        for step in range(1, 10):
            line.update(step, metrics={}, n_examples=8)
    bar, *_, last = re.split("  +", screen(out.getvalue())[-1])
    assert re.fullmatch("━+", bar) and last.endswith(" in all")


def test_time_left_if_updates_cover_several_steps(clock):
    out = io.StringIO()
    with Console(None, file=out).progress(n_steps=1000) as progress:
        for step in (100, 200, 300):
            clock.now += 10
            progress.update(step, metrics={}, n_examples=500)
    assert out.getvalue().splitlines()[-1] == "step 300/1,000  50 examples/s  1:10 left"


def test_throughput_follows_a_change(clock):
    out = io.StringIO()
    with Console(None, file=out).progress() as progress:
        for step in range(400):
            clock.now += 0.1 if step < 200 else 0.4
            progress.update(step, metrics={}, n_examples=1)
    assert "  2.5" in out.getvalue().splitlines()[-1]


def test_inner_progress_prints_only_compilations(clock):
    out = io.StringIO()
    console = Console(None, file=out)
    with console.progress(n_steps=9) as fit:
        fit.update(1, metrics={}, n_examples=1)
        with fit.pause("evaluating"), console.progress(n_steps=1, title="inner") as inner:
            with inner.compiling("the eval step"), inner.pause("x"):
                clock.now += 3
            inner.update(1, metrics={}, n_examples=1)
        clock.now += 1
        fit.update(2, metrics={}, n_examples=1)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/9",
        "compiling the eval step",
        "compiled the eval step in 3.0s",
        "step 2/9",
    ]
    with console.progress(title="free again") as progress:
        progress.update(1, metrics={}, n_examples=1)
    assert "free again" in out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_live_line_has_every_field(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    console = Console(None, file=out, terminal=True)
    with console.progress(n_epochs=3, n_steps=1236, first_step=1232) as progress:
        with progress.compiling("the train step"):
            wait_for(r"compiling the train step, \d+\.\ds", out)
        for step in range(1233, 1236):
            progress.update(step, epoch=2, metrics=METRICS, n_examples=8, n_tokens=2048)
            console.info(f"a line amid, at {step}")
            time.sleep(0.05)
        with progress.pause("evaluating"):
            wait_for(r"evaluating, \d+\.\ds", out)
    shown = screen(out.getvalue(), width)
    assert shown[0].startswith("compiled the train step in ")
    assert shown[1:4] == [f"a line amid, at {step}" for step in range(1233, 1236)]
    fields = [field for line in shown[4:] for field in re.split("  +", line)]
    assert len(shown) == 4 + {60: 3, 80: 2, 200: 1}[width]
    assert fields[1:6] == ["epoch 2/3", "step 1,235/1,236", "loss 2.3451", "lr 3.00e-04", "grad norm 1.2345"]
    assert re.fullmatch(r"[\d,.]+ examples/s", fields[6]) and re.fullmatch(r"[\d,]+ tokens/s", fields[7])
    assert re.fullmatch(r"[\d.]+s left", fields[8])
    assert out.getvalue().endswith("\x1b[?25h")


def test_cursor_is_never_left_hidden():
    out = io.StringIO()
    with Console(None, file=out, terminal=True).progress():
        assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("terminal", [False, True])
def test_exception_propagates_and_leaves_the_terminal_clean(terminal):
    out = io.StringIO()
    console = Console(None, file=out, terminal=terminal)
    stdout = sys.stdout
    with (
        pytest.raises(RuntimeError, match="boom"),
        console.progress(n_steps=9) as progress,
        progress.compiling("the train step"),
    ):
        progress.update(4, metrics={}, n_examples=1)
        raise RuntimeError("boom")
    assert sys.stdout is stdout
    shown = screen(out.getvalue())
    assert "step 4/9" in shown[-1] and "compiled" not in out.getvalue()
    if terminal:
        assert out.getvalue().endswith("\n\x1b[?25h")
    before = len(out.getvalue())
    time.sleep(0.3)
    assert len(out.getvalue()) == before  # the drawing thread has ended


def test_user_prints_appear_above_the_live_line(monkeypatch):
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    with Console(None, terminal=True).progress(n_steps=9) as progress:
        progress.update(4, metrics=METRICS, n_examples=1)
        time.sleep(0.3)
        print("mine")
        print("a warning", file=sys.stderr)
    assert sys.stdout is out
    shown = screen(out.getvalue())
    assert shown[0] == "mine" and "step 4/9" in shown[1] and len(shown) == 3
    assert "a warning" not in out.getvalue()  # standard error is not a terminal here and is not redirected


def test_log_gets_no_escape_codes_despite_force_color(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    print_everything(Console(None, file=out))
    assert "\x1b" not in out.getvalue()


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    print_everything(Console(None, file=out, terminal=True))
    assert "\x1b" not in out.getvalue() and "step 2/2" in out.getvalue()


def test_ascii_terminal_gets_ascii():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_everything(Console(None, file=out, terminal=True))
    out.flush()
    assert b"####" in raw.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0s"), (9.94, "9.9s"), (10.0, "0:10"), (59.7, "1:00"), (3600.0, "1:00:00"), (97283.0, "27:01:23")],
)
def test_durations(clock, seconds, text):
    out = io.StringIO()
    with Console(None, file=out).progress() as line:
        clock.now += seconds
        line.update(1, metrics={}, n_examples=1)
    assert out.getvalue() == f"step 1  {text} so far\n"
