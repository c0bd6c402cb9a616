"""Prefetch: prepares items in a thread ahead of their reader. Of each reader, only one such thread works at a time."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar

_NAME = "redeqx-prefetch"
_END = object()  # after the last item


class Prefetch(Iterator[Any]):
    """Yields the same items, prepared by a thread up to `depth` ahead. The thread's exceptions are raised here, with their
    tracebacks.

    Close it if you may stop before the end: otherwise the thread lives as long as a traceback that refers to your frame.

    A user's generator or tokenizer may not support two threads. So before a second thread of the same reader starts, the
    earlier ones prepare as much as they may, and pause. The order of a reader's items is therefore always the same.
    """

    _under_way: ClassVar["weakref.WeakSet[Prefetch]"] = weakref.WeakSet()

    def __init__(self, items: Iterator[Any], depth: int = 2):
        self._items: Iterator[Any] | None = items  # None if closed
        self._depth = depth
        self._ahead: deque[Future[Any]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __next__(self) -> Any:
        if (item := self._wait()) is _END:
            raise StopIteration
        self._ahead.popleft()
        self._prepare(self._depth)
        return item

    def peek(self) -> Any:
        """Returns the next item, without taking it; None after the last one."""
        return None if (item := self._wait()) is _END else item

    def hand_over(self, take: Callable[[Any], None]) -> None:
        """Calls `take` with the first item, in this thread. The other thread prepares the next one only afterwards.

        Nothing is called if there is no item. Closes this if `take` raises.
        """
        if (item := self._wait(depth=1)) is _END:
            return
        try:
            take(item)
        except BaseException:
            self.close()
            raise
        self._ahead.popleft()

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        thread, self._thread, self._items = self._thread, None, None
        self._ahead.clear()
        self._under_way.discard(self)
        if thread is not None:
            is_own = threading.current_thread().name.startswith(_NAME)  # if garbage is collected there
            _without_thread_frames(lambda: thread.shutdown(wait=not is_own, cancel_futures=True))

    def __del__(self) -> None:
        self.close()

    def _wait(self, depth: int | None = None) -> Any:
        """Waits for the next item, and returns it, or `_END`. Closes this after an error and at the end."""
        if self._items is None:
            return _END
        if self._thread is None:
            self._start()
        self._prepare(depth or self._depth)
        try:
            _without_thread_frames(lambda: wait([self._ahead[0]]))
            item = self._ahead[0].result()
        except BaseException:
            self.close()
            raise
        if item is _END:
            self.close()
        return item

    def _prepare(self, depth: int) -> None:
        assert self._thread is not None and self._items is not None, "started"
        while len(self._ahead) < depth:
            # The thread refers to the items, not to this object, so that an unused one is collected and ends its thread.
            self._ahead.append(self._thread.submit(partial(next, self._items, _END)))

    def _start(self) -> None:
        self._reader = threading.get_ident()
        for other in list(self._under_way):
            if other._reader == self._reader:
                wait(other._ahead)
        self._under_way.add(self)
        self._thread = ThreadPoolExecutor(1, _NAME)


def _without_thread_frames(wait: Callable[[], Any]) -> Any:
    """Calls `wait`. A Ctrl-C during the call shows the line of the user's script, without frames of threads."""
    try:
        return wait()
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None
