"""Items ahead of their reader: `Prefetch` prepares them in a thread, of which only one for each reader works at a time;
`drawn_ahead` draws them in the reader's own."""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

_END = object()


class Prefetch(Iterator[Any]):
    """Yields the same items, prepared by a thread up to `depth` ahead; with 0, by the reader itself, as a thread costs more
    than a single item takes. The thread's exceptions are raised here, with their tracebacks.

    Close it if you may stop before the end: otherwise the thread lives as long as a traceback that refers to your frame.

    A user's generator or tokenizer may not support two threads. So before a second thread of the same reader starts, the
    earlier ones prepare as much as they may, and pause. The order of a reader's items is therefore always the same.
    """

    _under_way: ClassVar["weakref.WeakSet[Prefetch]"] = weakref.WeakSet()

    def __init__(self, items: Iterator[Any], depth: int = 2):
        self._items: Iterator[Any] | None = (item for item in items)  # a generator: it ends with the first exception
        self._depth = depth
        # It refers to the items, not to this object, so that an unused one is collected and ends its thread.
        self._pool = ThreadPoolExecutor(1, "redeqx-prefetch") if depth else None
        self._upcoming: collections.deque[Future[Any]] = collections.deque()
        self._reader: int | None = None  # the thread that reads, once it does

    @classmethod
    def pause_others(cls) -> None:
        """Waits until the other threads of this reader have prepared as much as they may."""
        for other in list(cls._under_way):
            if other._reader == threading.get_ident():
                wait(other._upcoming)

    def __next__(self) -> Any:
        if (item := self.peek(_END)) is _END:
            raise StopIteration
        self._upcoming.popleft()
        if self._pool is not None:
            self._draw()
        return item

    def peek(self, default: Any = None) -> Any:
        """Returns the next item, without taking it; the default after the last one."""
        if self._items is None:
            return default
        if not self._upcoming:
            self.pause_others()
            self._reader = threading.get_ident()
            self._under_way.add(self)
            self._draw()
        _without_thread_frames(lambda: wait([self._upcoming[0]]))
        item: Any = _END
        try:
            item = self._upcoming[0].result()
        finally:
            if item is _END:
                self.close()
        return default if item is _END else item

    def _draw(self) -> None:
        assert self._items is not None
        while len(self._upcoming) < max(self._depth, 1):
            self._upcoming.append(_submitted(self._pool, self._items))

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        self._items = None
        self._upcoming.clear()
        if (pool := self._pool) is not None:
            _without_thread_frames(lambda: pool.shutdown(cancel_futures=True))
        self._under_way.discard(self)

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # where its own thread collects it
            self.close()


def _submitted(pool: ThreadPoolExecutor | None, items: Iterator[Any]) -> Future[Any]:
    """Returns the next item, or `_END`, from the thread or from this one."""
    if pool is not None:
        with contextlib.suppress(RuntimeError):  # the main thread has ended: no pool of Python takes work from then on
            return pool.submit(next, items, _END)
    done: Future[Any] = Future()
    try:
        done.set_result(next(items, _END))
    except BaseException as error:
        done.set_exception(error)
    return done


def drawn_ahead(items: Iterable[Any], n: int) -> Iterator[Any]:
    """Yields the same items, with up to `n` drawn ahead. An exception from drawing is raised after the items before it."""
    drawn: collections.deque[Any] = collections.deque()
    error = None
    try:
        for item in items:
            drawn.append(item)
            if len(drawn) > n:
                yield drawn.popleft()
    except Exception as raised:
        error = raised
    while drawn:
        yield drawn.popleft()
    if error is not None:
        try:
            raise error
        finally:
            del error  # in a cycle with its traceback, arrays in the frames would stay for a while


def _without_thread_frames(wait: Callable[[], Any]) -> Any:
    """Calls `wait`. A Ctrl-C during the call shows the line of the user's script, without frames of threads."""
    try:
        return wait()
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None
