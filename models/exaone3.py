"""EXAONE 3 and 3.5: LLaMA with names of its own.

Sources: *EXAONE 3.0* (arXiv:2408.03541); *EXAONE 3.5* (arXiv:2412.04862).
"""

from dataclasses import dataclass

from .decoder import Decoder, Names
from .hf import Aliases, published
from .llama import LlamaConfig
from .nn import Llama3Scaling

_LONG = {"n_positions": 32768, "rope_theta": 1e6, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192)}


@dataclass(frozen=True)
class ExaoneConfig(LlamaConfig):
    """The sizes of an EXAONE 3 or 3.5. The defaults are those of the first one. See `DecoderConfig`."""

    vocab_size, n_positions = 102400, 4096
    d_mlp = 14336
    n_kv_heads = 8
    rope_theta = 500000.0
    norm_eps = 1e-5
    eos_token_id, pad_token_id = 361, 0

    model_type = "exaone"
    architecture = "LlamaForCausalLM"
    aliases = Aliases(num_layers="num_hidden_layers", layer_norm_epsilon="rms_norm_eps", activation_function="hidden_act")
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.attention.q_proj": "attention.query",
            "attn.attention.k_proj": "attention.key",
            "attn.attention.v_proj": "attention.value",
            "attn.attention.out_proj": "attention.output",
            "ln_2": "mlp_norm",
            "mlp.c_fc_0": "mlp.gate",
            "mlp.c_fc_1": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
    )
    sizes = published(
        {
            "3-7.8b": {},
            "3.5-2.4b": {"d_model": 2560, "d_mlp": 7168, "n_layers": 30, "is_tied": True, **_LONG},
            "3.5-7.8b": _LONG,
            "3.5-32b": {"d_model": 5120, "d_mlp": 27392, "n_layers": 64, "n_heads": 40, **_LONG},
        }
    )


class Exaone(Decoder, config=ExaoneConfig, init=False):
    """An EXAONE 3 or 3.5, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("LlamaForCausalLM", "LlamaModel", "ExaoneForCausalLM", "ExaoneModel")
