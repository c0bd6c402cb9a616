"""The pre-norm block of vision transformers and of CLIP: attention and an MLP of two layers, each normalized before.

Dims: seq = tokens of one example, d = width of the model.
"""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from ._activations import ACTIVATIONS
from ._attention import Attention, Mask
from ._layers import linear, norm, normal_linear


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, the inner one wider."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, ACTIVATIONS[self.activation](linear(self.up, x)))


class PreNormBlock(eqx.Module):
    """Attention and MLP, each pre-norm and residual."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        config: Any,
        *,
        std: float,
        up_std: float | None = None,
        output_std: float | None = None,
        activation: str = "gelu",
        qkv_bias: bool = True,
        dropout: float = 0.0,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `config`: with `d_model`, `d_ff`, `n_heads`, `layer_norm_eps` and `attention_dropout`.
        - `std`: standard deviation of the initial weights; `up_std`: of the MLP's first layer; `output_std`: of the layers
            that add to the residual stream; None for the same.
        - `activation`: of the MLP.
        - `qkv_bias`: whether query, key and value have biases.
        - `dropout`: the dropout rate of additions to the residual stream.
        """
        q_key, k_key, v_key, o_key, mlp_key = jax.random.split(key, 5)
        up_key, down_key = jax.random.split(mlp_key)
        d, d_ff, eps = config.d_model, config.d_ff, config.layer_norm_eps
        output_std = std if output_std is None else output_std
        self.attention_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.attention = Attention(
            query=normal_linear(d, d, std=std, use_bias=qkv_bias, key=q_key),
            key=normal_linear(d, d, std=std, use_bias=qkv_bias, key=k_key),
            value=normal_linear(d, d, std=std, use_bias=qkv_bias, key=v_key),
            output=normal_linear(d, d, std=output_std, key=o_key),
            n_heads=config.n_heads,
            n_kv_heads=config.n_heads,
            dropout=eqx.nn.Dropout(config.attention_dropout),
        )
        self.mlp_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.mlp = Mlp(
            normal_linear(d, d_ff, std=std if up_std is None else up_std, key=up_key),
            normal_linear(d_ff, d, std=output_std, key=down_key),
            activation,
        )
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "seq d"], mask: Mask | None = None, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq d"]:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            mixed, _ = self.attention(norm(self.attention_norm, x), mask=mask, key=keys[0])
            x = x + self.dropout(mixed, key=keys[1])
        with jax.named_scope("mlp"):
            return x + self.dropout(self.mlp(norm(self.mlp_norm, x)), key=keys[2])
