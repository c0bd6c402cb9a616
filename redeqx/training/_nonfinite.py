"""Explains a loss that is not finite from its batch: values that are not finite, and labels beyond the number of classes.

It runs on the host, and only after a step has failed.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from .._tree import listed, named_leaves
from ..tracing import Body, Known, Trace, called


def explain_nonfinite(batch: PyTree[np.ndarray], places: Sequence[int], trace: Callable[[], Trace]) -> str:
    """Returns what in a batch makes its loss not finite, and the next step, as sentences that end an error.

    **Arguments:**

    - `places`: the index of each row's example.
    - `trace`: traces the loss of `(model, batch, key)` for the shapes of this batch.
    """
    leaves = named_leaves(batch)
    lines = [line for name, leaf in leaves.items() if (line := _describe_nonfinite(name, leaf, places))]
    if lines:
        return f"Its batch is not finite: {'; '.join(listed(lines, 3))}. Correct or remove these examples, or `collate_fn`."
    try:
        out_of_range = _out_of_range(trace(), list(leaves), jax.tree.leaves(batch))
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
    known = [Known(leaf, frozenset([name])) for name, leaf in zip(names, leaves, strict=True)]
    n_rest = len(trace.closed.jaxpr.invars) - len(trace.leaves) - len(known)
    body = Body(trace.closed, [None] * len(trace.leaves) + known + [None] * n_rest)
    of = dict(zip(names, leaves, strict=True))
    return list(
        dict.fromkeys(
            f"`{name}` has values from {of[name].min()} to {of[name].max()}, {what}"
            for sources, what in _lookups(body)
            for name in sorted(sources)
        )
    )


def _lookups(body: Body) -> Iterator[tuple[frozenset[str], str]]:
    """Yields each out-of-range lookup, and each value that is not finite, if the batch alone selects it: the leaves of the
    batch that select it, and a description."""
    for eqn in body.eqns:
        if called(eqn) is not None:
            yield from _lookups(body.inside(eqn))
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
