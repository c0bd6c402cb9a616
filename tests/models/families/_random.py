"""Random configs of every tiny model, against `transformers`: equal outputs and gradients, or an error that names it.

    python -m tests.models.families._random 1000 [SEED] [NAME ...]

takes about two seconds for each on a quiet machine, prints what it found for each case, and fails for any that differ
without an error, also for outputs of the folder that we write. Slow models are drawn if they are named. It needs the
`parity` extra, and is run by hand: transformers changes which values of a config it accepts.
"""

import collections
import dataclasses
import functools
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redeqx.models import from_pretrained, save_pretrained
from tests.models.families._case import Case, collect, gradients, outputs, torch_folder

ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "quick_gelu", "tanh", "relu2", "gelu_fast", "mish"]
EPS = [1e-6, 1e-5, 1e-2]
FACTORS = [0.3, 1.0, 2.5]
ROPES = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8},
    {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 1.0, "alpha": 50.0},
    {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "factor": 2.0},
]
# The values of keys whose type does not say which ones are valid. Flags are flipped.
SHARED: list[tuple[str, list[Any]]] = [
    ("hidden_act hidden_activation activation_function activation projector_hidden_act", ACTIVATIONS),
    ("classifier_activation pooler_hidden_act", ACTIVATIONS),
    ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon", EPS),
    ("num_hidden_layers n_layer num_layers n_layers encoder_layers", [1, 2, 3]),
    ("attention_multiplier residual_multiplier logits_scaling embedding_multiplier", FACTORS),
    ("lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier", FACTORS),
    ("ssm_in_multiplier ssm_out_multiplier", FACTORS),
    ("logit_scale routed_scaling_factor layerscale_value", FACTORS),
    ("final_logit_softcapping attn_logit_softcapping clip_qkv", [None, 0.5, 30.0]),
    ("intermediate_size ffn_dim n_inner d_ff moe_intermediate_size shared_expert_intermediate_size", [20, 36]),
    ("num_key_value_heads num_kv_heads n_group num_decoder_layers decoder_layers", [1, 2, 4]),
    ("num_attention_heads n_head n_heads num_heads", [2, 3, 4, 6]),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", [2, 4, 8]),
    ("top_k_experts moe_k num_kv_shared_layers", [0, 1, 2, 3]),
    ("linear_num_key_heads linear_num_value_heads", [1, 2, 4]),
    ("linear_key_head_dim linear_value_head_dim global_head_dim", [4, 8, 12]),
    ("vocab_size_per_layer_input hidden_size_per_layer_input", [0, 6, 60]),
    ("topk_group num_experts_per_tok first_k_dense_replace decoder_sparse_step", [0, 1, 2, 3]),
    ("n_shared_experts moe_layer_freq global_attn_every_n_layers", [1, 2]),
    ("rotary_dim head_dim", [4, 6, 8]),
    ("time_step_rank mamba_dt_rank mamba_expand expand", ["auto", 1, 5]),
    ("attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset", [0, 1, 2, 3]),
    ("mamba_n_groups n_groups mamba_d_conv conv_kernel", [1, 2, 3]),
    ("mamba_d_state ssm_state_size state_size moe_shared_expert_intermediate_size", [4, 8]),
    ("sliding_window window_size local_attention max_window_layers", [None, 1, 2, 4, 100]),
]
POOL: dict[str, list[Any]] = {
    **{key: values for keys, values in SHARED for key in keys.split()},
    "mlp_only_layers": [[], [0], [1]],
    "ssm_multipliers": [None, [0.5, 1.0, 2.0, 0.7, 1.3]],
    "mlp_multipliers": [None, [0.5, 2.0]],
    "mamba_d_ssm": [None, 24, 48],
    "attn_layer_indices": [None, [], [0], [2, 1], [0, 1, 2]],
    "rope_parameters": ROPES,
    "query_pre_attn_scalar": [4, 64],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "swiglu_limit": [0.5, 7.0],
    "no_rope_layers": [[1, 0], [0, 0], [1, 1]],
    "no_rope_layer_interval": [1, 2],
    "attention_types": [[[["global", "local"], 1]], [[["local"], 2]], [[["global"], 2]]],
    "position_buckets": [-1, 2, 4],
    "max_relative_positions": [-1, 3],
    "pos_att_type": [["p2c", "c2p"], "c2p|p2c", ["c2p"], []],
    "norm_rel_ebd": ["layer_norm", "none"],
    "relative_attention_num_buckets": [4, 8],
    "relative_attention_max_distance": [5, 20],
    "feed_forward_proj": ["relu", "gated-gelu", "gated-silu", "gelu"],
    "classifier_pooling": ["cls", "mean"],
    "num_register_tokens": [0, 1, 4],
    "vision_feature_layer": [-1, -2, 0, [-1, -2]],
    "vision_feature_select_strategy": ["default", "full"],
    "pad_token_id": [None, 0, 3],
    "type_vocab_size": [1, 2],
    "word_embed_proj_dim": [16],
    "conv_kernel_size": [0, 3],
    "linear_conv_kernel_dim": [1, 2, 3],
    "shared_intermediate_size": [20, 36],
    "position_embedding_type": ["absolute", "relative_key", "rope", "nope", None],
    "conv_L_cache": [1, 2, 3, 5],
    "block_multiple_of": [1, 8],
    "block_ffn_dim_multiplier": [1.0, 1.3],
    "num_dense_layers": [0, 1, 2, 4],
    "num_global_key_value_heads": [None, 1, 2],
    "use_bidirectional_attention": [None, "vision", "all"],
    "expansion_ratio": [2, 4],
    "qk_norm": [None, "rms_norm"],
    "dual_attention_layers": [(), (0,)],
    "pos_embed_max_size": [4, 8],
    "norm_num_groups": [2, 4],
    "freq_shift": [0, 1],
    "conv_in_kernel": [1, 3, 5],
    "conv_out_kernel": [1, 3, 5],
    "layers_per_block": [1, 2],
    "transformer_layers_per_block": [1, 2],
    "act_fn": ["silu", "gelu", "relu", "mish"],
    "resnet_time_scale_shift": ["default", "scale_shift"],
    "mid_block_type": ["UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None],
    "attn_config": [
        {"clip_qkv": 0.5},
        {"softmax_scale": 0.7, "attn_pdrop": 0.5},
        {"alibi": False},
        {"alibi_bias_max": 4},
        {"qk_ln": True},
    ],
}
# Flags of training, of outputs and of other classes.
SKIPPED = (
    "output_",
    "return_",
    "use_cache",
    "is_encoder",
    "is_decoder",
    "torchscript",
    "chunk",
    "_",
    "problem",
    "tie_encoder",
    "add_cross",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "name_or_path",
)
MIXERS = ["linear_attention", "conv"]
# Keys that classes of transformers read from any config, whether or not its own class has them.
UNDECLARED: dict[str, list[Any]] = {
    "is_causal": [False],
    "use_bidirectional_attention": [True],
    "attention_chunk_size": [4],
    "sliding_window": [2, 4],
    "head_dim": [4, 6],
    "position_embedding_type": ["relative_key", "relative_key_query"],
    "token_classification_bias": [False],
    "classifier_dropout": [0.5],
    "swiglu_limit": [0.3],
    "swiglu_alpha": [1.0],
}

SLOW = ("unet", "vae", "vision-encoder")  # and their configs have few options; "sdxl" is a UNet, too


@functools.cache
def base_of(make: Any) -> dict[str, Any]:
    """Returns a case's config, with the arguments that transformers keeps under other keys."""
    config = make().config
    options = {key: value for key, value in getattr(make, "keywords", {}).items() if value is not None}
    return {**options, **(config.to_dict() if hasattr(config, "to_dict") else config)}


def draw(case: Case, rng: random.Random) -> dict[str, Any]:
    """Returns changed keys of a case's config."""
    base = base_of(case.make)
    known = {key for key, value in base.items() if key in POOL or (isinstance(value, bool) and not key.startswith(SKIPPED))}
    known |= {key for key in ("layer_types", "layers_block_type") if base.get(key)}
    # Half of the configs also change keys whose valid values nobody listed, and keys that any config may have.
    fields = {key for key, value in base.items() if others(value) and not key.startswith(SKIPPED)} | UNDECLARED.keys()
    known = sorted(known | fields if rng.random() < 0.5 else known)
    chosen = rng.sample(known, min(len(known), rng.randint(1, 4)))
    return {key: draw_value(key, base.get(key), rng) for key in chosen}


def draw_value(key: str, value: Any, rng: random.Random) -> Any:
    """Returns another value of a key. Layers keep their number, and positions by kind of layer their kinds."""
    if key == "layer_types" and value:
        mixers = [kind for kind in MIXERS if kind in value] or ["sliding_attention"]
        kinds = ["full_attention", *mixers]
        return [rng.choice(kinds) for _ in value]
    if key == "layers_block_type" and value:
        return [rng.choice(["linear_attention", "full_attention", "mlp", "moe"]) for _ in value]
    if key == "rope_parameters" and "full_attention" in (value or {}):
        return {kind: rng.choice(POOL[key]) for kind in value}
    if isinstance(value, bool):
        return not value
    return rng.choice(POOL.get(key) or UNDECLARED.get(key) or others(value))


def others(value: Any) -> list[Any]:
    """Returns values to try for a key of which only its value in a config is known."""
    if value is None:
        return [True, 1, 4, 0.5]
    if isinstance(value, int):
        return [0, 1, 2, 3, 8, value + 1, 2 * value]
    if isinstance(value, float):
        return [0.0, 0.3, 1.0, 2.5]
    if isinstance(value, (list, tuple)):
        return [value[::-1], value[:1], []]
    return []


def compare(case: Case, folder: Path) -> str:
    """Returns what became of a case: invalid in transformers, refused by us, equal, or how it differs."""
    import torch

    def run(module: Any) -> np.ndarray:
        with torch.no_grad():
            return case.run(module, case.inputs).numpy()

    try:
        module = torch_folder(case, folder)
        expected = run(module)
    except Exception:
        return "invalid"
    if not np.isfinite(expected).all():
        return "invalid"
    try:
        model, config = from_pretrained(folder)
        found = outputs(case, model)
    except (ValueError, TypeError) as error:
        return "refused" if str(error).startswith("`") else f"unclear error: {error!r}"
    save_pretrained(model, config, folder / "again")
    again = run(type(module).from_pretrained(folder / "again").eval())
    counts = np.ones(1, bool) if case.counts is None else case.counts
    counts = np.broadcast_to(counts.reshape(counts.shape + (1,) * (expected.ndim - counts.ndim)), expected.shape)
    limit = 1e-3 * max(1.0, float(expected[counts].std()))
    for name, got in (("ours", found), ("the folder that we wrote", again)):
        if got.shape != expected.shape:
            return f"shape of {name}: {got.shape}, not {expected.shape}"
        if not (worst := np.abs(got - expected)[counts].max()) < limit:
            return f"{name} differs by {worst:.2g}"
    weight_map, exact = type(model).weight_map(config), {}
    found = gradients(case, module, model, weight_map, folder / "gradients")
    scale = max(np.abs(theirs).max() for theirs, _ in found.values())
    for name, (theirs, ours) in found.items():
        # A gradient that is zero in exact arithmetic, as of biases of keys, is only rounding error: 1e-7 of the largest.
        if not np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs) + 1e-6 * scale:
            exact = exact or exact_gradients(case, model, weight_map, folder)
            if np.linalg.norm(ours - exact[name]) < np.linalg.norm(theirs - exact[name]):
                continue  # it is the rounding of torch
            return f"the gradient of {name} differs by {np.abs(ours - theirs).max():.2g} of {np.abs(theirs).max():.2g}"
    return "equal"


def exact_gradients(case: Case, model: Any, weight_map: Any, folder: Path) -> dict[str, np.ndarray]:
    """Returns the gradients of the torch module of a case in float64."""
    import torch

    module = torch_folder(case, folder / "exact").double()
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")  # grouped products have no float64
    torch.set_default_dtype(torch.float64)
    try:
        found = gradients(case, module, model, weight_map, folder / "exact gradients")
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: theirs for name, (theirs, _) in found.items()}


def run_draws(
    cases: Sequence[Any],
    n: int,
    seed: int,
    draw: Callable[[Any, random.Random], Any],
    compare: Callable[[Any, Path, Any], str],
) -> None:
    """Makes `n` draws of these cases in turn, prints those that are wrong and why others were not compared, and fails if any
    is wrong.

    **Arguments:**

    - `draw`: draws something for a case.
    - `compare`: returns what became of it: "equal", "refused", "invalid" or how it differs. It has an empty folder.
    """
    import transformers

    # Each program runs once, so optimizing it would take nearly all of the time.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    rng, found, reasons = random.Random(seed), collections.Counter[str](), collections.Counter[str]()
    for i in range(n):
        case = cases[i % len(cases)]
        drawn = draw(case, rng)
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = compare(case, Path(folder), drawn)
            except Exception as error:
                result = f"crash: {type(error).__name__}: {str(error)[:300]}"
        kind, _, reason = result.partition(": ")
        is_right = kind in ("invalid", "refused", "equal")
        found[kind if is_right else "wrong"] += 1
        if is_right and reason:
            reasons[f"{kind}: {reason[:90]}"] += 1
        elif not is_right:
            print(f"{getattr(case, 'name', case)} {drawn}: {result}", flush=True)
        if i % 50 == 49:
            jax.clear_caches()  # no program runs again, and a process has memory maps for those of about 850 configs
            print(f"{i + 1}: {dict(found)}", flush=True)
    print(*(f"{count} {reason}" for reason, count in reasons.most_common()), sep="\n")
    print(f"{n} draws of {len(cases)} tiny models: {dict(found)}")
    if found["wrong"]:
        sys.exit(f"{found['wrong']} draws are wrong without an error")


def main(n: int, seed: int = 0, *names: str) -> None:
    from tests.models.families._decoders import CASES

    cases = [*CASES, *collect("CASES")]
    chosen = [case for case in cases if case.name in names] or [case for case in cases if not case.name.startswith(SLOW)]

    def changed(case: Case, folder: Path, changes: dict[str, Any]) -> str:
        return compare(dataclasses.replace(case, make=functools.partial(case.make, **changes)), folder)

    run_draws(chosen, n, seed, draw, changed)


if __name__ == "__main__":
    _, count, *rest = sys.argv
    main(int(count), *map(int, rest[:1]), *rest[1:])
