"""A block of a decoder: attention and an MLP, or experts, with their norms.

The values of `DecoderConfig` say what a block has. Attention is made in `_mixers.py`; the model is in `_model.py`.

Dims: seq = tokens of one example, d = width of the model, heads x size = width of the queries, groups x size = width of keys
and values.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..nn import (
    ACTIVATIONS,
    Attention,
    LatentAttention,
    MixtureOfExperts,
    Mlp,
    Recurrence,
    Routing,
    SegmentMask,
    ShortConv,
    Xielu,
    apply_rotary,
    linear,
    norm,
    normal_linear,
    times,
)
from ._config import DecoderConfig
from ._factors import Factors
from ._layers import LayerKind
from ._mixers import Norm, make_attention, make_latent_attention, make_mixer, make_norm, residual_std

# Passed from block to block: the residual stream [seq, d], the cache, the index of the layer if layers differ, and the sum
# of what the routers did.
Carry = tuple[Array, Any, Array | None, Routing | None]
# Cosines and sines of rotary positions, and the factors of queries, if these grow with the position.
Angles = tuple[Array, Array, Array | None]


def make_mlp(config: DecoderConfig, key: PRNGKeyArray, d_mlp: int | None = None) -> Mlp:
    """Returns an MLP of the config's kind, and of its inner width if none is given."""
    *gate_key, up_key, down_key = jax.random.split(key, 3 if config.is_gated else 2)
    make = functools.partial(normal_linear, use_bias=config.mlp_bias)
    d, d_mlp, std = config.d_model, config.inner if d_mlp is None else d_mlp, config.init_std
    gate = make(d, d_mlp, std=std, key=gate_key[0]) if config.is_gated else None
    down = make(d_mlp, d, std=residual_std(config), key=down_key)
    xielu = Xielu() if config.activation == "xielu" else None
    up, factor = make(d, d_mlp, std=std, key=up_key), config.factors.gate
    return Mlp(gate, up, down, activation=config.activation, xielu=xielu, factor=factor)


class MlpAndExperts(eqx.Module):
    """An MLP and a mixture of experts, each with norms of its own, whose outputs are added. Experts read the residual
    stream, by another norm than their router."""

    mlp: Mlp
    mlp_post_norm: Norm
    router_norm: eqx.nn.RMSNorm
    experts_norm: Norm
    experts: MixtureOfExperts
    experts_post_norm: Norm

    def __init__(self, config: DecoderConfig, *, d_mlp: int | None = None, key: PRNGKeyArray):
        mlp_key, experts_key = jax.random.split(key)
        make = functools.partial(make_norm, config, config.d_model)
        self.mlp = make_mlp(config, mlp_key, d_mlp)
        self.mlp_post_norm, self.experts_norm, self.experts_post_norm = make(), make(), make()
        self.router_norm = eqx.nn.RMSNorm(config.d_model, eps=config.norm_eps, use_bias=False)
        self.experts = _experts(config, experts_key)

    def __call__(
        self, x: Float[Array, "seq d"], stream: Float[Array, "seq d"], *, mask: Bool[Array, " seq"] | None = None
    ) -> tuple[Float[Array, "seq d"], Routing]:
        """Returns the outputs, and what the router did.

        **Arguments:**

        - `x`: the input of the MLP.
        - `stream`: the residual stream.
        - `mask`: False for padding, which experts do not count; None for all.
        """
        routed_by = times(norm(self.router_norm, stream), stream.shape[-1] ** -0.5)
        mixed, routing = self.experts(norm(self.experts_norm, stream), mask=mask, routed_by=routed_by)
        return norm(self.mlp_post_norm, self.mlp(x)) + norm(self.experts_post_norm, mixed), routing


class LayerInput(eqx.Module):
    """Adds a second embedding of each token to the residual stream, gated by the stream."""

    gate: eqx.nn.Linear
    output: eqx.nn.Linear
    norm: Norm
    activation: str = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, *, key: PRNGKeyArray):
        gate_key, output_key = jax.random.split(key)
        d, size, std = config.d_model, config.d_layer_input, config.init_std
        self.gate = normal_linear(d, size, std=std, use_bias=False, key=gate_key)
        self.output = normal_linear(size, d, std=std, use_bias=False, key=output_key)
        self.norm, self.activation = make_norm(config, d), config.activation

    def __call__(self, x: Float[Array, "seq d"], inputs: Float[Array, "seq size"]) -> Float[Array, "seq d"]:
        gated = ACTIVATIONS[self.activation](linear(self.gate, x)) * inputs
        return x + norm(self.norm, linear(self.output, gated))


class Block(eqx.Module):
    """Attention, a mixer that keeps a state, or both, a cross-attention if there is a memory, and MLP, each with norms
    before or after it, one after the other or in parallel, and residual; or only one of them."""

    attention_norm: Norm | None
    attention: Attention | LatentAttention | None
    mixer: Recurrence | ShortConv | None  # in place of attention, or beside it
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | MixtureOfExperts | MlpAndExperts | None
    mlp_post_norm: Norm | None
    layer_input: LayerInput | None
    layer_scale: Float[Array, "*layers 1"] | None
    cross_norm: Norm | None
    cross_attention: Attention | None
    dropout: eqx.nn.Dropout
    sums_norms: bool = eqx.field(static=True)  # norms come after additions
    is_parallel: bool = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    factors: Factors = eqx.field(static=True)
    is_interleaved: bool = eqx.field(static=True)

    def __init__(
        self,
        config: DecoderConfig,
        *,
        is_dense: bool = False,
        part: str = "attention",
        kind: LayerKind | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `is_dense`: whether the block has no experts.
        - `part`: `"attention"`, `"mixer"` in place of it, or `"both"`. If layers are only one part, also `"mlp"` or
            `"experts"`.
        - `kind`: the kind of the layer, if layers are of several kinds with attention; None if not.
        """
        attention_key, mlp_key = jax.random.split(key)
        mixer_key = jax.random.fold_in(attention_key, 1) if part == "both" else attention_key
        make = functools.partial(make_norm, config, config.d_model)
        has_pre, has_post = config.norm_places != "post", config.norm_places in ("post", "both")
        self.attention_norm = make() if has_pre else None
        mixes = part in ("attention", "mixer", "both")
        if part not in ("attention", "both"):
            self.attention = None
        elif config.latent_size is None:
            self.attention = make_attention(config, attention_key, kind)
        else:
            self.attention = make_latent_attention(config, attention_key)
        self.mixer = make_mixer(config, mixer_key) if part in ("mixer", "both") else None
        self.attention_post_norm = make() if has_post else None
        self.mlp_norm = make() if has_pre and not config.shares_norm else None
        d_mlp = None if kind is None else kind.d_mlp
        if mixes and config.has_one_part:
            self.mlp = None
        elif not config.n_experts or is_dense or part == "mlp":
            self.mlp = make_mlp(config, mlp_key, d_mlp)
        elif config.adds_experts:
            self.mlp = MlpAndExperts(config, d_mlp=d_mlp, key=mlp_key)
        else:
            self.mlp = _experts(config, mlp_key)
        norms_experts = config.norms_experts and isinstance(self.mlp, MixtureOfExperts)
        self.mlp_post_norm = make() if has_post or norms_experts else None
        has_input = config.d_layer_input > 0
        self.layer_input = LayerInput(config, key=jax.random.fold_in(key, 1)) if has_input else None
        self.layer_scale = jnp.ones(1) if config.has_layer_scale else None
        crosses, cross_key = config.has_cross_attention, jax.random.fold_in(key, 2)
        self.cross_norm = make() if crosses else None
        self.cross_attention = make_attention(config, cross_key) if crosses else None
        self.dropout = eqx.nn.Dropout(config.residual_dropout)
        self.sums_norms = config.norm_places == "sum"
        self.is_parallel, self.residual_scale = config.is_parallel, config.residual_scale
        self.factors, self.is_interleaved = config.factors, config.is_interleaved

    def __call__(
        self,
        carry: Carry,
        masks: tuple[Bool[Array, "seq source"], ...],
        angles: tuple[Angles, ...],
        kinds: tuple[Int[Array, " layers"], Int[Array, " layers"]] | None,
        segments: Int[Array, " seq"] | None = None,
        counts: Bool[Array, " seq"] | None = None,
        bias: Float[Array, "heads 1 source"] | None = None,
        *memory: Any,
        layer_input: Float[Array, "seq size"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        """Returns the carry after this block.

        **Arguments:**

        - `masks`, `angles`: the different masks and angles of layers. `kinds` are the indices of each layer's; None if there
            is one of each.
        - `counts`: False for padding, which experts do not count and a mixer does not see; None for all.
        - `bias`: added to attention scores; None for none.
        - `memory`: what a cross-attention attends to, and the mask of its rows. With a cache, its keys and values are there.
        - `layer_input`: the second embedding of the layer, if it has one.
        """
        x, cache, layer, routing = carry
        of_masks, of_angles = (None, None) if kinds is None else kinds
        mask = _select(masks, of_masks, layer)
        if segments is not None:
            mask = SegmentMask(mask, segments, segments)
        options: dict[str, Any] = {} if bias is None else {"bias": bias}
        if angles:
            cos, sin, growth = _select(angles, of_angles, layer)
            options["rotary"] = functools.partial(apply_rotary, cos=cos, sin=sin, is_interleaved=self.is_interleaved)
            options |= {} if growth is None else {"factors": growth}
        before, after = (_unchanged, norm) if self.sums_norms else (norm, _unchanged)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        factors = self.factors
        with jax.named_scope("attention"):
            normed = before(self.attention_norm, x)
            mixed = None
            if self.attention is not None:
                read = times(normed, factors.attention_input)
                mixed, cache = self.attention(read, mask=mask, cache=cache, key=keys[0], **options)
                mixed = times(mixed, factors.attention_output)
            if self.mixer is not None:
                read = times(normed, factors.mixer_input)
                kept, cache = self.mixer(read, mask=counts, segments=segments, cache=cache)
                kept = times(kept, factors.mixer_output)
                mixed = kept if mixed is None else mixed + kept
            if mixed is not None:
                mixed = self._scaled(norm(self.attention_post_norm, mixed), keys[1])
                x = x if self.is_parallel else after(self.attention_norm, x + mixed)
        x, routed = self._attend_memory(x, cache, *memory, key=key), None
        if self.mlp is not None:
            with jax.named_scope("mlp"):
                shares_norm = self.attention_norm is not None and self.mlp_norm is None
                computed, routed = self._compute(normed if shares_norm else before(self.mlp_norm, x), x, counts)
                computed = times(computed, factors.mlp_output)
                computed = self._scaled(norm(self.mlp_post_norm, computed), keys[2])
                added = x + computed if mixed is None or not self.is_parallel else x + (mixed + computed)
                x = added if self.is_parallel else after(self.mlp_norm, added)
        if self.layer_input is not None:
            assert layer_input is not None
            with jax.named_scope("layer_input"):
                x = self.layer_input(x, layer_input)
        if self.layer_scale is not None:
            x = x * jax.lax.stop_gradient(self.layer_scale).astype(x.dtype)
        if routed is not None:
            routing = jax.tree.map(jnp.add, routing, routed)
        return x, cache, None if layer is None else layer + 1, routing

    def _attend_memory(self, x: Float[Array, "seq d"], cache: Any, *memory: Any, key: Any) -> Float[Array, "seq d"]:
        """Returns the residual stream after the cross-attention, if there is one."""
        if self.cross_attention is None:
            return x
        values, mask = memory if cache is None else (None, cache.memory_mask)
        mask = None if mask is None else mask[None]
        keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 1))
        with jax.named_scope("cross_attention"):
            pairs = self.project_memory(values) if cache is None else cache.read_memory()
            mixed = self.cross_attention.attend_memory(norm(self.cross_norm, x), pairs, mask=mask, key=keys[0])
            return x + self.dropout(mixed, key=keys[1])

    def project_memory(self, memory: Float[Array, "memory d"] | None) -> tuple[Array, Array]:
        """Returns the keys and values for the cross-attention."""
        assert self.cross_attention is not None and memory is not None
        return self.cross_attention.project_memory(memory)

    def _compute(
        self, x: Float[Array, "seq d"], stream: Float[Array, "seq d"], counts: Bool[Array, " seq"] | None
    ) -> tuple[Float[Array, "seq d"], Routing | None]:
        assert self.mlp is not None
        if isinstance(self.mlp, MlpAndExperts):
            return self.mlp(x, stream, mask=counts)
        return self.mlp(x, mask=counts) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(x), None)

    def _scaled(self, x: Float[Array, "seq d"], key: PRNGKeyArray | None) -> Float[Array, "seq d"]:
        x = self.dropout(x, key=key)
        return times(x, self.residual_scale)


def _experts(config: DecoderConfig, key: PRNGKeyArray) -> MixtureOfExperts:
    return MixtureOfExperts(
        config.d_model,
        config.expert,
        config.n_experts,
        config.n_chosen,
        is_gated=config.is_gated,
        activation=ACTIVATIONS[config.activation],
        use_bias=config.expert_bias,
        limit=config.expert_limit,
        score=config.router_score,
        jitter=config.router_jitter,
        renormalize=config.renormalize,
        eps=config.router_eps,
        scale=config.router_scale,
        has_factors=config.adds_experts,
        has_correction=config.has_correction,
        wide=config.wide_routers,
        n_groups=config.n_expert_groups,
        n_chosen_groups=config.n_chosen_groups,
        d_shared=config.d_shared,
        gates_shared=config.gates_shared,
        averages_shared=config.averages_shared,
        by_logits=config.chooses_by_logits,
        init_std=config.init_std,
        key=key,
    )


def _unchanged(layer: Norm | None, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    del layer
    return x


def _select(values: tuple[Any, ...], kinds: Int[Array, " layers"] | None, layer: Array | None) -> Any:
    """Returns the value of a layer."""
    # A kernel recognises a causal mask only if it is not selected by an index.
    if len(values) == 1:
        return values[0]
    assert kinds is not None
    pick = lambda *arrays: jax.lax.dynamic_index_in_dim(jnp.stack(arrays), kinds[layer], keepdims=False)  # noqa: E731
    return jax.tree.map(pick, *values)
