"""Starts several processes of one script on this machine, to try out a run of many hosts.

Each process gets its index in the environment, where `_cluster` reads it. Each line that it prints is prefixed with the
index.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from ._addresses import free_port
from ._exits import discard
from ._links import TOKEN
from ._peers import EXIT_CODE

GRACE = 10.0  # seconds that the other processes have to exit after one has failed
_LAST_LINES = 5.0  # seconds to print what they have written, although a child of theirs may hold its end open
# Asks Linux to kill the process when its parent, this process, is gone, and then executes the command. Without the parent
# nobody would read its output, or end it if another process fails. (`preexec_fn` would run fork hooks.)
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def launch(n: int, command: Sequence[str], port: int | None = None) -> int:
    """Runs a command as `n` processes of one run; returns 0, or the exit code of a process that failed. `port` is that of
    process 0, by default a free one.

    Code 75, of a process that left because another one is gone, is returned only if no process has another code. If one
    fails, the others have ten seconds to exit and are then killed. SIGTERM, SIGINT and SIGUSR1 are forwarded. The processes
    are killed when this process ends, however it ends.
    """
    environment = {**os.environ, "REDEQX_PROCESSES": str(n), "REDEQX_HOST0": f"127.0.0.1:{port or free_port('127.0.0.1')}"}
    # With fewer threads than devices XLA's collectives deadlock: 8 devices and NPROC=4 (JAX 0.10.2; 2026-11-25).
    environment.setdefault("NPROC", "16")
    environment.setdefault(TOKEN, secrets.token_hex(16))
    environment["PYTHONUNBUFFERED"] = "1"
    command_line = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    processes = [
        subprocess.Popen(
            command_line,
            env={**environment, "REDEQX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C then arrives once: the forwarded one
        )
        for i in range(n)
    ]
    lock = threading.Lock()  # lines of several processes stay whole
    printing = [
        threading.Thread(target=_print, args=(source, target, f"[{i}] ".encode(), lock), daemon=True)
        for i, process in enumerate(processes)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for thread in printing:
        thread.start()

    def pass_on(number: int, _: Any) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        code = _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    until = time.monotonic() + _LAST_LINES
    for thread in printing:
        thread.join(max(until - time.monotonic(), 0))
    return code


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    until = float("inf")
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
        if until == float("inf") and any(codes):
            until = time.monotonic() + GRACE
        time.sleep(0.02)
    failed = sorted(filter(None, codes), key=EXIT_CODE.__eq__)
    code = failed[0] if failed else 0
    return 128 - code if code < 0 else code  # as a shell reports a signal


def _print(source: Any, target: TextIO, prefix: bytes, lock: threading.Lock) -> None:
    """Prints the lines of a stream after a prefix, until it ends."""
    with source:
        for line in source:
            with lock:
                try:
                    target.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                    target.flush()
                except OSError:  # the reader, such as `tee`, is gone; the processes continue
                    discard(target)
