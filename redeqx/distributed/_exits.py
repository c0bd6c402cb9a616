"""How a process ends at once, from any thread, in whatever state its streams and other threads are.

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


def attempt(act: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Call `act` and wait for it at most that long; exceptions are dropped."""

    def run() -> None:
        with contextlib.suppress(BaseException):
            act()

    thread = threading.Thread(target=run, name="redeqx-attempt", daemon=True)
    with contextlib.suppress(RuntimeError):  # while the interpreter shuts down no thread can start
        thread.start()
        thread.join(seconds)


def say(text: str) -> None:
    """Print a line to standard error, without blocking where nobody reads it."""
    attempt(lambda: print(text, file=sys.stderr, flush=True))


def exit_now(code: int) -> NoReturn:
    """End this process, without waiting for any thread, peer, or reader of its output."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            attempt(stream.flush)
    os._exit(code)


def discard(stream: Any) -> None:
    """Drop the output to a stream that nobody reads any more, and what is still in its buffer."""
    # Flushing the buffer at exit would fail again, and change the exit code.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end_in_time(code: int) -> None:
    """Once the main thread, which is about to end, has ended: end the process with that code if other threads keep it."""
    threading.Thread(target=_end_in_time, args=(code,), name="redeqx-exit", daemon=True).start()


def _end_in_time(code: int) -> None:
    main = threading.main_thread()
    main.join()  # the interpreter waits for the others from now on
    until = time.monotonic() + STAY
    others = [each for each in threading.enumerate() if each is not main and not each.daemon]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0))
    if names := [thread.name for thread in others if thread.is_alive()]:
        say(f"redeqx: thread {', '.join(names)} still runs {STAY:g} s after the end. Leaving with exit code {code}.")
        exit_now(code)


_last_acts: list[Callable[[], object]] = []


def at_end(act: Callable[[], object]) -> Callable[[], None]:
    """Call `act` when this process ends by itself: at its exit, or after an exception that ends all processes. Returns a
    function that takes this back."""
    _last_acts.append(act)
    atexit.register(act)

    def forget() -> None:
        atexit.unregister(act)
        with contextlib.suppress(ValueError):
            _last_acts.remove(act)

    return forget


def act_last() -> None:
    """What `at_end` was given, for an end at which nothing else is waited for."""
    for act in [*_last_acts]:
        act()


def keep_quiet(error: BaseException) -> None:
    """Print no traceback if this exception ends the script: its reason has been printed."""
    hook = sys.excepthook

    def print_others(kind: type[BaseException], raised: BaseException, frames: TracebackType | None) -> None:
        if raised is not error:
            hook(kind, raised, frames)

    sys.excepthook = print_others


def stacks() -> str:
    """The stack of each thread, the innermost call first."""
    # Not by `faulthandler`, which writes while it holds the interpreter, so that a blocked pipe would stop it; nor by
    # `traceback`, which reads source files, maybe from the file system that hangs.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        while frame is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
    return "\n".join(lines)
