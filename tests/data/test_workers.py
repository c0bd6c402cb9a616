"""Concurrent calls of `collate_fn`: the same batches, errors that show the user's frame, no worker process left running."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from redeqx.data import BatchSize, CollatePool, Workers, batches, slices
from redeqx.errors import FilteredTraceback
from redeqx.machine import make_mesh
from tests.data import collating

KINDS = ["threads", "processes"]
SIZE = BatchSize(8, 8)


def collate_all(collate_fn, examples, workers=None, **kwargs):
    """Return the places of the examples and the first group of rows of every step."""
    with closing_batches(collate_fn, examples, workers, **kwargs) as steps:
        return [(step.places, jax.tree.map(np.asarray, step.groups[0])) for step in steps]


def closing_batches(collate_fn, examples, workers=None, seed=(0, 0)):
    return closing(batches(slices(examples, 8, seed=seed), workers or CollatePool(collate_fn), SIZE, make_mesh()))


@pytest.fixture(scope="module", autouse=True)
def worker_process():
    """A running worker process, to which each test can send its own function."""
    with CollatePool(call_first_example, Workers(1, "processes")) as workers:
        collate_in_worker(workers, collating.stack_numbers)
        yield workers
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def no_process_is_left_running():
    before = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= {*before}


def call_first_example(examples):
    function, *examples = examples
    return function(examples)


def collate_in_worker(workers, function, examples=range(8)):
    return workers.start([function, *examples])()


# --- the same batches ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_those_of_a_single_thread_in_order(kind):
    expected = collate_all(collating.stack_numbers, range(45))
    with CollatePool(collating.stack_numbers, Workers(2, kind)) as workers:
        for _ in range(2):  # the same workers are used for both passes
            actual = collate_all(collating.stack_numbers, range(45), workers)
            assert [places for places, _ in actual] == [places for places, _ in expected]
            for (_, own), (_, other) in zip(actual, expected, strict=True):
                assert own["x"].dtype == other["x"].dtype
                np.testing.assert_array_equal(own["x"], other["x"])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_workers_run_concurrently(kind, tmp_path):
    """Each of the two calls waits for the other one, so that neither can finish alone."""
    with CollatePool(partial(wait_for_other_call, tmp_path), Workers(2, kind)) as workers:
        results = [workers.start(["a", "b"]), workers.start(["b", "a"])]
        assert [result() for result in results] == [["a", "b"], ["b", "a"]]


def wait_for_other_call(folder, examples):
    own, other = examples
    (folder / own).touch()
    deadline = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return examples


def test_one_thread_reads_the_examples_in_order():
    class Examples:
        readers, read = set(), []

        def __len__(self):
            return 40

        def __getitem__(self, i):
            self.readers.add(threading.get_ident())
            self.read.append(i)
            return i

    with CollatePool(collating.stack_numbers, Workers(3)) as workers:
        collate_all(collating.stack_numbers, Examples(), workers, seed=None)
    assert Examples.read == list(range(40))
    assert len(Examples.readers) == 1


class RecordReads:
    """Examples that record which of them were read, and raise at one."""

    def __init__(self, n, fail_at=None):
        self.n, self.fail_at, self.read = n, fail_at, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.fail_at:
            raise KeyError("no such example")
        self.read.append(i)
        return i


def test_reads_ahead_as_many_batches_as_workers():
    examples, may_go = RecordReads(100), threading.Event()

    def wait(numbers):
        assert may_go.wait(30)
        return collating.stack_numbers(numbers)

    with CollatePool(wait, Workers(3)) as workers, closing_batches(wait, examples, workers, seed=None) as steps:
        upcoming = threading.Thread(target=next, args=(steps,))
        upcoming.start()
        while len(examples.read) < 32:
            time.sleep(0.01)
        time.sleep(0.2)  # time to run too far ahead
        assert len(examples.read) == 32  # the first batch, and one for each worker
        may_go.set()
        upcoming.join()


@pytest.mark.parametrize("n", [0, 1, 3, 20])
def test_batches_before_an_error_are_returned_first(n):
    with CollatePool(collating.stack_numbers, Workers(n)) as workers:
        steps = closing_batches(collating.stack_numbers, RecordReads(100, fail_at=40), workers, seed=None)
        actual = []
        with steps as upcoming, pytest.raises(KeyError, match="no such example"):
            actual.extend(step.places for step in upcoming)
    assert actual == [list(range(8 * i, 8 * i + 8)) for i in range(5)]


def test_collating_with_jax_runs_on_the_cpu(worker_process):
    batch = collate_in_worker(worker_process, collating.uses_jax)
    np.testing.assert_array_equal(batch["x"], np.arange(1, 9))
    assert batch["on_cpu"].all()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_error_shows_the_frame_in_collate_fn_and_the_examples(kind):
    actual = []
    with CollatePool(collating.fails_at_9, Workers(1, kind)) as workers:
        with (
            pytest.raises(ValueError, match="nine will not do") as raised,
            FilteredTraceback(),
            closing_batches(collating.fails_at_9, range(40), workers, seed=None) as steps,
        ):
            actual.extend(step.places for step in steps)
        assert [list(places) for places in actual] == [list(range(8))]  # the batch before the error
        assert workers.start(list(range(8)))() is not None  # they can still be used
    note = "`collate_fn` was called with examples 8, 9, 10, 11, 12, 13, 14, 15, counted from 0."
    assert raised.value.__notes__ == [note]
    shown = "".join(traceback.format_exception(raised.value))
    assert 'collating.py", line' in shown and "in fails_at_9" in shown
    assert "redeqx/data/" not in shown and "concurrent/futures" not in shown


def test_unpicklable_exception_is_reported_as_runtime_error(worker_process):
    with pytest.raises(RuntimeError, match=r"^TwoWords: one and other$") as raised:
        collate_in_worker(worker_process, collating.raises_what_does_not_unpickle)
    assert "in raises_what_does_not_unpickle" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (collating.raises_end_of_file, EOFError, "a truncated file"),
        (collating.raises_lost_connection, ConnectionResetError, "a lost connection"),
    ],
)
def test_error_like_that_of_an_ended_process_is_raised(worker_process, function, error, message):
    with pytest.raises(error, match=message) as raised:
        worker_process.start([function, 1])(timeout=60)
    assert f"in {function.__name__}" in str(raised.value.__cause__)


def test_unpicklable_batch_fails_only_that_batch(worker_process):
    with pytest.raises((AttributeError, RuntimeError), match=r"pickle|local object"):
        collate_in_worker(worker_process, collating.returns_unpicklable_batch)
    np.testing.assert_array_equal(collate_in_worker(worker_process, collating.stack_with_pid)["x"], np.arange(8))


def test_unpicklable_examples_raise(worker_process):
    with pytest.raises(
        TypeError, match=r"`collate_fn`: expected examples that can be pickled, as .*, got some that cannot .* Pass"
    ):
        collate_in_worker(worker_process, collating.stack_with_pid, [lambda: None])


def test_invalid_batch_raises_as_without_workers():
    with (
        CollatePool(collating.returns_ragged_lists, Workers(1)) as workers,
        pytest.raises(TypeError, match="`collate_fn` output `x`: expected an array of 8 rows, got a list of 8 with lengths"),
    ):
        collate_all(collating.returns_ragged_lists, range(16), workers)


@pytest.mark.parametrize(
    ("function", "end"),
    [(collating.exits, "with exit code 3"), (collating.kills_itself, "by signal 9")],
    ids=["exited", "killed"],
)
def test_end_of_a_worker_process_raises(function, end):
    expected = f"`collate_fn`: expected its result from a worker process, got the end of the process, {end}. Look at"
    with CollatePool(function, Workers(1, "processes")) as workers, pytest.raises(RuntimeError, match=expected):
        workers.start([1, 2])()


@pytest.mark.parametrize("make", [lambda: lambda examples: examples, lambda: partial(call_first_example, lambda: None)])
def test_unpicklable_function_raises_at_construction(make):
    expected = "`collate_fn`: expected a function that can be pickled, .*, got one that cannot .* Define it at the top"
    with pytest.raises(TypeError, match=expected):
        CollatePool(make(), Workers(2, "processes"))
    CollatePool(make(), Workers(2, "threads")).close()


@pytest.mark.sweep
def test_function_that_cannot_be_unpickled_raises():
    expected = r"`collate_fn`: expected a function that another process can import, .* it cannot \(no such module there\)"
    with (
        CollatePool(collating.FailsToUnpickle(), Workers(1, "processes")) as workers,
        pytest.raises(TypeError, match=expected),
    ):
        workers.start([1])()


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"n": -1}, ValueError, "`workers`: expected at least 0, got -1. Pass 0 or more."),
        ({"where": "fork"}, ValueError, "`workers.where`: expected 'threads' or 'processes', got 'fork'. Pass one"),
    ],
)
def test_invalid_arguments_raise(kwargs, kind, message):
    with pytest.raises(kind, match=message):
        Workers(**kwargs)


# --- scripts ---------------------------------------------------------------------------------------------------------

_SCRIPT = """
import os, signal, sys
import numpy as np
from redeqx.data import CollatePool, Workers

print("imported", flush=True)

def collate_fn(examples):
    return {"x": np.asarray(examples), "pid": os.getpid()}

def main():
    with CollatePool(collate_fn, Workers(1, "processes")) as workers:
        while True:
            print("worker", workers.start([1, 2])()["pid"], flush=True)
            sys.stdin.readline()
"""


def script_command(folder, end):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(_SCRIPT) + end)
    return [sys.executable, str(path)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}


def run(command):
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def start_process(command):
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.sweep
def test_the_script_that_a_worker_imports_sees_no_accelerator(tmp_path):
    """A key or an array at the top of a script would take the memory of the accelerator in each worker."""
    path = tmp_path / "script.py"
    path.write_text(
        "import jax\nfrom redeqx.data import CollatePool, Workers\nplatforms = jax.config.jax_platforms\n"
        "def collate_fn(examples): return platforms\n"
        "if __name__ == '__main__':\n"
        "    with CollatePool(collate_fn, Workers(1, 'processes')) as workers:\n"
        "        print(platforms, workers.start([])(), end='')\n"
        "    import os; assert os.environ['JAX_PLATFORMS'] == platforms\n"
    )
    command = [sys.executable, str(path)]
    completed = subprocess.run(
        command, env=ENVIRONMENT | {"JAX_PLATFORMS": "tpu"}, capture_output=True, text=True, timeout=120
    )
    assert completed.stdout == "tpu cpu", completed.stderr


@pytest.mark.sweep
def test_script_without_a_main_guard_raises(tmp_path):
    completed = run(script_command(tmp_path, "main()\n"))
    assert completed.stdout == "imported\n"
    expected = 'script.py`: expected a script that does its work under `if __name__ == "__main__":`, '
    assert expected in completed.stderr and "got one that would run again. Add that line, or pass" in completed.stderr


@pytest.mark.sweep
def test_interactively_defined_function_raises():
    code = (
        "def f(examples): return {}\nfrom redeqx.data import CollatePool, Workers\n"
        "with CollatePool(f, Workers(1, 'processes')) as workers: workers.start([])()"
    )
    completed = run([sys.executable, "-c", code])
    expected = 'expected a function that another process can import, as `workers=Workers(n, "processes")` needs, got one'
    assert expected in completed.stderr and "Define it at the top of a module" in completed.stderr


@pytest.mark.sweep
def test_workers_ignore_signals_to_the_group_and_end_with_their_parent(tmp_path):
    """Only the parent process handles a signal to the process group; when the parent is killed, its workers end."""
    end = "if __name__ == '__main__':\n    signal.signal(signal.SIGTERM, lambda *_: None)\n    main()\n"
    command = script_command(tmp_path, end)
    with start_process(command) as run:
        assert run.stdout is not None and run.stdin is not None
        lines = (line for line in iter(run.stdout.readline, "") if line != "imported\n")
        worker = next(lines)
        os.killpg(run.pid, signal.SIGTERM)
        run.stdin.write("\n")
        run.stdin.flush()
        assert next(lines) == worker
        run.kill()
        run.wait(60)
        assert run.stdout.read() == ""  # returns once the last process holding the pipe has ended
    pid = int(worker.split()[1])
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


# --- rows that depend on each other, in several processes ------------------------------------------------------------


class Compared:
    """What the checks of a run of several processes are told."""

    mixes = None

    def vary(self, batches, *, mixes):
        self.mixes = mixes
        return False

    def __call__(self, i, batch, n_examples):
        pass


class Flips:
    """Flips the rows in the calls of these numbers, as an augmentation that is rarely drawn."""

    def __init__(self, *calls):
        self.calls, self.n = calls, 0

    def __call__(self, examples):
        self.n += 1
        return -np.stack(examples) if self.n in self.calls else np.stack(examples)


@pytest.mark.parametrize(
    ("collate_fn", "expected"),
    [
        (np.stack, False),
        (lambda rows: np.stack(rows) - np.mean(rows, axis=0), True),
        (lambda rows: {"x": np.stack(rows), "share": np.full(len(rows), 1 / len(rows))}, True),
        (lambda rows: {"x": np.stack(rows), "length": np.count_nonzero(rows, axis=1)}, False),
        (lambda rows: np.where(np.arange(3) == 1, np.nan, rows), False),
        (Flips(1), False),  # the whole batch
        (Flips(4), False),  # an example alone
    ],
)
def test_rows_that_are_drawn_do_not_depend_on_each_other(collate_fn, expected):
    """Also if an augmentation is so rare that few calls draw it."""
    compared, examples = Compared(), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    with closing(batches(slices(examples, 8), CollatePool(collate_fn), SIZE, make_mesh(), compared)) as steps:
        next(steps)
    assert compared.mixes is expected


# --- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_closing_kills_processes_and_waits_for_threads(tmp_path):
    n_threads = threading.active_count()
    with CollatePool(partial(wait_for_other_call, tmp_path), Workers(1, "processes")) as workers:
        result = workers.start(["here", "never there"])
        while not (tmp_path / "here").exists():
            time.sleep(0.005)
    with pytest.raises(RuntimeError, match="got the end of the process, by signal 9"):
        result()
    with CollatePool(partial(wait_for_other_call, tmp_path), Workers(1)) as workers:
        result = workers.start(["x", "here"])
    assert result() == ["x", "here"]
    assert threading.active_count() <= n_threads
