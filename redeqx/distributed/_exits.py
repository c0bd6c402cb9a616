"""Ends a process at once, from any thread, whatever the state of its streams and other threads.

A pipe without a reader raises, a pipe whose reader has stopped blocks for ever, and JAX waits at exit for processes that are
gone: none of these may delay an exit. The callers decide why a process ends, and with which code.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from .._at_end import end_all

PATIENCE = 2.0  # seconds that printing the last lines may take
UPLOADS = 5.0  # seconds that uploads of the last records may take: `redeqx launch` kills 10 s after a failure
STAY = 5.0  # seconds that other threads may run after the main thread has ended
CLEANUP = 10.0  # seconds that exit handlers may take after that: schedulers kill 30 s after their signal, with another code


def attempt(act: Callable[[], object], seconds: float | None = None) -> None:
    """Calls `act` in a thread and waits for it at most that long, by default `PATIENCE`. Drops exceptions."""

    def run() -> None:
        with contextlib.suppress(BaseException):
            act()

    thread = threading.Thread(target=run, name="redeqx-attempt", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can start while the interpreter of Python 3.12 shuts down
        run()
    else:
        thread.join(PATIENCE if seconds is None else seconds)


def say(text: str) -> None:
    """Prints a line to standard error. Does not block if nobody reads it."""
    # One write: an unbuffered stream would take the newline in a second one, after what another thread writes meanwhile.
    attempt(lambda: print(f"{text}\n", end="", file=sys.stderr, flush=True))


def exit_now(code: int, seconds: float | None = None) -> NoReturn:
    """Calls what is to be called at the end (`AtEnd`), for at most that many seconds (by default `UPLOADS`), and ends this
    process without waiting for any thread, peer, or reader of its output."""
    seconds = UPLOADS if seconds is None else seconds
    attempt(partial(end_all, seconds), seconds)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            attempt(stream.flush)
    os._exit(code)


def discard(stream: Any) -> None:
    """Redirects a stream that nobody reads any more to the null device, including what is still in its buffer."""
    # Flushing the buffer at exit would fail again, and change the exit code.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end_in_time(code: int) -> None:
    """After the main thread ends, gives threads `STAY` seconds and exit handlers `CLEANUP` seconds, then ends the process
    with that code."""

    def end() -> None:
        main = threading.main_thread()
        main.join()  # from now on the interpreter waits for the other threads
        others = [each for each in threading.enumerate() if each is not main and not each.daemon]
        until = time.monotonic() + STAY
        for thread in others:
            thread.join(max(until - time.monotonic(), 0))
        if names := [thread.name for thread in others if thread.is_alive()]:
            what = f"thread {', '.join(names)} still runs {STAY:g} s after the end"
        else:
            time.sleep(CLEANUP)
            what = f"exit handlers still run after {CLEANUP:g} s"  # such as a tracker without an answer
        say(f"redeqx: {what}. Leaving with exit code {code}.")
        exit_now(code)

    threading.Thread(target=end, name="redeqx-exit", daemon=True).start()


def stacks() -> str:
    """Returns the stack of each thread as text, innermost call first."""
    # `faulthandler` holds the interpreter's lock while it writes, so a blocked pipe would stop it. `traceback` reads source
    # files, maybe from the file system that hangs.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        while frame is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
    return "\n".join(lines)
