"""Ends a process at once, from any thread, whatever the state of its streams and other threads.

A pipe without a reader raises, a pipe whose reader has stopped blocks for ever, and JAX waits at exit for processes that are
gone: none of these may delay an exit. The callers decide why a process ends, and with which code.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

PATIENCE = 2.0  # seconds that printing the last lines may take
STAY = 5.0  # seconds that other threads may run after the main thread has ended
CLEANUP = 10.0  # seconds that exit handlers may take after that: schedulers kill 30 s after their signal, with another code


def attempt(act: Callable[[], object], seconds: float | None = None) -> None:
    """Call `act` in a thread and wait for it at most that long, by default `PATIENCE`. Drops exceptions."""

    def run() -> None:
        with contextlib.suppress(BaseException):
            act()

    thread = threading.Thread(target=run, name="redeqx-attempt", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter shuts down
        thread.start()
        thread.join(PATIENCE if seconds is None else seconds)


def say(text: str) -> None:
    """Print a line to standard error. Does not block if nobody reads it."""
    # One write: an unbuffered stream would take the newline in a second one, after what another thread writes meanwhile.
    attempt(lambda: print(f"{text}\n", end="", file=sys.stderr, flush=True))


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for any thread, peer, or reader of its output."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            attempt(stream.flush)
    os._exit(code)


def discard(stream: Any) -> None:
    """Redirect a stream that nobody reads any more to the null device, including what is still in its buffer."""
    # Flushing the buffer at exit would fail again, and change the exit code.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end_in_time(code: int) -> None:
    """After the main thread ends, give threads `STAY` seconds and exit handlers `CLEANUP` seconds, then end the process
    with that code."""
    threading.Thread(target=_end_in_time, args=(code,), name="redeqx-exit", daemon=True).start()


def _end_in_time(code: int) -> None:
    main = threading.main_thread()
    main.join()  # from now on the interpreter waits for the other threads
    until = time.monotonic() + STAY
    others = [each for each in threading.enumerate() if each is not main and not each.daemon]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0))
    if names := [thread.name for thread in others if thread.is_alive()]:
        say(f"redeqx: thread {', '.join(names)} still runs {STAY:g} s after the end. Leaving with exit code {code}.")
        exit_now(code)
    time.sleep(CLEANUP)  # such as a tracker without an answer
    say(f"redeqx: exit handlers still run after {CLEANUP:g} s. Leaving with exit code {code}.")
    exit_now(code)


_exit_callbacks: list[Callable[[], object]] = []


def at_end(act: Callable[[], object]) -> Callable[[], None]:
    """Register `act` to be called at exit, also after an exception that ends all processes. Returns a function that
    unregisters it."""
    _exit_callbacks.append(act)
    atexit.register(act)

    def forget() -> None:
        atexit.unregister(act)
        with contextlib.suppress(ValueError):
            _exit_callbacks.remove(act)

    return forget


def run_exit_callbacks() -> None:
    """Call the functions registered by `at_end`, before an exit that skips `atexit`: all at once, as one may hang."""
    threads = [threading.Thread(target=act, name="redeqx-end", daemon=True) for act in _exit_callbacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def keep_quiet(error: BaseException) -> None:
    """Suppress the traceback if this exception ends the script: its reason has been printed."""
    hook = sys.excepthook

    def print_others(kind: type[BaseException], raised: BaseException, frames: TracebackType | None) -> None:
        if raised is not error:
            hook(kind, raised, frames)

    sys.excepthook = print_others


def stacks() -> str:
    """Return the stack of each thread as text, innermost call first."""
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
