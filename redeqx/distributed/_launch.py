"""Starts several processes of one script on this machine, to try out a run of many hosts.

Each process gets its index in the environment, where `_cluster` reads it. Each line that it prints is prefixed with the
index.
"""

import os
import secrets
import selectors
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
_PIPE = 65536  # bytes that a pipe holds
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
    """Runs a command as `n` processes of one run; returns 0, or the exit code of a process that failed.

    Code 75, of a process that left because another one is gone, is returned only if no process has another code. If one
    fails, the others have ten seconds to exit and are then killed. SIGTERM, SIGINT and SIGUSR1 are forwarded. The processes
    are killed when this process ends, however it ends.

    **Arguments:**

    - `port`: the port of process 0; a free one by default.
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
            bufsize=0,
            start_new_session=True,  # Ctrl-C then arrives once: the forwarded one
        )
        for i in range(n)
    ]
    lock = threading.Lock()  # lines of several processes stay whole
    printing = [
        threading.Thread(target=_print, args=(process, f"[{i}] ".encode(), lock), daemon=True)
        for i, process in enumerate(processes)
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


def _print(process: subprocess.Popen[bytes], prefix: bytes, lock: threading.Lock) -> None:
    """Prints the lines of a process after its prefix, until both of its streams end. What it wrote to stdout before an error
    comes before it."""
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout: sys.stdout, process.stderr: sys.stderr}
    rest = dict.fromkeys(streams, b"")  # of the last line, which may not be complete
    with process.stdout, process.stderr, selectors.DefaultSelector() as open_streams:
        for source in streams:
            open_streams.register(source, selectors.EVENT_READ)
        while open_streams.get_map():
            ready = {key.fileobj for key, _ in open_streams.select()}
            for source in (source for source in streams if source in ready):
                found = os.read(source.fileno(), _PIPE)
                *lines, rest[source] = (rest[source] + found).split(b"\n")
                if not found:
                    open_streams.unregister(source)
                    lines = [rest[source]] if rest[source] else []
                _write(streams[source], [prefix + line + b"\n" for line in lines], lock)


def _write(stream: TextIO, lines: Sequence[bytes], lock: threading.Lock) -> None:
    with lock:
        try:
            stream.buffer.writelines(lines)
            stream.flush()
        except OSError:  # the reader, such as `tee`, is gone; the processes continue
            discard(stream)
