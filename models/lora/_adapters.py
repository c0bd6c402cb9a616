"""Adapters in a model: `LoraLinear`, and functions that add, select and merge adapters.

Reading and writing folders of adapters is in `_load` and `_save`.

Dims: in, out = features of a linear layer, rank = rank of its adapter, layers = the number of stacked layers.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx._tree import ModelT, PyTree, is_array_like, listed, map_named, named_leaves, nearest
from redeqx.errors import brief, check_count, check_function, check_key, check_number, filter_traceback

Where = str | Sequence[str] | Callable[[str, eqx.nn.Linear], bool]


class LoraLinear(eqx.nn.Linear):
    """A linear layer with an adapter. It applies to the last dim of an array, and also works under `jax.vmap`."""

    lora_a: Float[Array, "*layers rank in"]
    lora_b: Float[Array, "*layers out rank"]
    scale: float = eqx.field(static=True)

    # For each dim of a leaf, the dim of `weight` whose sharding it follows.
    follows_weight: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"lora_a": (None, 1), "lora_b": (0, None)}

    def __init__(
        self,
        layer: eqx.nn.Linear,
        lora_a: Float[Array, "*layers rank in"],
        lora_b: Float[Array, "*layers out rank"],
        *,
        scale: float,
    ):
        """**Arguments:**

        - `layer`: the layer whose weight and bias are kept.
        - `lora_a`, `lora_b`, `scale`: the adapter, which adds `scale * lora_b @ lora_a` to the weight.
        """
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features, self.use_bias = layer.in_features, layer.out_features, layer.use_bias
        self.lora_a, self.lora_b, self.scale = lora_a, lora_b, scale

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: of shape `[..., in]`, or `[...]` if `in_features` is `"scalar"`.
        - `key`: ignored, as in `eqx.nn.Linear`.
        """
        del key
        x = x[..., None] if self.in_features == "scalar" else x
        out = x @ self.weight.T
        out = out if self.bias is None else out + self.bias
        with jax.named_scope("lora"):
            # The adapter is float32 with 16-bit weights. The layer's output keeps the 16-bit dtype.
            delta = (self.scale * (x @ self.lora_a.T)) @ self.lora_b.T
        out = out + delta.astype(out.dtype)
        return out[..., 0] if self.out_features == "scalar" else out


@filter_traceback
def add(model: ModelT, *, rank: int, alpha: int | float | None = None, where: Where, key: PRNGKeyArray) -> ModelT:
    """Adds an adapter to each linear layer that `where` selects. The outputs are the same until the adapters are trained.

    Adapters have at least float32, even with 16-bit weights. Stacked layers get stacked adapters, `[layers, rank, in]` and
    `[layers, out, rank]`.

    **Arguments:**

    - `model`: any PyTree with `eqx.nn.Linear` layers. Subclasses are not adapted, because they may define another call.
    - `rank`: the rank of each adapter, at least 1.
    - `alpha`: adapters are scaled by `alpha / rank`. The default is `rank`.
    - `where`: one or more globs over the layers' paths (`"*.attention.query"`), each of which must match a layer; or a
        function of a layer's path and the layer that returns True for the layers to adapt.
    - `key`: draws `lora_a` as PEFT does, from U(-in ** -0.5, in ** -0.5); `lora_b` is zero.

    Raises ValueError for a rank below 1, if no layer is selected, and if a selected layer already has an adapter.
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
    check_key(key)
    picked = _select(linears_of(model), where)
    keys = jax.random.split(key, len(picked))

    def draw(layer: eqx.nn.Linear, key: PRNGKeyArray) -> LoraLinear:
        *stacked, n_out, n_in = layer.weight.shape
        dtype, limit = at_least_float32(layer.weight.dtype), max(n_in, 1) ** -0.5
        lora_a = jax.random.uniform(key, (*stacked, rank, n_in), dtype, -limit, limit)
        lora_b = jnp.zeros((*stacked, n_out, rank), dtype)
        return LoraLinear(layer, lora_a, lora_b, scale=(rank if alpha is None else alpha) / rank)

    return replace_layers(model, {path: draw(layer, key) for (path, layer), key in zip(picked.items(), keys, strict=True)})


@filter_traceback
def trainable(model: PyTree, *, also: str | Sequence[str] = ()) -> PyTree:
    """Returns a mask for `Trainer(trainable=...)`: True for the adapters' leaves, and for those that `also` matches.

    **Arguments:**

    - `also`: globs over the paths of further leaves to train, such as a new head's.

    Raises ValueError for a model without adapters, and for a glob that matches no leaf.
    """
    adapters = adapters_of(model)
    chosen = {leaf_path(path, leaf) for path in adapters for leaf in ("lora_a", "lora_b")}
    leaves = [name for name, leaf in named_leaves(model).items() if is_array_like(leaf) and _is_inexact(leaf)]
    for pattern in _globs(also, "also", 'Write `"head.*"`, say', optional=True):
        found = fnmatch.filter(leaves, pattern)
        if not found:
            raise ValueError(f"`also`: expected a path of the model, got {pattern!r}.{nearest(pattern, leaves)}")
        chosen.update(found)
    return map_named(lambda name, leaf: name in chosen, model)


def merge(model: ModelT) -> ModelT:
    """Merges the adapters: adds each one to its layer's weight, `W + scale * B A`. Returns the model without adapters.

    Raises ValueError for a model without adapters.
    """

    def merged(layer: LoraLinear) -> eqx.nn.Linear:
        delta = layer.scale * (layer.lora_b @ layer.lora_a)
        return _with_weight(layer, (layer.weight + delta).astype(layer.weight.dtype))

    return replace_layers(model, {path: merged(layer) for path, layer in adapters_of(model).items()})


def _is_linear(node: Any) -> bool:
    """Returns whether a node is a linear layer, with or without an adapter. Other subclasses are not: they may define
    another call."""
    return type(node) in (eqx.nn.Linear, LoraLinear)


def linears_of(model: PyTree) -> dict[str, eqx.nn.Linear]:
    """Returns every linear layer by its path."""
    return {path: node for path, node in named_leaves(model, is_leaf=_is_linear).items() if _is_linear(node)}


def adapters_of(model: PyTree) -> dict[str, LoraLinear]:
    """Returns every adapted layer by its path. Raises ValueError if there is none."""
    adapters = {path: layer for path, layer in linears_of(model).items() if isinstance(layer, LoraLinear)}
    if not adapters:
        raise ValueError("`model`: expected adapted layers, got none. Add adapters with `lora.add` first.")
    return adapters


def replace_layers(model: ModelT, layers: Mapping[str, eqx.nn.Linear]) -> ModelT:
    return map_named(lambda path, node: layers.get(path, node), model, is_leaf=_is_linear)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def leaf_path(path: str, leaf: str) -> str:
    """Returns the path of a layer's leaf. If the model itself is the layer, its own path is empty."""
    return leaf if path == "value" else f"{path}.{leaf}"


def at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _with_weight(layer: eqx.nn.Linear, weight: Array) -> eqx.nn.Linear:
    # An abstract layer, so that no weights are drawn only to be replaced.
    sizes, key = (layer.in_features, layer.out_features, layer.use_bias), jax.eval_shape(lambda: jax.random.key(0))
    plain = eqx.filter_eval_shape(eqx.nn.Linear, *sizes, key=key)
    return eqx.tree_at(lambda l: (l.weight, l.bias), plain, (weight, layer.bias), is_leaf=lambda leaf: leaf is None)


def _select(linears: Mapping[str, eqx.nn.Linear], where: Where) -> dict[str, eqx.nn.Linear]:
    """Returns the layers that `where` selects. Raises ValueError if one of them already has an adapter."""
    if callable(where):
        check_function(where, "where", ["path", "layer"])
        paths = {path for path, layer in linears.items() if where(path, layer)}
        if not paths:
            raise ValueError(f"`where`: expected a function that selects linear layers, got none. {_listed(linears)}")
    else:
        paths = set()
        for pattern in _globs(where, "where", 'Write `"*.attention.query"`, say'):
            found = fnmatch.filter(linears, pattern)
            if not found:
                near = nearest(pattern, linears)
                raise ValueError(f"`where`: expected the path of a linear layer, got {pattern!r}.{near} {_listed(linears)}")
            paths.update(found)
    picked = {path: layer for path, layer in linears.items() if path in paths}
    check_plain(picked)
    return picked


def _globs(given: Any, name: str, advice: str, *, optional: bool = False) -> list[str]:
    """Returns one or more globs as a list. Raises TypeError for anything else, ValueError for none."""
    globs: list[Any] = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence | set) else [None]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"`{name}`: expected globs over paths, got {brief(given)}. {advice}.")
    if not globs and not optional:
        raise ValueError(f"`{name}`: expected at least one glob, got none. {advice}.")
    return globs


def check_plain(layers: Mapping[str, eqx.nn.Linear]) -> None:
    """Raises ValueError if a layer has an adapter."""
    for path, layer in layers.items():
        if isinstance(layer, LoraLinear):
            raise ValueError(
                f"`{path}`: expected a layer without an adapter, got one of rank {layer.lora_a.shape[-2]}. "
                "Leave it out, or `lora.merge` the model first."
            )


def _listed(linears: Mapping[str, Any]) -> str:
    return f"The model's linear layers: {', '.join(listed(list(linears))) or 'none'}."
