"""Why a loss is not finite, as far as its batch tells: values that are not finite, and labels beyond the classes.

Looked for once a step has failed, on the host; no step pays for it.
"""

from collections.abc import Callable, Sequence

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
    found: dict[str, None] = {}
    _look_in(
        Body(trace.closed, [None] * len(trace.leaves) + known + [None] * n_rest),
        found,
        dict(zip(names, leaves, strict=True)),
    )
    return list(found)


def _look_in(body: Body, found: dict[str, None], leaves: dict[str, np.ndarray]) -> None:
    """Note each lookup beyond what is there, and each value that is not finite, chosen by the batch alone."""
    for eqn in body.eqns:
        if called(eqn) is not None:
            _look_in(body.inside(eqn), found, leaves)
        if eqn.primitive.name == "gather" and body.sources(eqn.invars[1]):
            dims = eqn.params["dimension_numbers"].start_index_map
            indices, shape = np.asarray(body.value(eqn.invars[1])), eqn.invars[0].aval.shape
            for i, dim in enumerate(dims):
                last = shape[dim] - eqn.params["slice_sizes"][dim]
                if ((indices[..., i] < 0) | (indices[..., i] > last)).any():
                    for leaf in sorted(body.sources(eqn.invars[1]) or ()):
                        found[f"{_range(leaf, leaves)}, which index a dim of {shape[dim]}"] = None
        if eqn.primitive.name == "select_n" and body.sources(eqn.invars[0]):
            which = np.asarray(body.value(eqn.invars[0]))
            for i, case in enumerate(eqn.invars[1:]):
                if not body.is_constant(case) or not (which == i).any():
                    continue
                values = np.asarray(body.value(case))
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    for leaf in sorted(body.sources(eqn.invars[0]) or ()):
                        found[f"{_range(leaf, leaves)}, for some of which the loss is {values.flat[0]}"] = None


def _range(name: str, leaves: dict[str, np.ndarray]) -> str:
    return f"`{name}` has values from {leaves[name].min()} to {leaves[name].max()}"
