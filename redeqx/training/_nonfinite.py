"""Why a loss is not finite, as far as its batch tells: values that are not finite, and labels beyond the classes.

Looked for once a step has failed, on the host; no step pays for it.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from .._tree import listed, named_leaves
from ..tracing import Body, Known, Trace, called


def why_nonfinite(batch: PyTree[np.ndarray], places: Sequence[int], trace: Callable[[], Trace]) -> str:
    """What of a batch makes its loss not finite, and the next step, as sentences that end an error.

    **Arguments:**

    - `places`: the number of each row's example.
    - `trace`: traces the loss of `(model, batch, key)` for the shapes of this batch.
    """
    leaves = named_leaves(batch)
    lines = [line for name, leaf in leaves.items() if (line := _not_finite(name, leaf, places))]
    if lines:
        return f"Its batch is not finite: {'; '.join(listed(lines, 3))}. Correct or remove these examples, or `collate_fn`."
    try:
        beyond = _beyond(trace(), list(leaves), jax.tree.leaves(batch))
    except Exception:  # the loss is what failed: looking for a reason must not hide that
        beyond = []
    if beyond:
        return (
            f"Its batch is finite, but labels or ids are out of range: {'; '.join(listed(beyond, 3))}. "
            "Count classes from 0, and make as many outputs (or rows of an embedding) as there are."
        )
    return "Its batch is finite. Lower the learning rate, clip gradients, or look at that step's examples."


def _not_finite(name: str, leaf: np.ndarray, places: Sequence[int]) -> str | None:
    if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
        return None
    wide = leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64)  # numpy knows no bfloat16
    bad = ~np.isfinite(wide)
    if not bad.any():
        return None
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1))
    kind = "NaN" if np.isnan(wide[bad]).any() else "infinite values"
    return f"`{name}` has {kind} in {len(rows)} of {len(leaf)} rows, the first from example {places[rows[0]]}"


# --- labels beyond the classes ---------------------------------------------------------------------------------------


def _beyond(trace: Trace, names: Sequence[str], leaves: Sequence[np.ndarray]) -> list[str]:
    """Where the loss looks up, by numbers of the batch alone, what is not there."""
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
    """Each lookup beyond what is there, and each value that is not finite, that is chosen by the batch alone: the leaves of
    the batch that choose it, and what is wrong with it."""
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
