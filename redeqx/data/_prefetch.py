"""Items ahead of their reader: `Prefetch` prepares them in a thread, of which only one for each reader works at a time;
`drawn_ahead` draws them in the reader's own."""

import collections
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, ClassVar, NamedTuple

_END = object()


class Deferred(NamedTuple):
    """An item that its reader prepares."""

    prepare: Callable[[], Any]


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
        self._asked: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
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
        if self._depth:
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
        if not self._upcoming[0].done():
            _without_thread_frames(lambda: wait([self._upcoming[0]]))
        item: Any = _END
        try:
            found = self._upcoming[0].result()
            if isinstance(found, Deferred):
                self.pause_others()  # it may read and collate again
                found = next(prepare() for prepare in (found.prepare,))  # in a generator, a StopIteration is an error
                self._upcoming[0] = Future()
                self._upcoming[0].set_result(found)
            item = found
        finally:
            if item is _END:
                self.close()
        return default if item is _END else item

    def _draw(self) -> None:
        assert self._items is not None
        if self._depth and self._thread is None:
            # No pool: Python waits for its threads at the end, and the user's iterator may block for ever. The thread refers
            # to the items, not to this object, so that an unused one is collected and ends its thread.
            given = (self._asked, self._items)
            self._thread = threading.Thread(target=_prepare_each, args=given, name="redeqx-prefetch", daemon=True)
            self._thread.start()
        while len(self._upcoming) < max(self._depth, 1):
            self._upcoming.append(Future())
            if self._depth:
                self._asked.put(self._upcoming[-1])
            else:
                _prepare(self._upcoming[-1], self._items)

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        self._items = None
        for item in self._upcoming:
            item.cancel()
        self._upcoming.clear()
        if (thread := self._thread) is not None:
            self._asked.put(None)
            if thread is not threading.current_thread():  # which may collect this object
                _without_thread_frames(thread.join)
        self._under_way.discard(self)

    def __del__(self) -> None:
        self.close()


def _prepare_each(asked: "queue.SimpleQueue[Future[Any] | None]", items: Iterator[Any]) -> None:
    """Prepares items, until it is asked for None."""
    while (item := asked.get()) is not None:
        _prepare(item, items)
        del item  # it would stay in memory during the next `get`


def _prepare(item: Future[Any], items: Iterator[Any]) -> None:
    """Sets the next item, or `_END`, unless it is cancelled."""
    if item.set_running_or_notify_cancel():
        try:
            item.set_result(next(items, _END))
        except BaseException as error:
            item.set_exception(error)
            del item  # in a cycle with its traceback, arrays in the frames would stay for a while


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
