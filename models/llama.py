"""LLaMA 1, 2, 3 and 3.1, Mistral, Qwen2 and Qwen3: pre-norm decoders with rotary positions.

They have RMSNorm, SwiGLU and grouped key/value heads.

Sources: Touvron et al. 2023, *LLaMA* (arXiv:2302.13971) and *Llama 2* (arXiv:2307.09288); Dubey et al. 2024, *The Llama 3
Herd of Models* (arXiv:2407.21783); Jiang et al. 2023, *Mistral 7B* (arXiv:2310.06825); *Qwen2* (arXiv:2407.10671); *Qwen3*
(arXiv:2505.09388). They are one architecture with a few differences, which `LlamaConfig.model_type` selects: Mistral attends
to a window of the last tokens, Qwen2 adds biases to query, key and value, and Qwen3 normalizes each head's queries and keys.
As in transformers, and unlike in Meta's code, rotary positions pair the first half of a head's dims with the second half,
instead of each even dim with the next.

Dims: seq = tokens of one example, d = width of the model, heads x size = width of the queries, groups x size = width of keys
and values, kinds = the number of different masks (one, or two if only some layers have a window).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._kinds import COUNT, RATE, SIZE
from .generation import Decoder, Generation
from .hf import (
    ConfigReader,
    Field,
    FolderConfig,
    ModelType,
    Only,
    Pretrained,
    Row,
    Tokens,
    WeightMap,
    layers,
    rope_from_hf,
    same,
    same_layer,
)
from .nn import (
    Attention,
    Cache,
    Llama3Scaling,
    Scaling,
    SegmentMask,
    Stack,
    apply_rotary,
    causal_mask,
    check_heads,
    check_rates,
    check_sizes,
    embed,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    rotation,
    token_positions,
)

# Passed from block to block: the residual stream [seq, d], the cache, and the index of the layer.
Carry = tuple[Array, Cache | None, Array]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The defaults of each `model_type` for keys that are absent from `config.json`, where they are not the config's own
# defaults.
_QWEN = {
    "vocab_size": 151936,
    "n_positions": 32768,
    "d_mlp": 22016,
    "n_kv_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"n_positions": 131072, "d_mlp": 14336, "n_kv_heads": 8},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_size": 128},
}


_LLAMA3 = {"8b": {"d_mlp": 14336}, "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64}}


# --- the config -------------------------------------------------------------------------------------------------------


def _head_size(size: int | None, known: Mapping[str, Any]) -> int | None:
    """Reads `head_size`: None if `head_dim` equals the default, which follows from the width. Qwen3 has its own default."""
    return None if known["model_type"] != "qwen3" and size == known["d_model"] // known["n_heads"] else size


class _Rope(Row):
    """The base and scaling of the rotary positions."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        theta, scaling = rope_from_hf(reader, known["n_positions"])
        return {"rope_theta": theta, "rope_scaling": scaling}

    def write(self, config: Any) -> dict[str, Any]:
        scaling = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.to_hf()
        return {"rope_parameters": {"rope_theta": config.rope_theta, **scaling}}


class _Windows(Row):
    """The attention window of Mistral and Qwen, and the layers that use it."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        model_type, n_layers = known["model_type"], known["n_layers"]
        if model_type == "llama":
            return {}
        window = reader.get("sliding_window", None if reader.has("sliding_window") else 4096, SIZE)
        if model_type == "mistral":
            return {"window": window}
        if not reader.get("use_sliding_window", False):
            window = None
        first = reader.get("max_window_layers", 28, COUNT)  # the layers before it have no window
        types = reader.get("layer_types", [])
        if types:
            accepted = ("full_attention", *(["sliding_attention"] if window is not None else []))
            if len(types) != n_layers or not all(kind in accepted for kind in types):
                raise reader.refuse("layer_types", types, f"{' or '.join(accepted)} for each of {n_layers} layers")
            windowed = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        else:
            windowed = tuple(range(first, n_layers))
        if window is None or not windowed:
            return {}
        return {"window": window, "windowed_layers": None if len(windowed) == n_layers else windowed}

    def write(self, config: Any) -> dict[str, Any]:
        if config.model_type == "llama":
            return {}
        window = {"sliding_window": config.window}
        if config.model_type == "mistral":
            return window
        types = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        return {**window, "use_sliding_window": config.window is not None, "layer_types": types}


@dataclass(frozen=True)
class LlamaConfig(FolderConfig):
    """The sizes and the dropout rate of a model of the LLaMA family. The defaults are those of the first LLaMA with 7
    billion parameters.

    **Arguments:**

    - `model_type`: `"llama"`, `"mistral"`, `"qwen2"` or `"qwen3"`.
    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `d_model`, `d_mlp`: the width of the model, and the inner width of its MLPs.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block.
    - `n_kv_heads`: the number of key and value heads, a divisor of `n_heads`; None for `n_heads`.
    - `head_size`: the width of one head, even; None for `d_model / n_heads`.
    - `window`: the number of tokens that each token attends to, including itself; None for all tokens before it. Not for
        LLaMA.
    - `windowed_layers`: the indices of the layers with the window; None for all. For Qwen only.
    - `rope_theta`, `rope_scaling`: the base of the rotary frequencies, and their scaling; None for no scaling.
    - `attention_bias`: whether query, key, value and output have biases. For LLaMA and Qwen3; Qwen2 always has the first
        three.
    - `mlp_bias`: whether the MLP's three layers have biases. For LLaMA only.
    - `attention_dropout`: the dropout rate of attention weights, in [0, 1).
    - `norm_eps`: added to the mean square in norms.
    - `is_tied`: whether the output head shares the embedding's weight.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide, rates outside [0, 1), and options that the `model_type`
    does not have.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    n_positions: int = 2048
    d_model: int = 4096
    d_mlp: int = 11008
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    norm_eps: float = 1e-6
    is_tied: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.model_type not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(f"`model_type`: expected one of {known}, got {self.model_type!r}. Pass the most similar one.")
        check_sizes(self, "vocab_size", "n_positions", "d_model", "d_mlp", "n_layers", "n_heads")
        optional = ("n_kv_heads", "head_size", "window")
        check_sizes(self, *(name for name in optional if getattr(self, name) is not None))
        if self.head_size is None or self.model_type == "llama":  # transformers checks it for llama anyway
            check_heads(self)
        if self.n_heads % self.groups:
            raise ValueError(
                f"`n_kv_heads`: expected a divisor of `n_heads`={self.n_heads}, got {self.n_kv_heads}. "
                "Each must serve the same number of heads."
            )
        if self.size % 2:
            raise ValueError(f"`head_size`: expected an even number, got {self.size}. Rotary positions pair its halves.")
        check_rates(self, "attention_dropout")
        for name, types in (
            ("window", ("mistral", "qwen2", "qwen3")),
            ("windowed_layers", ("qwen2", "qwen3")),
            ("attention_bias", ("llama", "qwen3")),
            ("mlp_bias", ("llama",)),
        ):
            value = getattr(self, name)
            if value not in (None, False) and self.model_type not in types:
                raise ValueError(
                    f"`{name}`: expected {None if name.startswith('window') else False} with "
                    f"`model_type`={self.model_type!r}, got {value}. It is implemented for {', '.join(types)}."
                )
        if self.windowed_layers is not None and (
            self.window is None or not set(self.windowed_layers) <= set(range(self.n_layers))
        ):
            raise ValueError(
                f"`windowed_layers`: expected numbers below `n_layers`={self.n_layers} with a window, got "
                f"{self.windowed_layers} with `window`={self.window}. Count from 0, or pass None."
            )

    @property
    def groups(self) -> int:
        """The number of key and value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def size(self) -> int:
        """The width of a head."""
        return self.d_model // self.n_heads if self.head_size is None else self.head_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer without one."""
        has = range(self.n_layers) if self.windowed_layers is None else self.windowed_layers
        return tuple(self.window if i in has else None for i in range(self.n_layers))

    def without_dropout(self) -> "LlamaConfig":
        """The same config without dropout."""
        return replace(self, attention_dropout=0.0)

    @classmethod
    def llama(cls, size: str) -> "LlamaConfig":
        """The first LLaMA: `"7b"`, `"13b"`, `"33b"` (called 30b on the Hub) or `"65b"`."""
        sizes = {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "33b": {"d_model": 6656, "d_mlp": 17920, "n_layers": 60, "n_heads": 52},
            "65b": {"d_model": 8192, "d_mlp": 22016, "n_layers": 80, "n_heads": 64, "norm_eps": 1e-5},
        }
        return cls(**_size_fields(size, sizes))

    @classmethod
    def llama2(cls, size: str) -> "LlamaConfig":
        """Llama 2: `"7b"`, `"13b"` or `"70b"`."""
        sizes = {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8},
        }
        return cls(n_positions=4096, norm_eps=1e-5, **_size_fields(size, sizes))

    @classmethod
    def llama3(cls, size: str) -> "LlamaConfig":
        """Llama 3: `"8b"` or `"70b"`."""
        return cls(
            vocab_size=128256,
            n_positions=8192,
            n_kv_heads=8,
            rope_theta=500000.0,
            norm_eps=1e-5,
            bos_token_id=128000,
            eos_token_id=128001,
            **_size_fields(size, _LLAMA3),
        )

    @classmethod
    def llama3_1(cls, size: str) -> "LlamaConfig":
        """Llama 3.1: `"8b"`, `"70b"` or `"405b"`."""
        sizes = {**_LLAMA3, "405b": {"d_model": 16384, "d_mlp": 53248, "n_layers": 126, "n_heads": 128}}
        scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
        return replace(cls.llama3("8b"), n_positions=131072, rope_scaling=scaling, **_size_fields(size, sizes))

    @classmethod
    def mistral(cls, size: str) -> "LlamaConfig":
        """The first Mistral: `"7b"`."""
        return cls(
            model_type="mistral",
            n_positions=32768,
            n_kv_heads=8,
            window=4096,
            norm_eps=1e-5,
            **_size_fields(size, {"7b": {"d_mlp": 14336}}),
        )

    @classmethod
    def qwen2(cls, size: str) -> "LlamaConfig":
        """Qwen2: `"0.5b"`, `"1.5b"`, `"7b"` or `"72b"`."""
        small, large = {"vocab_size": 151936, "is_tied": True}, {"vocab_size": 152064}
        sizes = {
            "0.5b": {**small, "d_model": 896, "d_mlp": 4864, "n_layers": 24, "n_heads": 14, "n_kv_heads": 2},
            "1.5b": {**small, "d_model": 1536, "d_mlp": 8960, "n_layers": 28, "n_heads": 12, "n_kv_heads": 2},
            "7b": {**large, "d_model": 3584, "d_mlp": 18944, "n_layers": 28, "n_heads": 28, "n_kv_heads": 4},
            "72b": {**large, "d_model": 8192, "d_mlp": 29568, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8},
        }
        return cls(
            model_type="qwen2",
            n_positions=131072,
            rope_theta=1000000.0,
            norm_eps=1e-5 if size == "72b" else 1e-6,
            bos_token_id=151643,
            eos_token_id=151643,
            **_size_fields(size, sizes),
        )

    @classmethod
    def qwen3(cls, size: str) -> "LlamaConfig":
        """Qwen3, the chat models: `"0.6b"`, `"1.7b"`, `"4b"`, `"8b"`, `"14b"` or `"32b"`."""
        sizes = {
            "0.6b": {"d_model": 1024, "d_mlp": 3072, "n_layers": 28, "n_heads": 16, "is_tied": True},
            "1.7b": {"d_model": 2048, "d_mlp": 6144, "n_layers": 28, "n_heads": 16, "is_tied": True},
            "4b": {"d_model": 2560, "d_mlp": 9728, "n_layers": 36, "is_tied": True},
            "8b": {"d_model": 4096, "d_mlp": 12288, "n_layers": 36},
            "14b": {"d_model": 5120, "d_mlp": 17408, "n_layers": 40, "n_heads": 40},
            "32b": {"d_model": 5120, "d_mlp": 25600, "n_layers": 64, "n_heads": 64},
        }
        return cls(
            model_type="qwen3",
            vocab_size=151936,
            n_positions=40960,
            n_kv_heads=8,
            head_size=128,
            rope_theta=1000000.0,
            bos_token_id=151643,
            eos_token_id=151645,
            **_size_fields(size, sizes),
        )

    rows = (
        ModelType(_ABSENT),
        Only("hidden_act", "silu"),
        Field("vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_mlp"),
        Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
        Field("num_attention_heads", "n_heads"),
        Field(
            "num_key_value_heads",
            "n_kv_heads",
            SIZE,
            null=None,
            load=lambda groups, known: None if groups == known["n_heads"] else groups,
            save=lambda config: config.groups,
        ),
        Field("head_dim", "head_size", SIZE, load=_head_size, save=lambda config: config.size),
        _Rope(),
        Field("attention_dropout", kind=RATE),
        Field("rms_norm_eps", "norm_eps"),
        Field("tie_word_embeddings", "is_tied"),
        Tokens(),
        Field("initializer_range", "init_std"),
        Field("attention_bias", only_for=("llama", "qwen3")),
        Field("mlp_bias", only_for=("llama",)),
        _Windows(),
    )


def _size_fields(size: str, sizes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if size not in sizes:
        raise ValueError(f"`size`: expected one of {', '.join(sizes)}, got {size!r}. For other sizes set the fields.")
    return sizes[size]


# --- the model --------------------------------------------------------------------------------------------------------


def _attention(config: LlamaConfig, key: PRNGKeyArray) -> Attention:
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, size, std = config.d_model, config.size, config.init_std
    has_bias = config.attention_bias or config.model_type == "qwen2"
    has_norms = config.model_type == "qwen3"

    def project(n_heads: int, key: PRNGKeyArray) -> eqx.nn.Linear:
        return normal_linear(d, n_heads * size, std=std, use_bias=has_bias, key=key)

    return Attention(
        query=project(config.n_heads, q_key),
        key=project(config.groups, k_key),
        value=project(config.groups, v_key),
        output=normal_linear(config.n_heads * size, d, std=std, use_bias=config.attention_bias, key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.groups,
        dropout=eqx.nn.Dropout(config.attention_dropout),
        query_norm=_rms_norm(config, size) if has_norms else None,
        key_norm=_rms_norm(config, size) if has_norms else None,
    )


def _rms_norm(config: LlamaConfig, size: int) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(size, eps=config.norm_eps, use_bias=False)


class Mlp(eqx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): two layers, one of which gates the other, and an output layer."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        d, d_mlp, std, has_bias = config.d_model, config.d_mlp, config.init_std, config.mlp_bias
        self.gate = normal_linear(d, d_mlp, std=std, use_bias=has_bias, key=gate_key)
        self.up = normal_linear(d, d_mlp, std=std, use_bias=has_bias, key=up_key)
        self.down = normal_linear(d_mlp, d, std=std, use_bias=has_bias, key=down_key)

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, jax.nn.silu(linear(self.gate, x)) * linear(self.up, x))


class Block(eqx.Module):
    """Attention and MLP, each pre-norm and residual."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    mlp_norm: eqx.nn.RMSNorm
    mlp: Mlp

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = _rms_norm(config, config.d_model)
        self.attention = _attention(config, attention_key)
        self.mlp_norm = _rms_norm(config, config.d_model)
        self.mlp = Mlp(config, key=mlp_key)

    def __call__(
        self,
        carry: Carry,
        masks: tuple[Bool[Array, "seq source"], ...],
        kinds: Int[Array, " layers"],
        cos: Float[Array, "seq 1 half"],
        sin: Float[Array, "seq 1 half"],
        segments: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        x, cache, layer = carry
        # A kernel recognises a causal mask only if it is not selected by an index.
        mask = masks[0]
        if len(masks) > 1:
            mask = jax.lax.dynamic_index_in_dim(jnp.stack(masks), kinds[layer], keepdims=False)
        if segments is not None:
            mask = SegmentMask(mask, segments, segments)
        with jax.named_scope("attention"):
            normed = norm(self.attention_norm, x)
            rotary = functools.partial(apply_rotary, cos=cos, sin=sin)
            mixed, cache = self.attention(normed, mask=mask, rotary=rotary, cache=cache, key=key)
            x = x + mixed
        with jax.named_scope("mlp"):
            x = x + self.mlp(norm(self.mlp_norm, x))
        return x, cache, layer + 1


class Llama(Decoder, Pretrained):
    """A model of the LLaMA family, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it
    over a batch.

    ```python
    model = Llama(LlamaConfig.llama3("8b"), key=jax.random.key(0))
    logits = jax.vmap(model)(ids)
    ```

    Published models have no dropout and need no key. `eqx.nn.inference_mode(model)` turns off the dropout of a config that
    has it.
    """

    config_class = LlamaConfig
    model_types = tuple(_ARCHITECTURES)
    architectures = tuple(_ARCHITECTURES.values())

    embedding: eqx.nn.Embedding
    stack: Stack[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), biases 0, norms 1.
        """
        embedding_key, stack_key, head_key = jax.random.split(key, 3)
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        self.embedding = normal_embedding(vocab, d, std=std, key=embedding_key)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = _rms_norm(config, d)
        self.head = None if config.is_tied else normal_linear(d, vocab, std=std, use_bias=False, key=head_key)
        self.config = config

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            return hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)

    def _run(self, ids, mask, cache, key, segments=None) -> tuple[Float[Array, "seq d"], Any]:
        (seq,) = ids.shape
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids)
        config, windows = self.config, self.config.windows
        different = list(dict.fromkeys(windows))
        masks = tuple(causal_mask(mask, seq, cache, window=window) for window in different)
        kinds = jnp.array([different.index(window) for window in windows])
        positions = token_positions(mask, seq, cache, segments=segments)
        cos, sin = rotation(positions, config.size, config.rope_theta, config.rope_scaling)
        x, cache, _ = self.stack((x, cache, jnp.int32(0)), masks, kinds, cos, sin, segments, key=key)
        return norm(self.norm, x), cache

    @property
    def _kv_heads(self) -> tuple[int, int]:
        return self.config.groups, self.config.size

    @classmethod
    def architecture(cls, config: LlamaConfig) -> str:
        """Returns the name of the `transformers` class that loads a saved folder."""
        return _ARCHITECTURES[config.model_type]

    @staticmethod
    def weight_map(config: LlamaConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        has_bias = config.attention_bias or config.model_type == "qwen2"
        projections = [("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")]
        block = [
            *same_layer("input_layernorm", "attention_norm", use_bias=False),
            *(
                n
                for disk, leaf in projections
                for n in same_layer(f"self_attn.{disk}", f"attention.{leaf}", use_bias=has_bias)
            ),
            *same_layer("self_attn.o_proj", "attention.output", use_bias=config.attention_bias),
            *same_layer("post_attention_layernorm", "mlp_norm", use_bias=False),
            *(
                n
                for part in ("gate", "up", "down")
                for n in same_layer(f"mlp.{part}_proj", f"mlp.{part}", use_bias=config.mlp_bias)
            ),
        ]
        if config.model_type == "qwen3":
            block += [
                *same_layer("self_attn.q_norm", "attention.query_norm", use_bias=False),
                *same_layer("self_attn.k_norm", "attention.key_norm", use_bias=False),
            ]
        return WeightMap(
            tensors=[
                same("model.embed_tokens.weight", "embedding.weight"),
                *layers("model.layers.{}.", "stack.blocks.", config.n_layers, block),
                *same_layer("model.norm", "norm", use_bias=False),
                *([] if config.is_tied else [same("lm_head.weight", "head.weight")]),
            ],
            ignored=("*.rotary_emb.inv_freq",),  # frequencies in old files
            copies={"lm_head.weight": "model.embed_tokens.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
        )
