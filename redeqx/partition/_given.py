"""Follows a function for given splits of its weights, and returns what a rule wants to know of it.

`_dataflow` follows the values, and decides splits where none are given.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..tracing import Trace, shapes_in
from ._dataflow import follow
from ._flow import Pass
from ._rules import Split


def followed(
    trace: Trace, n_shards: int, dims: Mapping[str, int | None] = MappingProxyType({}), *, records_values: bool = False
) -> Pass:
    """Returns the pass over a traced function for given splits of the leaves over the model axis.

    **Arguments:**

    - `n_shards`: size of the model axis.
    - `dims`: the dim of each leaf that the model axis splits, by name. All others are replicated.
    - `records_values`: whether to record the split of each value (`Pass.values`).
    """
    splits = {name: Split(dims.get(name), "") for name in trace.names}
    return follow(trace, n_shards, splits=splits, records_values=records_values)


def parts_taken(closed: Any, splits: Sequence[int | None], n_shards: int) -> Mapping[int, tuple[Any, int]]:
    """Returns the equations of a closed jaxpr that take equal parts of a split dim, by id: the equation and the dim.

    **Arguments:**

    - `splits`: the dim that the model axis splits, for each of the jaxpr's first inputs, which are the weights.
    """
    return _followed(closed, splits, n_shards).resharded


def operand_dims(
    closed: Any, eqns: Sequence[Any], splits: Sequence[int | None], n_shards: int
) -> Mapping[Any, tuple[int | None, int | None]]:
    """Returns for some products of a closed jaxpr the dims of both operands that the model axis splits.

    **Arguments:**

    - `splits`: as for `parts_taken`.
    """
    found = _followed(closed, splits, n_shards).operands
    return {eqn: found[id(eqn)] for eqn in eqns if id(eqn) in found}


def split_values(
    closed: Any, splits: Sequence[int | None], n_shards: int
) -> tuple[Mapping[Any, int | None], Mapping[int, tuple[int | None, int | None]]]:
    """Returns the dim that the model axis splits of each value that depends on data, by its variable, and None for a
    replicated one; and those of both operands of each product, by the id of its equation.

    **Arguments:**

    - `closed`: in normal form.
    - `splits`: as for `parts_taken`.
    """
    run = _followed(closed, splits, n_shards, records_values=True)
    return run.values, run.operands


def _followed(closed: Any, splits: Sequence[int | None], n_shards: int, *, records_values: bool = False) -> Pass:
    dims = {str(i): dim for i, dim in enumerate(splits)}
    trace = Trace(tuple(dims), tuple(shapes_in(closed)[: len(dims)]), closed)
    return followed(trace, n_shards, dims, records_values=records_values)
