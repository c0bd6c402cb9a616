"""Gemma 1, 2 and 3 (text): norms whose leaf is the scale minus one, scaled embeddings, and a gate by GELU.

Gemma 2 also has norms after attention and MLP, caps of scores and logits, and a window in every other layer. Gemma 3 has
norms of each head instead of caps, a window in all but every sixth layer, and another base of rotary positions in those.
EmbeddingGemma is a Gemma 3 whose tokens attend to both sides, and folders of it are those of a `SentenceEncoder`.

Sources: *Gemma* (arXiv:2403.08295); *Gemma 2* (arXiv:2408.00118); *Gemma 3* (arXiv:2503.19786).
"""

from dataclasses import dataclass

from ._kinds import FLAG, POSITIVE, TEXT
from .decoder import PART_OF_LARGER, Decoder, DecoderConfig, LayerTypes, Names, Rope, rows
from .hf import Field, Only, published

_BOTH = {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def _scalar(config: DecoderConfig) -> float | int:
    """Returns `query_pre_attn_scalar`, an integer in transformers."""
    assert config.attention_scale is not None
    scalar = round(config.attention_scale**-2, 9)
    return int(scalar) if scalar == int(scalar) else scalar


# The scale of attention scores is one over the square root of this number.
_SCALE = Field(
    "query_pre_attn_scalar", "attention_scale", POSITIVE, default=256.0, load=lambda value, known: value**-0.5, save=_scalar
)
_ATTENTION_CAP = Field("attn_logit_softcapping", "attention_cap", POSITIVE, null=None)
_LOGIT_CAP = Field("final_logit_softcapping", "logit_cap", POSITIVE, null=None)


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """The sizes of a Gemma. The defaults are those of the first one with 7 billion parameters. See `DecoderConfig`."""

    vocab_size, n_positions = 256000, 8192
    d_model, d_mlp, n_layers, n_heads = 3072, 24576, 28, 16
    n_kv_heads, head_size = 16, 256
    norm = "offset_rms"
    activation = "gelu_pytorch_tanh"
    embedding_scale = None
    is_tied = True
    bos_token_id, eos_token_id, pad_token_id = 2, 1, 0

    model_type = "gemma"
    rounds_embedding_scale = True
    # Old files say "gelu", for which transformers computes the approximation, too.
    rows = rows(
        Field("hidden_act", "activation", TEXT, load=lambda value, known: "gelu_pytorch_tanh" if value == "gelu" else value),
        Field("attention_bias"),
        Only("use_bidirectional_attention", None, False),
    )
    sizes = published({"2b": {"d_model": 2048, "d_mlp": 16384, "n_layers": 18, "n_heads": 8, "n_kv_heads": 1}, "7b": {}})


class Gemma(Decoder, config=GemmaConfig, init=False):
    """A Gemma, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """The sizes of a Gemma 2. The defaults are those with 2 billion parameters. See `DecoderConfig`."""

    d_model, d_mlp, n_layers, n_heads = 2304, 9216, 26, 8
    n_kv_heads = 4
    window = 4096
    attention_scale, attention_cap = 256**-0.5, 50.0
    norm_places = "both"
    logit_cap = 30.0

    model_type = "gemma2"
    window_period = 2
    rows = rows(
        Field("hidden_activation", "activation", TEXT),
        Field("attention_bias"),
        _SCALE,
        _ATTENTION_CAP,
        _LOGIT_CAP,
        Only("use_bidirectional_attention", False, None),
        LayerTypes(),
    )
    names = Names(_BOTH)
    sizes = published(
        {
            "2b": {},
            "9b": {"d_model": 3584, "d_mlp": 14336, "n_layers": 42, "n_heads": 16, "n_kv_heads": 8},
            "27b": {"d_model": 4608, "d_mlp": 36864, "n_layers": 46, "n_heads": 32, "n_kv_heads": 16, "head_size": 128,
                    "attention_scale": 144**-0.5},
        }
    )  # fmt: skip


class Gemma2(Decoder, config=Gemma2Config, init=False):
    """A Gemma 2, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class VaultGemmaConfig(Gemma2Config):
    """The sizes of a VaultGemma: a Gemma 2 without norms after attention and MLP. The defaults are those of transformers.
    See `DecoderConfig`."""

    norm_places = "pre"

    model_type = "vaultgemma"
    names = Names({"pre_feedforward_layernorm": "mlp_norm"})


class VaultGemma(Decoder, config=VaultGemmaConfig, init=False):
    """A VaultGemma, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """The sizes of a Gemma 3 for text. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 262208, 131072
    head_norm = "head"
    attention_cap = logit_cap = None
    rope_theta, local_rope_theta = 1000000.0, 10000.0

    model_type = "gemma3_text"
    part = "text_config"
    window_period = 6

    @classmethod
    def stem(cls) -> str:
        """Returns the start of the names of transformers' classes, but that of the language model."""
        return "Gemma3Text"

    rows = rows(
        Field("hidden_activation", "activation", TEXT),
        Field("attention_bias"),
        _SCALE,
        Only("attn_logit_softcapping", None),  # transformers reads it, and does not apply it
        _LOGIT_CAP,
        Field(
            "use_bidirectional_attention",
            "is_causal",
            FLAG,
            default=False,
            load=lambda value, known: not value,
            save=lambda config: not config.is_causal,
        ),
        Only("is_causal", True, is_written=False),
        LayerTypes("sliding_window_pattern"),
        Rope(has_local=True),
    )
    names = Names(_BOTH, **PART_OF_LARGER)
    sizes = published(
        {
            "270m": {"d_model": 640, "d_mlp": 2048, "n_layers": 18},
            "1b": {"d_model": 1152, "d_mlp": 6912},
            "embedding-300m": {"d_model": 768, "d_mlp": 1152, "n_layers": 24, "n_heads": 3, "n_positions": 2048,
                               "is_causal": False},
        },
        vocab_size=262144, n_positions=32768, n_heads=4, n_kv_heads=1, window=512,
    )  # fmt: skip


class Gemma3(Decoder, config=Gemma3Config, init=False):
    """A Gemma 3 for text, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("gemma3_text", "gemma3")

    @classmethod
    def architecture(cls, config: Gemma3Config) -> str:
        """Returns the class of transformers that loads a saved folder."""
        return super().architecture(config) if config.is_causal else config.base_architecture()
