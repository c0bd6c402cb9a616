"""Items prepared by a thread ahead of their reader, one such thread at work at a time."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar


class _Shelf:
    """What a thread has prepared and its reader has not taken yet."""

    def __init__(self, items: Iterator[Any], depth: int):
        self.items: Iterator[Any] | None = items
        self.depth = depth
        self.ready: collections.deque[Any] = collections.deque()
        self.is_done = False  # no more comes
        self.error: BaseException | None = None  # after what is ready
        self.change = threading.Condition()

    def fill(self) -> None:
        """Prepare items up to the depth, until the last, an error, or `is_done`."""
        items, self.items = self.items, None
        assert items is not None
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
        except BaseException as raised:  # handed to the thread that reads: it is that thread's error
            error = raised
        finally:
            with self.change:
                self.is_done, self.error = True, error
                self.change.notify_all()


class Prefetch(Iterator[Any]):
    """The same items, prepared by a thread up to `depth` ahead; its exceptions are raised here, with their tracebacks.

    Who may stop before the end closes it: else the thread lives as long as a traceback that holds the caller's frame.

    A user's generator or tokenizer is not made for two threads: before the thread of a second one starts, those that the
    same reader has under way have prepared all that they may, and rest. So the order of a reader's items is always the same.
    """

    _under_way: ClassVar["weakref.WeakSet[Prefetch]"] = weakref.WeakSet()

    def __init__(self, items: Iterator[Any], depth: int = 2):
        self._shelf = _Shelf(items, depth)
        self._thread: threading.Thread | None = None
        self._reader = threading.get_ident()

    def peek(self) -> Any:
        """The next item, which stays the next; None after the last."""
        self._start()
        shelf = self._shelf
        with shelf.change:
            _briefly(lambda: shelf.change.wait_for(lambda: shelf.ready or shelf.is_done))
            if shelf.ready:
                return shelf.ready[0]
            error, shelf.error = shelf.error, None
        self.close()
        if error is not None:
            raise error
        return None

    def __next__(self) -> Any:
        if self.peek() is None and not self._shelf.ready:
            raise StopIteration
        with self._shelf.change:
            item = self._shelf.ready.popleft()
            self._shelf.change.notify_all()
        return item

    def settle(self) -> None:
        """Return once the thread prepares nothing until an item is taken."""
        if self._thread is not None:
            with self._shelf.change:
                self._shelf.change.wait_for(lambda: self._shelf.is_done or len(self._shelf.ready) >= self._shelf.depth)

    def close(self) -> None:
        """End the thread, and wait for it."""
        with self._shelf.change:
            self._shelf.is_done, self._shelf.items = True, None
            self._shelf.ready.clear()
            self._shelf.change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            _briefly(self._thread.join)
        self._under_way.discard(self)

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        if self._thread is not None or self._shelf.items is None:
            return
        self._reader = threading.get_ident()
        for other in list(self._under_way):
            if other._reader == self._reader:
                other.settle()
        self._under_way.add(self)
        # The thread holds the shelf, not this: what nobody reads any more is collected, and ends it.
        self._thread = threading.Thread(target=self._shelf.fill, name="redeqx-prefetch", daemon=True)
        self._thread.start()


def _briefly(wait: Callable[[], Any]) -> Any:
    """What it returns; a Ctrl-C meanwhile shows where the user's script was, and no frames of queues and threads."""
    try:
        return wait()
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None
