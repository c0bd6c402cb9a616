"""What a block computes across tokens: an attention, or in some layers a mixer, which keeps a state.

The values of `DecoderConfig` say what a layer has. The layers are those of `nn`; norms are here too.

Dims: d = width of the model, heads x size = width of the queries, groups x size = width of keys and values, kernel =
taps of a convolution.
"""

import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..nn import (
    Attention,
    GatedDelta,
    GroupRMSNorm,
    LatentAttention,
    Mamba1,
    Mamba2,
    OffsetLayerNorm,
    OffsetRMSNorm,
    Recurrence,
    ShortConv,
    States,
    YarnScaling,
    normal_linear,
)
from ._config import DecoderConfig
from ._layers import LayerKind

Norm = eqx.nn.RMSNorm | eqx.nn.LayerNorm


def make_norm(config: DecoderConfig, size: int) -> Norm:
    """Returns a norm of the config's kind."""
    if config.norm in ("rms", "plain_rms"):
        return eqx.nn.RMSNorm(size, eps=config.norm_eps, use_weight=config.norm == "rms", use_bias=False)
    if config.norm == "offset_rms":
        return OffsetRMSNorm(size, eps=config.norm_eps)
    if config.norm == "offset_layer":
        return OffsetLayerNorm(size, eps=config.norm_eps)
    has_leaves = config.norm == "layer"
    return eqx.nn.LayerNorm(size, eps=config.norm_eps, use_weight=has_leaves, use_bias=has_leaves and config.norm_bias)


def residual_std(config: DecoderConfig) -> float:
    """Returns the standard deviation of the initial weights that add to the residual stream, two in each block."""
    return config.init_std / (2 * config.n_layers) ** 0.5 if config.scales_residual else config.init_std


def make_attention(config: DecoderConfig, key: PRNGKeyArray, kind: LayerKind | None = None) -> Attention:
    """Returns an attention with keys and values of each head.

    **Arguments:**

    - `kind`: the kind of the layer; None if all layers are alike.
    """
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, std = config.d_model, config.init_std
    size, groups = (config.size, config.groups) if kind is None else (kind.size, kind.groups)
    has_keys, has_values = (True, True) if kind is None else (kind.has_keys, kind.has_values)
    output_bias = config.attention_bias if config.output_bias is None else config.output_bias

    def project(n_heads: int, key: PRNGKeyArray) -> eqx.nn.Linear:
        return normal_linear(d, n_heads * size, std=std, use_bias=config.attention_bias, key=key)

    def make_gate(key: PRNGKeyArray) -> eqx.nn.Linear:
        if config.gates_heads:
            return normal_linear(d, config.n_heads, std=std, use_bias=False, key=key)
        return project(config.n_heads, key)

    def head_norm(n_heads: int) -> Norm | None:
        sizes = {"head": size, "all": n_heads * size}
        return None if config.head_norm is None else make_norm(config, sizes[config.head_norm])

    return Attention(
        query=project(config.n_heads, q_key),
        key=project(groups, k_key) if has_keys else None,
        value=project(groups, v_key) if has_values else None,
        output=normal_linear(config.n_heads * size, d, std=residual_std(config), use_bias=output_bias, key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=groups,
        dropout=eqx.nn.Dropout(config.attention_dropout),
        scale=_score_scale(config, size),
        query_norm=head_norm(config.n_heads),
        key_norm=head_norm(groups) if has_keys else None,
        cap=config.attention_cap,
        sinks=jnp.zeros(config.n_heads) if config.has_sinks else None,
        gate=make_gate(jax.random.fold_in(q_key, 1)) if config.gates_attention else None,
        clip=config.attention_clip,
        rotates_first=config.norms_rotated,
        value_norm=_plain_norm(config, size) if has_keys and config.has_value_norm else None,
    )


def _score_scale(config: DecoderConfig, size: int) -> float | None:
    """Returns the factor of scores, which that of keys is part of; None for `size ** -0.5`."""
    if config.factors.key == 1:
        return config.attention_scale
    return (size**-0.5 if config.attention_scale is None else config.attention_scale) * config.factors.key


def _plain_norm(config: DecoderConfig, size: int) -> eqx.nn.RMSNorm:
    """Returns an RMSNorm without a scale."""
    return eqx.nn.RMSNorm(size, eps=config.norm_eps, use_weight=False, use_bias=False)


def make_latent_attention(config: DecoderConfig, key: PRNGKeyArray) -> LatentAttention:
    """Returns an attention whose keys and values are computed from latent vectors."""
    keys = iter(jax.random.split(key, 6))
    d, heads, rank, rotary = config.d_model, config.n_heads, config.latent_size, config.shared_rotary_size
    assert rank is not None
    query_rank, scaling = config.query_latent_size, config.rope_scaling
    has_bias = config.attention_bias  # of layers to the latent vectors, and of the output

    def make(n_in: int, n_out: int, use_bias: bool = False, std: float = config.init_std) -> eqx.nn.Linear:
        return normal_linear(n_in, n_out, std=std, use_bias=use_bias, key=next(keys))

    return LatentAttention(
        query_down=None if query_rank is None else make(d, query_rank, has_bias),
        query_norm=None if query_rank is None else eqx.nn.RMSNorm(query_rank, eps=config.latent_eps, use_bias=False),
        query=make(d if query_rank is None else query_rank, heads * config.size),
        latent=make(d, rank + rotary, has_bias),
        latent_norm=eqx.nn.RMSNorm(rank, eps=config.latent_eps, use_bias=False),
        key=make(rank, heads * config.plain_size),
        value=make(rank, heads * config.value_size),
        output=make(heads * config.value_size, d, has_bias, residual_std(config)),
        n_heads=heads,
        n_rotary=rotary,
        scale=config.size**-0.5 * (scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0),
        dropout=eqx.nn.Dropout(config.attention_dropout),
    )


def make_delta(config: DecoderConfig, key: PRNGKeyArray) -> GatedDelta:
    """Returns a layer with a gated delta rule, whose rates of decay are drawn from U(0.01, 16)."""
    keys, heads = iter(jax.random.split(key, 11)), config.state_heads
    return GatedDelta(
        **_recurrence(config, keys, "query key value gate strength decay"),
        decay_bias=jnp.ones(heads),
        log_rate=jnp.log(jax.random.uniform(next(keys), (heads,), minval=0.01, maxval=16.0)),
        norm=eqx.nn.RMSNorm(config.state_value_size, eps=config.norm_eps, use_bias=False),
        output=_output(config, next(keys)),
    )


def make_mamba(config: DecoderConfig, key: PRNGKeyArray) -> Mamba2:
    """Returns a layer with a state space, whose rates of decay are 1, 2, 3, ..."""
    keys, heads, groups = iter(jax.random.split(key, 10)), config.state_heads, config.state_groups
    d_key, d_value = groups * config.state_size, heads * config.state_value_size
    bias = jnp.zeros if config.conv_bias else lambda width: None
    return Mamba2(
        **_recurrence(config, keys, "query key value gate decay"),
        decay_bias=config.initial_steps.bias(heads, next(keys)),
        log_rate=jnp.log(jnp.arange(1.0, heads + 1)),
        norm=GroupRMSNorm(d_value, groups, eps=config.norm_eps) if config.norms_states else None,
        output=_output(config, next(keys)),
        query_bias=bias(d_key),
        key_bias=bias(d_key),
        value_bias=bias(d_value),
        skip=jnp.ones(heads),
        step_limits=config.step_limits,
        gates_first=not config.norms_first,
        factors=config.factors.states,
    )


def make_mamba1(config: DecoderConfig, key: PRNGKeyArray) -> Mamba1:
    """Returns a layer with the state space of the first Mamba, whose rates of decay are 1, 2, 3, ... in each feature."""
    keys, std, d = iter(jax.random.split(key, 10)), config.init_std, config.d_model
    inner, size, rank, steps = config.state_value_size, config.state_size, config.rank, config.initial_steps
    make = lambda n_in, n_out: normal_linear(n_in, n_out, std=std, use_bias=False, key=next(keys))  # noqa: E731

    def make_scan_norm(width: int) -> eqx.nn.RMSNorm | None:
        if config.scan_norm is None:
            return None
        is_plain = config.scan_norm == "plain"
        eps = config.latent_eps if is_plain else config.norm_eps
        return eqx.nn.RMSNorm(width, eps=eps, use_weight=not is_plain, use_bias=False)

    decay = eqx.tree_at(lambda layer: layer.weight, make(rank, inner), steps.weight(inner, rank, next(keys)))
    return Mamba1(
        query=make(inner, size),
        key=make(inner, size),
        value=make(d, inner),
        gate=make(d, inner),
        decay=decay,
        query_taps=None,
        key_taps=None,
        value_taps=std * jax.random.normal(next(keys), (inner, config.conv_kernel)),
        decay_bias=steps.bias(inner, next(keys)),
        log_rate=jnp.log(jnp.broadcast_to(jnp.arange(1.0, size + 1), (inner, size))),
        norm=None,
        output=_output(config, next(keys)),
        n_groups=1,
        n_heads=1,
        activation=config.mixer_activation or config.activation,
        low=make(inner, rank),
        query_norm=make_scan_norm(size),
        key_norm=make_scan_norm(size),
        low_norm=make_scan_norm(rank),
        value_bias=jnp.zeros(inner) if config.conv_bias else None,
        skip=jnp.ones(inner),
    )


def _recurrence(config: DecoderConfig, keys: Iterator[PRNGKeyArray], projections: str) -> dict[str, Any]:
    """Returns the fields that mixers with states share, with these projections."""
    d, std, heads, groups = config.d_model, config.init_std, config.state_heads, config.state_groups
    widths: dict[str, int] = dict.fromkeys(("query", "key"), groups * config.state_size)
    widths |= dict.fromkeys(("value", "gate"), heads * config.state_value_size)
    make = functools.partial(normal_linear, d, std=std, use_bias=False)
    layers = {name: make(widths.get(name, heads), key=next(keys)) for name in projections.split()}
    read = ("query", "key", "value")
    taps = {f"{name}_taps": std * jax.random.normal(next(keys), (widths[name], config.conv_kernel)) for name in read}
    sizes = {"n_groups": groups, "n_heads": heads, "activation": config.mixer_activation or config.activation}
    return {**layers, **taps, **sizes}


def _output(config: DecoderConfig, key: PRNGKeyArray) -> eqx.nn.Linear:
    """Returns the projection of what a mixer with states computes."""
    width = config.state_heads * config.state_value_size
    return normal_linear(width, config.d_model, std=residual_std(config), use_bias=False, key=key)


def make_conv(config: DecoderConfig, key: PRNGKeyArray) -> ShortConv:
    """Returns a short convolution between two gates."""
    *keys, taps_key, output_key = jax.random.split(key, 5)
    d, std = config.d_model, config.init_std
    value, gate_in, gate_out = (normal_linear(d, d, std=std, use_bias=False, key=key) for key in keys)
    taps = std * jax.random.normal(taps_key, (d, config.conv_kernel))
    output = normal_linear(d, d, std=residual_std(config), use_bias=False, key=output_key)
    return ShortConv(value, gate_in, gate_out, taps, output)


def make_mixer(config: DecoderConfig, key: PRNGKeyArray) -> Recurrence | ShortConv:
    """Returns a layer of the kind that the config has in place of some attentions."""
    return {"delta": make_delta, "mamba": make_mamba, "mamba1": make_mamba1, "conv": make_conv}[config.mixer](config, key)


def empty_states(config: DecoderConfig, dtype: Any) -> States:
    """Returns the states of all mixers before the first token."""
    n, kept = sum(config.mixers), config.conv_kernel - 1
    if config.mixer == "conv":
        return States.empty(((n, kept, config.d_model),), None, dtype)
    heads, size, value_size = config.state_heads, config.state_size, config.state_value_size
    widths = (*[config.state_groups * size] * (0 if config.mixer == "mamba1" else 2), heads * value_size)
    return States.empty(tuple((n, kept, width) for width in widths), (n, heads, size, value_size), dtype)
