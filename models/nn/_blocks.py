"""The MLP and the attention of all families, and the block of all but decoders: of encoders of texts and images, and of
models from one text to another.

Dims: seq = tokens of one example, d = width of the model, memory = the sequence that a decoder attends to.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._activations import ACTIVATIONS, Xielu
from ._attention import Attention, Cache, Mask
from ._layers import finite, linear, norm, normal_linear, times

Norm = eqx.nn.LayerNorm | eqx.nn.RMSNorm
# Passed from block to block: the residual stream [seq, d], the cache, and the index of the layer if layers differ.
Carry = tuple[Array, Cache | None, Array | None]


class BlockStds(NamedTuple):
    """The standard deviations of a block's initial matrices: of the attention's query, key and value, of its output, and of
    the first and last layer of the MLP."""

    attention: float
    output: float
    up: float
    down: float


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, the inner one wider; or three, of which one gates another
    (arXiv:2002.05202)."""

    gate: eqx.nn.Linear | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.0)  # inside
    activation: str = eqx.field(static=True, kw_only=True)
    xielu: Xielu | None = None  # the activation, if it has parameters
    factor: float = eqx.field(static=True, default=1.0)  # of what the activation reads

    def __call__(self, x: Float[Array, "seq d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "seq d"]:
        activate = ACTIVATIONS[self.activation] if self.xielu is None else self.xielu
        inner = activate(times(linear(self.up if self.gate is None else self.gate, x), self.factor))
        inner = inner if self.gate is None else inner * linear(self.up, x)
        return self.project(self.dropout(inner, key=key))

    def project(self, inner: Float[Array, "seq inner"]) -> Float[Array, "seq d"]:
        """Applies the last layer."""
        return linear(self.down, inner)


def normal_mlp(
    d: int,
    d_ff: int,
    *,
    std: float,
    down_std: float,
    activation: str,
    is_gated: bool = False,
    use_bias: bool = True,
    dropout: float = 0.0,
    key: PRNGKeyArray,
) -> Mlp:
    """Returns an `Mlp` whose weights are drawn from N(0, `std`²), those of the last layer from N(0, `down_std`²)."""
    up_key, down_key = jax.random.split(key)
    gate = None
    if is_gated:
        gate_key, up_key = jax.random.split(up_key)
        gate = normal_linear(d, d_ff, std=std, use_bias=use_bias, key=gate_key)
    up = normal_linear(d, d_ff, std=std, use_bias=use_bias, key=up_key)
    down = normal_linear(d_ff, d, std=down_std, use_bias=use_bias, key=down_key)
    return Mlp(gate, up, down, eqx.nn.Dropout(dropout), activation=activation)


def normal_attention(
    d: int,
    n_heads: int,
    *,
    std: float,
    output_std: float | None = None,
    biases: Sequence[bool] = (True, True, True, True),
    dropout: float = 0.0,
    scale: float | None = None,
    keys: Sequence[PRNGKeyArray],
) -> Attention:
    """Returns an `Attention` of one width, whose weights are drawn from N(0, `std`²), those of the output from N(0,
    `output_std`²).

    **Arguments:**

    - `biases`, `keys`: of query, key, value and output.
    """
    stds = (std, std, std, std if output_std is None else output_std)
    layers = [
        normal_linear(d, d, std=std, use_bias=has_bias, key=key)
        for std, has_bias, key in zip(stds, biases, keys, strict=True)
    ]
    return Attention(*layers, n_heads=n_heads, n_kv_heads=n_heads, dropout=eqx.nn.Dropout(dropout), scale=scale)


class Block(eqx.Module):
    """Attention, cross-attention (in a decoder) and MLP, each residual, and pre-norm or post-norm."""

    attention: Attention
    attention_norm: Norm | None  # None for rows that are normalized already
    cross_attention: Attention | None
    cross_norm: Norm | None
    mlp: Mlp
    mlp_norm: Norm
    dropout: eqx.nn.Dropout  # of what is added to the residual stream
    is_pre_norm: bool = eqx.field(static=True)
    attention_dropout: eqx.nn.Dropout | None = None  # of what attention adds; None for `dropout`
    attention_scale: Float[Array, "*layers d"] | None = None  # multiplies what attention adds (arXiv:2103.17239)
    mlp_scale: Float[Array, "*layers d"] | None = None

    def __call__(
        self,
        carry: Carry,
        mask: Mask | None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Mask | None = None,
        bias: Float[Array, "heads seq source"] | Callable[..., Any] | None = None,
        layers: Any = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        """Returns the carry after this block.

        **Arguments:**

        - `memory`, `memory_mask`: what a cross-attention attends to. With a cache, its keys and values are there.
        - `bias`: of the scores of attention; or a function of the attention and a key that returns it.
        - `layers`: what differs between layers: its `mask` and `rotary` are functions that also take the index of a layer.
        """
        x, cache, layer = carry
        keys = (None,) * 6 if key is None else jax.random.split(key, 6)
        before, after = (norm, _unchanged) if self.is_pre_norm else (_unchanged, norm)
        bias = bias(self.attention, key) if callable(bias) else bias
        rotary = None
        if layers is not None:
            mask, rotary = layers.mask(mask, layer), lambda heads: layers.rotary(heads, layer)
        with jax.named_scope("attention"):
            normed = before(self.attention_norm, x)
            mixed, cache = self.attention(normed, mask=mask, bias=bias, rotary=rotary, cache=cache, key=keys[0])
            mixed = mixed if self.attention_scale is None else mixed * self.attention_scale
            dropout = self.dropout if self.attention_dropout is None else self.attention_dropout
            x = after(self.attention_norm, finite(x + dropout(finite(mixed), key=keys[1])))
        if self.cross_attention is not None:
            with jax.named_scope("cross_attention"):
                pairs = self.project_memory(memory) if cache is None else cache.read_memory()
                normed = before(self.cross_norm, x)
                mixed = self.cross_attention.attend_memory(normed, pairs, mask=memory_mask, key=keys[2])
                x = after(self.cross_norm, finite(x + self.dropout(finite(mixed), key=keys[3])))
        with jax.named_scope("mlp"):
            computed = self.mlp(before(self.mlp_norm, x), key=keys[4])
            computed = computed if self.mlp_scale is None else computed * self.mlp_scale
            x = after(self.mlp_norm, finite(x + self.dropout(finite(computed), key=keys[5])))
        return x, cache, None if layer is None else layer + 1

    def project_memory(self, memory: Float[Array, "memory d"] | None) -> tuple[Array, Array]:
        """Returns the keys and values for the cross-attention."""
        assert self.cross_attention is not None and memory is not None
        return self.cross_attention.project_memory(memory)


def pre_norm_block(
    config: Any,
    *,
    stds: BlockStds,
    activation: str,
    d_inner: int,
    qkv_bias: bool = True,
    is_gated: bool = False,
    layer_scale: float | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray,
) -> Block:
    """Returns a block of a vision transformer, or of the text model with it.

    **Arguments:**

    - `config`: with `d_model`, `n_heads`, `layer_norm_eps` and `attention_dropout`.
    - `stds`: the standard deviations of the initial weights.
    - `activation`, `d_inner`: of the MLP.
    - `qkv_bias`: whether query, key and value have biases.
    - `is_gated`: whether the MLP has a gate.
    - `layer_scale`: the initial factors of additions to the residual stream; None for no such factors.
    - `dropout`: the dropout rate of additions to the residual stream.
    """
    *keys, mlp_key = jax.random.split(key, 5)
    d, eps, rate = config.d_model, config.layer_norm_eps, config.attention_dropout
    biases, std = (qkv_bias, qkv_bias, qkv_bias, True), stds.attention
    scale = lambda: None if layer_scale is None else jnp.full(d, layer_scale)  # noqa: E731
    shape = {"activation": activation, "is_gated": is_gated}
    return Block(
        normal_attention(d, config.n_heads, std=std, output_std=stds.output, biases=biases, dropout=rate, keys=keys),
        eqx.nn.LayerNorm(d, eps=eps),
        cross_attention=None,
        cross_norm=None,
        mlp=normal_mlp(d, d_inner, std=stds.up, down_std=stds.down, **shape, key=mlp_key),
        mlp_norm=eqx.nn.LayerNorm(d, eps=eps),
        dropout=eqx.nn.Dropout(dropout),
        is_pre_norm=True,
        attention_scale=scale(),
        mlp_scale=scale(),
    )


def _unchanged(layer: Norm | None, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    del layer
    return x
