"""The rules of a decoder's values: sizes, heads that divide, known choices, and layers that exist.

Those of a family's `config.json` are its rows'.
"""

from typing import Any

from redeqx.errors import wrong

from ..nn import check_choice, check_heads, check_rates, check_sizes
from ._layers import check_kinds


def check_values(config: Any) -> None:
    """Raises ValueError for values of a `DecoderConfig` that no decoder has."""
    if config.n_chosen and config.n_experts == 0:
        raise wrong("n_chosen", "0 without experts", config.n_chosen, "Pass `n_chosen=0`, or `n_experts`.")
    optional = ("d_mlp", "n_kv_heads", "head_size", "window", "d_embedding", "d_expert", "n_classes")
    optional = (*optional, "latent_size", "query_latent_size", *(["n_experts"] if config.n_chosen else []))
    check_sizes(config, "vocab_size", "n_positions", "d_model", "n_layers", "n_heads")
    check_sizes(config, *(name for name in optional if getattr(config, name) is not None))
    check_rates(config, "embedding_dropout", "attention_dropout", "residual_dropout", "classifier_dropout")
    check_choice(config, "activation", config.activations)
    check_choice(config, "norm", ("rms", "offset_rms", "plain_rms", "layer", "offset_layer", "plain_layer"))
    check_choice(config, "norm_places", ("pre", "post", "both", "sum"))
    _check_attention(config)
    if config.n_chosen > config.n_experts:
        raise wrong("n_chosen", f"at most `n_experts`={config.n_experts}", config.n_chosen, "Choose fewer.")
    if len(config.factors.states) != 5:
        raise wrong("factors", "five `states`", config.factors.states, "Pass one for each projection.")
    if config.by_kind:
        check_kinds(config)
    _check_layers(config)
    if any(config.mixers):
        _check_mixers(config)


def _check_attention(config: Any) -> None:
    if config.latent_size is not None:
        check_sizes(config, "shared_rotary_size", "value_size", "plain_size")
    elif config.head_size is None:
        check_heads(config)
    if config.n_heads % config.groups:
        rule = f"a divisor of `n_heads`={config.n_heads}"
        raise wrong("n_kv_heads", rule, config.n_kv_heads, "Each must serve the same number of heads.")
    is_rotary = config.position_offset is None and config.bias_range is None
    if is_rotary and (config.rotary_size % 2 or not 2 <= config.rotary_size <= config.size):
        whole = config.rope_share == 1
        raise ValueError(
            f"`{'head_size' if whole else 'rope_share'}`: expected an even number{'' if whole else ' of rotary dims'}, "
            f"got {config.rotary_size}. Rotary positions pair {'its halves' if whole else 'dims'}."
        )
    if config.query_growth and not hasattr(config.rope_scaling, "n_original"):
        rule = "one with `n_original`, after which queries grow"
        raise wrong("rope_scaling", rule, config.rope_scaling, "Pass a `YarnScaling`, say.")


def _check_layers(config: Any) -> None:
    if config.n_dense > config.n_layers:
        raise wrong("n_dense", f"at most `n_layers`={config.n_layers}", config.n_dense, "Experts are in the others.")
    known = ("attention", "mixer", "mlp", "experts")
    if config.parts is not None and (len(config.parts) != config.n_layers or not set(config.parts) <= set(known)):
        rule = f"one of {', '.join(known)} for each of `n_layers`={config.n_layers}"
        raise wrong("parts", rule, config.parts, "Each layer has one.")
    for name in ("windowed_layers", "unrotated_layers", "mixer_layers", "expert_layers"):
        value = getattr(config, name)
        if value is not None and not set(value) <= set(range(config.n_layers)):
            raise wrong(name, f"numbers below `n_layers`={config.n_layers}", value, "Count from 0, or pass None.")


def _check_mixers(config: Any) -> None:
    check_sizes(config, "state_groups", "state_heads", "state_size", "state_value_size", "conv_kernel")
    check_sizes(config, *(["step_rank"] if config.step_rank is not None else []))
    check_choice(config, "mixer", ("delta", "mamba", "mamba1", "conv"))
    if config.state_heads % config.state_groups:
        rule = f"a multiple of `state_groups`={config.state_groups}"
        raise wrong("state_heads", rule, config.state_heads, "Each head of keys serves the same number of them.")
