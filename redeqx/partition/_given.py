"""Follows a function for given splits of its weights: what plans and rules want to know of it.

`_dataflow` follows the values, and decides splits where none are given.
"""

from typing import Any

from ..tracing import Trace, once, shapes_in
from ._dataflow import follow
from ._pass import Pass
from ._rules import Split


@once
def values_by(closed: Any, splits: tuple[int | None, ...], n_shards: int) -> Pass:
    """Returns the pass over a closed jaxpr in normal form for given splits of its weights, whose names are their numbers.

    It has the dims that the model axis splits of each value that depends on data (`values`) and of both operands of each
    product (`operands`), the equations that take equal parts of such a dim (`resharded`), and others.

    **Arguments:**

    - `splits`: the dim that the model axis splits, for each of the jaxpr's first inputs, which are the weights.
    - `n_shards`: size of the model axis.
    """
    given = {str(i): Split(dim, "") for i, dim in enumerate(splits)}
    trace = Trace(tuple(given), tuple(shapes_in(closed)[: len(given)]), closed)
    return follow(trace, n_shards, splits=given, records_values=True)
