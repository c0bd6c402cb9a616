"""NanoChat: norms without scales, also of embeddings and, after rotary positions, of heads; an MLP without a gate.

Rotary positions turn the other way than LLaMA's.

Source: Karpathy 2025, github.com/karpathy/nanochat.
"""

from dataclasses import dataclass

from ._kinds import POSITIVE
from .decoder import Decoder, DecoderConfig, Names, rows
from .hf import Field


@dataclass(frozen=True)
class NanoChatConfig(DecoderConfig):
    """The sizes of a NanoChat. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 50304
    d_model, d_mlp, n_layers, n_heads = 768, 8192, 12, 6
    head_norm, norms_rotated = "head", True
    norm, has_embedding_norm = "plain_rms", True
    activation, is_gated = "relu2", False
    logit_cap = 15.0
    bos_token_id, eos_token_id, pad_token_id = 0, 1, 1

    model_type = "nanochat"
    architecture = "NanoChatForCausalLM"
    scales_residual = True  # transformers scales the attentions' alone; in the model's own code both begin as zeros
    rotates_back = True
    rows = rows(Field("attention_bias"), Field("final_logit_softcapping", "logit_cap", POSITIVE, null=None))
    names = Names({"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"})


class NanoChat(Decoder, config=NanoChatConfig, init=False):
    """A NanoChat, from token ids to the logits of each next token. See `Decoder`."""
