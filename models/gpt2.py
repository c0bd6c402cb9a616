"""GPT-2: a pre-norm decoder with learned positions, GELU by tanh, and a tied output head.

Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, and its code, github.com/openai/gpt-2.
Only the layout differs from that code: query, key and value are three layers instead of one, so that a plan shards each of
them by whole heads.
"""

from dataclasses import dataclass

from .decoder import GPT_ALIASES, GPT_ROWS, Decoder, GPTConfig, Names, rows
from .hf import Field, Fixed, published


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """The sizes and dropout rates of GPT-2. The defaults are those of the smallest published one. See `DecoderConfig`.

    `init_std`: the published 0.02 suits widths of 768 and more; narrower models learn faster with a larger one.
    """

    vocab_size, n_positions = 50257, 1024
    d_model, n_layers, n_heads = 768, 12, 12
    attention_bias = True
    position_offset = 0
    is_tied = True
    embedding_dropout = residual_dropout = attention_dropout = 0.1
    bos_token_id = eos_token_id = 50256

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    scales_residual = True
    position_scale = 0.5
    rows = rows(
        *Fixed(is_written=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        *GPT_ROWS,
        Field("add_cross_attention", "has_cross_attention"),
        without=("n_kv_heads", "head_size", "rope_theta"),
    )
    aliases = GPT_ALIASES
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
            "attn.c_proj": "attention.output",
            "ln_cross_attn": "cross_norm",
            "crossattention.q_attn": "cross_attention.query",
            "crossattention.c_attn": ("cross_attention.key", "cross_attention.value"),
            "crossattention.c_proj": "cross_attention.output",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        token_score="classifier",
        norm="transformer.ln_f",
        others={"transformer.wpe.weight": "positions"},
        is_transposed=True,
        # Attention masks in old files.
        ignored=("*.attn.bias", "*.attn.masked_bias", "*.crossattention.bias", "*.crossattention.masked_bias"),
        # The Hub's first files hold the base model, whose names lack the prefix.
    )
    sizes = published(
        {
            "124m": {},
            "355m": {"d_model": 1024, "n_layers": 24, "n_heads": 16},
            "774m": {"d_model": 1280, "n_layers": 36, "n_heads": 20},
            "1.6b": {"d_model": 1600, "n_layers": 48, "n_heads": 25},
        }
    )


class GPT2(Decoder, config=GPT2Config, init=False):
    """GPT-2, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = GPT2(GPT2Config.of("124m"), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed. The initial weights are those of OpenAI's code:
    N(0, `init_std`²), positions N(0, (`init_std` / 2)²), layers that add to the residual stream scaled by `1 / sqrt(2 *
    n_layers)`, biases 0, norms 1.
    """

    model_types = ("gpt2", "gpt-sw3")  # the latter is the same model with another tokenizer
