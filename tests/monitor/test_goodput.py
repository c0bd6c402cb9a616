"""Goodput: seconds by cause under a fake clock, also over restarts, compared with sums by hand."""

import json
import time

import pytest

from redeqx.monitor import Console


class Clock:
    """The process's clock and the time of day, which run together."""

    now = 0.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "time", lambda: 1e9 + clock.now)
    return clock


def take_step(console, line, clock, step, seconds=2.0):
    clock.pass_(seconds)
    console.records.step(line, step, {"loss": 1.0}, n_examples=1)


def run(console, clock, steps, first=0):
    """Five seconds before the steps, three of compilation, and two a step; the first step belongs to the start."""
    with console.progress(first_step=first) as line, console.records.goodput.during("steps"):
        clock.pass_(5)
        with line.compiling("train step"):
            clock.pass_(3)
        for step in steps:
            take_step(console, line, clock, step)
    return console.records.goodput.seconds


def nonzero(seconds):
    return {cause: x for cause, x in seconds.items() if x}


def test_each_moment_has_the_innermost_cause(clock):
    console = Console(None, verbose=False)
    clock.pass_(4)  # the script makes its model
    run(console, clock, [1])
    goodput = console.records.goodput
    with console.progress() as line, goodput.during("steps"):
        with line.waiting():
            clock.pass_(1)
        take_step(console, line, clock, 2)
        with line.pause("evaluating"):
            with console.progress(title="evaluate") as inner, inner.waiting():
                clock.pass_(0.5)
            with inner.compiling("eval step"):
                clock.pass_(6)
            clock.pass_(7)
        with line.pause("saving"):
            clock.pass_(8)
        with line.pause("thinking"):
            clock.pass_(0.25)
    clock.pass_(1)
    assert nonzero(goodput.seconds) == {
        "steps": 2, "starting": 11, "compiling": 9, "data": 1.5, "evaluating": 7, "saving": 8, "other": 1.25,
    }  # fmt: skip
    assert goodput.text() == (
        "5.0% of 0:40 in steps, starting 27.7%, compiling 22.6%, saving 20.1%, evaluating 17.6%, waiting for data 3.8%, "
        "other 3.1%"
    )


def test_a_restart_counts_lost_steps_and_the_time_until_it(clock, tmp_path):
    first = Console(tmp_path, verbose=False)
    run(first, clock, range(1, 7))
    first.records.close()
    assert clock.now == 20  # killed; records of steps 2 to 6 at 12, 14, ... 20 s
    rows = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3, 4, 5, 6] and rows[-1]["unix_time"] == 1e9 + 20
    assert (rows[-1]["goodput"], rows[-1]["seconds_starting"], rows[-1]["seconds_compiling"]) == (0.5, 7, 3)
    clock.pass_(30)
    second = Console(tmp_path, verbose=False)
    second.records.rewind(4)  # the newest checkpoint: two steps are lost
    seconds = run(second, clock, [5, 6, 7], first=4)
    assert nonzero(seconds) == {"steps": 6 + 4, "starting": 14, "compiling": 6, "lost": 4, "stalled": 30}
    assert sum(seconds.values()) == clock.now
    second.records.end(7)
    second.records.close()
    clock.pass_(1000)  # after its end, nothing is missing
    third = Console(tmp_path, verbose=False)
    third.records.rewind(7)
    assert third.records.goodput.seconds == seconds


def test_a_save_between_two_records_loses_what_came_after(clock, tmp_path):
    console = Console(tmp_path, verbose=False)
    with console.progress() as line, console.records.goodput.during("steps"):
        for step in range(1, 10):
            take_step(console, line, clock, step, 0.4)  # records of steps 2, 5, 8
    console.records.close()
    again = Console(tmp_path, verbose=False)
    again.records.rewind(6)
    assert again.records.goodput.seconds["lost"] == pytest.approx(0.8)  # of steps 7 and 8
    assert again.records.goodput.seconds["stalled"] == pytest.approx(0.4)  # nothing says that step 9 was taken


def test_a_run_without_a_checkpoint_loses_everything(clock, tmp_path):
    console = Console(tmp_path, verbose=False)
    run(console, clock, range(1, 4))
    console.records.close()
    again = Console(tmp_path, verbose=False)
    again.records.rewind(-1)
    assert nonzero(again.records.goodput.seconds) == {"lost": 14}


def test_each_trainer_continues_its_own_records(clock, tmp_path):
    def take(console, name, step):
        clock.pass_(2)
        console.records.step(line, step, {"loss": 1.0}, n_examples=1, name=name)

    console = Console(tmp_path, verbose=False)
    with console.progress() as line, console.records.goodput.during("steps"):
        for step in range(1, 5):
            take(console, "actor", step)
            take(console, "critic", 10 * step)
    console.records.close()
    again = Console(tmp_path, verbose=False)
    again.records.rewind(30, "critic")
    assert again.records.goodput.seconds["lost"] == 4
    again.records.rewind(3, "actor")  # they share the time
    assert again.records.goodput.seconds["lost"] == 4
