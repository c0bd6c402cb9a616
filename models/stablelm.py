"""StableLM 2: LLaMA with layer norms, and a quarter of each head rotary.

Source: *Stable LM 2 1.6B Technical Report* (arXiv:2402.17834).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Rope, rows
from .hf import Fields, Fixed, Only, published


@dataclass(frozen=True)
class StableLmConfig(DecoderConfig):
    """The sizes of a StableLM. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 50304, 4096
    d_model, d_mlp = 2560, 6912
    output_bias = False
    rope_share = 0.25
    norm, norm_bias, norm_eps = "layer", True, 1e-5
    bos_token_id = eos_token_id = 0

    model_type = "stablelm"
    rows = rows(
        Rope(has_share=True),
        *Fields(norm_eps="layer_norm_eps", attention_bias="use_qkv_bias"),
        # transformers applies it to the output of the MLP only.
        Only("hidden_dropout", 0.0, name="residual_dropout"),
        *Fixed(use_parallel_residual=False, qk_layernorm=False),
        without=("head_size",),
    )
    sizes = published(
        {
            "2-1.6b": {"vocab_size": 100352, "d_model": 2048, "n_layers": 24, "d_mlp": 5632, "attention_bias": True,
                       "bos_token_id": 100257, "eos_token_id": 100257}
        }
    )  # fmt: skip


class StableLm(Decoder, config=StableLmConfig, init=False):
    """A StableLM, from token ids to the logits of each next token. See `Decoder`."""
