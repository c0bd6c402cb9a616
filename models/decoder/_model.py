"""What every decoder computes: blocks between an embedding and an output head.

The values of `DecoderConfig` say what it has. The block is in `_block.py`; positions and the stack are those of `nn`.

Dims: seq = tokens of one example, d = width of the model, embedding = width of the embedding, which commonly is d.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx._rounding import at_least_float32
from redeqx.errors import wrong

from ..hf import Pretrained, WeightMap
from ..nn import (
    Cache,
    LatestKeys,
    LongScaling,
    Routing,
    Scaling,
    Stack,
    causal_mask,
    check_length,
    check_segments,
    distance_bias,
    embed,
    learned_positions,
    linear,
    near_mask,
    norm,
    normal_embedding,
    normal_linear,
    rotation,
    sinusoids,
    soft_cap,
    times,
    token_positions,
)
from ._block import Angles, Block
from ._blocks import Blocks, LayerInputs
from ._config import DecoderConfig
from ._layers import different, layers_of
from ._mixers import Norm, empty_states, make_norm

FAMILIES: dict[str, type["Decoder"]] = {}  # by `model_type`


class Decoder(Pretrained):
    """A decoder, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = Llama(LlamaConfig.of("llama3-8b"), key=jax.random.key(0))
    logits = jax.vmap(model)(ids)
    ```

    A key is needed only for a config with dropout. `eqx.nn.inference_mode(model)` turns dropout off.
    """

    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig

    embedding: eqx.nn.Embedding
    project_in: eqx.nn.Linear | None  # None if the embedding has the model's width
    # An array instead of an `eqx.nn.Embedding`: it is mostly read as a slice, so a plan must not shard its rows.
    positions: Float[Array, "rows d"] | None
    embedding_norm: Norm | None
    dropout: eqx.nn.Dropout
    layer_inputs: LayerInputs | None
    # Layers before those of `stack`: the ones without experts, or with keys and values that later layers share.
    first: Stack[Any] | None
    stack: Stack[Any]  # of blocks, or of `Blocks` if layers are of several kinds
    norm: Norm | None
    project_out: eqx.nn.Linear | None
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    head_bias: Float[Array, " vocab"] | None  # the head's bias in that case
    config: Any = eqx.field(static=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "architectures" not in cls.__dict__:
            cls.architectures = (cls.config_class.architecture, cls.config_class.base_architecture())
        FAMILIES.setdefault(cls.config_class.model_type, cls)

    def __init__(self, config: DecoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), biases 0, norms 1.
        """
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        width = d if config.d_embedding is None else config.d_embedding
        embedding_key, stack_key, head_key = jax.random.split(key, 3)
        self.positions = None
        if config.position_offset is not None and not config.has_sinusoids:
            positions_key, stack_key, head_key = stack_key, head_key, jax.random.fold_in(key, 1)
            n_rows = config.n_positions + config.position_offset
            self.positions = std * config.position_scale * jax.random.normal(positions_key, (n_rows, d))
        padding = config.pad_token_id if config.zeroes_padding else None
        self.embedding = normal_embedding(vocab, width, std=config.embedding_std * std, zero=padding, key=embedding_key)
        project = functools.partial(normal_linear, std=std, use_bias=False)
        self.project_in = project(width, d, key=jax.random.fold_in(key, 2)) if width != d else None
        self.embedding_norm = make_norm(config, d) if config.has_embedding_norm else None
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        self.layer_inputs = LayerInputs(config, key=jax.random.fold_in(key, 4)) if config.d_layer_input else None
        n_first, first_key = config.n_first_stack, jax.random.fold_in(stack_key, 1)
        if config.by_kind:
            self.first, self.stack = self._stacks_of_kinds(config, stack_key, first_key)
        else:
            self.first = self._stack(config, 0, n_first, first_key) if n_first else None
            self.stack = self._stack(config, n_first, config.n_layers - n_first, stack_key)
        self.norm = make_norm(config, d) if config.has_final_norm and config.norm_places != "sum" else None
        self.project_out = project(d, width, key=jax.random.fold_in(key, 3)) if width != d else None
        has_own = config.has_head and not config.is_tied
        self.head = normal_linear(width, vocab, std=std, use_bias=config.head_bias, key=head_key) if has_own else None
        self.head_bias = jnp.zeros(vocab) if config.is_tied and config.head_bias else None
        self.config = config

    @classmethod
    def _stack(cls, config: DecoderConfig, first: int, n_layers: int, key: PRNGKeyArray) -> Stack[Any]:
        """Returns the stack of some layers. Layers of several kinds are a stack of the smallest group that repeats."""
        kinds = config.kinds(first, n_layers)

        def make(kind: tuple[str, bool], key: PRNGKeyArray) -> Block:
            return Block(config, part=kind[0], is_dense=kind[1], key=key)

        def make_group(key: PRNGKeyArray) -> Blocks:
            keys = jax.random.split(key, len(kinds))
            return Blocks(tuple(make(kind, key) for kind, key in zip(kinds, keys, strict=True)), config.remat)

        if len(kinds) == 1:
            return Stack(functools.partial(make, kinds[0]), n_layers, remat=config.remat, key=key)
        return Stack(make_group, n_layers // len(kinds), key=key)

    @classmethod
    def _stacks_of_kinds(cls, config: DecoderConfig, *keys: PRNGKeyArray) -> tuple[Stack[Any] | None, Stack[Any]]:
        """Returns the stacks of layers with attentions of several kinds."""
        of = {
            layers.field: Stack(
                lambda key, layers=layers: Blocks.of_kinds(config, layers, key=key),
                len(layers.kinds) // layers.period,
                key=stack_key,
            )
            for layers, stack_key in zip(layers_of(config)[::-1], keys, strict=False)
        }
        return of.get("first"), of["stack"]

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Returns the logits of the token that follows each of `ids`, given that token and all before it.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `mask`: True for tokens, False for padding on either side; None if all are tokens. Positions count tokens only.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `memory`, `memory_mask`: the sequence for cross-attentions, and True for its rows that are attended to; None if
            there are no cross-attentions.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, for a mask or a memory together with segments, and for a
        memory without cross-attentions or the reverse.
        """
        masks = {"mask": mask, "segments": segments, "memory": memory, "memory_mask": memory_mask}
        return self.logits(self.hidden(ids, **masks, key=key))

    def hidden(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq embedding"]:
        """Returns the input of `logits`: the residual stream after all blocks and the final norm. See `__call__` for the
        arguments."""
        self._check(ids, mask, segments)
        self._check_memory(memory)
        if segments is not None and memory is not None:
            raise wrong("segments", "None with a memory", list(segments.shape), "Pass one text with its memory.")
        return self.run(ids, mask, None, key, segments, memory, memory_mask)[0]

    def logits(self, hidden: Float[Array, "*dims embedding"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states.

        Raises ValueError for a model without an output head.
        """
        if not self.config.has_head:
            raise wrong("has_head", "True for logits", "False", "Call `hidden`, or a `SentenceEncoder`.")
        with jax.named_scope("head"):
            logits = hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)
            logits = logits if self.head_bias is None else logits + self.head_bias
            return soft_cap(times(logits, 1 / self.config.logit_divisor), self.config.logit_cap)

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
        if not self.config.has_experts:
            raise wrong("routed", "a model with experts", "layers without", "Call its `hidden`.")
        self._check(ids, mask, segments)
        hidden, _, routing = self._run_all(ids, mask, None, key, segments)
        assert routing is not None
        return hidden, routing

    def _check(self, ids: Array, mask: Array | None, segments: Array | None) -> None:
        check_segments(segments, mask, len(ids))
        if segments is None:
            check_length("ids", len(ids), self.config.n_positions)

    def _check_memory(self, memory: Array | None) -> None:
        if (memory is not None) != self.config.has_cross_attention:
            wanted, got = "one" if memory is None else "None", "None" if memory is None else memory.shape
            rule = f"{wanted} with `has_cross_attention`={self.config.has_cross_attention}"
            raise wrong("memory", rule, got, "Change one of the two.")

    def run(
        self,
        ids: Array,
        mask: Bool[Array, " seq"] | None,
        cache: Any,
        key: PRNGKeyArray | None,
        segments: Int[Array, " seq"] | None = None,
        *memory: Array | None,
    ) -> tuple[Float[Array, "seq embedding"], Any]:
        """Returns the input of `logits`, and the cache. See `__call__` for the arguments.

        **Arguments:**

        - `ids`: token ids `[seq]`, or rows `[seq, d]` in place of those of the embedding, such as features of images.
        - `cache`: a cache after `begin`, whose `end` is left to the caller; or None.
        - `memory`: the memory and its mask, if there are cross-attentions and no cache.
        """
        if cache is None or not cache.is_paired:
            return self._run_all(ids, mask, cache, key, segments, *memory)[:2]
        n_original = self.config.rope_scaling.n_original
        if mask is None and len(ids) > n_original:  # from here on, the text is long
            return self._run_all(ids, mask, cache.second(), key)[:2]

        def run(cache: Cache, length: Int[Array, ""]) -> tuple[Array, Cache]:
            hidden, written, _ = self._run_all(ids, mask, replace(cache, is_paired=False), key, length=length)
            assert written is not None
            return hidden, replace(written, is_paired=True)

        axes, lengths = cache.pair_axes(), jnp.array([n_original, n_original + 1])
        (short, long), written = jax.vmap(run, (axes, 0), (0, axes))(cache, lengths)
        # A token of a window, as in speculative decoding, is the last of a text that ends with it.
        is_long = token_positions(mask, len(ids), cache) >= n_original
        return jnp.where(is_long[:, None], long, short), written

    def _run_all(
        self, ids, mask, cache, key, segments=None, *memory, length=None
    ) -> tuple[Float[Array, "seq embedding"], Cache | None, Routing | None]:
        seq, config = len(ids), self.config
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids) if ids.ndim == 1 else ids
            scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
            x = times(x, float(np.asarray(scale, x.dtype)) if config.rounds_embedding_scale else scale)
            x = x if self.project_in is None else linear(self.project_in, x)
            x = norm(self.embedding_norm, x)
            offset = config.position_offset
            if config.has_sinusoids:
                rows = offset + token_positions(mask, seq, cache, segments=segments)
                is_zero = (rows == (-1 if config.pad_token_id is None else config.pad_token_id))[:, None]
                x = x + jnp.where(is_zero, 0, sinusoids(rows, config.d_model)).astype(x.dtype)
            elif self.positions is not None:
                x = x + learned_positions(self.positions, mask, seq, cache, offset=offset, segments=segments)
            x = self.dropout(x, key=dropout_key)
        masks, mask_kinds = different(config.windows)
        angles, angle_kinds = different(config.ropes)
        bias = None
        if config.bias_range is not None:
            scale = config.size**-0.5 if config.scales_bias else None
            options = {"n_heads": config.n_heads, "largest": config.bias_range, "scale": scale}
            bias = distance_bias(mask, seq, cache, segments=segments, **options)
            angles = []
        elif config.position_offset is None:
            positions = token_positions(mask, seq, cache, segments=segments)
            if cache is not None and length is None:
                # After the prompt, each token is the last of its text, also one of a window, as in speculative decoding.
                length = jnp.where(cache.index > 0, positions, positions.max()) + 1
            angles = [] if angles == [None] else [self._angles(positions, rope, length, segments) for rope in angles]
        else:
            angles = []
        if config.is_causal:
            masks = tuple(causal_mask(mask, seq, cache, window=window) for window in masks)
        else:
            masks = tuple(near_mask(mask, seq, window=window) for window in masks)
        if config.by_kind:
            inputs = None if self.layer_inputs is None else self.layer_inputs(_ids_of(ids), x)
            carry = (x, cache, jnp.int32(0), self._no_routing())
            x, cache, routing = self._run_kinds(carry, (masks, tuple(angles), segments, mask), inputs, stack_key)
        else:
            carry = (x, cache, jnp.int32(0) if len(masks) > 1 or len(angles) > 1 else None, self._no_routing())
            kinds = jnp.array(mask_kinds), jnp.array(angle_kinds)
            same = (masks, tuple(angles), kinds, segments, mask, bias, *memory)
            if self.first is not None:
                first_key, stack_key = (None, None) if stack_key is None else jax.random.split(stack_key)
                carry = self.first(carry, *same, key=first_key)
            x, cache, _, routing = self.stack(carry, *same, key=stack_key)
        x = norm(self.norm, x)
        return x if self.project_out is None else linear(self.project_out, x), cache, routing

    def _run_kinds(self, carry, same, inputs, key) -> tuple[Float[Array, "seq d"], Any, Routing | None]:
        """Runs layers of several kinds: those with keys and values of their own, then those that share them."""
        x, cache, _, routing = carry
        parts = layers_of(self.config)
        if len(parts) > 1 and cache is None:
            one_of_each = {kind.store: kind for kind in parts[0].kinds}.values()
            sizes = [(kind.groups, len(x), kind.size) for kind in one_of_each]
            zeros = tuple(jnp.zeros(size, x.dtype) for size in sizes)
            cache = LatestKeys(zeros, zeros)
        keys = (None, None) if key is None else jax.random.split(key)
        for layers, key in zip(parts, keys, strict=False):
            each = None
            if inputs is not None:
                own = inputs[layers.first : layers.first + len(layers.kinds)]
                each = rearrange(own, "(periods n) seq size -> periods n seq size", n=layers.period)
            stack = getattr(self, layers.field)
            x, cache, _, routing = stack((x, cache, jnp.int32(0), routing), *same, each=each, key=key)
        return x, None if isinstance(cache, LatestKeys) else cache, routing

    def _angles(
        self,
        positions: Int[Array, " seq"],
        rope: tuple[int, float, Scaling | None] | None,
        length: Array | None,
        segments: Int[Array, " seq"] | None,
    ) -> Angles:
        """Returns cosines and sines of the rotary dims, and the factors of queries. Without rotary positions, all angles are
        zero."""
        if rope is None:
            zeros = jnp.zeros((len(positions), 1, self.config.rotary_size // 2))
            return zeros + 1, zeros, None
        growth, factors = self.config.query_growth, None
        if growth:
            factors = 1 + growth * jnp.log1p(positions // self.config.rope_scaling.n_original)[:, None, None]
        cos, sin = rotation(positions, *rope, length=length, segments=segments)
        return cos, -sin if self.config.rotates_back else sin, factors

    def _no_routing(self) -> Routing | None:
        """Returns the start of the sum over layers."""
        if not self.config.has_experts:
            return None
        zero = jnp.zeros((), at_least_float32(self.embedding.weight.dtype))
        return Routing(*[zero] * 6)

    def init_cache(
        self, length: int, memory: Float[Array, "memory d"] | None = None, memory_mask: Bool[Array, " memory"] | None = None
    ) -> Cache:
        """Returns an empty cache for one example of at most `length` tokens, including padding. The keys and values of a
        memory are computed here.

        Raises ValueError if `length` exceeds the number of positions, for a model that does not generate, and for a memory
        as a call does.
        """
        self._check_memory(memory)
        config, dtype, scaling = self.config, self.embedding.weight.dtype, self.config.rope_scaling
        if not config.is_causal:
            raise wrong("is_causal", "True to generate", "False", "Call `hidden`, or a `SentenceEncoder`.")
        check_length("length", length, config.n_positions)
        if config.by_kind:
            own = layers_of(config)[0].kinds
            stores = [[kind for kind in own if kind.store == i] for i in range(1 + max(kind.store for kind in own))]
            sizes = [(len(kinds), kinds[0].groups, kinds[0].size) for kinds in stores]
            cache = Cache.of_kinds(sizes, length, dtype)
        elif config.latent_size is not None:
            size = config.latent_size + config.shared_rotary_size
            cache = Cache.empty(config.n_layers, length, 1, size, dtype, value_size=0)
        else:
            cache = Cache.empty(config.n_attentions, length, config.groups, config.size, dtype)
        if any(config.mixers):
            cache = eqx.tree_at(lambda c: c.states, cache, empty_states(config, dtype), is_leaf=lambda x: x is None)
        if memory is not None:
            pairs = self.stack.map(lambda block: block.project_memory(memory))
            cache = replace(cache, memory=pairs, memory_mask=memory_mask)
        return cache.paired() if isinstance(scaling, LongScaling) and length > scaling.n_original else cache

    def decode(
        self, ids: Int[Array, " seq"], cache: Cache, *, mask: Bool[Array, " seq"] | None = None, every: bool = False
    ) -> tuple[Float[Array, "*seq vocab"], Cache]:
        """Continues the sequence in the cache with `ids`: the logits of the token that follows, and the updated cache.

        **Arguments:**

        - `ids`, `mask`: as for a call, but with padding on the left only, so that the last id is a token.
        - `every`: whether to return the logits of the tokens that follow each of `ids`, as a call does.
        """
        (seq,) = ids.shape
        cache = cache.begin(jnp.ones(seq, bool) if mask is None else mask)
        hidden, cache = self.run(ids, mask, cache, None)
        return self.logits(hidden if every else hidden[-1]), cache.end(seq)

    @classmethod
    def architecture(cls, config: Any) -> str:
        return cls.architectures[0] if config.has_head else config.base_architecture()

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        shapes = eqx.filter_eval_shape(cls, config, key=jax.eval_shape(lambda: jax.random.key(0)))
        return config.disk_names().weight_map(shapes, config)


def _ids_of(ids: Array) -> Int[Array, " seq"]:
    """Raises ValueError for embedded rows, whose second embeddings are not known."""
    if ids.ndim != 1:
        rule = "ids for a model with `d_layer_input`"
        raise wrong("embedded", rule, list(ids.shape), "Pass ids to `hidden`: each layer has an embedding of its own.")
    return ids
