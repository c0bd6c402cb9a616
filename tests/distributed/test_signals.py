"""Signal handlers apply only in this process and only while a fit runs, never in a forked child."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from redeqx.distributed import Peers, Preemption

LIMIT = 30.0
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


def test_previous_handlers_are_restored():
    before, outer, inner = handlers(), Preemption(Peers()), Preemption(Peers())
    with outer.listening():
        with inner.listening():
            signal.raise_signal(signal.SIGUSR1)
            assert inner.is_due(1) and not outer.is_due(1)
        signal.raise_signal(signal.SIGTERM)
        assert outer.is_due(2) and not inner.is_due(2)
    assert handlers() == before


def test_other_threads_change_no_handlers():
    before, found = handlers(), []

    def run():
        with Preemption(Peers()).listening():
            found.append(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    assert found == [before]


def run_script(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.sweep
def test_signals_within_half_a_second_count_once(tmp_path):
    """A wrapper forwards the Ctrl-C that the terminal also sends: the two count as one. A later one ends the process."""
    ended = run_script(
        tmp_path,
        """
import signal, time
from redeqx.distributed import Peers, Preemption

with Preemption(Peers()).listening():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    time.sleep(1)
    print("still here", flush=True)
    signal.raise_signal(signal.SIGINT)
    time.sleep(60)
""",
    )
    assert (ended.returncode, ended.stdout) == (130, "still here\n"), ended.stderr
    assert ended.stderr.count("Ctrl-C: stopping after this step") == 1


@pytest.mark.sweep
def test_forked_child_inherits_no_handlers(tmp_path):
    """Even inside nested fits; a signal to the child does not wake the parent."""
    ended = run_script(
        tmp_path,
        """
import os, signal, time
from redeqx.distributed import Peers, Preemption

signal.signal(signal.SIGUSR1, handler := lambda *_: None)
numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
runs = [Preemption(Peers()), Preemption(Peers())]
with runs[0].listening(), runs[1].listening():
    if (pid := os.fork()) == 0:
        found = [signal.getsignal(number) for number in numbers]
        right = found == [signal.SIG_DFL, handler, signal.default_int_handler] and signal.set_wakeup_fd(-1) == -1
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            os._exit(3 if right else 4)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if (pid := os.fork()) == 0:
        time.sleep(60)
        os._exit(5)
    os.kill(pid, signal.SIGTERM)
    print(code, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), [run.is_due(1) for run in runs])
""",
    )
    assert ended.stdout == "3 -15 [False, False]\n", ended.stderr
