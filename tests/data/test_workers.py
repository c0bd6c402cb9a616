"""Several calls of `collate_fn` at once: the same batches, errors that show the user's frame, no process left behind."""

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

from redeqx.data._examples import batches, slices
from redeqx.data._rows import BatchSize
from redeqx.data._workers import Workers, drawn_ahead
from redeqx.errors import FilteredTraceback
from redeqx.machine import make_mesh
from tests.data import collating

KINDS = ["threads", "processes"]
SIZE = BatchSize(8, 8)


def passed(collate_fn, examples, workers=None, **kwargs):
    """The rows of every step, and the examples' numbers."""
    with make_closing(collate_fn, examples, workers, **kwargs) as steps:
        return [(step.places, jax.tree.map(np.asarray, step.groups[0])) for step in steps]


def make_closing(collate_fn, examples, workers=None, seed=(0, 0)):
    return closing(batches(slices(examples, 8, seed=seed), workers or Workers(collate_fn), SIZE, make_mesh()))


@pytest.fixture(scope="module", autouse=True)
def a_process():
    """A worker process that has started; each test may send it another function."""
    with Workers(call, 1, "processes") as workers:
        collated(workers, collating.numbers)
        yield workers
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= {*before}


def call(examples):
    function, *examples = examples
    return function(examples)


def collated(workers, function, examples=range(8)):
    return workers.start([function, *examples])()


# --- the same batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_are_those_of_one_thread_in_their_order(kind):
    expected = passed(collating.numbers, range(45))
    with Workers(collating.numbers, 2, kind) as workers:
        for _ in range(2):  # the same workers serve every pass
            got = passed(collating.numbers, range(45), workers)
            assert [places for places, _ in got] == [places for places, _ in expected]
            for (_, mine), (_, theirs) in zip(got, expected, strict=True):
                assert mine["x"].dtype == theirs["x"].dtype
                np.testing.assert_array_equal(mine["x"], theirs["x"])


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_calls_run_at_once_as_there_are_workers(kind, tmp_path):
    """Each call waits for the other one."""
    with Workers(partial(meets, tmp_path), 2, kind) as workers:
        results = [workers.start(["a", "b"]), workers.start(["b", "a"])]
        assert [result() for result in results] == [["a", "b"], ["b", "a"]]


def meets(folder, examples):
    mine, other = examples
    (folder / mine).touch()
    until = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    return examples


def test_examples_are_read_by_one_thread_in_order():
    class Examples:
        readers, read = set(), []

        def __len__(self):
            return 40

        def __getitem__(self, i):
            self.readers.add(threading.get_ident())
            self.read.append(i)
            return i

    with Workers(collating.numbers, 3) as workers:
        passed(collating.numbers, Examples(), workers, seed=None)
    assert Examples.read == list(range(40))
    assert len(Examples.readers) == 1


def test_no_more_is_read_ahead_than_there_are_workers():
    drawn = []
    ahead = drawn_ahead((drawn.append(i) or i for i in range(100)), 3)
    assert [next(ahead) for _ in range(4)] == [0, 1, 2, 3]
    assert drawn == list(range(7))


@pytest.mark.parametrize("n", [0, 1, 3, 20])
def test_what_comes_before_an_error_of_the_examples_comes_first(n):
    def items():
        yield from range(5)
        raise KeyError("five")

    got = []
    with pytest.raises(KeyError, match="five"):
        got.extend(drawn_ahead(items(), n))
    assert got == list(range(5))
    assert list(drawn_ahead(iter(range(7)), n)) == list(range(7))


def test_collating_by_jax_takes_no_accelerator(a_process):
    batch = collated(a_process, collating.uses_jax)
    np.testing.assert_array_equal(batch["x"], np.arange(1, 9))
    assert batch["on_cpu"].all()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_shows_the_users_frame_and_the_examples(kind):
    got = []
    with Workers(collating.fails_at_9, 2, kind) as workers:
        with (
            pytest.raises(ValueError, match="nine will not do") as raised,
            FilteredTraceback(),
            make_closing(collating.fails_at_9, range(40), workers, seed=None) as steps,
        ):
            got.extend(step.places for step in steps)
        assert [list(places) for places in got] == [list(range(8))]  # what came before it
        assert not workers._is_closed
    note = "`collate_fn` was called with examples 8, 9, 10, 11, 12, 13, 14, 15, counted from 0."
    assert raised.value.__notes__ == [note]
    shown = "".join(traceback.format_exception(raised.value))
    assert 'collating.py", line' in shown and "in fails_at_9" in shown
    assert "redeqx/data/" not in shown and "concurrent/futures" not in shown


def test_an_exception_that_does_not_come_through_says_the_same(a_process):
    with pytest.raises(RuntimeError, match=r"^TwoWords: one and other$") as raised:
        collated(a_process, collating.raises_what_does_not_unpickle)
    assert "in raises_what_does_not_unpickle" in str(raised.value.__cause__)


def test_a_batch_that_does_not_pickle_is_an_error_of_that_batch(a_process):
    with pytest.raises((AttributeError, RuntimeError), match="pickle"):
        collated(a_process, collating.returns_what_does_not_pickle)
    np.testing.assert_array_equal(collated(a_process, collating.pids)["x"], np.arange(8))


def test_examples_that_do_not_pickle_are_refused(a_process):
    with pytest.raises(TypeError, match=r"`collate_fn`: expected examples that pickle, as .*, got some that do not .* Pass"):
        collated(a_process, collating.pids, [lambda: None])


def test_what_is_wrong_with_a_batch_is_said_as_without_workers():
    with (
        Workers(collating.ragged, 1) as workers,
        pytest.raises(TypeError, match="`collate_fn` output `x`: expected an array of 8 rows, got a list of 8 with lengths"),
    ):
        passed(collating.ragged, range(16), workers)


@pytest.mark.parametrize(
    ("function", "end"),
    [(collating.leaves, "with exit code 3"), (collating.is_killed, "by signal 9")],
    ids=["left", "killed"],
)
def test_a_process_that_ends_is_an_error(function, end):
    expected = f"`collate_fn`: expected its result from a worker process, got the end of the process, {end}. Look at"
    with Workers(function, 1, "processes") as workers, pytest.raises(RuntimeError, match=expected):
        workers.start([1, 2])()


@pytest.mark.parametrize("make", [lambda: lambda examples: examples, lambda: partial(call, lambda: None)])
def test_a_function_that_does_not_pickle_is_refused_before_any_work(make):
    expected = "`collate_fn`: expected a function that can be pickled, .*, got one that cannot .* Define it at the top"
    with pytest.raises(TypeError, match=expected):
        Workers(make(), 2, "processes")
    Workers(make(), 2, "threads").close()


def test_a_function_that_the_process_cannot_read_is_refused():
    expected = r"`collate_fn`: expected a function that another process can import, .* it cannot \(no such module there\)"
    with Workers(collating.Unreadable(), 1, "processes") as workers, pytest.raises(TypeError, match=expected):
        workers.start([1])()


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"n_collate_workers": -1}, ValueError, "`n_collate_workers`: expected at least 0, got -1. Pass 0 or more."),
        ({"collate_in": "fork"}, ValueError, "`collate_in`: expected 'threads' or 'processes', got 'fork'. Pass one"),
    ],
)
def test_other_arguments_are_refused(kwargs, kind, message):
    with pytest.raises(kind, match=message):
        Workers(collating.pids, **kwargs)


# --- scripts ---------------------------------------------------------------------------------------------------------

_SCRIPT = """
import os, signal, sys
import numpy as np
from redeqx.data import Workers

print("imported", flush=True)

def collate_fn(examples):
    return {"x": np.asarray(examples), "pid": os.getpid()}

def main():
    with Workers(collate_fn, 1, "processes") as workers:
        while True:
            print("worker", workers.start([1, 2])()["pid"], flush=True)
            sys.stdin.readline()
"""


def script(folder, end):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(_SCRIPT) + end)
    return [sys.executable, str(path)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}


def run(command):
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def begun(command):
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_script_that_would_run_again_in_its_processes_is_refused(tmp_path):
    done = run(script(tmp_path, "main()\n"))
    assert done.stdout == "imported\n"
    expected = 'script.py`: expected a script that does its work under `if __name__ == "__main__":`, as each process of '
    assert expected in done.stderr and "got one that would run again. Add that line, or pass" in done.stderr


def test_a_function_defined_interactively_is_refused():
    code = "def f(examples): return {}\nfrom redeqx.data import Workers\nWorkers(f, 1, 'processes')"
    done = run([sys.executable, "-c", code])
    assert "got one that was defined interactively. Define it at the top of a module" in done.stderr


@pytest.mark.sweep
def test_processes_outlive_the_signals_that_are_this_processs_and_not_this_process(tmp_path):
    """A signal to the whole job is for the run to handle; where the run is killed, none of its processes stays."""
    end = "if __name__ == '__main__':\n    signal.signal(signal.SIGTERM, lambda *_: None)\n    main()\n"
    command = script(tmp_path, end)
    with begun(command) as run:
        assert run.stdout is not None and run.stdin is not None
        lines = (line for line in iter(run.stdout.readline, "") if line != "imported\n")
        worker = next(lines)
        os.killpg(run.pid, signal.SIGTERM)
        run.stdin.write("\n")
        run.stdin.flush()
        assert next(lines) == worker
        run.kill()
        run.wait(60)
        assert run.stdout.read() == ""  # returns when the last process that holds the pipe has ended
    pid = int(worker.split()[1])
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


# --- ends ------------------------------------------------------------------------------------------------------------


def test_closing_ends_processes_at_once_and_threads_after_their_call(tmp_path):
    n_threads = threading.active_count()
    with Workers(partial(meets, tmp_path), 1, "processes") as workers:
        result = workers.start(["here", "never there"])
        while not (tmp_path / "here").exists():
            time.sleep(0.005)
    with pytest.raises(RuntimeError, match="got the end of the process, by signal 9"):
        result()
    with Workers(partial(meets, tmp_path), 1) as workers:
        result = workers.start(["x", "here"])
    assert result() == ["x", "here"]
    assert threading.active_count() <= n_threads
