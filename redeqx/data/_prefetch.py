"""Items ahead of their reader: `Prefetch` prepares them in a thread, of which only one for each reader works at a time;
`drawn_ahead` draws them in the reader's own."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar


class _Buffer:
    """The items that a thread has prepared and its reader has not yet taken."""

    def __init__(self, items: Iterator[Any], depth: int):
        self.items: Iterator[Any] | None = items
        self.depth = depth
        self.ready: collections.deque[Any] = collections.deque()
        self.is_done = False  # no more items are prepared
        self.error: BaseException | None = None  # raised after the items that are ready
        self.change = threading.Condition()

    def prepare(self) -> None:
        """Prepares one item, in the thread that reads."""
        if self.items is not None and not self.ready:
            try:
                self.ready.append(next(self.items))
            except StopIteration:
                self.is_done = True

    def fill(self) -> None:
        """Prepares items, at most `depth` ahead, until the last one, an error, or `is_done`."""
        items, self.items = self.items, None
        if items is None:  # closed before the thread began
            return
        error = None
        try:
            while True:
                with self.change:
                    self.change.wait_for(lambda: self.is_done or len(self.ready) < self.depth)
                    if self.is_done:
                        return
                item = next(items)
                with self.change:
                    self.ready.append(item)
                    self.change.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:  # raised in the thread that reads
            error = raised
        finally:
            with self.change:
                self.is_done, self.error = True, error
                self.change.notify_all()


class Prefetch(Iterator[Any]):
    """Yields the same items, prepared by a thread up to `depth` ahead; with 0, by the reader itself, as a thread costs more
    than a single item takes. The thread's exceptions are raised here, with their tracebacks.

    Close it if you may stop before the end: otherwise the thread lives as long as a traceback that refers to your frame.

    A user's generator or tokenizer may not support two threads. So before a second thread of the same reader starts, the
    earlier ones prepare as much as they may, and pause. The order of a reader's items is therefore always the same.
    """

    _under_way: ClassVar["weakref.WeakSet[Prefetch]"] = weakref.WeakSet()

    def __init__(self, items: Iterator[Any], depth: int = 2):
        self._buffer, self._has_thread = _Buffer(items, depth), depth > 0
        self._thread: threading.Thread | None = None

    def hand_over(self, take: Callable[[Any], None]) -> None:
        """Calls `take` with the first item, in this thread. The other thread prepares the next one only afterwards.

        Nothing is called if there is no item. Closes this if `take` raises.
        """
        buffer = self._buffer
        depth, buffer.depth = buffer.depth, 1
        if self.peek() is None and not buffer.ready:
            return
        try:
            take(buffer.ready[0])
        except BaseException:
            self.close()
            raise
        buffer.depth = depth
        next(self)

    def peek(self) -> Any:
        """Returns the next item, without taking it; None after the last one."""
        buffer = self._buffer
        if self._has_thread:
            self._start()
        else:
            self._settle_others()
            buffer.prepare()
        with buffer.change:
            _without_thread_frames(lambda: buffer.change.wait_for(lambda: buffer.ready or buffer.is_done))
            if buffer.ready:
                return buffer.ready[0]
            error, buffer.error = buffer.error, None
        self.close()
        if error is not None:
            raise error
        return None

    def __next__(self) -> Any:
        if self.peek() is None and not self._buffer.ready:
            raise StopIteration
        with self._buffer.change:
            item = self._buffer.ready.popleft()
            self._buffer.change.notify_all()
        return item

    def settle(self) -> None:
        """Waits until the thread has prepared as much as it may."""
        if self._thread is not None:
            with self._buffer.change:
                self._buffer.change.wait_for(lambda: self._buffer.is_done or len(self._buffer.ready) >= self._buffer.depth)

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        with self._buffer.change:
            self._buffer.is_done, self._buffer.items = True, None
            self._buffer.ready.clear()
            self._buffer.change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            _without_thread_frames(self._thread.join)
        self._under_way.discard(self)

    def __del__(self) -> None:
        self.close()

    def _settle_others(self) -> None:
        self._reader = threading.get_ident()
        for other in list(self._under_way):
            if other._reader == self._reader:
                other.settle()

    def _start(self) -> None:
        if self._thread is not None or self._buffer.items is None:
            return
        self._settle_others()
        self._under_way.add(self)
        # The thread refers to the buffer, not to this object, so that an unused one is collected and ends its thread.
        self._thread = threading.Thread(target=self._buffer.fill, name="redeqx-prefetch", daemon=True)
        self._thread.start()


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
