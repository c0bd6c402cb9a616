"""OLMo 1, 2 and 3: LLaMA with layer norms without leaves, or with norms after attention and MLP.

In OLMo 2, all queries and keys of a token are normalized at once, too. OLMo 3 adds a window in all but every fourth layer.

Sources: *OLMo* (arXiv:2402.00838); *2 OLMo 2 Furious* (arXiv:2501.00656); *Olmo 3* (arXiv:2512.13961).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, LayerTypes, Names, Rope, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class OlmoConfig(DecoderConfig):
    """The sizes of an OLMo 1. The defaults are those with 7 billion parameters. See `DecoderConfig`."""

    vocab_size = 50304
    norm, norm_eps = "plain_layer", 1e-5
    bos_token_id, eos_token_id, pad_token_id = None, 50279, 1

    model_type = "olmo"
    rows = rows(Field("attention_bias"), Only("clip_qkv", None), without=("norm_eps",))
    sizes = published({"1b": {"d_model": 2048, "d_mlp": 8192, "n_layers": 16, "n_heads": 16, "is_tied": True}, "7b": {}})


class Olmo(Decoder, config=OlmoConfig, init=False):
    """An OLMo 1, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Olmo2Config(OlmoConfig):
    """The sizes of an OLMo 2. The defaults are those of transformers. See `DecoderConfig`."""

    head_norm = "all"
    norm, norm_places = "rms", "post"

    model_type = "olmo2"
    rows = rows(Field("attention_bias"))
    names = Names({"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"})
    sizes = published(
        {
            "1b": {"d_model": 2048, "d_mlp": 8192, "n_layers": 16, "n_heads": 16},
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "32b": {"d_model": 5120, "d_mlp": 27648, "n_layers": 64, "n_heads": 40, "n_kv_heads": 8},
        },
        vocab_size=100352, n_positions=4096, rope_theta=500000.0, norm_eps=1e-6, eos_token_id=100257, pad_token_id=100277,
    )  # fmt: skip


class Olmo2(Decoder, config=Olmo2Config, init=False):
    """An OLMo 2, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The sizes of an OLMo 3. The defaults are those of transformers. See `DecoderConfig`."""

    window = 4096
    rope_theta = local_rope_theta = 500000.0

    model_type = "olmo3"
    window_period = 4
    rows = rows(Field("attention_bias"), LayerTypes(), Rope(has_local=True))
    sizes = published(
        {
            "7b": {"vocab_size": 100278, "n_positions": 65536, "norm_eps": 1e-6, "eos_token_id": 100257,
                   "pad_token_id": 100277}
        }
    )  # fmt: skip


class Olmo3(Decoder, config=Olmo3Config, init=False):
    """An OLMo 3, from token ids to the logits of each next token. See `Decoder`."""
