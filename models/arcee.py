"""AFM (Arcee): LLaMA whose MLP has no gate, and the square of ReLU.

Source: the model's card, huggingface.co/arcee-ai/AFM-4.5B.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, rows
from .hf import Field


@dataclass(frozen=True)
class ArceeConfig(DecoderConfig):
    """The sizes of an AFM. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 4096
    d_model, d_mlp = 2560, 18432
    norm_eps = 1e-5
    activation, is_gated = "relu2", False
    bos_token_id, eos_token_id = 128000, 128001

    model_type = "arcee"
    rows = rows(Field("attention_bias"), Field("mlp_bias"))


class Arcee(Decoder, config=ArceeConfig, init=False):
    """An AFM, from token ids to the logits of each next token. See `Decoder`."""
