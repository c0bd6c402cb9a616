"""Signal handlers apply only in this process and only while they are installed, never in a forked child."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from redeqx.distributed._signals import handled, woken

LIMIT = 30.0


def wait_until(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_previous_handlers_are_restored():
    before, seen = signal.getsignal(signal.SIGUSR2), []
    with handled({signal.SIGUSR2: lambda: seen.append("outer")}):
        with handled({signal.SIGUSR2: lambda: seen.append("inner")}):
            signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_other_threads_change_no_handlers():
    before, found = signal.getsignal(signal.SIGUSR2), []

    def run():
        with handled({signal.SIGUSR2: lambda: None}), woken(signal.SIGUSR2, lambda n: None):
            found.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT)
    assert found == [before]


def test_signals_within_half_a_second_count_once():
    """A wrapper forwards the Ctrl-C that the terminal also sends: the two count as one."""
    seen = []
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with (
        handled({signal.SIGUSR2: lambda: None}),
        woken(signal.SIGUSR2, lambda n: seen.append((n, threading.current_thread()))),
    ):
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        wait_until(lambda: seen)
        time.sleep(0.6)
        signal.raise_signal(signal.SIGUSR2)
        wait_until(lambda: len(seen) == 2)
    assert [n for n, _ in seen] == [1, 2]
    assert threading.main_thread() not in {thread for _, thread in seen}
    after = signal.set_wakeup_fd(before)
    assert after == before


def test_forked_child_inherits_no_handlers(tmp_path):
    """Even inside nested fits; a signal to the child does not wake the parent."""
    script = tmp_path / "forks.py"
    script.write_text("""
import os, signal, time
from redeqx.distributed._signals import handled, woken

seen = []
signal.signal(signal.SIGUSR1, handler := lambda *_: None)
ours = {number: lambda: seen.append("parent") for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
with handled(ours), handled(ours), woken(signal.SIGINT, lambda n: seen.append(n)):
    if (pid := os.fork()) == 0:
        found = [signal.getsignal(number) for number in ours]
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
    print(code, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen)
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "3 -15 []\n", ended.stderr
