"""The kind of every leaf (matrix, output head, embedding, convolution, bias, norm), and the dims of each matrix.

Owns the names of kinds. They follow from the types of Equinox's layers and, if a loss was traced, from what the loss
computes with each leaf. They are the same on every mesh. Optimizers treat kinds differently. `_dataflow` decides how
leaves are split.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from .._tree import array_leaves, is_array_like, render
from ..tracing import Trace, WeightUses
from ._dataflow import values_by
from ._flow import Use
from ._layers import CONVS, LAYERS, NORMS, modules, n_stacked, within

KINDS = ("matrix", "head", "embedding", "convolution", "bias", "norm", "other")


@dataclass(frozen=True)
class Kind:
    """The role of a leaf in its layer."""

    # One of `"matrix"` (the weight of a fully connected layer, of an attention's projection, of a recurrent cell or of an
    # adapter), `"head"` (a matrix that computes the model's outputs), `"embedding"`, `"convolution"`, `"bias"` (of one of
    # these layers), `"norm"` (any leaf of a normalisation), `"other"`.
    name: str
    # For a matrix or a head, the dims of the layer's outputs, and of its inputs, which the product contracts. All other dims
    # stack matrices: layers of a scan, experts, vmapped heads.
    outputs: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()


OTHER = Kind("other")
_CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell)
_current: ContextVar[Mapping[str, Kind] | None] = ContextVar("kinds", default=None)


@contextmanager
def using_kinds(kinds: Mapping[str, Kind]) -> Iterator[None]:
    """A context in which `current_kinds` returns these kinds: an optimizer's mask is a function of the parameters alone, and
    cannot know what the loss computes with them."""
    token = _current.set(kinds)
    try:
        yield
    finally:
        _current.reset(token)


def current_kinds() -> Mapping[str, Kind]:
    """Returns the kinds by name that `using_kinds` has set; empty outside of it."""
    return _current.get() or {}


def kinds_of(model: PyTree, trace: Trace | None = None) -> dict[str, Kind]:
    """Returns the kind of every array leaf, by name.

    Without a trace, arrays outside Equinox's layers are `"other"`, and the head is the last fully connected layer in field
    order. There is no head if that layer is stacked, or has as many outputs as an embedding has features, as before an
    output layer that is tied to the embedding.

    The model has arrays or their shapes; some may be replaced by None or by nodes without leaves. The trace is of a loss of
    this model, or of one that has these leaves and others.
    """
    kinds = dict.fromkeys(array_leaves(model), OTHER)
    last: tuple[str, eqx.nn.Linear] | None = None  # the last fully connected layer, and the name of its weight
    widths: set[int] = set()
    for path, node in modules(model, lambda node: isinstance(node, (*LAYERS, *_CELLS))):
        kinds |= {within(render(path), leaf): _by_type(node, leaf, array) for leaf, array in array_leaves(node).items()}
        if isinstance(node, eqx.nn.Linear):
            last = within(render(path), "weight"), node
        elif isinstance(node, eqx.nn.Embedding):
            widths.add(node.embedding_size)
    if trace is not None:
        return of_loss(kinds, trace)
    if last is not None:
        name, layer = last
        if is_array_like(layer.weight) and n_stacked(layer) == 0 and layer.out_features not in widths:
            kinds[name] = Kind("head", (0,), (1,))
    return kinds


def _by_type(layer: Any, leaf: str, array: Any) -> Kind:
    """Returns the kind of a leaf of a layer."""
    if isinstance(layer, NORMS):
        return Kind("norm")
    if leaf == "bias" or (isinstance(layer, _CELLS) and leaf.startswith("bias")):
        return Kind("bias")
    if leaf == "weight" and isinstance(layer, (*CONVS, eqx.nn.Embedding)):
        return Kind("convolution" if isinstance(layer, CONVS) else "embedding")
    is_matrix = leaf == "weight" or isinstance(layer, _CELLS) or len(getattr(layer, "follows_weight", {}).get(leaf, ())) == 2
    n = max(array.ndim - 2, 0)
    return Kind("matrix", (n,), (n + 1,)) if is_matrix else OTHER


def of_loss(kinds: Mapping[str, Kind], trace: Trace) -> dict[str, Kind]:
    """Returns kinds that follow from layer types, completed by what a traced loss computes with the leaves."""
    kinds, found = dict(kinds), _by_loss(trace)
    for name in kinds.keys() & found.keys():
        if kinds[name].name == "other" or (kinds[name].name == "matrix" and found[name].name in ("head", "embedding")):
            kinds[name] = found[name]
    return kinds


def _by_loss(trace: Trace) -> Mapping[str, Kind]:
    """Returns the kind of each leaf whose rows a traced loss looks up, or that it multiplies with data."""
    names, weights = trace.names, WeightUses(trace.closed, len(trace.names))
    run = values_by(trace.closed, (None,) * len(names), 1)  # no leaf is split: all of its views are followed
    of_leaf: dict[str, dict[Any, Use]] = {}
    for (leaf, eqn), use in run.uses.items():
        of_leaf.setdefault(names[int(leaf)], {})[eqn] = use
    kinds = {leaf: _of_products(uses, weights) for leaf, uses in of_leaf.items()}
    return kinds | {names[int(leaf)]: Kind("embedding") for leaf in run.looked_up}


def _of_products(uses: Mapping[Any, Use], weights: WeightUses) -> Kind:
    if any(eqn.primitive.name == "conv_general_dilated" for eqn in uses):
        return Kind("convolution")
    outputs, inputs = next(iter(uses.values()))
    if not outputs or not inputs:
        return OTHER  # a vector: it scales or sums its input
    return Kind("head" if all(map(weights.is_last, uses)) else "matrix", outputs, inputs)
