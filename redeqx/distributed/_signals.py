"""Installs signal handlers while a fit runs, restores them afterwards, and removes them in forked children.

`_interrupts` decides what a signal means.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

_DEBOUNCE = 0.5  # seconds within which a second signal counts as the same Ctrl-C: a shell and a wrapper may both forward it
_replaced: list[dict[int, Any]] = []  # for each running fit, the handlers before it
_wakeup: list[int] = []  # for each running fit, the wakeup file descriptor before it
_thread_mask = threading.local()  # the signal mask of the thread that forks


@contextmanager
def handled(handlers: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Returns a context in which the main thread calls these handlers. Forked children get the previous handlers. In another
    thread it changes nothing: Python delivers signals to the main thread only."""
    if not _is_in_main_thread():
        yield
        return
    _register()
    before = {number: signal.getsignal(number) for number in handlers}
    _replaced.append(before)
    try:
        for number, act in handlers.items():
            signal.signal(number, lambda _number, _frame, act=act: act())
        yield
    finally:
        if _replaced:  # empty in a forked child, which has restored them already
            _restore(_replaced.pop())


def handle_always(numbers: Sequence[int], act: Callable[[], None]) -> bool:
    """Installs a handler for the rest of the process, for signals that have their default effect; forked children keep that.
    Returns whether this was possible: only the main thread may install handlers."""
    if not _is_in_main_thread():
        return False
    # None: not installed by Python, such as JAX's, which only records the signal.
    own = [number for number in numbers if signal.getsignal(number) in (signal.SIG_DFL, None)]
    if own:
        _register()
        _replaced.insert(0, dict.fromkeys(own, signal.SIG_DFL))
        for number in own:
            signal.signal(number, lambda _number, _frame: act())
    return True


@contextmanager
def woken(number: int, act: Callable[[int], None]) -> Iterator[None]:
    """Returns a context in which a thread calls `act(n)` at the n-th signal of this number, even if Python cannot interrupt
    what the main thread does. A signal within half a second of the previous one is not counted."""
    if not _is_in_main_thread():
        yield
        return
    _register()
    reader, writer = socket.socketpair()
    with writer:
        writer.setblocking(False)
        _wakeup.append(signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        threading.Thread(target=_count, args=(reader, number, act), name="redeqx-signals", daemon=True).start()
        try:
            yield
        finally:
            if _wakeup:  # empty in a forked child, which has no such thread
                signal.set_wakeup_fd(_wakeup.pop())
                writer.shutdown(socket.SHUT_RDWR)  # ends the thread, even if a forked child has a copy


def _is_in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _count(reader: socket.socket, number: int, act: Callable[[int], None]) -> None:
    n, last = 0, -_DEBOUNCE
    with reader:
        while received := reader.recv(64):
            now = time.monotonic()
            if number in received and now - last >= _DEBOUNCE:
                n, last = n + 1, now
                act(n)


def _restore(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():  # None: not installed by Python, such as JAX's, which only records the signal
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@cache
def _register() -> None:
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_in_child)


def _block_signals() -> None:
    """Before a fork: block the signals until the child has its handlers; Python would lose one that arrives earlier."""
    numbers = {number for before in _replaced for number in before}
    _thread_mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread_mask.before)


def _restore_in_child() -> None:
    """In a forked child: restore the handlers, so that `terminate()` ends the child, and detach from the parent's thread."""
    if _wakeup:
        signal.set_wakeup_fd(_wakeup[0])
    while _replaced:
        _restore(_replaced.pop())
    _wakeup.clear()
    _unblock_signals()
