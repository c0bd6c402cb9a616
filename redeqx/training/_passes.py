"""Passes over examples and single updates: what `train`, `update` and an epoch of a fit share.

Epochs, evaluations and checkpoints belong to the fit, in `_loop.py`; one update to the engine, in `_engine.py`.
"""

from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from typing import Any

from ..data import Batch, BatchSize, Prefetch, Slice, check_examples, is_function, size_of, slices
from ..errors import warn
from ..monitor import ProgressLine
from ._engine import Engine
from ._progress import Position


def in_order(examples: Any, size: BatchSize, drop_remainder: bool = False) -> Iterator[Slice]:
    """Returns the examples of each step of one pass, in their given order."""
    check_examples(examples, "examples")
    if is_function(examples):
        raise TypeError("`examples`: expected examples, got a function, which only `fit` calls, with an epoch. Call it.")
    return slices(examples, size.examples, drop_remainder=drop_remainder, name="examples")


def warn_of_large_batch(n: int | None, size: BatchSize, per_device: int | None) -> None:
    """Warns if there are fewer examples than one update takes.

    **Arguments:**

    - `n`: the number of examples; None if unknown.
    - `per_device`: the rows per device, if these were given instead of the examples per update.
    """
    # The smallest number of rows per device that takes all examples is meant, although it may take more.
    step = 1 if per_device is None else size.examples // per_device
    if n is not None and n <= size.examples - step:
        name = "batch_size" if per_device is None else "per_device_batch_size"
        warn(
            f"`{name}`: expected at most {n} examples per update, all that there are, got {size.examples}. Each pass is one "
            f"update of {n}. Pass `batch_size={n}` if this is meant, or less for more updates."
        )


def updates(
    engine: Engine, upcoming: Prefetch, line: ProgressLine, fit: int | None = None, epoch: int | None = None
) -> Generator[tuple[Batch, bool], None, None]:
    """Takes the updates of one pass; after each, yields its batch and whether it was the last.

    **Arguments:**

    - `fit`, `epoch`: in a fit, for the position of each update.
    """
    with engine.updating():
        with line.waiting():
            batch = next(upcoming, None)
        while batch is not None:
            position = None if fit is None or epoch is None else Position(fit, epoch, batch.position, batch.state)
            engine.update(batch, line, position)
            with line.waiting():
                following = next(upcoming, None)
            yield batch, following is None
            batch = following


def train(engine: Engine, steps: Iterator[Slice], size: BatchSize) -> dict[str, float]:
    """Takes one pass over the examples; returns the last step's metrics."""
    run = engine.run
    with run.watch.on(), run.console.progress(first_step=engine.step, title="train") as line:
        with closing(engine.batches(steps, size)) as upcoming:
            for _ in updates(engine, upcoming, line):
                engine.end_if_preempted(line)
        engine.flush(line)
    return dict(engine.metrics.last)


def as_one_step(engine: Engine, examples: Any) -> tuple[Iterator[Slice], BatchSize]:
    """Returns all of these examples as one step, and its sizes."""
    check_examples(examples, "examples")
    n = size_of(examples)
    if n is None:
        raise TypeError(
            f"`examples`: expected `len()` and integer items, got {type(examples).__name__}. Pass a list of them."
        )
    size = engine.batch_size(None, n)
    return in_order(examples, size), size


def update(engine: Engine, examples: Any) -> dict[str, float]:
    """Takes one update on all of these examples; returns its metrics."""
    steps, size = as_one_step(engine, examples)
    line = engine.update_line
    line.begin_step(engine.step)
    shown = line if engine.must_compile else nullcontext()  # shows the compilation
    watched = engine.run.watch.on() if engine.run.peers.n > 1 else nullcontext()  # it costs a thread
    with shown, engine.updating(), watched, closing(engine.batches(steps, size)) as upcoming:
        engine.update(next(upcoming), line)
        engine.flush(line)
        engine.end_if_preempted(line)
    return dict(engine.metrics.last)
