"""The field-order traversal: finds a model's layers by type, in field order, and applies the two rules to them.

Owns the definitions of a layer and of an attention. `_plan` turns the splits into specs on a mesh.

A subclass of a known layer counts as that layer. Arrays that the subclass adds (an adapter's) are replicated, unless its
class attribute `follows_weight` declares how they relate to the weight. It maps the name of the array's field to a tuple.
For each dim of the array the tuple holds the dim of `weight` with which it is split (both counted without stacked dims), or
None for a dim that matches none.

```python
class LoraLinear(eqx.nn.Linear):
    lora_a: Array  # [rank, in]
    lora_b: Array  # [out, rank]

    follows_weight: ClassVar = {"lora_a": (None, 1), "lora_b": (0, None)}
```
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._tree import array_leaves, is_array_like, named_leaves, nearest, render
from . import _rules

_Heads = str | Callable[[Any], int] | None


@dataclass(frozen=True)
class _Attention:
    """The names of an attention class's fields."""

    projections: tuple[str, ...]  # query, key, value and output
    heads: _Heads
    kv_heads: _Heads
    by_name: bool = False  # whether it was recognised by these names

    def n_heads(self, module: Any) -> tuple[int | None, int | None]:
        heads, kv_heads = (
            of(module) if callable(of) else None if of is None else getattr(module, of) for of in (self.heads, self.kv_heads)
        )
        return heads, heads if kv_heads is None else kv_heads


_MULTIHEAD = "query_proj", "key_proj", "value_proj", "output_proj"
_ATTENTIONS: dict[type, _Attention] = {eqx.nn.MultiheadAttention: _Attention(_MULTIHEAD, "num_heads", None)}

# The fallback for classes that are not registered: common field names in published code.
_PROJECTION_NAMES = (
    ("query", "q", "q_proj", "query_proj", "wq", "to_q", "w_q", "linear_q"),
    ("key", "k", "k_proj", "key_proj", "wk", "to_k", "w_k", "linear_k"),
    ("value", "v", "v_proj", "value_proj", "wv", "to_v", "w_v", "linear_v"),
    ("output", "o", "out", "o_proj", "out_proj", "output_proj", "wo", "to_out", "w_o", "linear_o", "proj"),
)
_HEADS_NAMES = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "h")
_KV_HEADS_NAMES = ("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads")


def register_attention(
    cls: type,
    *,
    query: str,
    key: str,
    value: str,
    output: str,
    heads: _Heads = None,
    kv_heads: _Heads = None,
) -> None:
    """Registers `cls` as an attention, with the names of its four projections.

    **Arguments:**

    - `cls`: the class of an Equinox module.
    - `query`, `key`, `value`, `output`: names of fields that each hold an `eqx.nn.Linear`; `key` and `value` may also hold
        None, in a layer that attends to the keys and values of another.
    - `heads`, `kv_heads`: the number of query heads and of key/value heads: the name of a field, or a function of the
        module. No head is split over two shards. By default common field names are tried (`num_heads`, `n_heads`, ...).
        Without a field for the key/value heads, their number is that of the query heads.

    Raises TypeError if `cls` is not a subclass of `eqx.Module`, ValueError if it lacks one of the four fields.
    """
    if not (isinstance(cls, type) and issubclass(cls, eqx.Module)):
        raise TypeError(f"`cls`: expected a subclass of eqx.Module, got {cls!r}. Register the class, not an instance.")
    fields = cls.__dataclass_fields__
    for role, name in (("query", query), ("key", key), ("value", value), ("output", output)):
        if name not in fields:
            raise ValueError(f"`{role}`: expected a field of {cls.__name__}, got {name!r}.{nearest(name, fields)}")
    heads, kv_heads = heads or _first(_HEADS_NAMES, fields), kv_heads or _first(_KV_HEADS_NAMES, fields)
    _ATTENTIONS[cls] = _Attention((query, key, value, output), heads, kv_heads)


def _first(names: Sequence[str], among: Collection[str]) -> str | None:
    return next((name for name in names if name in among), None)


def _attention_of(node: Any) -> _Attention | None:
    """Recognises an attention by its type, or else by its field names. Returns None if `node` is not an attention."""
    if not isinstance(node, eqx.Module):
        return None
    for cls in type(node).__mro__:
        if cls in _ATTENTIONS:
            return _ATTENTIONS[cls]

    def find(names: Sequence[str], kind: type) -> str | None:
        return next((name for name in names if isinstance(getattr(node, name, None), kind)), None)

    found = [name for names in _PROJECTION_NAMES if (name := find(names, eqx.nn.Linear)) is not None]
    if len(found) < len(_PROJECTION_NAMES):
        return None
    kv_heads = _first(_KV_HEADS_NAMES, type(node).__dataclass_fields__)
    return _Attention(tuple(found), find(_HEADS_NAMES, int), kv_heads, by_name=True)


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


def is_layer(node: Any) -> bool:
    return isinstance(node, LAYERS)


def split_in_field_order(model: PyTree, n_shards: int) -> tuple[dict[str, _rules.Split], dict[str, int]]:
    """Returns the split of each leaf of each known layer, and the number of stacked dims of each leaf, both by name."""
    weights: dict[str, _rules.Split] = {}  # by the path of the layer
    others: dict[str, _rules.Split] = {}
    sequence: list[_rules.Layer | None] = []  # rule 1's layers in calling order
    siblings: dict[str, list[int]] = {}  # module -> positions of its fields in `sequence`

    def visit(path: tuple[Any, ...], node: Any) -> None:
        name = render(path)
        if isinstance(node, (eqx.nn.Linear, *CONVS)):
            parent = render(path[:-1]) if path and isinstance(path[-1], jtu.GetAttrKey) else None
            if parent is not None:
                siblings.setdefault(parent, []).append(len(sequence))
            sequence.append(_as_layer(name, node, parent))
        elif isinstance(node, NORMS):
            others.update(
                {within(name, leaf): _rules.Split(None, "replicated: normalisation") for leaf in named_leaves(node)}
            )
        elif isinstance(node, eqx.nn.Embedding):
            sequence.append(None)
            others[within(name, "weight")] = _rules.embedding(node.num_embeddings, n_shards)
        elif (how := _attention_of(node)) is not None:
            sequence.append(None)
            weights.update(_split_attention(path, node, how, n_shards))
            for (key,), child in jtu.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]:
                if render((key,)) not in how.projections:
                    visit_all((*path, key), child)

    def visit_all(path: tuple[Any, ...], tree: PyTree) -> None:
        for own, node in modules(tree, lambda node: is_layer(node) or _attention_of(node) is not None):
            visit((*path, *own), node)

    visit_all((), model)
    for positions in siblings.values():
        ordered = _rules.in_calling_order([layer for i in positions if (layer := sequence[i]) is not None])
        for position, layer in zip(positions, ordered, strict=True):
            sequence[position] = layer
    weights |= _rules.alternate(sequence, n_shards)
    biases = {within(name, "bias"): _rules.bias(split) for name, split in weights.items()}
    splits = {within(name, "weight"): split for name, split in weights.items()} | biases | others
    for name, (weight, dims) in followers(model).items():
        if weight in splits:
            splits.setdefault(name, _rules.follow(splits[weight], dims))
    stacked = _stacked(model)
    return {name: split.past(stacked[name]) for name, split in splits.items() if name in stacked}, stacked


def _split_attention(path: tuple[Any, ...], attention: Any, how: _Attention, n_shards: int) -> dict[str, _rules.Split]:
    """Returns the splits of the weights of an attention's four projections, by the projections' paths."""
    layers, cls = [], type(attention).__name__
    for i, field in enumerate(how.projections):
        name, linear = render((*path, jtu.GetAttrKey(field))), getattr(attention, field)
        if linear is None and i in (1, 2):
            layers.append(None)
            continue
        if not isinstance(linear, eqx.nn.Linear):
            raise TypeError(
                f"`{name}`: expected an eqx.nn.Linear, as registered for {cls}, got {type(linear).__name__}. "
                "Register the field that holds the layer."
            )
        layers.append(_as_layer(name, linear, None))
    heads, kv_heads = how.n_heads(attention)
    found = _rules.attention(*layers, n_shards=n_shards, heads=heads, kv_heads=kv_heads)
    note = f"; recognised by the names of its fields, register {cls} to be sure" if how.by_name else ""
    return {name: replace(split, reason=split.reason + note) for name, split in found.items()}


def _as_layer(name: str, node: Any, parent: str | None) -> _rules.Layer:
    if isinstance(node, eqx.nn.Linear):
        sizes = (1 if size == "scalar" else int(size) for size in (node.in_features, node.out_features))
        return _rules.Layer(name, *sizes, parent=parent)
    return _rules.Layer(name, node.in_channels, node.out_channels, parent, node.groups)


def followers(model: PyTree) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Returns the arrays that classes declare by `follows_weight`, with the name of their weight and the tuple."""
    found = {}
    for path, node in modules(model, lambda node: isinstance(node, eqx.Module) and hasattr(type(node), "follows_weight")):
        for field, dims in node.follows_weight.items():
            name = within(render(path), field)
            if is_layer(node) and is_array_like(node.weight) and is_array_like(getattr(node, field)):
                _check_follows(name, node, field, dims)
            found[name] = within(render(path), "weight"), tuple(dims)
    return found


def _check_follows(name: str, node: Any, field: str, dims: Sequence[int | None]) -> None:
    """Raises ValueError if the shape of a layer's array contradicts its class's `follows_weight`."""
    n = max(n_stacked(node), 0)
    shape, weight = tuple(getattr(node, field).shape), tuple(node.weight.shape)
    own, of_weight = shape[n:], weight[n:]
    wanted = [size if dim is None else of_weight[dim] for dim, size in zip(dims, own, strict=False)]
    if len(own) != len(dims) or list(own) != wanted:
        raise ValueError(
            f"`{name}`: expected dims that follow {tuple(dims)} of a weight {weight}, as `{type(node).__name__}."
            f"follows_weight` says, got {shape}. Correct the shape, or the attribute."
        )


def within(module: str, leaf: str) -> str:
    """Returns the name of a module's leaf. A model that is itself a layer adds no prefix."""
    return leaf if module == render(()) else f"{module}.{leaf}"


def _stacked(model: PyTree) -> dict[str, int]:
    """Returns the number of stacked dims of each array.

    An array outside known layers has those of the known layers in the nearest enclosing module.
    """
    known: dict[str, int] = {}
    for path, layer in modules(model, is_layer):
        known |= {within(render(path), leaf): max(n_stacked(layer), 0) for leaf in named_leaves(layer)}
    stacked: dict[str, int] = {}
    for name, leaf in array_leaves(model).items():
        module, found = name, [known[name]] if name in known else []
        while not found and (module := module.rpartition(".")[0]):
            found = [n for other, n in known.items() if other.startswith(f"{module}.") and n <= leaf.ndim]
        stacked[name] = min(found, default=0)
    return stacked
