"""Evaluation: the loss and its metrics over all examples, as sums over batches that are divided once."""

from collections import deque
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..checkpoint import array_leaves
from ..data import BatchSize, size_of
from ..errors import check_model, warn
from ..partition import place
from ._engine import Engine
from ._metrics import LAG
from ._passes import in_order
from ._step import row_span


def evaluate(engine: Engine, examples: Any, size: BatchSize, model: PyTree | None = None) -> dict[str, float]:
    """Computes `{"loss": ...}` and every metric of `Loss.metrics` over all examples.

    **Arguments:**

    - `size`: the largest sizes of a batch.
    - `model`: replaces the trained model, or the average of it that the optimizer keeps, with the same structure.

    Raises ValueError for a `model` of another structure.
    """
    if model is not None:
        _check_alike(engine, model)
    run, recipe = engine.run, engine.recipe
    run.need_values("eval_loss")
    size = engine.even_eval_size(examples, size)
    steps = in_order(examples, size)
    sums: np.ndarray | float = 0.0
    pending: deque[tuple[jax.Array, int, int | None]] = deque()  # not the batches, which take memory
    n_done = n_rows = 0
    weights: tuple[list[Any], list[Any]] | None = None

    def finish_oldest() -> None:
        nonlocal sums, n_done
        vector, n_examples, n_tokens = pending.popleft()
        sums, n_done = sums + np.asarray(vector, np.float64), n_done + 1
        line.update(n_done, metrics={}, n_examples=n_examples, n_tokens=n_tokens)

    progress = run.console.progress(title="evaluate", unit="batch")
    with run.watch.on(), progress as line, closing(engine.batches(steps, size, inference=True)) as upcoming:
        for batch in upcoming:
            engine.place_for(batch)
            state = engine.state
            if weights is None:
                given = None if model is None else place(model, state.program.plan)
                weights = (state.eval_trained, state.frozen) if given is None else recipe.parts.take(given)
            args = state.eval_args(row_span(n_rows, size_of(examples)), batch.groups, weights)
            n_rows += batch.n_examples
            vector = engine.calls.evaluate(state.program.eval_step, args, batch, line)
            run.watch.beat()
            vector.copy_to_host_async()
            pending.append((vector, batch.n_examples, batch.n_tokens))
            if len(pending) > LAG:
                finish_oldest()
        while pending:
            finish_oldest()
    pairs, names = np.asarray(sums).reshape(-1, 2), engine.state.program.eval_names
    if pairs[names.index("loss"), 1] == 0:
        warn(
            "`Loss.weight`: expected a sum above 0 over the evaluated examples, got 0, as if every row or token were "
            "masked. Their loss is NaN: evaluate other examples."
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        return dict(zip(names, (pairs[:, 0] / pairs[:, 1]).tolist(), strict=True))


def _check_alike(engine: Engine, model: PyTree) -> None:
    """Raises ValueError for a model whose arrays differ from the trained one's in name or shape."""
    check_model(model)
    own, found = array_leaves(engine.trees[0]), array_leaves(model)
    for name in [*own, *(name for name in found if name not in own)]:
        shapes = [None if name not in of else of[name].shape for of in (own, found)]
        if shapes[0] != shapes[1]:
            expected, got = ("no array" if shape is None else f"shape {shape}" for shape in shapes)
            raise ValueError(
                f"`model`: `{name}`: expected {expected}, as in the trained model, got {got}. "
                "Pass a model of the same structure."
            )
