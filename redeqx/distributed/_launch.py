"""Several processes of one script on this machine, for trying what runs on many.

Each is told its number in the environment, as `_cluster` reads it; what they print is printed with that number before it.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from ._exits import discard
from ._peers import EXIT_CODE
from ._rendezvous import TOKEN

GRACE = 10.0  # seconds that the others have to leave once one has failed
# What becomes the command once Linux is told to kill it when this process, its parent, is gone: then nobody reads what it
# prints any more, or ends it where another one fails. (Not in `preexec_fn`, which forks by the hooks of other libraries.)
_TIED = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
if prctl is not None:
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def launch(n: int, command: Sequence[str], port: int | None = None) -> int:
    """Run a command as `n` processes of one run; returns 0, or the exit code of one that failed.

    (Not of one that left because another failed, unless all did.) Where one fails, the others are given ten seconds to
    leave, then ended. SIGTERM, SIGINT and SIGUSR1 are passed on. However this process ends, on Linux its
    children are killed then.

    **Arguments:**

    - `port`: of process 0; a free one by default.
    """
    environment = {**os.environ, "REDEQX_PROCESSES": str(n), "REDEQX_HOST0": f"127.0.0.1:{port or _free_port()}"}
    environment.setdefault("NPROC", "16")  # with fewer cores than devices XLA's collectives wait for each other for ever
    environment.setdefault(TOKEN, secrets.token_hex(16))
    environment["PYTHONUNBUFFERED"] = "1"
    tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
    processes = [
        subprocess.Popen(
            tied,
            env={**environment, "REDEQX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes once, by what is passed on
        )
        for i in range(n)
    ]
    printing = threading.Lock()
    threads = [
        threading.Thread(target=_print, args=(f"[{i}] ".encode(), source, target, printing), daemon=True)
        for i, process in enumerate(processes)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for thread in threads:
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
    for thread in threads:
        thread.join(timeout=5)
    return code


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    until = float("inf")
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
        if until == float("inf") and any(codes):
            until = time.monotonic() + GRACE
        time.sleep(0.02)
    failed = sorted(filter(None, codes), key=EXIT_CODE.__eq__)
    code = failed[0] if failed else 0
    return 128 - code if code < 0 else code  # as a shell says that a signal ended it


def _print(prefix: bytes, source: IO[bytes] | None, target: Any, printing: threading.Lock) -> None:
    assert source is not None
    with source:
        for line in source:
            with printing:
                try:
                    target.write((prefix + line).decode(errors="replace"))
                    target.flush()
                except OSError:  # nobody reads it any more, as of a `tee` that is gone: the processes go on
                    discard(target)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
