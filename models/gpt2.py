"""GPT-2: a pre-norm decoder with learned positions, GELU by tanh, and a tied output head.

Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, and its code, github.com/openai/gpt-2.
Only the layout differs from that code: query, key and value are three layers instead of one, so that a plan shards each of
them by whole heads.

Dims: seq = tokens of one example, d = width of the model.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .decoder import GPT_ALIASES, GPT_ROWS, Block, CausalLM, GPTConfig, Names, make_attention, make_norm, rows
from .hf import Field, Only, published
from .nn import Attention, Cache, Stack, check_length, check_segments, norm


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """The sizes and dropout rates of GPT-2. The defaults are those of the smallest published one. See `CausalLMConfig`.

    **Arguments:**

    - `has_cross_attention`: whether each block also attends to a memory, as in a captioning decoder.
    - `init_std`: the published 0.02 suits widths of 768 and more; narrower models learn faster with a larger one.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    attention_bias: bool = True
    position_offset: int | None = 0
    is_tied: bool = True
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    has_cross_attention: bool = False

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    scales_residual = True
    position_scale = 0.5
    rows = rows(
        Only("scale_attn_weights", True, is_written=False),
        Only("scale_attn_by_inverse_layer_idx", False, is_written=False),
        *GPT_ROWS,
        Field("add_cross_attention", "has_cross_attention"),
        without=("n_kv_heads", "head_size", "rope_theta"),
    )
    aliases = GPT_ALIASES
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
            "attn.c_proj": "attention.output",
            "ln_cross_attn": "cross_norm",
            "crossattention.q_attn": "cross_attention.query",
            "crossattention.c_attn": ("cross_attention.key", "cross_attention.value"),
            "crossattention.c_proj": "cross_attention.output",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        token_score="classifier",
        norm="transformer.ln_f",
        others={"transformer.wpe.weight": "positions"},
        is_transposed=True,
        # Attention masks in old files.
        ignored=("*.attn.bias", "*.attn.masked_bias", "*.crossattention.bias", "*.crossattention.masked_bias"),
        # The Hub's first files hold the base model, whose names lack the prefix.
    )
    sizes = published(
        {
            "124m": {},
            "355m": {"d_model": 1024, "n_layers": 24, "n_heads": 16},
            "774m": {"d_model": 1280, "n_layers": 36, "n_heads": 20},
            "1.6b": {"d_model": 1600, "n_layers": 48, "n_heads": 25},
        }
    )


class CrossBlock(Block):
    """Attention, cross-attention (if configured) and MLP, each pre-norm and residual."""

    cross_norm: Any
    cross_attention: Attention | None

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
        self.cross_norm = make_norm(config, config.d_model) if config.has_cross_attention else None
        cross_key = jax.random.fold_in(key, 2)
        self.cross_attention = make_attention(config, cross_key) if config.has_cross_attention else None

    def between(self, x: Float[Array, "seq d"], cache: Cache | None, *memory: Any, key: Any) -> Float[Array, "seq d"]:
        """Returns the residual stream after the cross-attention.

        **Arguments:**

        - `memory`: the memory, and the mask of its rows. With a cache, its keys and values are there.
        """
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


class GPT2(CausalLM, config=GPT2Config, init=False):
    """GPT-2, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = GPT2(GPT2Config.of("124m"), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed. The initial weights are those of OpenAI's code:
    N(0, `init_std`²), positions N(0, (`init_std` / 2)²), layers that add to the residual stream scaled by `1 / sqrt(2 *
    n_layers)`, biases 0, norms 1.
    """

    block_class = CrossBlock

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
        """Returns the logits of the token that follows each of `ids`, given that token, all before it and a memory.

        **Arguments:**

        - `memory`, `memory_mask`: the sequence for the cross-attentions, and True for its rows that are attended to. None if
            there are no cross-attentions.
        - The others are those of every `Decoder`.

        Raises ValueError as a `Decoder` does, for a memory together with segments, and for a memory without cross-attentions
        or the reverse.
        """
        hidden = self.hidden(ids, mask=mask, segments=segments, memory=memory, memory_mask=memory_mask, key=key)
        return self.logits(hidden)

    def hidden(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the input of `logits`: the residual stream after all blocks and the final norm. See `__call__` for the
        arguments."""
        check_segments(segments, mask, len(ids))
        if segments is None:
            check_length("ids", len(ids), self.config.n_positions)
        elif memory is not None:
            raise ValueError(
                f"`segments`: expected None with a memory, got {list(segments.shape)}. Pass one text with its memory."
            )
        self._check_memory(memory)
        return self._run_all(ids, mask, None, key, segments, memory, memory_mask)[0]

    def init_cache(
        self,
        length: int,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
    ) -> Cache:
        """Returns an empty cache for one example of at most `length` tokens. Its memory's keys and values are computed here.

        Raises ValueError if `length` exceeds the number of positions, and for a memory as a call does.
        """
        self._check_memory(memory)
        pairs = None
        if memory is not None:
            stack: Stack[Any] = self.stack
            pairs = stack.map(lambda block: block.project_memory(memory))
        cache = super().init_cache(length)
        return eqx.tree_at(lambda c: (c.memory, c.memory_mask), cache, (pairs, memory_mask), is_leaf=lambda x: x is None)

    def _check_memory(self, memory: Float[Array, "memory d"] | None) -> None:
        if (memory is not None) != self.config.has_cross_attention:
            wanted, got = "one" if memory is None else "None", "None" if memory is None else memory.shape
            raise ValueError(
                f"`memory`: expected {wanted} with `has_cross_attention`={self.config.has_cross_attention}, got {got}. "
                "Change one of the two."
            )
