"""Follows a function for given splits of its weights: what rules want to know of it.

`_dataflow` follows the values, and decides splits where none are given.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..tracing import Trace, once, shapes_in
from ._dataflow import follow
from ._pass import Pass
from ._rules import Split


def followed(trace: Trace, n_shards: int, dims: Mapping[str, int | None] = MappingProxyType({})) -> Pass:
    """Returns the pass over a traced function for given splits of the leaves over the model axis.

    **Arguments:**

    - `n_shards`: size of the model axis.
    - `dims`: the dim of each leaf that the model axis splits, by name. All others are replicated.
    """
    splits = {name: Split(dims.get(name), "") for name in trace.names}
    return follow(trace, n_shards, splits=splits, records_values=True)


@once
def values_by(closed: Any, splits: tuple[int | None, ...], n_shards: int) -> Pass:
    """Returns the same for a closed jaxpr in normal form: the dims that the model axis splits of each value that depends on
    data (`values`), of both operands of each product (`operands`), and the equations that take equal parts of such a dim
    (`resharded`).

    **Arguments:**

    - `splits`: the dim that the model axis splits, for each of the jaxpr's first inputs, which are the weights.
    """
    dims = {str(i): dim for i, dim in enumerate(splits)}
    return followed(Trace(tuple(dims), tuple(shapes_in(closed)[: len(dims)]), closed), n_shards, dims)
