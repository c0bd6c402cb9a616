"""A process that must leave does so, whatever the state of its output streams and other threads."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import pytest

from redeqx._at_end import AtEnd
from redeqx.distributed import Peers, Watch, _cluster

LIMIT = 30.0


class ExitCalled(BaseException):
    """Raised instead of ending the process."""


class ClosedStream:
    """A stream whose reader has exited."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


class BlockedStream:
    """A stream whose reader has stopped reading."""

    def __init__(self):
        self.over = threading.Event()

    def write(self, text):
        self.over.wait(LIMIT)

    def flush(self):
        self.over.wait(LIMIT)


@pytest.fixture(params=[ClosedStream, BlockedStream])
def stream(request, monkeypatch):
    stream = request.param()
    monkeypatch.setattr("redeqx.distributed._exits.PATIENCE", 0.1)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    yield stream
    if isinstance(stream, BlockedStream):
        stream.over.set()


@pytest.fixture
def codes(monkeypatch):
    """Exit codes with which a thread would have ended the process."""
    codes = []

    def exit(code):
        codes.append(code)
        raise ExitCalled

    monkeypatch.setattr("redeqx._at_end._registered", {})  # what other tests have registered is theirs
    monkeypatch.setattr(os, "_exit", exit)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return codes


def wait_until(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_leave_exits_with_unusable_streams(stream, codes):
    with pytest.raises(ExitCalled):
        Peers().end("process 1 of 2 is gone", 75)
    assert codes == [75]


def test_watch_exits_with_unusable_streams(stream, codes):
    watch = Watch(Peers(), 0.1)
    with watch.on():
        watch.beat(3)
        wait_until(lambda: codes)
    assert codes == [75]


def test_excepthook_exits_with_unusable_streams(stream, codes, monkeypatch):
    monkeypatch.setattr(_cluster, "_HOOK", 0.1)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    peers = Peers()
    _cluster._report_ends(peers)
    try:
        with pytest.raises(ExitCalled):
            sys.excepthook(RuntimeError, RuntimeError("the loader is broken"), None)
    finally:
        _cluster.atexit.unregister(peers.close)
    assert codes == [1]


def raised(act):
    try:
        act()
    except Exception as error:
        return error


def runtime_error():
    raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")


def error_of_it(cause):
    try:
        runtime_error()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError("the step failed") from (error if cause else None)


@pytest.mark.parametrize(
    ("act", "in_runtime"),
    [
        (runtime_error, True),
        (lambda: error_of_it(cause=True), True),
        (lambda: error_of_it(cause=False), True),
        (lambda: [][0], False),
    ],
)
def test_excepthook_tells_errors_of_the_runtime_apart(codes, monkeypatch, act, in_runtime):
    """A collective raises one if another process is gone, and the user's code may raise its own from it."""
    found = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, frames: None)
    peers = Peers()
    monkeypatch.setattr(peers, "fail", lambda *, in_runtime: found.append(in_runtime))
    _cluster._report_ends(peers)
    try:
        error = raised(act)
        with pytest.raises(ExitCalled):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        _cluster.atexit.unregister(peers.close)
    assert found == [in_runtime]
    assert codes == [1]


def test_the_watch_prints_the_position_of_each_thread(codes, capsys):
    over = threading.Event()

    def waits():
        over.wait(LIMIT)

    thread = threading.Thread(target=waits, name="mine")
    thread.start()
    watch = Watch(Peers(), 0.2)
    with watch.on():
        watch.beat(3)
        wait_until(lambda: codes)
    over.set()
    thread.join(LIMIT)
    (mine,) = [each for each in capsys.readouterr().err.split("thread ") if each.startswith("mine:")]
    assert f"{__file__}:" in mine
    assert "in waits\n" in mine


@pytest.mark.sweep
def test_running_thread_does_not_prevent_the_exit(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text("""
import threading, time
from unittest import mock
from redeqx.distributed import Peers, Preemption

threading.Thread(target=time.sleep, args=(60,), name="uploads").start()
mock.patch("redeqx.distributed._exits.STAY", 0.3).start()
Preemption(Peers()).end(7, lambda text: None)
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 75
    assert ended.stderr == "redeqx: thread uploads still runs 0.3 s after the end. Leaving with exit code 75.\n"


@pytest.mark.sweep
def test_exit_handler_that_hangs_does_not_prevent_the_exit(tmp_path):
    """Such as that of a tracker whose server is down; a scheduler would kill the process, and not requeue it."""
    script = tmp_path / "ends.py"
    script.write_text("""
import time
from unittest import mock
from redeqx._at_end import AtEnd
from redeqx.distributed import Peers, Preemption

mock.patch("redeqx.distributed._exits.CLEANUP", 0.3).start()
AtEnd(lambda: time.sleep(60))
Preemption(Peers()).end(7, lambda text: None)
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 75
    assert ended.stderr == "redeqx: exit handlers still run after 0.3 s. Leaving with exit code 75.\n"


def test_exit_handler_that_hangs_does_not_delay_the_others(codes, monkeypatch):
    monkeypatch.setattr("redeqx.distributed._exits.UPLOADS", 2.0)
    called, over = threading.Event(), threading.Event()
    ends = [AtEnd(called.set), AtEnd(over.wait)]
    try:
        with pytest.raises(ExitCalled):
            Peers().end("process 1 of 2 is gone", 75)
        assert called.is_set()
    finally:
        over.set()
        for each in ends:
            each.forget()


def test_exit_handlers_end_in_the_order_of_atexit(codes):
    """The records of a tracker are in files that are uploaded."""
    done = []
    for name in ("upload", "delivery"):
        AtEnd(partial(lambda name: [time.sleep(0.05 * (name == "delivery")), done.append(name)], name))
    with pytest.raises(ExitCalled):
        Peers().end("process 1 of 2 is gone", 75)
    assert done == ["delivery", "upload"]


# --- the watch -------------------------------------------------------------------------------------------------------


def test_watch_is_active_only_while_steps_are_expected(codes):
    """A notebook may stay idle after `train` for any length of time."""
    watch = Watch(Peers(), 0.1)
    with watch.on():
        with watch.on():
            watch.beat(1)
        assert watch._last is not None
    watch.beat(2)
    watch.beat()
    time.sleep(0.5)
    assert codes == []
