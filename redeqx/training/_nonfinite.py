"""Why a loss is not finite, as far as its batch tells: values that are not finite, and labels beyond the classes.

Looked for once a step has failed, on the host; no step pays for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jaxtyping import PyTree

from .._tree import listed, named_leaves
from ..tracing import Trace, called, run

_MOST = 2**22  # elements of a value that is computed to look into


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
    bad = ~np.isfinite(leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64))
    if not bad.any():
        return None
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1))
    kind = "NaN" if np.isnan(leaf[bad].astype(np.float64)).any() else "infinite values"
    return f"`{name}` has {kind} in {len(rows)} of {len(leaf)} rows, the first from example {places[rows[0]]}"


# --- labels beyond the classes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """A value that depends on the batch alone, and on which of its leaves."""

    value: Any
    leaves: frozenset[str]


def _beyond(trace: Trace, names: Sequence[str], leaves: Sequence[np.ndarray]) -> list[str]:
    """Where the loss looks up, by numbers of the batch alone, what is not there."""
    unknown = [None] * len(trace.leaves)
    known = [_Known(leaf, frozenset([name])) for name, leaf in zip(names, leaves, strict=True)]
    n_rest = len(trace.closed.jaxpr.invars) - len(unknown) - len(known)
    found: dict[str, None] = {}
    of_leaf = dict(zip(names, leaves, strict=True))
    _follow(trace.closed, [*unknown, *known, *[None] * n_rest], found, of_leaf)
    return list(found)


def _follow(closed: Any, args: Sequence[_Known | None], found: dict[str, None], leaves: dict[str, np.ndarray]) -> list[Any]:
    """The outputs of a jaxpr, None for those that more is needed for than the batch."""
    consts = [_Known(const, frozenset()) for const in closed.consts]
    env: dict[Any, _Known | None] = dict(zip(closed.jaxpr.constvars, consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> _Known | None:
        return _Known(atom.val, frozenset()) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        if (inner := called(eqn)) is not None:
            outs = _follow(inner, ins, found, leaves)
        else:
            _look(eqn, ins, found, leaves)
            outs = _computed(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _computed(eqn: Any, ins: Sequence[_Known | None]) -> list[_Known | None]:
    sizes = [int(np.prod(var.aval.shape)) for var in eqn.outvars]
    if not all(ins) or max(sizes, default=0) > _MOST or eqn.effects:
        return [None] * len(eqn.outvars)
    leaves = frozenset().union(*(known.leaves for known in ins if known))
    return [_Known(value, leaves) for value in run(eqn, [known.value for known in ins if known])]


def _look(eqn: Any, ins: Sequence[_Known | None], found: dict[str, None], leaves: dict[str, np.ndarray]) -> None:
    """Note a lookup beyond what is there, and a value that is not finite, chosen by the batch alone."""
    name = eqn.primitive.name
    if name == "gather" and ins[1] is not None and ins[1].leaves:
        dims = eqn.params["dimension_numbers"].start_index_map
        indices, shape = np.asarray(ins[1].value), eqn.invars[0].aval.shape
        for i, dim in enumerate(dims):
            last = shape[dim] - eqn.params["slice_sizes"][dim]
            if ((indices[..., i] < 0) | (indices[..., i] > last)).any():
                for leaf in sorted(ins[1].leaves):
                    found[f"{_range(leaf, leaves)}, which index a dim of {shape[dim]}"] = None
    if name == "select_n" and ins[0] is not None and ins[0].leaves:
        which = np.asarray(ins[0].value)
        for i, case in enumerate(ins[1:]):
            if case is None or case.leaves or not (which == i).any():
                continue
            values = np.asarray(case.value)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                for leaf in sorted(ins[0].leaves):
                    found[f"{_range(leaf, leaves)}, for some of which the loss is {values.flat[0]}"] = None


def _range(name: str, leaves: dict[str, np.ndarray]) -> str:
    return f"`{name}` has values from {leaves[name].min()} to {leaves[name].max()}"
