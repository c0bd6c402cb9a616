"""The signal handlers that stand while a fit runs: set, put back afterwards, and left out of forked children.

What a signal means is for `_interrupts`.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ECHO = 0.5  # seconds in which a second signal is the first one: a shell and a wrapper both pass a Ctrl-C on
_replaced: list[dict[int, Any]] = []  # for each fit under way, the handlers that stood before
_wakeup: list[int] = []  # for each, the file descriptor that was woken before
_is_registered = False
_mask = threading.local()  # of the thread that forks


@contextmanager
def handled(handlers: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Calls these for the signals, in the main thread, until the end of this; forked children have what stood before.

    Elsewhere than in the main thread, to which alone Python hands signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
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
        if _replaced:  # else in a forked child, which has them already
            _put_back(_replaced.pop())


@contextmanager
def woken(number: int, act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act(n)` for the n-th of this signal, from a thread: also while the main one is in a call that takes none.

    A signal that comes within half a second of the one before is not counted.
    """
    if threading.current_thread() is not threading.main_thread():
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
            if _wakeup:  # else in a forked child, which has no such thread
                signal.set_wakeup_fd(_wakeup.pop())
                writer.shutdown(socket.SHUT_RDWR)  # ends the thread, though a forked child may have a copy


def _count(reader: socket.socket, number: int, act: Callable[[int], None]) -> None:
    n, last = 0, -_ECHO
    with reader:
        while received := reader.recv(64):
            now = time.monotonic()
            if number in received and now - last >= _ECHO:
                n, last = n + 1, now
                act(n)


def _put_back(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():  # None: not Python's, as that of JAX, which only notes it too
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _register() -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def _block() -> None:
    """Before a fork: a signal to the child waits until its handlers are right; Python would forget it."""
    numbers = {number for before in _replaced for number in before}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget() -> None:
    """In a forked child: `terminate()` ends it, and its signals wake nobody in the parent."""
    if _wakeup:
        signal.set_wakeup_fd(_wakeup[0])
    while _replaced:
        _put_back(_replaced.pop())
    _wakeup.clear()
    _unblock()
