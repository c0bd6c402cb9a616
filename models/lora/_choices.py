"""Several adapters on one base: each row of a batch chooses its own.

`combine` stacks the adapters of several models, and `choose` returns the model with one of them. Under `jax.vmap` each row
has an index: products with the base's weights are those of the whole batch, and only adapters are looked up row by row.

Source: the batched adapters of S-LoRA (arXiv:2311.03285) and mLoRA (arXiv:2312.02515).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redeqx._tree import ModelT, map_named
from redeqx.errors import brief, filter_traceback, wrong

from ._adapters import adapters_of, is_linear
from ._layers import LoraEmbedding, LoraLinear


class LoraChoices(LoraLinear):
    """A linear layer with several adapters, of which `choose` selects one."""

    lora_a: Float[Array, "*layers adapters rank in"]
    lora_b: Float[Array, "*layers adapters out rank"]

    follows_weight: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"lora_a": (None, None, 1), "lora_b": (None, 0, None)}

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        del x, key
        raise ValueError(
            "`model`: expected one adapter for each layer, got several. Choose one in the loss: "
            "`jax.vmap(lambda ids, i: lora.choose(model, i)(ids))(batch['ids'], batch['adapter'])`."
        )


@filter_traceback
def combine(models: Sequence[ModelT]) -> ModelT:
    """Returns the first model with the adapters of all, for `choose`. They are trained together by `lora.trainable`.

    **Arguments:**

    - `models`: models with adapters on the same layers, of the same ranks and scales. The base of the first one is kept.

    Raises ValueError for adapters that differ in layers, ranks or scales.
    """
    models = list(models)
    if not models:
        raise wrong("models", "at least one model", "none", "Pass models with adapters.")
    layers = [adapters_of(model) for model in models]
    for i, other in enumerate(layers):
        for path in sorted(layers[0].keys() | other.keys()):
            if isinstance(other.get(path), LoraEmbedding):
                raise ValueError(f"`models[{i}]`: `{path}`: expected no adapter of an embedding, got one. Leave it out.")
            if getattr(other.get(path), "magnitude", None) is not None:
                raise ValueError(
                    f"`models[{i}]`: `{path}`: expected an adapter, got one of DoRA. Add it without `use_dora`."
                )
            found, expected = (_described(adapters.get(path)) for adapters in (other, layers[0]))
            if found != expected:
                raise ValueError(
                    f"`models[{i}]`: `{path}`: expected {expected}, as in the first model, got {found}. Add adapters alike."
                )

    def combined(path: str, node: Any) -> Any:
        if path not in layers[0]:
            return node
        a, b = (jnp.stack([getattr(own[path], leaf) for own in layers], axis=-3) for leaf in ("lora_a", "lora_b"))
        return LoraChoices(node, a, b, scale=node.scale, dropout=node.dropout)  # pyright: ignore[reportCallIssue]

    return map_named(combined, models[0], is_leaf=is_linear)


def choose(model: ModelT, index: int | Int[Array, ""]) -> ModelT:
    """Returns the model with one of the adapters that `combine` stacked.

    **Arguments:**

    - `index`: of the adapter, from 0. It may be traced, such as one of a batch's rows under `jax.vmap`; an index that no
        adapter has then gives NaN.

    Raises ValueError for a model without several adapters, and for a number that no adapter has.
    """
    layers = {path: layer for path, layer in adapters_of(model, several=True).items() if isinstance(layer, LoraChoices)}
    if not layers:
        raise wrong("model", "several adapters", "one", "Stack them with `lora.combine` first.")
    n = next(iter(layers.values())).lora_a.shape[-3]
    if isinstance(index, int) and not 0 <= index < n:
        raise wrong("index", f"an adapter from 0 to {n - 1}", brief(index), "Pass one of these.")

    index = jnp.where(jnp.asarray(index) < 0, n, index)  # JAX would count from the end

    def chosen(path: str, node: Any) -> Any:
        if path not in layers:
            return node
        a, b = (
            jnp.take(leaf, index, axis=leaf.ndim - 3, mode="fill", fill_value=jnp.nan) for leaf in (node.lora_a, node.lora_b)
        )
        return LoraLinear(node, a, b, scale=node.scale, dropout=node.dropout)

    return map_named(chosen, model, is_leaf=is_linear)


def _described(layer: LoraLinear | None) -> str:
    if layer is None:
        return "no adapter"
    return f"rank {layer.lora_a.shape[-2]}, scale {layer.scale:g} and shapes {layer.lora_a.shape} and {layer.lora_b.shape}"
