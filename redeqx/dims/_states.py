"""What is known of a value: how its entries depend on rows, and with which power of the number of rows it grows.

This is the table of how equations combine these powers, the *degrees*; how they combine rows is in `_rows`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..tracing import BY_WEIGHT, GROUPED
from ._atoms import Step
from ._lookups import ADDING


class Kind(IntEnum):
    """How a value depends on rows, from the least to the most."""

    FREE = 0  # on no row; its entry of a row may be made from the row's number
    ROW = 1  # its entry of a row depends on that row alone
    PREFIX = 2  # a carry of a loop over rows, plus a sum over the rows so far
    SUM = 3  # a sum over rows of such entries, plus terms without rows
    MIXED = 4  # anything else


FREE, ROW, PREFIX, SUM, MIXED = Kind


class State(NamedTuple):
    """What is known of a value."""

    kind: Kind = FREE
    degree: int = 0  # d, if it grows like the d-th power of the number of rows: 0 for a mean over rows, 1 for a sum
    is_of_any_degree: bool = False  # whether it is zeros, infinite, or the carry of a loop to which nothing was added
    carry: int = 0  # of a `PREFIX`, the id of the carry


def joined(*states: State) -> State:
    """Returns the state of a value that is one of several."""
    kinds = {state.kind for state in states} - {FREE}
    degrees = {state.degree for state in states if not state.is_of_any_degree}
    carries = {state.carry for state in states}
    is_mixed = (ROW in kinds and kinds != {ROW}) or len(degrees) > 1
    if is_mixed or (PREFIX in kinds and len(carries) > 1):  # another carry, or none
        return State(MIXED, is_of_any_degree=not degrees)
    return State(max(kinds, default=FREE), max(degrees, default=0), not degrees, max(carries))


def chosen(state: State, by: State) -> State:
    """Returns the state of a value that a branch or the end of a loop chooses."""
    if by.degree:
        return State(MIXED)
    if by.kind == FREE or state.kind == PREFIX:
        return state
    return state._replace(kind=ROW if state.kind in (FREE, ROW) else MIXED)


# --- degrees ------------------------------------------------------------------------------------------------------------

# By primitive, the operands in which an equation is linear together, if the others have no rows. They become entries of the
# output, or are added, and so have one degree.
TERMS = {
    **dict.fromkeys(("add", "sub", "neg", "add_any", "real", "imag", "conj", "reduce_precision", "name"), slice(None)),
    **dict.fromkeys(("copy", "convert_element_type", "stop_gradient", "reduce_sum", "psum", "cumsum"), slice(None)),
    **dict.fromkeys(("reshape", "transpose", "squeeze", "broadcast_in_dim", "tile", "rev", "slice", "pad"), slice(None)),
    **dict.fromkeys(("concatenate", "stack", "split", "complex", "fft", "reduce_window_sum"), slice(None)),
    **dict.fromkeys(("div", "gather", "dynamic_slice", "select_and_scatter_add", "select_and_gather_add"), slice(1)),
    "dynamic_update_slice": slice(2),
    "triangular_solve": slice(1, 2),
    **dict.fromkeys((*ADDING, "scatter"), slice(0, None, 2)),
    **dict.fromkeys(("select_n", "select_if_vmap"), slice(1, None)),
}
# In the first two operands.
_BILINEAR = {"mul", *BY_WEIGHT, *GROUPED}


def of_constant(x: Any, degree: int | None) -> State:
    """Returns the state of a constant whose degree is known; if it is None, it is no power of the number of rows."""
    if degree is None:
        return State(MIXED)
    is_number = x is not None and np.shape(x) == () and not jnp.issubdtype(jax.dtypes.result_type(x), jax.dtypes.extended)
    return State(degree=degree, is_of_any_degree=is_number and bool(not x or not np.isfinite(x)))


def is_linear(step: Step, ins: Sequence[State]) -> bool:
    """Whether an equation is linear in the operands that depend on rows."""
    terms = _terms(step)
    if terms is not None and all(ins[i].kind == FREE for i in _others(terms, ins)):
        return True
    depends = [state.kind != FREE for state in ins]
    return step.name in _BILINEAR and sum(depends[:2]) == 1 and not any(depends[2:])


def is_of_any_degree(step: Step, ins: Sequence[State]) -> bool:
    """Whether the outputs of an equation are of any degree."""
    if step.name in _BILINEAR:
        return any(state.is_of_any_degree and state.kind in (FREE, ROW) for state in ins[:2])
    terms = _terms(step)
    return terms is not None and all(state.is_of_any_degree for state in ins[terms])


def degree_of_outputs(step: Step, ins: Sequence[State], is_sum: bool) -> int | None:
    """Returns the degree of an equation's outputs; None if there is none. `is_sum`: whether it sums over a dim that grows
    with the rows."""
    name, degrees, terms = step.name, [state.degree for state in ins], _terms(step)
    if name in _BILINEAR:
        return None if any(degrees[2:]) else sum(degrees) + is_sum
    if name == "div" and terms is not None:
        return degrees[0] - degrees[1]
    if name in ("integer_pow", "square"):
        return degrees[0] * step.eqn.params.get("y", 2)
    if terms is None:
        is_counted = any(state.kind == SUM for state in ins) and name != "convert_element_type"
        return 0 if is_counted or not any(degrees) else None
    if any(degrees[i] for i in _others(terms, ins)):
        return None
    added = [int(i == 2 and is_sum and name in ADDING) for i in range(len(ins))]  # only the updates are summed
    of = {s.degree + more for s, more in list(zip(ins, added, strict=True))[terms] if not s.is_of_any_degree}
    return max(of, default=0) + (is_sum and not any(added)) if len(of) < 2 else None


def keeps_numbers(step: Step) -> bool:
    """Whether a conversion is linear up to rounding, as that to a real part is: not one to integers from floats, to fewer
    bits, or to bools."""
    old, new = step.ins[0].aval.dtype, step.outs[0].aval.dtype
    if jnp.issubdtype(new, jnp.inexact):
        return True
    return jnp.issubdtype(new, jnp.integer) and not jnp.issubdtype(old, jnp.inexact) and new.itemsize >= old.itemsize


def _terms(step: Step) -> slice | None:
    """Returns the operands in which an equation is linear together; None if it is not linear."""
    is_rounded = step.name == "convert_element_type" and not keeps_numbers(step)
    is_rounded |= step.name == "div" and not jnp.issubdtype(step.outs[0].aval.dtype, jnp.inexact)
    return None if is_rounded else TERMS.get(step.name)


def _others(terms: slice, ins: Sequence[State]) -> set[int]:
    """Returns the indices of the other operands."""
    return set(range(len(ins))) - set(range(*terms.indices(len(ins))))
