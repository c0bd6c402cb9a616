"""Passes over examples in their given order, and evaluations. Epochs belong to the fit, in `_fit.py`."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._tree import array_leaves
from ..data import (
    BatchSize,
    Prefetch,
    Slice,
    check_examples,
    collated_shapes,
    drawn_ahead,
    size_of,
    slices,
)
from ..dims import UNKNOWN
from ..errors import check_alike, warn
from ..partition import place
from ..steps import row_span
from ._engine import Engine
from ._metrics import LAG


def in_order(examples: Any, size: BatchSize, drop_remainder: bool = False) -> Iterator[Slice]:
    """Returns the examples of each step of one pass, in their given order."""
    check_examples(examples, "examples", or_function=False)
    return slices(examples, size.examples, drop_remainder=drop_remainder, name="examples")


def warn_of_large_batch(n: int | None, size: BatchSize, per_device: int | None) -> None:
    """Warns if there are fewer examples (None if unknown) than one update takes; `per_device` are its rows per device, if
    these were given instead of all examples."""
    # The smallest number of rows per device that takes all examples is meant, although it may take more.
    step = 1 if per_device is None else size.examples // per_device
    if n is not None and n <= size.examples - step:
        name = "batch_size" if per_device is None else "per_device_batch_size"
        warn(
            f"`{name}`: expected at most {n} examples per update, all that there are, got {size.examples}. Each pass is one "
            f"update of {n}. Pass `batch_size={n}` if this is meant, or less for more updates."
        )


def evaluate(engine: Engine, examples: Any, size: BatchSize, model: PyTree | None = None) -> dict[str, float]:
    """Computes `{"loss": ...}` and every metric of `Loss.metrics` over all examples, in batches of at most this size. A
    `model` replaces the one to evaluate; raises ValueError for one of another structure."""
    if model is not None:
        check_alike(model, array_leaves(engine.trees[0]), "the trained model")
    deployer, task = engine.deployer, engine.task
    deployer.need_values("eval_loss")
    size = _even_size(engine, examples, size)
    steps, n = in_order(examples, size), size_of(examples)
    sums: np.ndarray | float = 0.0

    def computed(upcoming: Prefetch) -> Iterator[tuple[jax.Array, int, int | None]]:  # not the batches, which take memory
        n_rows, weights = 0, None
        for batch in upcoming:
            if weights is None:
                engine.place(batch.micro_batch)
                program, state = engine.placed
                program.check_alive(state)
                given = None if model is None else place(model, program.plan)
                weights = (program.eval_trained(state), state.frozen) if given is None else task.structure.take(given)
            args = (*weights, state.layers, state.stream, row_span(n_rows, n), batch.groups)
            vector = engine.evaluated.call(program.eval_step, args, batch.signature, nullcontext(line))
            n_rows += batch.n_examples
            deployer.watch.beat()
            vector.copy_to_host_async()
            yield vector, batch.n_examples, batch.n_tokens

    progress = deployer.console.progress(title="evaluate", unit="batch")
    upcoming = engine.batches(steps, size, inference=True, is_counted=n is not None)
    with deployer.watch.on(), progress as line, closing(upcoming):
        for i, (vector, n_examples, n_tokens) in enumerate(drawn_ahead(computed(upcoming), LAG)):
            sums = sums + np.asarray(vector, np.float64)
            line.update(i + 1, metrics={}, n_examples=n_examples, n_tokens=n_tokens)
    pairs, names = np.asarray(sums).reshape(-1, 2), engine.placed[0].eval_names
    if pairs[names.index("loss"), 1] == 0:
        warn(
            "`Loss.weight`: expected a sum above 0 over the evaluated examples, got 0, as if every row or token were "
            "masked. Their loss is NaN: evaluate other examples."
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        return dict(zip(names, (pairs[:, 0] / pairs[:, 1]).tolist(), strict=True))


def _even_size(engine: Engine, examples: Any, size: BatchSize) -> BatchSize:
    """Returns the sizes of an evaluation's batch: these, or those of `BatchSize.evenly` where the loss allows them."""
    task, n, n_devices = engine.task, size_of(examples), engine.deployer.mesh.size
    use = engine.eval_use
    if use is None and n and size.evenly(n, n_devices).examples != size.examples:  # so it matters what the loss does
        first = [examples[i] for i in range(min(n, size.examples))]
        with closing(Prefetch(map(partial(collated_shapes, task.collate_fn), [first]))) as shapes:
            use = task.row_use_of(*engine.trees, next(shapes), inference=True)
    return size.evenly(n, n_devices, use or UNKNOWN)
