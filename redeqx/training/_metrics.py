"""The metrics of updates: read a few steps late, checked, shown and recorded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._tree import listed, named_leaves
from ..data import Batch
from ..errors import Once, warn
from ..monitor import Work
from ..steps import UNMOVED
from ..tracing import Body, Trace, called

_MOST_UNMOVED = 0.5  # warn above this share
LAG = 2  # this many newest steps stay unread, so that the device has one queued while the host reads


@dataclass(frozen=True)
class Queued:
    """An update that the device may still be computing."""

    step: int  # the engine's step after it
    epoch: int | None  # in a fit, the epoch, from 1; None outside a fit
    names: Sequence[str]  # of the metrics
    vector: jax.Array  # their values, and then the weight of the loss
    batch: Batch  # without its arrays on devices, so that their memory can be freed
    work: Work | None  # its work on one device; None if nothing shows the rates

    def read(self) -> tuple[dict[str, float], float]:
        """Returns the metrics, and the share of parameters' updates that are lost to rounding. Waits for the device."""
        metrics = dict(zip(self.names, np.asarray(self.vector)[:-1].tolist(), strict=True))
        unmoved = metrics.pop(UNMOVED, 0.0)
        return metrics, unmoved


def _first_nonfinite(metrics: dict[str, float]) -> str | None:
    """Returns the first of the metrics that must be finite and is not."""
    return next((name for name in ("loss", "grad_norm") if not np.isfinite(metrics[name])), None)


class Metrics:
    """Reads, checks, shows and records the metrics of an engine's updates.

    Methods are passed the engine, since nothing may keep it alive. They raise ValueError for an update that is not finite,
    unless it may be skipped.
    """

    def __init__(self, log: Callable[[str], None], max_skipped: int | None):
        self.n_skipped = 0  # updates among those that have been read
        self.last: dict[str, float] = {}  # of the newest update that has been read
        self._log, self._max_skipped = log, max_skipped  # None if steps skip none
        self._n_skipped_in_a_row = 0
        self._warn_of_unmoved = Once(warn)
        self._broken_at: int | None = None  # the step whose update left the parameters not finite
        self._unread: deque[Queued] = deque()

    def add(self, update: Queued, to: Any) -> None:
        """Adds the newest update, and reads the one that is due."""
        update.vector.copy_to_host_async()
        self._unread.append(update)
        if len(self._unread) > LAG:
            self._read(to)

    def read_all(self, to: Any) -> None:
        """Reads all updates."""
        while self._unread:
            self._read(to)

    def forget(self) -> None:
        """Drops the unread updates, whose arrays have been replaced."""
        self._unread.clear()
        self._n_skipped_in_a_row, self._broken_at = 0, None

    def newest_unread(self, to: Any) -> tuple[dict[str, float], int]:
        """Returns the newest update's metrics, and the number of skipped updates, without showing or removing anything."""
        metrics, n_skipped = self.last, self.n_skipped
        for update in self._unread:
            metrics, _ = update.read()
            if (name := _first_nonfinite(metrics)) is not None:
                if self._max_skipped is None:
                    raise self._error(update, name, metrics, to)
                n_skipped += 1
        return metrics, n_skipped

    def _read(self, to: Any) -> None:
        update = self._unread.popleft()
        metrics, unmoved = update.read()
        name = _first_nonfinite(metrics)
        self._n_skipped_in_a_row = 0 if name is None else self._n_skipped_in_a_row + 1
        self._broken_at = None if name is None else self._broken_at
        if name is not None:
            if self._max_skipped is None or self._n_skipped_in_a_row > self._max_skipped:
                self._unread.clear()
                raise self._error(update, name, metrics, to)
            self.n_skipped += 1
            text = f"skipped, as `{name}` is {metrics[name]}; {self.n_skipped} so far"
            self._log(f"step {update.step}: {text}")
        elif unmoved > _MOST_UNMOVED:
            self._warn_of_unmoved(
                f"`model`: expected 16-bit parameters that updates change, got {unmoved:.0%} of the updates of "
                f"step {update.step} lost: each is less than half of its parameter's last digit. Pass "
                "`compute=redeqx.Precision(parameters='bfloat16')`, which keeps float32 copies of them, add "
                "`rounding='stochastic'` to need none, or store them in float32: `compute='bfloat16'`."
            )
        self.last = metrics
        to.records.step(
            to.line,
            update.step,
            metrics,
            n_examples=update.batch.n_examples,
            n_tokens=update.batch.n_tokens,
            epoch=update.epoch,
            work=update.work,
            name=to.name,
        )

    def _error(self, update: Queued, name: str, metrics: dict[str, float], to: Any) -> ValueError:
        what = "the loss" if name == "loss" else "the gradient's norm"
        often = why = ""
        if self._max_skipped is not None:
            often = f" for {self._n_skipped_in_a_row} steps one after the other"
        elif self._broken_at is None:
            self._broken_at = update.step
        elif update.step > self._broken_at:
            why = (
                f"The model has not been finite since step {self._broken_at}, which raised. Load a checkpoint by "
                "`load_ckpt`, or make another Trainer."
            )
        return ValueError(
            f"`{name}` at step {update.step}: expected {what} to be finite, got {metrics[name]}{often}. "
            f"{why or _why_nonfinite(update, to)}"
        )


# --- why a loss is not finite -----------------------------------------------------------------------------------------


def _why_nonfinite(update: Queued, engine: Any) -> str:
    """Returns what makes the loss of an update not finite, and the next step, as sentences that end an error."""
    newest = None
    if engine.checkpoints is not None:
        engine.checkpoints.wait()
        newest = engine.checkpoints.index().get("last")
    last = "Nothing was saved yet." if newest is None else f"The last good checkpoint is {newest}."
    if not np.asarray(update.vector)[-1]:
        return (
            f"{last} The sum of `Loss.weight` over the update is 0, as if every row or token were masked: leave such "
            "examples out, or pass a larger batch size."
        )
    return f"{last} {_describe_batch(update.batch, engine)}"


def _describe_batch(batch: Batch, engine: Any) -> str:
    leaves = named_leaves(batch.rows)
    lines = [line for name, leaf in leaves.items() if (line := _describe_nonfinite(name, leaf, batch.places))]
    if lines:
        return f"Its batch is not finite: {'; '.join(listed(lines, 3))}. Correct or remove these examples, or `collate_fn`."
    try:
        trace = engine.task.trace(*engine.trees, batch.rows)
        out_of_range = _out_of_range(trace, list(leaves), jax.tree.leaves(batch.rows))
    except Exception:  # an error of the search must not hide that of the loss
        out_of_range = []
    if out_of_range:
        return (
            f"Its batch is finite, but labels or ids are out of range: {'; '.join(listed(out_of_range, 3))}. "
            "Count classes from 0, and make as many outputs (or rows of an embedding) as there are."
        )
    return "Its batch is finite. Lower the learning rate, clip gradients, or look at that step's examples."


def _describe_nonfinite(name: str, leaf: np.ndarray, places: Sequence[int]) -> str | None:
    if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
        return None
    wide = leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64)  # NumPy does not support bfloat16
    bad = ~np.isfinite(wide)
    if not bad.any():
        return None
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1))
    kind = "NaN" if np.isnan(wide[bad]).any() else "infinite values"
    return f"`{name}` has {kind} in {len(rows)} of {len(leaf)} rows, the first from example {places[rows[0]]}"


# --- labels beyond the classes ---------------------------------------------------------------------------------------


def _out_of_range(trace: Trace, names: Sequence[str], leaves: Sequence[np.ndarray]) -> list[str]:
    """Describes lookups out of range whose indices depend on the batch alone."""
    of = dict(zip(names, leaves, strict=True))
    body = Body(trace.closed, [*[None] * len(trace.leaves), *of.items()])
    return list(
        dict.fromkeys(
            f"`{name}` has values from {of[name].min()} to {of[name].max()}, {what}"
            for sources, what in _lookups(body, trace.closed)
            for name in sorted(sources)
        )
    )


def _lookups(body: Body, closed: Any) -> Iterator[tuple[frozenset[str], str]]:
    """Yields each out-of-range lookup, and each value that is not finite, if the batch alone selects it: the leaves of the
    batch that select it, and a description."""
    for eqn in closed.jaxpr.eqns:
        if (inner := called(eqn)) is not None:
            yield from _lookups(body, inner)
        if eqn.primitive.name == "gather" and (sources := body.sources(eqn.invars[1])):
            indices, shape = np.asarray(body.value(eqn.invars[1])), eqn.invars[0].aval.shape
            for i, dim in enumerate(eqn.params["dimension_numbers"].start_index_map):
                last = shape[dim] - eqn.params["slice_sizes"][dim]
                if ((indices[..., i] < 0) | (indices[..., i] > last)).any():
                    yield sources, f"which index a dim of {shape[dim]}"
        if eqn.primitive.name == "select_n" and (sources := body.sources(eqn.invars[0])):
            which = np.asarray(body.value(eqn.invars[0]))
            chosen = [case for i, case in enumerate(eqn.invars[1:]) if body.is_constant(case) and (which == i).any()]
            for values in (np.asarray(body.value(case)) for case in chosen):
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    yield sources, f"for some of which the loss is {values.flat[0]}"
