"""Adapters in a model: functions that add, select and merge them.

The adapted layers are in `_layers`; reading and writing folders of adapters is in `_load` and `_save`.

Dims: in, out = features of a linear layer, rank = rank of its adapter, layers = the number of stacked layers.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray

from redeqx._quantised import is_quantised
from redeqx._rounding import at_least_float32
from redeqx._tree import ModelT, PyTree, is_array_like, listed, map_named, named_leaves, nearest
from redeqx.errors import (
    brief,
    check_count,
    check_function,
    check_key,
    check_number,
    check_optimizer,
    filter_traceback,
    warn,
    wrong,
)

from ..hf import Pretrained
from ._layers import LEAVES, LoraEmbedding, LoraLinear, lengths

Adapted = LoraLinear | LoraEmbedding
Layer = eqx.nn.Linear | eqx.nn.Embedding
Where = str | Sequence[str] | Callable[[str, eqx.nn.Linear], bool]


@filter_traceback
def add(
    model: ModelT,
    *,
    rank: int,
    alpha: int | float | None = None,
    where: Where = (),
    embeddings: str | Sequence[str] = (),
    dropout: int | float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    key: PRNGKeyArray,
) -> ModelT:
    """Adds an adapter to each linear layer that `where` selects, and to each embedding that `embeddings` selects.

    The outputs are the same until the adapters are trained.

    Adapters have at least float32, even with 16-bit weights. Stacked layers get stacked adapters, `[layers, rank, in]` and
    `[layers, out, rank]`.

    **Arguments:**

    - `model`: any PyTree with `eqx.nn.Linear` or `eqx.nn.Embedding` layers. Subclasses are not adapted, because they may
        define another call.
    - `rank`: the rank of each adapter, at least 1.
    - `alpha`: adapters are scaled by `alpha / rank`. The default is `rank`.
    - `where`: one or more globs over the layers' paths (`"*.attention.query"`), each of which must match a layer; or a
        function of a layer's path and the layer that returns True for the layers to adapt.
    - `embeddings`: the same for embeddings, as globs only. A head that shares the weight of one gets no adapter.
    - `dropout`: the dropout rate of the adapters' inputs, in [0, 1). Not for experts and embeddings. The loss then needs
        `with_keys`.
    - `use_rslora`: scales by `alpha / sqrt(rank)` instead (arXiv:2312.03732).
    - `use_dora`: whether to train the length of each output's weights too (arXiv:2402.09353). Not for experts and
        embeddings.
    - `key`: draws `lora_a` as PEFT does, from U(-in ** -0.5, in ** -0.5); `lora_b` is zero. In embeddings, `lora_a` is zero,
        and `lora_b` is drawn from N(0, 1).

    Raises ValueError for a rank below 1, a rate outside of [0, 1), if no layer is selected, and if a selected layer already
    has an adapter.
    """
    check_count(rank, "rank", advice="Pass a positive rank.")
    check_number(
        alpha,
        "alpha",
        "a finite number above 0",
        lambda alpha: 0 < alpha < math.inf,
        "Pass `rank` or twice of it.",
        optional=True,
    )
    check_number(dropout, "dropout", "a rate in [0, 1)", lambda rate: 0 <= rate < 1, "Pass 0.05, say.")
    check_key(key)
    layers = layers_of(model)
    linears, tables = ({path: x for path, x in layers.items() if is_linear(x) is of} for of in (True, False))
    paths = set[str]()
    if not _is_empty(embeddings):
        globs = globs_of(embeddings, "embeddings", 'Write `"embedding"`')
        paths = selected(tables, globs, "embeddings", "an embedding", "embeddings")
    if not _is_empty(where) or not paths:
        paths |= selected(linears, where, "where", "a linear layer", "linear layers")
    picked = {path: layer for path, layer in {**linears, **tables}.items() if path in paths}
    check_plain(picked)
    keys = jax.random.split(key, len(picked))
    drop = eqx.nn.Dropout(dropout) if dropout else None

    def draw(layer: Any, key: PRNGKeyArray) -> Adapted:
        *stacked, n_out, n_in = layer.weight.shape
        dtype, limit = at_least_float32(layer.weight.dtype), max(n_in, 1) ** -0.5
        scale = (rank if alpha is None else alpha) / (rank**0.5 if use_rslora else rank)
        if not is_linear(layer):
            zeros, drawn = jnp.zeros((rank, n_out), dtype), jax.random.normal(key, (n_in, rank), dtype)
            return LoraEmbedding(layer, zeros, drawn, scale=scale)
        lora_a = jax.random.uniform(key, (*stacked, rank, n_in), dtype, -limit, limit)
        lora_b = jnp.zeros((*stacked, n_out, rank), dtype)
        magnitude = lengths(layer.weight) if use_dora else None
        return LoraLinear(layer, lora_a, lora_b, scale=scale, magnitude=magnitude, dropout=drop)

    return replace_layers(model, {path: draw(layer, key) for (path, layer), key in zip(picked.items(), keys, strict=True)})


@filter_traceback
def trainable(model: PyTree, *, also: str | Sequence[str] = ()) -> PyTree:
    """Returns a mask for `Trainer(trainable=...)`: True for the adapters' leaves, and for those that `also` matches.

    **Arguments:**

    - `also`: globs over the paths of further leaves to train, such as a new head's.

    Raises ValueError for a model without adapters, and for a glob that matches no leaf.
    """
    adapters = adapters_of(model, several=True)
    chosen = {leaf_path(path, leaf) for path in adapters for leaf in LEAVES}
    arrays = {name: leaf for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
    leaves = [name for name, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for pattern in globs_of(also, "also", 'Write `"head.*"`, say', optional=True):
        found = fnmatch.filter(leaves, pattern)
        if not found:
            raise ValueError(f"`also`: expected a path of the model, got {pattern!r}.{nearest(pattern, leaves)}")
        chosen.update(found)
    return map_named(lambda name, leaf: name in chosen, model)


def merge(model: ModelT) -> ModelT:
    """Merges the adapters: adds each one to its layer's weight, `W + scale * B A`. Returns the model without adapters.

    A quantised weight becomes an array again, with what quantising has rounded off lost, which a warning says.

    Raises ValueError for a model without adapters, and for one with an adapter of an embedding that the output head shares.
    """
    adapters = adapters_of(model)

    check_untied(model, adapters)

    def merged(layer: Adapted) -> Layer:
        delta = layer.scale * (layer.lora_b @ layer.lora_a)
        if isinstance(layer, LoraEmbedding):
            return eqx.nn.Embedding(weight=(layer.weight + delta.T).astype(layer.weight.dtype))
        weight = layer.weight + delta
        if layer.magnitude is not None:
            weight *= (layer.magnitude / lengths(layer.weight, delta))[..., None]
        return _with_weight(layer, weight.astype(layer.weight.dtype))

    if rounded := [path for path, layer in adapters.items() if is_quantised(layer.weight)]:
        more = f" (and {len(rounded) - 1} more)" if len(rounded) > 1 else ""
        warn(
            f"`{rounded[0]}`{more}: merges into dequantised weights, which lack what quantising has rounded off. To merge "
            "into the original weights, save the adapters with `lora.save_adapter`, and load them over a plain model."
        )
    return replace_layers(model, {path: merged(layer) for path, layer in adapters.items()})


def is_linear(node: Any) -> bool:
    """Returns whether a node is a linear layer, with or without an adapter. Other subclasses are not: they may define
    another call."""
    return type(node) is eqx.nn.Linear or isinstance(node, LoraLinear)


def is_layer(node: Any) -> bool:
    """Returns whether a node is a layer that adapters are for: a linear layer or an embedding, with or without one."""
    return is_linear(node) or type(node) is eqx.nn.Embedding or isinstance(node, LoraEmbedding)


def layers_of(model: PyTree) -> dict[str, Any]:
    """Returns every linear layer and embedding by its path."""
    return {path: node for path, node in named_leaves(model, is_leaf=is_layer).items() if is_layer(node)}


def adapters_of(model: PyTree, *, several: bool = False) -> dict[str, Any]:
    """Returns every adapted layer by its path.

    **Arguments:**

    - `several`: whether a layer may have several adapters.

    Raises ValueError if there is none, or if a layer has several and may not.
    """
    adapters = {path: layer for path, layer in layers_of(model).items() if isinstance(layer, Adapted)}
    if not adapters:
        raise wrong("model", "adapted layers", "none", "Add adapters with `lora.add` first.")
    for path, layer in adapters.items():
        if not several and layer.lora_a.ndim > layer.weight.ndim:
            n = layer.lora_a.shape[-3]
            raise wrong(path, "one adapter", n, "Select one: `lora.choose(model, 0)`.")
    return adapters


def replace_layers(model: ModelT, layers: Mapping[str, Any]) -> ModelT:
    return map_named(lambda path, node: layers.get(path, node), model, is_leaf=is_layer)


def with_keys(model: ModelT, key: PRNGKeyArray) -> ModelT:
    """Returns the model with a key for the dropout of each adapter, to be called in the loss on one example.

    ```python
    logits = jax.vmap(lambda ids, key: lora.with_keys(model, key)(ids))(ids, keys)
    ```

    **Arguments:**

    - `key`: split into one for each adapter, and for each layer of a stack.

    Raises ValueError for a model without adapters.
    """
    layers = {path: layer for path, layer in adapters_of(model).items() if getattr(layer, "dropout", None) is not None}
    keys = jax.random.split(key, max(len(layers), 1))

    def keyed(layer: LoraLinear, key: PRNGKeyArray) -> LoraLinear:
        stacked = layer.lora_a.shape[:-2]
        own = jax.random.split(key, stacked) if stacked else key
        return eqx.tree_at(lambda layer: layer.key, layer, own, is_leaf=lambda leaf: leaf is None)

    return replace_layers(model, {path: keyed(layer, k) for (path, layer), k in zip(layers.items(), keys, strict=False)})


def check_untied(model: PyTree, adapters: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter of an embedding whose weight another layer shares: merged, it would change both."""
    if not isinstance(model, Pretrained):
        return
    weight_map = type(model).weight_map(model.config)
    shared = {
        leaf for tensor in weight_map.tensors if tensor.disk in {*weight_map.copies.values()} for leaf in tensor.leaves
    }
    for path, layer in adapters.items():
        if isinstance(layer, LoraEmbedding) and leaf_path(path, "weight") in shared:
            step = "Save the adapters with `lora.save_adapter` instead, or train without this one."
            raise wrong(path, "an embedding of its own", "one whose weight another layer shares", step)


def plus(optimizer: optax.GradientTransformation, *, ratio: int | float = 16) -> optax.GradientTransformation:
    """Returns an optimizer that updates `lora_b` with `ratio` times the learning rate, as LoRA+ (arXiv:2402.12354). Adapters
    of embeddings are updated as usual.

    **Arguments:**

    - `optimizer`: of all leaves. Its updates of `lora_b` are multiplied.
    - `ratio`: above 0; the paper recommends 16 and the half of the usual learning rate.
    """
    check_optimizer(optimizer, "optimizer")
    rule, advice = "a finite number above 0", "Pass 16, say."
    check_number(ratio, "ratio", rule, lambda ratio: 0 < ratio < math.inf, advice)
    is_table = lambda node: isinstance(node, LoraEmbedding)  # noqa: E731

    def is_b(name: str, node: Any) -> Any:
        return jax.tree.map(lambda _: False, node) if is_table(node) else name.rpartition(".")[2] == "lora_b"

    of_b = lambda params: map_named(is_b, params, is_leaf=is_table)  # noqa: E731
    return optax.chain(optimizer, optax.masked(optax.scale(ratio), of_b))


def leaf_path(path: str, leaf: str) -> str:
    """Returns the path of a layer's leaf. If the model itself is the layer, its own path is empty."""
    return leaf if path == "value" else f"{path}.{leaf}"


def _with_weight(layer: eqx.nn.Linear, weight: Array) -> eqx.nn.Linear:
    # An abstract layer, so that no weights are drawn only to be replaced.
    sizes, key = (layer.in_features, layer.out_features, layer.use_bias), jax.eval_shape(lambda: jax.random.key(0))
    plain = eqx.filter_eval_shape(eqx.nn.Linear, *sizes, key=key)
    return eqx.tree_at(lambda l: (l.weight, l.bias), plain, (weight, layer.bias), is_leaf=lambda leaf: leaf is None)


def _is_empty(globs: Any) -> bool:
    return isinstance(globs, Sequence) and not globs


def selected(layers: Mapping[str, Any], where: Any, name: str, one: str, several: str) -> set[str]:
    """Returns the paths of the layers that `where` selects, by a function or globs. Raises ValueError for none.

    **Arguments:**

    - `name`: of the argument, for errors.
    - `one`, `several`: what the layers are, for errors.
    """
    listing = f"The model's {several}: {', '.join(listed(list(layers))) or 'none'}."
    if callable(where):
        check_function(where, name, ["path", "layer"])
        paths = {path for path, layer in layers.items() if where(path, layer)}
        if not paths:
            raise ValueError(f"`{name}`: expected a function that selects {several}, got none. {listing}")
        return paths
    paths = set[str]()
    for pattern in globs_of(where, name, 'Write `"*.attention.query"`, say'):
        found = fnmatch.filter(layers, pattern)
        if not found:
            raise ValueError(f"`{name}`: expected the path of {one}, got {pattern!r}.{nearest(pattern, layers)} {listing}")
        paths.update(found)
    return paths


def globs_of(given: Any, name: str, advice: str, *, optional: bool = False) -> list[str]:
    """Returns one or more globs as a list. Raises TypeError for anything else, ValueError for none."""
    globs: list[Any] = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence | set) else [None]
    if not all(isinstance(glob, str) for glob in globs):
        raise wrong(name, "globs over paths", brief(given), f"{advice}.", TypeError)
    if not globs and not optional:
        raise wrong(name, "at least one glob", "none", f"{advice}.")
    return globs


def check_plain(layers: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer has an adapter."""
    for path, layer in layers.items():
        if isinstance(layer, Adapted):
            step = "Leave it out, or `lora.merge` the model first."
            raise wrong(path, "a layer without an adapter", f"one of rank {layer.lora_a.shape[-2]}", step)
