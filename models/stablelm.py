"""StableLM 2: LLaMA with layer norms, and a quarter of each head rotary.

Source: *Stable LM 2 1.6B Technical Report* (arXiv:2402.17834).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Rope, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class StableLmConfig(DecoderConfig):
    """The sizes of a StableLM. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 50304
    n_positions: int = 4096
    d_model: int = 2560
    d_mlp: int | None = 6912
    output_bias: bool | None = False
    rope_share: float = 0.25
    norm: str = "layer"
    norm_bias: bool = True
    norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 0

    model_type = "stablelm"
    rows = rows(
        Rope(has_share=True),
        Field("layer_norm_eps", "norm_eps"),
        Field("use_qkv_bias", "attention_bias"),
        # transformers applies it to the output of the MLP only.
        Only("hidden_dropout", 0.0, name="residual_dropout"),
        Only("use_parallel_residual", False),
        Only("qk_layernorm", False),
        without=("head_size",),
    )
    sizes = published(
        {
            "2-1.6b": {
                "vocab_size": 100352,
                "d_model": 2048,
                "n_layers": 24,
                "d_mlp": 5632,
                "attention_bias": True,
                "bos_token_id": 100257,
                "eos_token_id": 100257,
            }
        }
    )


class StableLm(Decoder, config=StableLmConfig, init=False):
    """A StableLM, from token ids to the logits of each next token. See `Decoder`."""
