"""Workers: several calls of `collate_fn` at once, in threads or in processes.

Owns how workers start, what they receive, and how they end. One thread reads examples and places batches, in order, as
without workers: see `_examples`.

A worker process is started by `spawn`: a forked one would inherit JAX's threads and locks. It has one connection, which
receives examples and returns a batch. It ends when that connection closes, however this process ends.
"""

import ast
import contextlib
import os
import pickle  # only between our own processes: nothing from a file or the network is unpickled
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jaxtyping import PyTree

from ..distributed import WORKER
from ..errors import RemoteTraceback, check_choice, check_count

# A shell sends SIGINT, and a scheduler the others, to every process of a job. Only this process handles them.
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]

_waiting = threading.Lock()  # one thread at a time: `multiprocessing` loses the exit code if two wait for one process


@dataclass(frozen=True)
class ArgumentNames:
    """The names of the workers' arguments, for errors.

    **Arguments:**

    - `function`, `number`: the names.
    - `processes`, `otherwise`: the settings with which processes are used, and are not.
    """

    function: str = "collate_fn"
    number: str = "workers"
    processes: str = 'workers=Workers(n, "processes")'
    otherwise: str = 'workers=Workers(n, "threads")'

    @property
    def sent(self) -> str:
        return f"as `{self.processes}` sends it to processes"

    @property
    def remedy(self) -> str:
        return f"Define it at the top of a module and bind arguments by `functools.partial`, or pass `{self.otherwise}`."


@dataclass(frozen=True)
class Workers:
    """How many calls of `collate_fn` run at once, ahead of the device, and where. The examples and their order stay.

    **Arguments:**

    - `n`: the number of concurrent calls. With 0 there is one, in the thread that prepares batches.
    - `where`: `"threads"`, for a `collate_fn` that spends its time in NumPy, I/O or a tokenizer, which let others run; or
        `"processes"`, for one written in Python. Processes need a `collate_fn` and examples that can be pickled, and a
        script that does its work under `if __name__ == "__main__":`. They see no accelerator.

    Raises TypeError for a number that is not an integer, ValueError for a negative one and another place.
    """

    n: int = 0
    where: str = "threads"

    def __post_init__(self) -> None:
        check_count(self.n, "workers", 0)
        check_choice(self.where, "workers.where", ("threads", "processes"))


class CollatePool:
    """Calls a `collate_fn` in workers; a context that ends them. They start at the first call, and serve any number of
    passes over the examples.

    **Arguments:**

    - `collate_fn`: returns the same batch for the same examples, whichever worker calls it.
    - `names`: of the arguments, for errors.

    Raises TypeError for a function that cannot be pickled, ValueError for a script that processes cannot import.
    """

    def __init__(
        self, collate_fn: Callable[[list], PyTree], workers: Workers = Workers(), names: ArgumentNames = ArgumentNames()
    ):
        self.n, self._names = workers.n, names
        self._collate_fn = collate_fn
        self._function = _pickled(collate_fn, names) if self.n and workers.where == "processes" else None
        self._pool: ThreadPoolExecutor | None = None
        self._processes: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()  # None: a process that has not started yet
        for _ in range(self.n):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, examples: list) -> Callable[[], PyTree]:
        """Starts to collate these examples; returns a function that waits for the result, or raises the call's error."""
        if not self.n:
            return lambda: self._collate_fn(examples)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.n, "redeqx-collate")
            return self._pool.submit(self._call, examples).result

    def _call(self, examples: list) -> PyTree:
        if self._function is None:
            return self._collate_fn(examples)
        process = self._idle.get()  # there are as many processes as threads
        try:
            process = process or self._started(self._function)
            return process.collate(examples)
        finally:
            self._idle.put(process)

    def _started(self, function: bytes) -> "_Process":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("`collate_fn`: expected workers that have not been closed. Report this.")
            self._processes.append(process := _Process(function, self._names))
        return process

    def close(self) -> None:
        """Ends the workers: processes at once, threads after their current calls."""
        with self._lock:
            self._is_closed = True
        for process in self._processes:
            process.end()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "CollatePool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        self.close()


def drawn_ahead(items: Iterator[Any], n: int) -> Iterator[Any]:
    """Yields the same items, with up to `n` drawn ahead. An exception from drawing is raised after the items before it."""
    drawn: deque[Any] = deque()
    error: Exception | None = None
    while True:
        while error is None and len(drawn) <= n:
            try:
                drawn.append(next(items))
            except Exception as raised:  # including StopIteration
                error = raised
        if drawn:
            yield drawn.popleft()
        elif isinstance(error, StopIteration):
            return
        else:
            assert error is not None
            raise error


# --- processes -------------------------------------------------------------------------------------------------------


def _pickled(collate_fn: Callable[[list], PyTree], names: ArgumentNames) -> bytes:
    """Returns the pickled function for the worker processes; checked as far as this process can."""
    try:
        function = pickle.dumps(collate_fn)
    except Exception as error:
        raise TypeError(
            f"`{names.function}`: expected a function that can be pickled, {names.sent}, got one that cannot ({error}). "
            f"{names.remedy}"
        ) from error
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        if b"__main__" in function:
            raise TypeError(
                f"`{names.function}`: expected a function of a module, {names.sent}, got one that was defined "
                f"interactively. {names.remedy}"
            )
    elif not _is_guarded(Path(file)):
        raise ValueError(
            f'`{file}`: expected a script that does its work under `if __name__ == "__main__":`, as each process of '
            f"`{names.processes}` imports it, got one that would run again. Add that line, or pass `{names.otherwise}`."
        )
    return function


def _is_guarded(script: Path) -> bool:
    """Returns whether a script's source contains `if __name__ == "__main__":`."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    tests = [node.test for node in body if isinstance(node, ast.If)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


class _Process:
    """A process that collates one list of examples after another."""

    def __init__(self, function: bytes, names: ArgumentNames):
        self._names = names
        spawn = get_context("spawn")
        self._connection, far_end = spawn.Pipe()
        self._is_ready = False
        arguments = (far_end, function, names, bool(jax.config.read("jax_enable_x64")))
        self._process = spawn.Process(target=_serve, args=arguments, name=WORKER, daemon=True)
        resource_tracker.ensure_running()  # otherwise `start` does this, and lets the signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the process inherits this, until `_serve` ignores them
        try:
            with _waiting:
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far_end.close()

    def collate(self, examples: list) -> PyTree:
        """Returns the function's result for these examples. Raises its error, with the worker's traceback as the cause."""
        try:
            message = pickle.dumps(examples)
        except Exception as error:
            raise TypeError(
                f"`{self._names.function}`: expected examples that can be pickled, as `{self._names.processes}` sends them "
                f"to processes, got some that cannot ({error}). Pass `{self._names.otherwise}`."
            ) from error
        try:
            if not self._is_ready:
                self._result()
                self._is_ready = True
            self._connection.send_bytes(message)
            return self._result()
        except (EOFError, ConnectionError) as error:
            code = self._joined()
            end = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            raise RuntimeError(
                f"`{self._names.function}`: expected its result from a worker process, got the end of the process, {end}. "
                f"Look at what it printed; where memory ran out, pass fewer `{self._names.number}`."
            ) from error

    def _result(self) -> Any:
        is_returned, value = pickle.loads(self._connection.recv_bytes())
        if is_returned:
            return value
        error, text = value
        raise error from RemoteTraceback(text)

    def _joined(self) -> int | None:
        """Returns the exit code of the process, once it has ended."""
        with _waiting:
            self._process.join()
            return self._process.exitcode

    def end(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._joined()


def _serve(connection: Connection, function: bytes, names: ArgumentNames, enable_x64: bool) -> None:
    """Runs a worker process, until the other end of the connection closes."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, name="redeqx-parent", daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # a `collate_fn` that uses JAX must not allocate on the accelerator
    jax.config.update("jax_enable_x64", enable_x64)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            collate_fn = pickle.loads(function)
        except Exception as error:
            expected = f"`{names.function}`: expected a function that another process can import"
            text = f"{expected}, {names.sent}, got one that it cannot ({error}). {names.remedy}"
            _send_error(connection, TypeError(text), "")
            return
        connection.send_bytes(pickle.dumps((True, None)))
        while True:
            message = connection.recv_bytes()
            try:
                result = pickle.dumps((True, collate_fn(pickle.loads(message))))
            except Exception as error:
                frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
                _send_error(connection, error, "".join(traceback.format_exception(type(error), error, frames)))
                continue
            connection.send_bytes(result)


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even during a call, which may take any time."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _send_error(connection: Connection, error: Exception, text: str) -> None:
    """Sends an exception, or one with the same text if it does not survive pickling."""
    try:
        message = pickle.dumps((False, (error, text)))
        pickle.loads(message)
    except Exception:
        message = pickle.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))
    connection.send_bytes(message)
