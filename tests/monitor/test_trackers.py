"""Trackers by name: what they receive, also after a resume, after failures, and at the end of a script."""

import contextlib
import html
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.monitor import TRACKERS, Console


class Fake:
    """A tracker that keeps, for each run id, a list of what it received."""

    package, install, keeps = "json", "redeqx[fake]", "at once"
    runs: ClassVar[dict[str, list]] = {}
    fails: ClassVar[list[Exception]] = []  # raised by the next calls
    blocks: threading.Event | None = None
    waits = False

    def __init__(self, folder, run_id):
        self._fail()
        self.run_id = run_id or f"run {len(self.runs)}"
        self.where = f"at {self.run_id}"
        self.seen = self.runs.setdefault(self.run_id, [])
        self.seen.append("continued" if run_id else "begun")

    def _fail(self):
        if self.blocks is not None:
            type(self).waits = True
            self.blocks.wait()
        if self.fails:
            raise self.fails.pop(0)

    def config(self, values):
        self.seen.append(values)

    def rows(self, rows):
        self._fail()
        self.seen += [(row.step, dict(row.numbers)) for row in rows]

    def medium(self, medium):
        self.seen.append((medium.step, medium.filename))

    def close(self, failed):
        self.seen.append("failed" if failed else "closed")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(Fake, "runs", {})
    monkeypatch.setattr(Fake, "fails", [])
    monkeypatch.setattr(Fake, "blocks", None)
    monkeypatch.setattr(Fake, "waits", False)
    monkeypatch.setitem(TRACKERS, "fake", Fake)
    monkeypatch.setattr("redeqx.monitor._delivery.GAP", 0.01)
    monkeypatch.setattr("redeqx.monitor._delivery.FIRST_RETRY", 0.01)
    return Fake


def steps(seen: list) -> list[int]:
    return [each[0] for each in seen if isinstance(each, tuple) and isinstance(each[1], dict)]


def wait_for(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def record(console: Console, *steps: int) -> None:
    for step in steps:
        console.records.metrics({"loss": step / 2}, step, speed={"rate": 7.0})


# The `loggers` argument


@pytest.mark.parametrize(
    "loggers, error, message",
    [
        ("wandb", TypeError, "`loggers`: expected a list of trackers, got 'wandb'. Pass `loggers=[logger]`."),
        (
            ["wandb", "wandbb"],
            ValueError,
            "`loggers[1]`: expected one of ['fake', 'mlflow', 'tensorboard', 'trackio', 'wandb'], or an object with "
            "`log(metrics, step)`, got 'wandbb'. Pass one of them.",
        ),
        (["tensorboard"], ValueError, "`loggers`: expected a `workdir` to write to, got None. Pass `workdir=`."),
        (
            ["trackio"],
            ImportError,
            "`loggers`: expected trackio, got no such package. "
            'Run `pip install "redeqx[trackio]"`, or do without this tracker.',
        ),
    ],
)
@pytest.mark.parametrize("is_main", [True, False])
def test_loggers_are_checked_in_every_process(loggers, error, message, is_main, monkeypatch):
    for package in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error) as raised:
        Console(None, loggers=loggers, is_main=is_main)
    assert str(raised.value) == message


def test_nothing_is_opened_before_something_is_recorded(tmp_path, fake):
    fake.fails.append(AssertionError("opened"))
    Console(tmp_path, loggers=["fake", "fake"], verbose=False).records.close()
    Console(tmp_path, loggers=["fake"], is_main=False).records.metrics({"loss": 1.0}, 1)
    assert not fake.runs and fake.fails and not list(tmp_path.iterdir())


# Deliveries


def test_records_are_delivered_in_order(tmp_path, fake, capsys):
    console = Console(tmp_path, loggers=["fake", "fake"])
    console.records.begin({"mesh": "data=8"}, lambda: "whole")
    record(console, 1, 2)
    console.records.text("words", "hello", None)
    record(console, 3)
    console.records.close()
    rows = [(step, {"rate": 7.0, "loss": step / 2}) for step in (1, 2, 3)]
    plan, words = (0, "step_00000000_plan.txt"), (2, "step_00000002_words.txt")
    assert fake.runs == {"run 0": ["begun", {"mesh": "data=8"}, plan, *rows[:2], words, rows[2], "closed"]}
    assert capsys.readouterr().out == "fake: at run 0\n"
    record(console, 4)  # later records continue the run
    console.records.close()
    assert fake.runs["run 0"][-3:] == ["continued", (4, {"rate": 7.0, "loss": 2.0}), "closed"]


def test_metrics_of_a_lower_step_are_delivered_too(fake):
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, 5, 1, 1)
    console.records.close()
    assert steps(fake.runs["run 0"]) == [5, 1, 1]


def test_record_evicted_during_its_delivery_is_delivered_once(fake, monkeypatch):
    monkeypatch.setattr(fake, "blocks", threading.Event())
    monkeypatch.setattr("redeqx.monitor._delivery.ROOM", 500)
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, *range(1, 4))
    wait_for(lambda: fake.waits)  # the first three are being delivered
    record(console, *range(4, 40))
    fake.blocks.set()
    console.records.close()
    seen = steps(fake.runs["run 0"])
    assert len(seen) == len(set(seen)) and seen == sorted(seen)


def test_resumed_run_continues_the_tracker_run_without_repeated_steps(tmp_path, fake):
    first = Console(tmp_path, loggers=["fake"], verbose=False)
    first.records.rewind(0)
    first.records.begin({}, lambda: "the plan")
    record(first, 1, 2, 3, 3, 4)
    first.records.text("words", "of 4", None)
    first.records.close()
    again = Console(tmp_path, loggers=["fake"], verbose=False)
    again.records.rewind(2)
    again.records.begin({}, lambda: "the plan")
    record(again, 3, 3, 4)
    again.records.text("words", "of 4", None)
    record(again, 5)
    again.records.text("words", "of 5", None)
    again.records.close()
    last = Console(tmp_path, loggers=["fake"], verbose=False)
    last.records.rewind(6)
    last.records.begin({}, lambda: "the plan")
    last.records.close()
    (seen,) = fake.runs.values()
    assert steps(seen) == [1, 2, 3, 3, 4, 5]
    assert [x for x in seen if isinstance(x, str)] == ["begun", "closed", *["continued", "closed"] * 2]
    assert [x[0] for x in seen if isinstance(x, tuple) and isinstance(x[1], str)] == [0, 4, 5]  # the plan once


def record_trainers(console: Console, names: tuple, begins: tuple, ends: tuple) -> None:
    """Records trainers that train one after the other, each from its own step on."""
    for name, begin, end in zip(names, begins, ends, strict=True):
        console.records.rewind_once(begin, name)
        for step in range(begin + 1, end + 1):
            console.records.metrics({"loss": step / 2, "grad_norm": 1.0}, step, name=name)


@pytest.mark.parametrize("names", [(None, "student"), ("actor", "critic")])
@pytest.mark.parametrize("killed_at, begins", [((4, 2), (4, 1)), ((3, 0), (2, 0))], ids=["second", "first"])
def test_each_trainer_has_its_own_steps(tmp_path, fake, names, killed_at, begins):
    """The second trainer begins below the steps of the first, whose rows are delivered once, into one run."""
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    n = sum(map(bool, killed_at))
    record_trainers(console, names[:n], (0, 0)[:n], killed_at[:n])
    console.records.close()
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    record_trainers(console, names, begins, (4, 3))
    console.records.close()
    (seen,) = fake.runs.values()
    rows = [(step, next(iter(numbers))) for step, numbers in (each for each in seen if isinstance(each, tuple))]
    losses = ["loss" if name is None else f"{name}/loss" for name in names]
    assert sorted(rows) == sorted((step, loss) for loss, n in zip(losses, (4, 3), strict=True) for step in range(1, n + 1))


@pytest.mark.parametrize("n_fails", [0, 1])
def test_trackers_receive_every_row_of_a_run_without_a_workdir(fake, n_fails, monkeypatch):
    """Of one step too, before and after another trainer begins."""
    monkeypatch.setattr("redeqx.monitor._delivery.FIRST_RETRY", 60.0)
    fake.fails += [ConnectionError("no network")] * n_fails
    console = Console(None, loggers=["fake"], verbose=False)
    with pytest.warns(UserWarning) if n_fails else contextlib.nullcontext():
        record_trainers(console, (None,), (0,), (2,))
        console.records.metrics({"accuracy": 0.5}, 2)
        if n_fails:
            wait_for(lambda: not fake.fails)
        record_trainers(console, ("student",), (0,), (1,))
        console.records.metrics({"recall": 0.5}, 2)
        console.records.close()
    (seen,) = fake.runs.values()
    rows = [(step, next(iter(numbers))) for step, numbers in (each for each in seen if isinstance(each, tuple))]
    assert rows == [(1, "loss"), (2, "loss"), (2, "accuracy"), (1, "student/loss"), (2, "recall")]


def test_resumed_run_delivers_what_the_tracker_missed(tmp_path, fake):
    first = Console(tmp_path, verbose=False)  # without the tracker
    record(first, 1, 2, 3)
    first.records.close()
    again = Console(tmp_path, loggers=["fake"], verbose=False)
    again.records.rewind(2)
    record(again, 3)
    again.records.close()
    rows = [(1, {"loss": 0.5}), (2, {"loss": 1.0}), (3, {"rate": 7.0, "loss": 1.5})]
    assert fake.runs == {"run 0": ["begun", *rows, "closed"]}


@pytest.mark.parametrize("n_fails", [0, 2])
def test_rewind_in_the_same_process_repeats_nothing(tmp_path, fake, monkeypatch, n_fails):
    """With `n_fails` the earlier records are still queued at the rewind."""
    monkeypatch.setattr("redeqx.monitor._delivery.FIRST_RETRY", 60.0)
    fake.fails += [ConnectionError("no network")] * n_fails
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    console.records.rewind(0)
    with pytest.warns(UserWarning) if n_fails else contextlib.nullcontext():
        record(console, 1, 2)
        console.records.text("words", "of 2", 2)
        record(console, 3, 4)
        console.records.text("words", "of 4", 4)
        if n_fails:
            wait_for(lambda: len(fake.fails) < n_fails)
        console.records.rewind(2)
    record(console, 3, 4)
    console.records.text("words", "of 4", 4)
    record(console, 5)
    console.records.close()
    (seen,) = fake.runs.values()
    assert steps(seen) == [1, 2, 3, 4, 5]
    media = [each[0] for each in seen if isinstance(each, tuple) and isinstance(each[1], str)]
    assert media == [2, 4]


def test_rows_that_a_kill_may_lose_are_delivered_again(tmp_path, fake, monkeypatch):
    """wandb keeps the rows of the newest step in memory until the next step."""
    monkeypatch.setattr(fake, "keeps", "after the step")
    killed = Console(tmp_path, loggers=["fake"], verbose=False)
    killed.records.rewind(0)
    record(killed, 1, 2)
    wait_for(lambda: fake.runs and steps(fake.runs["run 0"]) == [1, 2])
    record(killed, 3, 3)
    wait_for(lambda: steps(fake.runs["run 0"]) == [1, 2, 3, 3])
    state = tmp_path / "trackers" / "fake.json"
    wait_for(lambda: json.loads(state.read_text())["sent"] == {"": [2, 1]})
    resumed = Console(tmp_path, loggers=["fake"], verbose=False)
    resumed.records.rewind(3)
    resumed.records.close()
    (seen,) = fake.runs.values()
    assert steps(seen) == [1, 2, 3, 3, 3, 3]
    assert json.loads(state.read_text())["sent"] == {"": [3, 2]}  # closed, and so complete


@pytest.mark.parametrize(
    "keeps", ["at once", *(pytest.param(keeps, marks=pytest.mark.sweep) for keeps in ("soon", "after the step"))]
)
def test_rows_count_as_sent_when_a_kill_no_longer_loses_them(tmp_path, fake, monkeypatch, keeps):
    monkeypatch.setattr(fake, "keeps", keeps)
    monkeypatch.setattr("redeqx.monitor._delivery.GAP", 1.5)
    console, state = Console(tmp_path, loggers=["fake"], verbose=False), tmp_path / "trackers" / "fake.json"
    record(console, 1, 2)
    wait_for(lambda: fake.runs and steps(fake.runs["run 0"]) == [1, 2])
    if keeps != "at once":  # the last row was delivered in this pass
        assert json.loads(state.read_text())["sent"] != {"": [2, 1]}
    wait_for(lambda: json.loads(state.read_text())["sent"].get("") == ([1, 1] if keeps == "after the step" else [2, 1]))
    console.records.close()
    assert json.loads(state.read_text())["sent"] == {"": [2, 1]}


def test_a_configuration_before_a_fit_opens_no_run_of_its_own(tmp_path, fake):
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    console.records.config({"seed": 1})
    time.sleep(0.1)
    console.records.rewind(0)
    console.records.begin({"mesh": "data=8"}, lambda: "whole")
    record(console, 1)
    console.records.close()
    assert fake.runs == {
        "run 0": [
            "begun",
            {"seed": 1},
            {"mesh": "data=8"},
            (0, "step_00000000_plan.txt"),
            (1, {"rate": 7.0, "loss": 0.5}),
            "closed",
        ]
    }
    console.records.config({"seed": 2})
    console.records.close()
    assert fake.runs["run 0"][-3:] == ["continued", {"seed": 2}, "closed"]


def test_numbers_of_a_configuration_stay_numbers(tmp_path, fake):
    """So that a tracker can sort runs by them, and plot against them."""
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    given = {"rate": 1e-3, "width": np.int64(3), "tied": True, "adam": {"b1": np.float32(0.5)}, "dims": (2, 4)}
    others = {"workdir": tmp_path, "array": jnp.arange(2), "limit": float("inf"), "odd": {(1, 2): 3}}
    console.records.config({**given, **others, "dtype": jnp.dtype("bfloat16")})
    console.records.close()
    plain = {"rate": 1e-3, "width": 3, "tied": True, "adam": {"b1": 0.5}, "dims": [2, 4]}
    text = {"workdir": str(tmp_path), "array": "[0 1]", "limit": "Infinity", "odd": "{(1, 2): 3}", "dtype": "bfloat16"}
    assert fake.runs["run 0"][1] == {**plain, **text}


def test_restarted_run_begins_a_new_tracker_run(tmp_path, fake):
    for _ in range(2):
        console = Console(tmp_path, loggers=["fake"], verbose=False)
        record(console, 0)  # before the fit
        console.records.rewind(0)
        record(console, 1)
        console.records.close()
    assert [steps(seen) for seen in fake.runs.values()] == [[0, 1], [0, 0, 1]]  # as in metrics.jsonl


def test_records_added_by_a_rerun_to_the_last_step_are_delivered(tmp_path, fake):
    for names in (["sample"], ["sample", "report"], ["sample", "report"]):
        console = Console(tmp_path, loggers=["fake"], verbose=False)
        console.records.rewind(8)
        console.records.begin({}, lambda: "the plan")
        for name in names:
            console.records.text(name, "text", 8)
        console.records.close()
    assert list(fake.runs) == ["run 0"]
    media = [seen for seen in fake.runs["run 0"] if isinstance(seen, tuple)]
    assert [(step, name.split("_")[-1]) for step, name in media] == [(8, "plan.txt"), (8, "sample.txt"), (8, "report.txt")]


def test_damaged_tracker_state_begins_a_new_run(tmp_path, fake):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "fake.json").write_text('{"run_id": ')
    console = Console(tmp_path, loggers=["fake"], verbose=False)
    record(console, 1)
    console.records.close()
    state = json.loads((tmp_path / "trackers" / "fake.json").read_text())
    assert state == {"run_id": "run 0", "sent": {"": [1, 1]}}


# Failures


def test_failing_tracker_warns_once_and_catches_up(tmp_path, fake, capsys):
    fake.fails += [ConnectionError("no\nnetwork")] * 3
    with pytest.warns(UserWarning) as caught:
        console = Console(tmp_path, loggers=["fake"])
        record(console, 1, 2)
        wait_for(lambda: not fake.fails)
        record(console, 3)
        console.records.close()
    assert [str(w.message) for w in caught] == [
        "`loggers`: expected fake to record, got ConnectionError: no network. Training goes on; what it misses is kept, and "
        "sent when it works again. All of it is in the workdir, too."
    ]
    assert steps(fake.runs["run 0"]) == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == ["fake: at run 0", "fake: records again"]


def test_run_is_closed_even_if_its_last_delivery_fails(fake, monkeypatch):
    monkeypatch.setattr("redeqx.monitor._delivery.FIRST_RETRY", 60.0)
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, 1)
    wait_for(lambda: fake.runs and steps(fake.runs["run 0"]))
    with pytest.warns(UserWarning, match="expected fake to record, got ConnectionError: no network"):
        fake.fails += [ConnectionError("no network")] * 99
        record(console, 2)
        console.records.close()
    assert fake.runs["run 0"] == ["begun", (1, {"loss": 0.5, "rate": 7.0}), "closed"]


def test_failing_tracker_does_not_end_the_run_if_warnings_are_errors(fake, capsys):
    fake.fails += [ConnectionError("no network")] * 99
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, 1, 2, 3)
    console.records.close()
    assert capsys.readouterr().err.startswith("`loggers`: expected fake to record, got ConnectionError: no network.")
    assert not fake.runs


def test_hanging_tracker_delays_nothing(fake, monkeypatch):
    monkeypatch.setattr("redeqx.monitor._delivery.PATIENCE", 0.05)
    fake.blocks = threading.Event()
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, *range(100))
    with pytest.warns(UserWarning, match=r"expected fake to take its last records within 0\.05 s, got no answer"):
        console.records.close()
    console.records.close()
    record(console, 101)
    (thread,) = [each for each in threading.enumerate() if each.name == "redeqx-fake"]
    fake.blocks.set()
    thread.join(30)
    assert steps(fake.runs["run 0"]) == [*range(100)]


def test_queue_is_bounded(fake, monkeypatch):
    monkeypatch.setattr("redeqx.monitor._delivery.ROOM", 3 * 1024)
    fake.blocks = threading.Event()
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, *range(10))
    fake.blocks.set()
    console.records.close()
    assert steps(fake.runs["run 0"]) == [7, 8, 9]


def test_dropped_console_closes_its_runs(fake):
    console = Console(None, loggers=["fake"], verbose=False)
    record(console, 1)
    del console
    wait_for(lambda: fake.runs and fake.runs["run 0"][-1] == "closed")


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_trackers import Fake
from redeqx.monitor import TRACKERS, Console
TRACKERS["fake"] = Fake
Fake.close = lambda self, failed: print(len(self.seen), "failed" if failed else "closed")
console = Console(None, loggers=["fake"], verbose=False)
console.records.metrics({{"loss": 1.0}}, 1)
{last}
"""


@pytest.mark.parametrize(
    "last, output, code",
    [
        pytest.param("", "2 closed\n", 0, marks=pytest.mark.sweep),
        ("raise ValueError('x')", "2 failed\n", 1),
    ],
)
def test_run_is_closed_at_the_end_of_a_script(last, output, code):
    script = SCRIPT.format(tests=str(Path(__file__).parent), last=last)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.returncode) == (output, code), run.stderr


TENSORBOARD = """
import os, sys, threading
from pathlib import Path
from redeqx.monitor import Console
console = Console(Path("run"), loggers=["tensorboard"], verbose=False)
console.records.config({"seed": 1})
console.records.rewind(0)
console.records.begin({"mesh": "data=8"}, lambda: "whole")
for step in range(1, 40):
    console.records.metrics({"loss": step / 2}, step)
if sys.argv[1] == "raise":
    raise ValueError("boom")
if sys.argv[1] == "leave":  # as a thread does if a process is gone
    from unittest import mock
    from redeqx.distributed import Peers
    mock.patch("redeqx.distributed._exits.UPLOADS", 60).start()  # a busy machine imports tensorboardX in more than 2 s
    threading.Thread(target=Peers().end, args=("process 1 of 2 is gone", 75)).start()
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("how", "code"), [("end", 0), *(pytest.param(*how, marks=pytest.mark.sweep) for how in (("raise", 1), ("leave", 75)))]
)
def test_tensorboard_has_all_records_of_a_short_run(tmp_path, how, code):
    """tensorboardX closes its writer at exit, before what was registered earlier; records after that are lost in silence."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", TENSORBOARD, how]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == code, run.stderr
    (file,) = (tmp_path / "run" / "tensorboard").glob("*")  # one, although the configuration came first
    assert tensorboard_losses(file) == [(step, step / 2) for step in range(1, 40)]


def tensorboard_losses(file: Path) -> list[tuple[int, float]]:
    """The losses in a file of events: each record is its length, a crc, an event and a crc."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, losses = file.read_bytes(), 0, []
    while at < len(data):
        (n,) = struct.unpack("<Q", data[at : at + 8])
        event = Event.FromString(data[at + 12 : at + 12 + n])
        losses += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
        at += n + 16
    return losses


# The real packages


REAL = """
import os, sys, time
import numpy as np
import redeqx
from unittest import mock
# The packages take seconds to import, minutes on a machine with other work.
mock.patch("redeqx.monitor._delivery.PATIENCE", 250).start()
name, begin, end, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
deployer = redeqx.Deployer(workdir="run", loggers=[name])
deployer.begin_records(begin)
deployer.console.records.begin({"plan": "data=8", "seed": "1"}, lambda: "<split> by rule")  # as a Trainer does
for step in range(begin + 1, end + 1):
    deployer.log_metrics({"loss": step / 2}, step)
    deployer.log_image("samples", np.full((4, 6, 3), step / 10))
    deployer.log_text("words", f"<b>|{step}|</b>")
if how == "cut":  # by a kill soon after the end
    time.sleep(30 if name == "trackio" else 15)
    os._exit(9)
deployer.console.records.close()
if how == "kill":
    os._exit(9)
if how == "raise":
    raise ValueError("boom")
"""


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("wandb", ((0, 4, "cut", 9), (4, 5, "kill", 9), (5, 6, "end", 0))),
        ("mlflow", ((0, 4, "kill", 9), (2, 5, "raise", 1), (5, 6, "end", 0))),
        ("trackio", ((0, 4, "kill", 9), (2, 5, "raise", 1), (5, 6, "end", 0))),
    ],
)
def test_real_package_killed_and_resumed(name, runs, tmp_path):
    pytest.importorskip(name)
    env = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_MODE": "offline", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }  # fmt: skip
    (tmp_path / "train.py").write_text(REAL)
    for begin, end, how, code in runs:
        command = [sys.executable, "train.py", name, str(begin), str(end), how]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert run.returncode == code, run.stdout + run.stderr
        assert "expected" not in run.stderr, run.stderr
    run_id = json.loads((tmp_path / "run" / "trackers" / f"{name}.json").read_text())["run_id"]
    read = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name]
    losses, media, config, plan = read(tmp_path, run_id)
    assert losses == [(step, step / 2) for step in range(1, 7)]
    assert media == [*range(1, 7)]
    assert {"plan": "data=8", "seed": "1"}.items() <= config.items()
    assert "<split> by rule" in html.unescape(plan)


def read_wandb(folder: Path, run_id: str) -> tuple[list, list, dict, str]:
    """The losses, image steps, config and plan in the files of its offline runs, which share one id."""
    from wandb.proto.wandb_internal_pb2 import Record

    losses, media, config = [], [], {}
    parts = sorted((folder / "run" / "wandb").glob("offline-run-*"))
    assert len(parts) == 3 and all(part.name.endswith(run_id) for part in parts)
    for part in parts:
        for record in map(Record.FromString, leveldb_records(next(part.glob("*.wandb")).read_bytes())):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in items:
                losses.append((record.history.step.num, json.loads(items["loss"])))
            config.update({item.key: json.loads(item.value_json) for item in record.config.update})
        media += [int(image.name.split("_")[1]) for image in (part / "files/media/images").iterdir()]
    (plan,) = (parts[0] / "files/media/html").glob("plan_*.html")
    return losses, sorted(media), config, plan.read_text()


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: 32 KiB blocks of record fragments, each after its crc, length and type."""
    record, at = b"", 7  # after the file's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little for another fragment
            at += 32768 - at % 32768
            continue
        n, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + n]
        at += 7 + n
        if kind in (1, 4):  # full, last
            yield record
            record = b""


def read_mlflow(folder: Path, run_id: str) -> tuple[list, list, dict, str]:
    """The same values from its file store, all of one run."""
    store = next((folder / "mlruns").glob(f"*/{run_id}"))
    losses = [line.split() for line in (store / "metrics/loss").read_text().splitlines()]
    assert len(list(store.parent.glob("*/metrics"))) == 1
    config = {path.name: path.read_text() for path in (store / "params").iterdir()}
    plan = next((store / "artifacts/media").glob("*_plan.txt")).read_text()
    images = (store / "artifacts/media").glob("*_samples.png")
    steps = sorted(int(path.name[5:13]) for path in images)
    return [(int(step), float(value)) for _, value, step in losses], steps, config, plan


def read_trackio(folder: Path, run_id: str) -> tuple[list, list, dict, str]:
    """The same values from its database, all of one run."""
    database = sqlite3.connect(next((folder / "trackio").glob("*.db")))
    rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    configs = [json.loads(x) for (x,) in database.execute("select config from configs where run_name = ?", (run_id,))]
    database.close()
    assert {name for name, _, _ in rows} == {run_id}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    plan = next(m["plan"] for _, m in found if "plan" in m)
    losses = [(s, m["loss"]) for s, m in found if "loss" in m]
    return losses, [s for s, m in found if "samples" in m], configs[-1], str(plan)


KILLED = """
import json, os, time
from pathlib import Path
from redeqx.monitor import Console

console, state = Console(Path.cwd(), loggers=["trackio"], verbose=False), Path("trackers/trackio.json")
for step in range(30):
    console.records.metrics({"loss": step / 2}, step)
    while step in (0, 29) and not (state.exists() and json.loads(state.read_text())["sent"].get("", [-1])[0] == step):
        time.sleep(0.002)
os._exit(9)
"""


@pytest.mark.sweep
def test_trackio_has_after_a_kill_what_counts_as_delivered(tmp_path):
    """A resumed run does not deliver it again."""
    pytest.importorskip("trackio")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 9, run.stdout + run.stderr
    run_id = json.loads((tmp_path / "trackers" / "trackio.json").read_text())["run_id"]
    database = sqlite3.connect(next((tmp_path / "trackio").glob("*.db")))
    rows = database.execute("select step, metrics from metrics where run_name = ? order by step", (run_id,)).fetchall()
    database.close()
    assert [(step, json.loads(metrics)["loss"]) for step, metrics in rows] == [(step, step / 2) for step in range(30)]
