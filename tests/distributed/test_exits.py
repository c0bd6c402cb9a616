"""A process that has to leave does, whatever has become of the streams that it prints to, and of its other threads."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from redeqx.distributed import _cluster, _exits
from redeqx.distributed._exits import attempt, keep_quiet, stacks
from redeqx.distributed._interrupts import Watch
from redeqx.distributed._peers import Peers, leave

LIMIT = 30.0


class Left(BaseException):
    """In place of the end of the process."""


class Gone:
    """A stream whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


class Stuck:
    """A stream whose reader has stopped."""

    def __init__(self):
        self.over = threading.Event()

    def write(self, text):
        self.over.wait(LIMIT)

    def flush(self):
        self.over.wait(LIMIT)


@pytest.fixture(params=[Gone, Stuck])
def stream(request, monkeypatch):
    stream = request.param()
    monkeypatch.setattr(_exits, "PATIENCE", 0.1)
    monkeypatch.setattr(attempt, "__defaults__", (0.1,))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    yield stream
    if isinstance(stream, Stuck):
        stream.over.set()


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which a thread would have ended the process."""
    codes = []

    def exit(code):
        codes.append(code)
        raise Left

    monkeypatch.setattr(os, "_exit", exit)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return codes


def eventually(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_process_leaves_whoever_reads_what_it_prints(stream, codes):
    with pytest.raises(Left):
        leave("process 1 of 2 is gone", 7)
    assert codes == [75]


def test_the_watch_ends_a_run_whoever_reads_what_it_prints(stream, codes):
    watch = Watch(Peers(), 0.1)
    with watch.on():
        watch.beat(3)
        eventually(lambda: codes)
    assert codes == [75]


def test_an_exception_ends_a_process_whoever_reads_what_it_prints(stream, codes, monkeypatch):
    monkeypatch.setattr(_cluster, "_HOOK", 0.1)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    peers = Peers()
    _cluster._report_ends(peers)
    try:
        with pytest.raises(Left):
            sys.excepthook(RuntimeError, RuntimeError("the loader is broken"), None)
    finally:
        _cluster.atexit.unregister(peers.close)
    assert codes == [1]


def test_the_stacks_name_each_thread_and_where_it_is():
    over = threading.Event()

    def waits():
        over.wait(LIMIT)

    thread = threading.Thread(target=waits, name="mine")
    thread.start()
    eventually(lambda: "waits" in stacks())
    found = stacks().split("thread ")
    over.set()
    thread.join(LIMIT)
    (mine,) = [each for each in found if each.startswith("mine:")]
    assert f"{__file__}:" in mine
    assert "in waits\n" in mine
    assert any(each.startswith("MainThread:") for each in found)


def test_one_exception_is_kept_quiet_and_no_other(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, frames: printed.append(error))
    quiet, other = KeyboardInterrupt(), KeyboardInterrupt()
    keep_quiet(quiet)
    for error in (quiet, other):
        sys.excepthook(KeyboardInterrupt, error, None)
    assert printed == [other]


def test_another_thread_keeps_no_process_that_has_come_to_its_end(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text("""
import sys, threading, time
from redeqx.distributed import _exits

_exits.STAY = 0.3
threading.Thread(target=time.sleep, args=(60,), name="uploads").start()
_exits.end_in_time(75)
sys.exit(75)
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 75
    assert ended.stderr == "redeqx: thread uploads still runs 0.3 s after the end. Leaving with exit code 75.\n"


# --- the watch -------------------------------------------------------------------------------------------------------


def test_the_watch_is_on_while_steps_are_expected_and_not_after(codes):
    """A notebook stays after `train`, for as long as it likes."""
    watch = Watch(Peers(), 0.1)
    with watch.on():
        with watch.on():
            watch.beat(1)
        assert watch._last is not None
    watch.beat(2)
    watch.beat_on()
    time.sleep(0.5)
    assert codes == []
