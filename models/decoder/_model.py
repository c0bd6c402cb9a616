"""What every decoder computes: blocks of attention and MLP, or experts, between an embedding and an output head.

The values of `CausalLMConfig` say what a block has. Attention, positions, experts and the stack are those of `nn`.

Dims: seq = tokens of one example, d = width of the model, heads x size = width of the queries, groups x size = width of keys
and values, half = half of the rotary dims of a head, embedding = width of the embedding, which commonly is d.
"""

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..generation import Decoder
from ..hf import Pretrained, WeightMap
from ..nn import (
    ACTIVATIONS,
    Attention,
    Cache,
    MixtureOfExperts,
    OffsetRMSNorm,
    Routing,
    Scaling,
    SegmentMask,
    Stack,
    apply_rotary,
    causal_mask,
    check_length,
    check_segments,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    rotation,
    soft_cap,
    token_positions,
)
from ._config import CausalLMConfig

Norm = eqx.nn.RMSNorm | eqx.nn.LayerNorm
# Passed from block to block: the residual stream [seq, d], the cache, the index of the layer if layers differ, and the sum
# of what the routers did.
Carry = tuple[Array, Cache | None, Array | None, Routing | None]


def make_norm(config: CausalLMConfig, size: int) -> Norm:
    """Returns a norm of the config's kind."""
    if config.norm == "rms":
        return eqx.nn.RMSNorm(size, eps=config.norm_eps, use_bias=False)
    if config.norm == "offset_rms":
        return OffsetRMSNorm(size, eps=config.norm_eps)
    has_leaves = config.norm == "layer"
    return eqx.nn.LayerNorm(size, eps=config.norm_eps, use_weight=has_leaves, use_bias=has_leaves and config.norm_bias)


def residual_std(config: CausalLMConfig) -> float:
    """Returns the standard deviation of the initial weights that add to the residual stream, two in each block."""
    return config.init_std / (2 * config.n_layers) ** 0.5 if config.scales_residual else config.init_std


def make_attention(config: CausalLMConfig, key: PRNGKeyArray) -> Attention:
    """Returns the attention of a block."""
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, size, std = config.d_model, config.size, config.init_std
    output_bias = config.attention_bias if config.output_bias is None else config.output_bias

    def project(n_heads: int, key: PRNGKeyArray) -> eqx.nn.Linear:
        return normal_linear(d, n_heads * size, std=std, use_bias=config.attention_bias, key=key)

    def head_norm(n_heads: int) -> Norm | None:
        sizes = {"head": size, "all": n_heads * size}
        return None if config.head_norm is None else make_norm(config, sizes[config.head_norm])

    return Attention(
        query=project(config.n_heads, q_key),
        key=project(config.groups, k_key),
        value=project(config.groups, v_key),
        output=normal_linear(config.n_heads * size, d, std=residual_std(config), use_bias=output_bias, key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.groups,
        dropout=eqx.nn.Dropout(config.attention_dropout),
        scale=config.attention_scale,
        query_norm=head_norm(config.n_heads),
        key_norm=head_norm(config.groups),
        cap=config.attention_cap,
        sinks=jnp.zeros(config.n_heads) if config.has_sinks else None,
    )


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, or three of which one gates another (arXiv:2002.05202)."""

    gate: eqx.nn.Linear | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: CausalLMConfig, *, key: PRNGKeyArray):
        *gate_key, up_key, down_key = jax.random.split(key, 3 if config.is_gated else 2)
        make = functools.partial(normal_linear, use_bias=config.mlp_bias)
        d, d_mlp, std = config.d_model, config.inner, config.init_std
        self.gate = make(d, d_mlp, std=std, key=gate_key[0]) if config.is_gated else None
        self.up = make(d, d_mlp, std=std, key=up_key)
        self.down = make(d_mlp, d, std=residual_std(config), key=down_key)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            return linear(self.down, activate(linear(self.up, x)))
        return linear(self.down, activate(linear(self.gate, x)) * linear(self.up, x))


class Block(eqx.Module):
    """Attention and MLP, each with norms before or after it, one after the other or in parallel, and residual."""

    attention_norm: Norm | None
    attention: Attention
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | MixtureOfExperts
    mlp_post_norm: Norm | None
    dropout: eqx.nn.Dropout
    sums_norms: bool = eqx.field(static=True)  # norms come after additions
    is_parallel: bool = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    is_interleaved: bool = eqx.field(static=True)

    def __init__(self, config: CausalLMConfig, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        make = functools.partial(make_norm, config, config.d_model)
        has_pre, has_post = config.norm_places != "post", config.norm_places in ("post", "both")
        self.attention_norm = make() if has_pre else None
        self.attention = make_attention(config, attention_key)
        self.attention_post_norm = make() if has_post else None
        self.mlp_norm = make() if has_pre and not config.shares_norm else None
        self.mlp = _mlp(config, mlp_key)
        self.mlp_post_norm = make() if has_post else None
        self.dropout = eqx.nn.Dropout(config.residual_dropout)
        self.sums_norms = config.norm_places == "sum"
        self.is_parallel, self.residual_scale = config.is_parallel, config.residual_scale
        self.is_interleaved = config.is_interleaved

    def __call__(
        self,
        carry: Carry,
        masks: tuple[Bool[Array, "seq source"], ...],
        angles: tuple[tuple[Array, Array], ...],
        kinds: tuple[Int[Array, " layers"], Int[Array, " layers"]],
        segments: Int[Array, " seq"] | None = None,
        counts: Bool[Array, " seq"] | None = None,
        *memory: Any,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        """Returns the carry after this block.

        **Arguments:**

        - `masks`, `angles`: the different masks, and cosines and sines, of layers. `kinds` are the indices of each layer's.
        - `counts`: False for padding, which experts do not count; None for all.
        - `memory`: passed to `between`.
        """
        x, cache, layer, routing = carry
        mask = _select(masks, kinds[0], layer)
        if segments is not None:
            mask = SegmentMask(mask, segments, segments)
        rotary = None
        if angles:
            cos, sin = _select(angles, kinds[1], layer)
            rotary = functools.partial(apply_rotary, cos=cos, sin=sin, is_interleaved=self.is_interleaved)
        before, after = (_unchanged, _apply) if self.sums_norms else (_apply, _unchanged)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            normed = before(self.attention_norm, x)
            mixed, cache = self.attention(normed, mask=mask, rotary=rotary, cache=cache, key=keys[0])
            mixed = self._scaled(_apply(self.attention_post_norm, mixed), keys[1])
            x = x if self.is_parallel else after(self.attention_norm, x + mixed)
        x = self.between(x, cache, *memory, key=key)
        with jax.named_scope("mlp"):
            computed, routed = self._compute(normed if self._shares_norm else before(self.mlp_norm, x), counts)
            computed = self._scaled(_apply(self.mlp_post_norm, computed), keys[2])
            x = x + (mixed + computed) if self.is_parallel else after(self.mlp_norm, x + computed)
        if routed is not None:
            routing = jax.tree.map(jnp.add, routing, routed)
        return x, cache, None if layer is None else layer + 1, routing

    def between(self, x: Float[Array, "seq d"], cache: Cache | None, *memory: Any, key: Any) -> Float[Array, "seq d"]:
        """Returns the residual stream between attention and MLP. A subclass may add a cross-attention."""
        del cache, memory, key
        return x

    @property
    def _shares_norm(self) -> bool:
        return self.attention_norm is not None and self.mlp_norm is None

    def _compute(
        self, x: Float[Array, "seq d"], counts: Bool[Array, " seq"] | None
    ) -> tuple[Float[Array, "seq d"], Routing | None]:
        return self.mlp(x, mask=counts) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(x), None)

    def _scaled(self, x: Float[Array, "seq d"], key: PRNGKeyArray | None) -> Float[Array, "seq d"]:
        x = self.dropout(x, key=key)
        return x if self.residual_scale == 1 else x * self.residual_scale


def _mlp(config: CausalLMConfig, key: PRNGKeyArray) -> Mlp | MixtureOfExperts:
    if not config.n_experts:
        return Mlp(config, key=key)
    return MixtureOfExperts(
        config.d_model,
        config.inner,
        config.n_experts,
        config.n_chosen,
        is_gated=config.is_gated,
        activation=ACTIVATIONS[config.activation],
        renormalize=config.renormalize,
        init_std=config.init_std,
        key=key,
    )


def _apply(layer: Norm | None, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    return x if layer is None else norm(layer, x)


def _unchanged(layer: Norm | None, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    del layer
    return x


def _select(values: tuple[Any, ...], kinds: Int[Array, " layers"], layer: Array | None) -> Any:
    """Returns the value of a layer."""
    # A kernel recognises a causal mask only if it is not selected by an index.
    if len(values) == 1:
        return values[0]
    pick = lambda *arrays: jax.lax.dynamic_index_in_dim(jnp.stack(arrays), kinds[layer], keepdims=False)  # noqa: E731
    return jax.tree.map(pick, *values)


class CausalLM(Decoder, Pretrained):
    """A decoder, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = Llama(LlamaConfig.llama3("8b"), key=jax.random.key(0))
    logits = jax.vmap(model)(ids)
    ```

    A key is needed only for a config with dropout. `eqx.nn.inference_mode(model)` turns dropout off.
    """

    config_class: ClassVar[type[CausalLMConfig]] = CausalLMConfig
    block_class: ClassVar[type[Block]] = Block

    embedding: eqx.nn.Embedding
    project_in: eqx.nn.Linear | None  # None if the embedding has the model's width
    # An array instead of an `eqx.nn.Embedding`: it is mostly read as a slice, so a plan must not shard its rows.
    positions: Float[Array, "rows d"] | None
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: Norm | None
    project_out: eqx.nn.Linear | None
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    head_bias: Float[Array, " vocab"] | None  # the head's bias in that case
    config: Any = eqx.field(static=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.model_types = (cls.config_class.model_type,)
        if "architectures" not in cls.__dict__:
            cls.architectures = (cls.config_class.architecture,)

    def __init__(self, config: CausalLMConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), biases 0, norms 1.
        """
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        width = d if config.d_embedding is None else config.d_embedding
        embedding_key, stack_key, head_key = jax.random.split(key, 3)
        self.positions = None
        if config.position_offset is not None:
            positions_key, stack_key, head_key = stack_key, head_key, jax.random.fold_in(key, 1)
            n_rows = config.n_positions + config.position_offset
            self.positions = std * config.position_scale * jax.random.normal(positions_key, (n_rows, d))
        self.embedding = normal_embedding(vocab, width, std=std, key=embedding_key)
        project = functools.partial(normal_linear, std=std, use_bias=False)
        self.project_in = project(width, d, key=jax.random.fold_in(key, 2)) if width != d else None
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        make = lambda key: self.block_class(config, key=key)  # noqa: E731
        self.stack = Stack(make, config.n_layers, remat=config.remat, key=stack_key)
        self.norm = make_norm(config, d) if config.has_final_norm and config.norm_places != "sum" else None
        self.project_out = project(d, width, key=jax.random.fold_in(key, 3)) if width != d else None
        self.head = None if config.is_tied else normal_linear(width, vocab, std=std, use_bias=config.head_bias, key=head_key)
        self.head_bias = jnp.zeros(vocab) if config.is_tied and config.head_bias else None
        self.config = config

    def logits(self, hidden: Float[Array, "*dims embedding"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            logits = hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)
            logits = logits if self.head_bias is None else logits + self.head_bias
            logits = logits if self.config.logit_divisor == 1 else logits / self.config.logit_divisor
            return soft_cap(logits, self.config.logit_cap)

    def routed(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq embedding"], Routing]:
        """Returns `hidden`, and what the routers did, summed over layers, for `add_routing`.

        See `__call__` for the arguments.

        Raises ValueError for a model without experts.
        """
        if not self.config.n_experts:
            raise ValueError("`n_experts`: expected a model with experts, got 0. Call `hidden` of a model without.")
        check_segments(segments, mask, len(ids))
        if segments is None:
            check_length("ids", len(ids), self.config.n_positions)
        hidden, _, routing = self._run_all(ids, mask, None, key, segments)
        assert routing is not None
        return hidden, routing

    def _run(self, ids, mask, cache, key, segments=None) -> tuple[Float[Array, "seq embedding"], Any]:
        return self._run_all(ids, mask, cache, key, segments)[:2]

    def _run_all(
        self, ids, mask, cache, key, segments=None, *memory
    ) -> tuple[Float[Array, "seq embedding"], Cache | None, Routing | None]:
        (seq,) = ids.shape
        config = self.config
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids)
            scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
            x = x if scale == 1 else x * jnp.asarray(scale, x.dtype)
            x = x if self.project_in is None else linear(self.project_in, x)
            if self.positions is not None:
                offset = config.position_offset
                x = x + learned_positions(self.positions, mask, seq, cache, offset=offset, segments=segments)
            x = self.dropout(x, key=dropout_key)
        windows = config.windows
        has_local = config.local_rope_theta is not None
        ropes = [
            (None if not rotated else (config.local_rope_theta, None) if has_local and window else config.rope)
            for window, rotated in zip(windows, config.rotated, strict=True)
        ]
        masks, mask_kinds = _different(windows)
        angles, angle_kinds = _different(ropes)
        if self.positions is None:
            positions = token_positions(mask, seq, cache, segments=segments)
            angles = [self._angles(positions, rope) for rope in angles]
        else:
            angles = []
        x, cache, _, routing = self.stack(
            (x, cache, jnp.int32(0) if len(masks) > 1 or len(angles) > 1 else None, self._no_routing()),
            tuple(causal_mask(mask, seq, cache, window=window) for window in masks),
            tuple(angles),
            (mask_kinds, angle_kinds),
            segments,
            mask,
            *memory,
            key=stack_key,
        )
        x = _apply(self.norm, x)
        return x if self.project_out is None else linear(self.project_out, x), cache, routing

    def _angles(self, positions: Int[Array, " seq"], rope: tuple[float, Scaling | None] | None) -> tuple[Array, Array]:
        """Returns cosines and sines for a base and a scaling. Without rotary positions, all angles are zero."""
        size = self.config.rotary_size
        if rope is None:
            zeros = jnp.zeros((len(positions), 1, size // 2))
            return zeros + 1, zeros
        return rotation(positions, size, *rope)

    def _no_routing(self) -> Routing | None:
        """Returns the start of the sum over layers."""
        if not self.config.n_experts:
            return None
        zero = jnp.zeros((), jnp.promote_types(self.embedding.weight.dtype, jnp.float32))
        return Routing(*[zero] * 6)

    @property
    def _kv_heads(self) -> tuple[int, int]:
        return self.config.groups, self.config.size

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        shapes = eqx.filter_eval_shape(cls, config, key=jax.eval_shape(lambda: jax.random.key(0)))
        return config.names.weight_map(shapes, config)


def _different(values: Any) -> tuple[list[Any], Int[Array, " layers"]]:
    """Returns the different values of layers, and the index of each layer's."""
    different = list(dict.fromkeys(values))
    return different, jnp.array([different.index(value) for value in values])
