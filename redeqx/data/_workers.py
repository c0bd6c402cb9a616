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
import signal
import sys
import threading
import traceback
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


_NEEDED = 'as `workers=Workers(n, "processes")` needs'
_THREADS = '`workers=Workers(n, "threads")`'
_REMEDY = f"Define it at the top of a module and bind arguments by `functools.partial`, or pass {_THREADS}."


@dataclass(frozen=True)
class Workers:
    """How many calls of `collate_fn` run at once, ahead of the device, and where. The examples and their order stay.
    Calls in threads overlap: each needs arrays of its own to fill, and shares no random generator with others.

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
    passes over the examples. Whichever worker calls it, it has to return the same batch for the same examples.

    Raises TypeError for a function that cannot be pickled, ValueError for a script that processes cannot import.
    """

    def __init__(self, collate_fn: Callable[[list], PyTree], workers: Workers = Workers()):
        self.n, self._collate_fn = workers.n, collate_fn
        self._function = _pickled(collate_fn) if self.n and workers.where == "processes" else None
        self._threads = ThreadPoolExecutor(self.n, "redeqx-collate") if self.n else None
        self._own = threading.local()  # each thread's process
        self._processes: list[_Process] = []

    def start(self, examples: list) -> Callable[[], PyTree]:
        """Starts to collate these examples; returns a function that waits for the result, or raises the call's error."""
        if self._threads is None:
            return lambda: self._collate_fn(examples)
        return self._threads.submit(self._call, examples).result

    def _call(self, examples: list) -> PyTree:
        if self._function is None:
            return self._collate_fn(examples)
        if not hasattr(self._own, "process"):
            self._own.process = _Process(self._function)
            self._processes.append(self._own.process)
        return self._own.process.collate(examples)

    def close(self) -> None:
        """Ends the workers: processes at once, threads after their current calls."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._end_processes()
            self._threads.shutdown()
            self._end_processes()  # also one that a thread has just started

    def _end_processes(self) -> None:
        for process in self._processes:
            process.end()

    def __enter__(self) -> "CollatePool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        self.close()


# --- processes -------------------------------------------------------------------------------------------------------


def _pickled(collate_fn: Callable[[list], PyTree]) -> bytes:
    """Returns the pickled function for the worker processes; checked as far as this process can."""
    try:
        function = pickle.dumps(collate_fn)
    except Exception as error:
        raise TypeError(
            f"`collate_fn`: expected a function that can be pickled, {_NEEDED}, got one that cannot ({error}). {_REMEDY}"
        ) from error
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is not None and not _is_guarded(Path(file)):
        raise ValueError(
            f'`{file}`: expected a script that does its work under `if __name__ == "__main__":`, {_NEEDED}, '
            f"got one that would run again. Add that line, or pass {_THREADS}."
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

    def __init__(self, function: bytes):
        spawn = get_context("spawn")
        self._connection, far_end = spawn.Pipe()
        arguments = (far_end, function, bool(jax.config.read("jax_enable_x64")))
        self._process = spawn.Process(target=_serve, args=arguments, name=WORKER, daemon=True)
        resource_tracker.ensure_running()  # otherwise `start` does this, and lets the signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the process inherits this, until `_serve` ignores them
        try:
            with _waiting, _without_accelerator():
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
                f"`collate_fn`: expected examples that can be pickled, {_NEEDED}, got some that cannot ({error}). "
                f"Pass {_THREADS}."
            ) from error
        try:
            self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, ConnectionError) as error:
            code = self._joined()
            end = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            raise RuntimeError(
                f"`collate_fn`: expected its result from a worker process, got the end of the process, {end}. "
                "Look at what it printed; where memory ran out, pass fewer `workers`."
            ) from error
        is_returned, value = pickle.loads(answer)
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


@contextlib.contextmanager
def _without_accelerator() -> Iterator[None]:
    """Processes that start in this context see only the CPU: before `_serve` they import the script, which may use JAX."""
    name = "JAX_PLATFORMS"
    before = os.environ.get(name)
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def _serve(connection: Connection, function: bytes, enable_x64: bool) -> None:
    """Runs a worker process, until the other end of the connection closes."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, name="redeqx-parent", daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # a `collate_fn` that uses JAX must not allocate on the accelerator
    jax.config.update("jax_enable_x64", enable_x64)
    collate_fn = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = connection.recv_bytes()
            try:
                collate_fn = _unpickled(function) if collate_fn is None else collate_fn
                result = pickle.dumps((True, collate_fn(pickle.loads(message))))
            except Exception as error:
                frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
                _send_error(connection, error, "".join(traceback.format_exception(type(error), error, frames)))
                continue
            connection.send_bytes(result)


def _unpickled(function: bytes) -> Callable[[list], PyTree]:
    try:
        return pickle.loads(function)
    except Exception as error:
        found = f"expected a function that another process can import, {_NEEDED}, got one that it cannot ({error})"
        raise TypeError(f"`collate_fn`: {found}. {_REMEDY}") from error


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
