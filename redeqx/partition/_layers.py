"""Equinox's layers in a model: their types, the dims over which they are stacked, and arrays that follow a layer's weight.

Owns what is known from types alone. What a loss does with the layers, and so how they are split, is `_dataflow`'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._tree import array_leaves, is_array_like, named_leaves, render

NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
LAYERS = (eqx.nn.Linear, eqx.nn.Embedding, *CONVS, *NORMS)


def n_stacked(layer: Any) -> int:
    """Returns the number of leading dims over which a known layer is stacked (`eqx.filter_vmap` over its constructor)."""
    weight = layer.weight
    if not is_array_like(weight):
        return 0
    if isinstance(layer, CONVS):
        return len(weight.shape) - 2 - layer.num_spatial_dims
    if isinstance(layer, eqx.nn.LayerNorm | eqx.nn.RMSNorm):
        return len(weight.shape) - len(layer.shape)
    return len(weight.shape) - (1 if isinstance(layer, NORMS) else 2)


def modules(model: PyTree, is_wanted: Callable[[Any], bool]) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the outermost modules that are wanted, each with its path, in field order."""
    flat = jtu.tree_flatten_with_path(model, is_leaf=is_wanted)[0]
    return [(path, node) for path, node in flat if is_wanted(node)]


def within(module: str, leaf: str) -> str:
    """Returns the name of a module's leaf. A model that is itself a layer adds no prefix."""
    return leaf if module == render(()) else f"{module}.{leaf}"


def stacked_dims(model: PyTree) -> dict[str, int]:
    """Returns the number of stacked dims of each array. An array outside known layers has those of the known layers in the
    nearest enclosing module."""
    known: dict[str, int] = {}
    for path, layer in modules(model, lambda node: isinstance(node, LAYERS)):
        known |= {within(render(path), leaf): max(n_stacked(layer), 0) for leaf in named_leaves(layer)}
    stacked: dict[str, int] = {}
    for name, leaf in array_leaves(model).items():
        module, found = name, [known[name]] if name in known else []
        while not found and (module := module.rpartition(".")[0]):
            found = [n for other, n in known.items() if other.startswith(f"{module}.") and n <= leaf.ndim]
        stacked[name] = min(found, default=0)
    return stacked


def followers(model: PyTree) -> dict[str, tuple[str, Sequence[int | None]]]:
    """Returns the leaves that are split like the weight of their layer, by name: the weight's name, and for each dim of the
    leaf the dim of the weight with which it is split, or None. Both are counted without stacked dims.

    Their class declares them, as `follows_weight`: the adapters of `redeqx.models.lora`. From the loss alone, an adapter's
    output would be split where that of its layer is not, and with it all that is computed from their sum.
    """
    found = {}
    for path, node in modules(model, lambda node: isinstance(node, eqx.Module) and hasattr(type(node), "follows_weight")):
        for field, dims in node.follows_weight.items():
            found[within(render(path), field)] = within(render(path), "weight"), dims
    return found
