"""Qwen3.5, its text models: Qwen3-Next without experts, or with others, and with its own names of the delta rule's layers.

Folders that also have a model of images are read by the class, `Qwen3_5.from_pretrained(folder)`, as the text model alone.
Layers that predict further tokens, `mtp`, are not read.

Source: Qwen team 2026, *Qwen3.5*, as in `transformers`.
"""

from dataclasses import dataclass

from .decoder import DELTA, DELTA_NAMES, Decoder, Names, Rope, expert_names, rows
from .hf import Aliases, Field, Fields, Only, published
from .qwen import Qwen3Config

_BLOCK = {
    **DELTA_NAMES,
    "linear_attn.in_proj_qkv": ("mixer.query", "mixer.key", "mixer.value"),
    "linear_attn.in_proj_z": "mixer.gate",
    "linear_attn.in_proj_b": "mixer.strength",
    "linear_attn.in_proj_a": "mixer.decay",
}
_OTHERS = {
    "ignored": ("*.rotary_emb.inv_freq", "mtp.*", "model.visual.*"),
    "aliases": ((r"^model\.language_model\.", "model."),),
}
_ROWS = (*DELTA, Rope(has_share=True), Field("attention_bias"), Only("attn_output_gate", True, is_written=False))
_PUBLISHED = {"n_positions": 262144, "rope_theta": 1e7, "eos_token_id": 248044}


@dataclass(frozen=True)
class Qwen3_5Config(Qwen3Config):
    """The sizes of a Qwen3.5. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 248320
    d_mlp, n_heads = 12288, 16
    n_kv_heads, head_size = 4, 256
    gates_attention = True
    rope_share = 0.25
    norm = "offset_rms"

    model_type = "qwen3_5_text"
    part = "text_config"
    attention_period = 4
    rows = rows(*_ROWS)
    names = Names(_BLOCK, **_OTHERS)
    sizes = published(
        {
            "0.8b": {"d_model": 1024, "d_mlp": 3584, "n_layers": 24, "n_heads": 8, "n_kv_heads": 2, "state_heads": 16,
                     "is_tied": True},
            "9b": {},
            "27b": {"d_model": 5120, "d_mlp": 17408, "n_layers": 64, "n_heads": 24, "state_heads": 48},
        },
        **_PUBLISHED,
    )  # fmt: skip

    @classmethod
    def stem(cls) -> str:
        """Returns the start of the names of transformers' classes, but that of the language model."""
        return cls.architecture.removesuffix("ForCausalLM") + "Text"


class Qwen3_5(Decoder, config=Qwen3_5Config, init=False):
    """The text model of a Qwen3.5, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("qwen3_5_text", "qwen3_5")


@dataclass(frozen=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    """The sizes of a Qwen3.5 with experts. The defaults are those of transformers. See `DecoderConfig`."""

    d_model, d_mlp, n_layers = 2048, None, 40
    n_kv_heads = 2
    n_experts, n_chosen, d_expert, d_shared = 256, 8, 512, 512
    gates_shared = True

    model_type = "qwen3_5_moe_text"
    rows = rows(
        *_ROWS,
        *Fields(d_expert="moe_intermediate_size", d_shared="shared_expert_intermediate_size", n_experts="num_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        without=("d_mlp",),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names({**expert_names("shared_expert"), **_BLOCK}, **_OTHERS)
    sizes = published({"35b-a3b": {}}, **_PUBLISHED)


class Qwen3_5Moe(Decoder, config=Qwen3_5MoeConfig, init=False):
    """The text model of a Qwen3.5 with experts, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
