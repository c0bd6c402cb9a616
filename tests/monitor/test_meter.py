"""Rates of a loop, compared with values calculated by hand under a fake clock."""

import io
import json
import math
import re
import time

import pytest

from redeqx.monitor import Console, Work


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def line(clock):
    with Console(None, verbose=False).progress() as line:
        yield line


def finish(line, step, n_examples=1, **counts):
    line.update(step, metrics={}, n_examples=n_examples, **counts)


def test_rates_of_equal_steps(clock, line):
    """Each step takes 2 s, 0.4 s of it waiting for data, and has 8 examples, 2,048 tokens, 3e12 FLOPs (0.5 s at peak)."""
    counts = {"n_examples": 8, "n_tokens": 2048, "work": Work(3e12, 0.5)}
    assert line.speed() == {}
    finish(line, 1, **counts)  # the first step compiles, so only its end is known
    assert line.speed() == {}
    for step in range(2, 7):
        clock.now += 1.6
        for _ in range(2):  # as for the end of an epoch, then for the first batch of the next
            with line.waiting():
                clock.now += 0.2
        finish(line, step, **counts)
    assert line.speed() == pytest.approx(
        {
            "examples_per_second": 4,
            "tokens_per_second": 1024,
            "model_flops_per_second": 1.5e12,
            "mfu": 0.25,
            "data_wait": 0.2,
        }
    )


def test_step_reported_twice_counts_once(clock):
    out = io.StringIO()
    with Console(None, file=out).progress(n_steps=12) as line:
        for step in (1, 1, 2):
            clock.now += 2
            finish(line, step)
    (left,) = re.findall(r"0:(\d+) left", out.getvalue())
    assert int(left) == pytest.approx(40, rel=0.2)  # 10 steps of 4 s; the newest step has the largest weight


def test_unknown_quantities_have_no_rate(clock, line):
    for step in (1, 2, 3):
        clock.now += 2
        finish(line, step, 8, work=Work(3e12))  # a chip without published peak rates
    assert line.speed() == {"examples_per_second": 4, "model_flops_per_second": 1.5e12}


def test_weight_of_a_step_decays_with_age(clock, line):
    finish(line, 1, 1)
    clock.now += 3
    finish(line, 2, 6)
    clock.now += 15  # the time constant
    finish(line, 3, 15)
    assert line.speed() == {"examples_per_second": pytest.approx((6 / math.e + 15) / (3 / math.e + 15))}


def test_compilations_and_pauses_are_excluded_from_rates(clock, line):
    finish(line, 1, 4)
    clock.now += 1
    with line.pause("saving"):
        clock.now += 50
    finish(line, 2, 4)
    with line.waiting():
        clock.now += 50
    with line.compiling("the step"):
        clock.now += 50
    finish(line, 3, 4)
    assert line.speed() == {"examples_per_second": 4}
    clock.now += 1
    finish(line, 4, 4)
    rates = line.speed()
    assert rates["examples_per_second"] == 4 and rates["data_wait"] == 0  # the wait before the compilation is discarded


def test_work_can_be_scaled():
    assert Work(4.0, 2.0) * 0.5 == Work(2.0, 1.0) and Work(4.0) * 0.5 == Work(2.0)


# --- printed and recorded -----------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.seen = []

    def log(self, metrics: dict, step: int) -> None:
        self.seen.append((step, metrics))


def run(console, clock, work, n_steps=5, seconds=0.4):
    with console.progress() as line:
        for step in range(1, n_steps + 1):
            clock.now += seconds * 0.75
            with line.waiting():
                clock.now += seconds * 0.25
            line.update(step, metrics={"loss": 1.0}, n_examples=8, n_tokens=4096, work=work)
            console.records.metrics({"loss": 1.0}, step, speed=line.speed())
    console.records.close()


def test_speed_is_recorded_once_a_second_with_the_metrics(tmp_path, clock):
    recorder = Recorder()
    console = Console(tmp_path, verbose=False, loggers=[recorder], peak_memory=lambda: 2**33)
    run(console, clock, Work(2e12, 0.1), n_steps=8)
    expected = {
        "examples_per_second": 20,
        "tokens_per_second": 10240,
        "model_flops_per_second": 5e12,
        "mfu": 0.25,
        "data_wait": 0.25,
        "peak_memory_bytes": 2**33,
    }
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [2, 5, 8]
    assert all(line == pytest.approx(expected) for line in lines)
    assert [step for step, metrics in recorder.seen if "mfu" in metrics] == [2, 5, 8]
    assert recorder.seen[0] == (1, {"loss": 1.0}) and recorder.seen[1] == (2, {"loss": 1.0, **lines[0]})
    # A rerun must reproduce metrics.jsonl byte for byte, so it contains no timings.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [f'{{"step": {step}, "loss": 1.0}}' for step in range(1, 9)]


def test_user_metric_takes_precedence_over_speed(tmp_path):
    recorder = Recorder()
    console = Console(tmp_path, verbose=False, loggers=[recorder])
    console.records.metrics({"mfu": 7.0}, 1, speed={"mfu": 0.5})
    console.records.close()
    assert recorder.seen == [(1, {"mfu": 7.0})]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "mfu": 7.0}\n'
    assert (tmp_path / "speed.jsonl").read_text() == '{"step": 1, "mfu": 0.5}\n'


def test_speed_is_rewound_with_the_metrics(tmp_path):
    console = Console(tmp_path, verbose=False)
    for step in (1, 2, 3):
        console.records.metrics({"loss": 1.0}, step, speed={"mfu": 0.5})
    console.records.rewind(2)
    for name in ("metrics", "speed"):
        assert [json.loads(line)["step"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("work", "peak", "expected"),
    [
        (Work(2e12, 0.1), 2**33, "MFU 25.0%  peak 8.0 GiB  waiting for data 25%"),
        (Work(2e12), None, "5 TFLOP/s a device  waiting for data 25%"),
        (Work(2e9), None, "5 GFLOP/s a device  waiting for data 25%"),
        (Work(2e6), None, "5 MFLOP/s a device  waiting for data 25%"),
        (None, None, "tokens/s  waiting for data 25%"),
    ],
)
def test_speed_in_the_progress_line(clock, work, peak, expected):
    out = io.StringIO()
    run(Console(None, file=out, peak_memory=lambda: peak), clock, work, n_steps=20)
    assert f"{expected}  " in out.getvalue().splitlines()[-1]
    assert "20 examples/s  10,240 tokens/s  " in out.getvalue().splitlines()[-1]
