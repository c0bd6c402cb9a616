"""Quantised weights in a plan: codes and scales are one weight, split along the same dims.

The layers and the dataflow see the weight that the codes stand for. Here it is put in the place of its codes and scales, and
its split becomes theirs. A split never divides a block of codes, which has one scale.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from .._quantised import Quantised, map_quantised
from .._tree import PyTree
from ..machine import n_shards
from ..tracing import Trace
from ._flow import Split


def with_whole_weights(model: PyTree) -> PyTree:
    """Returns a model with the shape of the weight in place of each quantised weight."""
    return map_quantised(lambda weight: jax.ShapeDtypeStruct(weight.shape, weight.dtype), model)


def of_whole_weights(trace: Trace, quantised: Mapping[str, Quantised]) -> Trace:
    """Returns a trace whose codes have the names of the weights."""
    names = {f"{name}.codes": name for name in quantised}
    return replace(trace, names=tuple(names.get(name, name) for name in trace.names))


def unit_shape(weight: Quantised) -> tuple[int, ...]:
    """Returns the shape of a quantised weight in parts that are not divided: blocks, or bytes if there is one block."""
    n = weight.scales.shape[-1]
    return (*weight.codes.shape[:-1], weight.codes.shape[-1] if n == 1 else n)


def by_blocks(split: Split, weight: Quantised, n: int) -> Split:
    """Returns the split of a weight over n shards, unless it would divide blocks."""
    shape = unit_shape(weight)
    if split.dim != len(shape) - 1 or shape[-1] % n == 0:
        return split
    return Split(None, f"replicated: {shape[-1]} blocks of codes do not divide over {n} shards")


def expanded(leaves: Mapping[str, Any], quantised: Mapping[str, Quantised], mesh: Mesh) -> dict[str, Any]:
    """Returns the plans of leaves, with those of codes and scales in place of the weights that they stand for. One scale for
    a whole dim is replicated along it."""
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if (weight := quantised.get(name)) is None:
            found[name] = leaf
            continue
        codes, scales = ({"shape": tuple(each.shape), "dtype": each.dtype} for each in (weight.codes, weight.scales))
        *others, last = leaf.spec
        spec, reason = P(*others, last if weight.scales.shape[-1] > 1 else None), "follows its codes"
        found[f"{name}.codes"] = replace(leaf, **codes)
        found[f"{name}.scales"] = replace(leaf, **scales, spec=spec, n_shards=n_shards(spec, mesh), reason=reason)
    return found
