"""ERNIE 4.5, the dense models: LLaMA whose rotary positions pair each even dim with the next.

Source: Baidu 2025, *ERNIE 4.5 Technical Report*, ernie.baidu.com.
"""

from dataclasses import dataclass

from jaxtyping import PRNGKeyArray

from .decoder import CausalLM, CausalLMConfig, Shared, published, rows


@dataclass(frozen=True)
class Ernie4_5Config(CausalLMConfig):
    """The sizes of a dense ERNIE 4.5. The defaults are those with 0.36 billion parameters. See `CausalLMConfig`."""

    vocab_size: int = 103424
    n_positions: int = 131072
    d_model: int = 1024
    n_layers: int = 18
    n_heads: int = 16
    d_mlp: int | None = 3072
    n_kv_heads: int | None = 2
    head_size: int | None = 128
    is_interleaved: bool = True
    norm_eps: float = 1e-5
    is_tied: bool = True
    pad_token_id: int | None = 0

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    rows = rows(Shared("use_bias", "attention_bias", "mlp_bias"), without=("attention_dropout",))
    sizes = published({"0.3b": {"rope_theta": 500000.0}})


class Ernie4_5(CausalLM):
    """A dense ERNIE 4.5, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = Ernie4_5Config

    def __init__(self, config: Ernie4_5Config, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
