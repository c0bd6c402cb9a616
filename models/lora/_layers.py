"""Layers with an adapter: a linear layer, and an embedding.

Dims: in, out = features of a linear layer, rank = rank of its adapter, layers = the number of stacked layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx._rounding import at_least_float32

LEAVES = ("lora_a", "lora_b", "magnitude")


class LoraLinear(eqx.nn.Linear):
    """A linear layer with an adapter. It applies to the last dim of an array, and also works under `jax.vmap`."""

    lora_a: Float[Array, "*layers rank in"]
    lora_b: Float[Array, "*layers out rank"]
    scale: float = eqx.field(static=True)
    magnitude: Float[Array, "*layers out"] | None  # of DoRA
    dropout: eqx.nn.Dropout | None  # of the adapter's input
    key: PRNGKeyArray | None  # for the dropout, from `with_keys`

    # For each dim of a leaf, the dim of `weight` whose sharding it follows.
    follows_weight: ClassVar[Mapping[str, tuple[int | None, ...]]] = {
        "lora_a": (None, 1),
        "lora_b": (0, None),
        "magnitude": (0,),
    }

    def __init__(
        self,
        layer: eqx.nn.Linear,
        lora_a: Float[Array, "*layers rank in"],
        lora_b: Float[Array, "*layers out rank"],
        *,
        scale: float,
        magnitude: Float[Array, "*layers out"] | None = None,
        dropout: eqx.nn.Dropout | None = None,
        key: PRNGKeyArray | None = None,
    ):
        """**Arguments:**

        - `layer`: the layer whose weight and bias are kept.
        - `lora_a`, `lora_b`, `scale`: the adapter, which adds `scale * lora_b @ lora_a` to the weight.
        - `magnitude`: for DoRA, the length to which each output's weights are then scaled.
        - `dropout`, `key`: the dropout of the adapter's input, and its key; None for no dropout.
        """
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features, self.use_bias = layer.in_features, layer.out_features, layer.use_bias
        self.lora_a, self.lora_b, self.scale, self.magnitude = lora_a, lora_b, scale, magnitude
        self.dropout, self.key = dropout, key

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: of shape `[..., in]`, or `[...]` if `in_features` is `"scalar"`.
        - `key`: for dropout, in place of the layer's own.

        Raises RuntimeError if there is dropout, and no key.
        """
        x = x[..., None] if self.in_features == "scalar" else x
        out, kept = x @ self.weight.T, self._dropped(x, self.key if key is None else key)
        with jax.named_scope("lora"):
            # The adapter is float32 with 16-bit weights. The layer's output keeps the 16-bit dtype.
            delta = (self.scale * (kept @ self.lora_a.T)) @ self.lora_b.T
        if self.magnitude is None:
            out = out if self.bias is None else out + self.bias
            out = out + delta.astype(out.dtype)
        else:
            with jax.named_scope("lora"):
                # As in DoRA's section 4.3, the length of the weights is a constant of the gradient.
                whole = lengths(self.weight, self.scale * (self.lora_b @ self.lora_a))
                factor = self.magnitude / jax.lax.stop_gradient(whole)
                if kept is x:
                    out = (factor * (out + delta)).astype(out.dtype)
                else:  # PEFT drops the inputs of what DoRA adds to the base
                    out = (out + (factor - 1) * (kept @ self.weight.T) + factor * delta).astype(out.dtype)
            out = out if self.bias is None else out + self.bias
        return out[..., 0] if self.out_features == "scalar" else out

    def _dropped(self, x: Array, key: PRNGKeyArray | None) -> Array:
        if self.dropout is None or self.dropout.inference:
            return x
        if key is None:
            raise RuntimeError(
                "`key`: expected one for the dropout of adapters, got None. Call `lora.with_keys(model, key)` in the loss, "
                "or use `eqx.nn.inference_mode(model)`."
            )
        return self.dropout(x, key=key)


class LoraEmbedding(eqx.nn.Embedding):
    """An embedding with an adapter, of one id or of an array of them. An output head that shares the weight has no adapter,
    as in PEFT."""

    lora_a: Float[Array, "rank rows"]
    lora_b: Float[Array, "size rank"]
    scale: float = eqx.field(static=True)

    follows_weight: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"lora_a": (None, 0), "lora_b": (1, None)}

    def __init__(
        self, layer: eqx.nn.Embedding, lora_a: Float[Array, "rank rows"], lora_b: Float[Array, "size rank"], *, scale: float
    ):
        """**Arguments:**

        - `layer`: the embedding whose weight is kept.
        - `lora_a`, `lora_b`, `scale`: the adapter, which adds `scale * (lora_b @ lora_a).T` to the weight.
        """
        self.weight, self.num_embeddings, self.embedding_size = layer.weight, layer.num_embeddings, layer.embedding_size
        self.lora_a, self.lora_b, self.scale = lora_a, lora_b, scale

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: ids. One outside of the table gives NaN.
        - `key`: ignored, as in `eqx.nn.Embedding`.
        """
        del key
        rows = self.weight.at[x].get(mode="fill", wrap_negative_indices=False)
        with jax.named_scope("lora"):
            taken = self.lora_a.T.at[x].get(mode="fill", wrap_negative_indices=False)
            return rows + (self.scale * (taken @ self.lora_b.T)).astype(rows.dtype)


def lengths(weight: Any, delta: Any = 0) -> Array:
    """Returns the length of each output's weights, after `delta` is added to them."""
    return jnp.linalg.norm(weight.astype(at_least_float32(weight.dtype)) + delta, axis=-1)
