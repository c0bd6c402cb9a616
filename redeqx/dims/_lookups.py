"""How gathers and scatters relate dims, and which values are the index of each entry itself, as of an `iota`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._atoms import Dim, Value, flat, size_of
from ._inference import Inference

ADDING = ("scatter-add", "scatter_add", "scatter-sub")
SCATTERS = ("scatter", *ADDING, "scatter-mul", "scatter-max", "scatter-min")


def gather(names: Inference, eqn: Any, ins: Sequence[Value]) -> list[Sequence[Dim]]:
    numbers, sizes, (table, indices) = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], ins
    batching = numbers.operand_batching_dims
    names.unify_all((table.dims[i] for i in batching), (indices.dims[j] for j in numbers.start_indices_batching_dims))
    window = [i for i in range(len(table.dims)) if i not in (*numbers.collapsed_slice_dims, *batching)]
    dims: list[Dim] = [()] * len(eqn.outvars[0].aval.shape)
    for j, place in enumerate(i for i in range(len(dims)) if i not in numbers.offset_dims):
        dims[place] = indices.dims[j]
    for i, place in zip(window, numbers.offset_dims, strict=True):
        is_all = sizes[i] == table.aval.shape[i]
        dims[place] = table.dims[i] if is_all else names.part(table.dims[i], sizes[i], "pick")
    _select(names, numbers.start_index_map, table, indices, numbers.collapsed_slice_dims, "pick")
    return [dims]


def scatter(names: Inference, eqn: Any, ins: Sequence[Value]) -> list[Sequence[Dim]]:
    numbers, (table, indices, update) = eqn.params["dimension_numbers"], ins
    batching = numbers.operand_batching_dims
    names.unify_all((table.dims[i] for i in batching), (indices.dims[j] for j in numbers.scatter_indices_batching_dims))
    window = [i for i in range(len(table.dims)) if i not in (*numbers.inserted_window_dims, *batching)]
    places = [i for i in range(len(update.dims)) if i not in numbers.update_window_dims]
    names.unify_all(indices.dims, (update.dims[place] for place in places))
    for i, place in zip(window, numbers.update_window_dims, strict=True):
        if update.aval.shape[place] == table.aval.shape[i]:
            names.unify(update.dims[place], table.dims[i])
        else:
            names.mix("pick", table.dims[i])
            names.mix("into", update.dims[place])
    _select(names, numbers.scatter_dims_to_operand_dims, table, indices, numbers.inserted_window_dims, "into")
    kept = set(table.atoms)
    how = "sum" if eqn.primitive.name in ADDING else "reduce"
    for place in places:
        names.mix(how, tuple(atom for atom in flat(update.dims[place]) if atom not in kept))
    return [table.dims]


def _select(names: Inference, index_map: Any, table: Value, indices: Value, dims: Sequence[int], how: str) -> None:
    """Relates the dims at which indices select one entry: it is each entry's own if the index is the entry's number."""
    for i in dims:
        column = list(index_map).index(i) if i in index_map else None
        own = None if column is None else indices.columns[column] if indices.columns else indices.index_of
        if column is not None and own and table.dims[i] and size_of(own) == table.aval.shape[i]:
            names.unify(own, table.dims[i])
            names.mark_own(column)
        else:
            names.mix(how, table.dims[i])


def follow_indices(eqn: Any, ins: Sequence[Value], outs: Sequence[Value]) -> None:
    """Follows values that equal the index along a dim, which `x[jnp.arange(n), labels]` needs."""
    name = eqn.primitive.name
    if len(outs) != 1:
        return
    (out,) = outs
    if name == "iota":
        out.index_of = out.dims[eqn.params["dimension"]]
    elif name in ("broadcast_in_dim", "reshape", "convert_element_type", "squeeze", "copy", "transpose", "clamp"):
        source = ins[1] if name == "clamp" else ins[0]
        if source.index_of is not None and set(flat(source.index_of)) <= set(out.atoms):
            out.index_of = source.index_of if name != "clamp" or _keeps_index(ins[0], source.index_of, ins[2]) else None
    elif name == "lt" and ins[0].index_of is not None:
        out.is_negative = ins[1].literal is not None and np.ndim(ins[1].literal) == 0 and ins[1].literal <= 0
    elif name == "select_n" and ins[0].is_negative:
        out.index_of = ins[1].index_of
    elif name == "concatenate" and eqn.params["dimension"] == len(out.dims) - 1:
        is_by_column = all(value.aval.shape[-1] == 1 for value in ins)
        out.columns = tuple(value.index_of for value in ins) if is_by_column else None


def _keeps_index(low: Value, dim: Dim, high: Value) -> bool:
    """Whether an index along a dim is within these bounds."""
    if low.literal is None or high.literal is None:
        return False
    return bool(np.all(low.literal <= 0) and np.all(high.literal >= size_of(flat(dim)) - 1))
