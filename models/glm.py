"""GLM-4: LLaMA with half of each head rotary, whose dims are interleaved.

The newer `glm4` also has norms after attention and MLP.

Source: GLM team 2024, *ChatGLM* (arXiv:2406.12793), and the models' cards, huggingface.co/zai-org.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Names, Rope, rows
from .hf import Field, published

_JOINT = {"mlp.gate_up_proj": ("mlp.gate", "mlp.up")}
_ENDS = (151329, 151336, 151338)


@dataclass(frozen=True)
class GlmConfig(DecoderConfig):
    """The sizes of a GLM-4 of 2024. The defaults are those of glm-4-9b-chat. See `DecoderConfig`."""

    vocab_size, n_positions = 151552, 131072
    d_mlp, n_layers = 13696, 40
    n_kv_heads, head_size = 2, 128
    attention_bias, output_bias = True, False
    rope_share, is_interleaved = 0.5, True
    norm_eps = 0.00000015625
    bos_token_id, eos_token_id, pad_token_id = None, _ENDS, 151329

    model_type = "glm"
    rows = rows(Field("attention_bias"), Rope(has_share=True))
    names = Names(_JOINT)
    sizes = published({"9b": {"norm_eps": 1.5625e-7}})


class Glm(Decoder, config=GlmConfig, init=False):
    """A GLM-4 of 2024, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Glm4Config(GlmConfig):
    """The sizes of a GLM-4-0414. The defaults are those of transformers. See `DecoderConfig`."""

    norm_places = "both"

    model_type = "glm4"
    names = Names({**_JOINT, "post_self_attn_layernorm": "attention_post_norm", "post_mlp_layernorm": "mlp_post_norm"})
    sizes = published({"9b": {"n_positions": 32768, "norm_eps": 1e-5}})


class Glm4(Decoder, config=Glm4Config, init=False):
    """A GLM-4-0414, from token ids to the logits of each next token. See `Decoder`."""
