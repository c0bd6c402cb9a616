"""The families that are tables of the one decoder: a tiny model of each, with left padding.

`test_decoders.py` compares them with stored outputs, `test_decoders_parity.py` with transformers. `python -m
tests.models.families._decoders [NAME ...]` stores the outputs.
"""

import functools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.models.families._case import Case, collect, outputs, shapes, torch_folder, weights_file
from tests.models.families._table import DIFFERENCES
from tests.models.families.llama import run_last

GOLDEN = Path(__file__).parents[1] / "golden" / "decoders"
VOCAB, SEQ = 47, 11
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(name, head="ForCausalLM", **kwargs):
    import transformers

    sizes = {key: value for key, value in {**SIZES, **kwargs}.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**sizes)
    if cls := getattr(transformers, name + head, None):
        return cls(config).eval()
    return transformers.AutoModelForCausalLM.from_config(config).eval()  # whose class has another name


rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (2, SEQ)).astype(np.int32)
LEFT = np.arange(SEQ) >= np.array([[0], [3]])  # the second row has three padding tokens on the left


def case(name, cls, **kwargs):
    inputs = {"ids": np.where(LEFT, IDS, 0).astype(np.int32), "mask": LEFT}
    return Case(name, functools.partial(make, cls, **kwargs), inputs, run_last, lambda model, row: model(**row)[-4:])


WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 4,
}


def run_head(module, inputs):
    """Returns the logits of a classifier. Its padding is found by the id, and positions count tokens, as in `generate`."""
    import torch

    mask = torch.tensor(inputs["mask"]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    options = {} if type(module).__name__.startswith("OPT") else {"position_ids": positions}
    return module(torch.tensor(inputs["ids"]), attention_mask=mask, **options).logits


BOTH = (np.arange(SEQ) >= np.array([[0], [3]])) & (np.arange(SEQ) < np.array([[SEQ - 2], [SEQ]]))  # padding on either side
PADDED = {"ids": np.where(BOTH, IDS, 0).astype(np.int32), "mask": BOTH}


def headed(name, cls, head, **kwargs):
    """Returns a case of a classifier, with padding on the right of one row and on the left of the other."""
    kwargs = {"num_labels": 3, "head": f"For{head}Classification", **kwargs}
    return Case(name, functools.partial(make, cls, **kwargs), PADDED, run_head, counts=None if head == "Sequence" else BOTH)


def run_hidden(module, inputs):
    """Returns the hidden states of a model without a head."""
    import torch

    return module(torch.tensor(inputs["ids"]), attention_mask=torch.tensor(inputs["mask"]).long()).last_hidden_state


def embedding(name, cls, **kwargs):
    """Returns a case of a model without an output head, with the same padding."""
    make_model = functools.partial(make, cls, head="Model", **kwargs)
    return Case(name, make_model, PADDED, run_hidden, lambda model, row: model.hidden(**row), counts=BOTH)


LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
DENSE = {key: value for key, value in LATENT.items() if "expert" not in key and key != "first_k_dense_replace"}
ROUTED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
WHOLE = {key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"}
MIXED = {
    "num_hidden_layers": 3,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4, "conv_L_cache": 3}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}
ATTENTION = {"layer_types": ["full_attention"] * 2, "shared_intermediate_size": 20, "mamba_n_heads": 4}
MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
}
LISTED = {key: value for key, value in MAMBA.items() if key != "layer_types"} | {"attn_layer_indices": [1]}
BESIDE = {key: value for key, value in LISTED.items() if key != "attn_layer_indices"}
BESIDE |= {"mamba_d_ssm": 48, "head_dim": 8, "num_hidden_layers": 2}
MUP = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 1.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.5, 0.8, 1.4, 0.6],
    "mlp_multipliers": [0.9, 1.6],
}
PARTS = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 5,
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
}
OLD = dict.fromkeys(("num_key_value_heads", "intermediate_size", "max_position_embeddings"))  # keys that they lack
PLAIN = {"num_attention_heads": None, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 5, "conv_kernel": 3}
SCANNED = {"num_attention_heads": None, "state_size": 5, "conv_kernel": 3}
EVERY = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "expert_layer_period": 3,
}
NEO = {"num_key_value_heads": None, "num_hidden_layers": None, "num_attention_heads": None, "num_layers": 2, "num_heads": 4}
CASES = [
    case("gemma", "Gemma", head_dim=8),
    case("gemma2", "Gemma2", head_dim=8, query_pre_attn_scalar=12, sliding_window=4, attn_logit_softcapping=2.0),
    case("gemma3", "Gemma3Text", head_dim=8, query_pre_attn_scalar=12, **WINDOWED),
    # With embeddings of each layer, and two layers that share keys and values; then with experts, and values that are keys.
    case(
        "gemma4",
        "Gemma4Text",
        head_dim=8,
        global_head_dim=12,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCAB,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    case(
        "gemma4-unified",
        "Gemma4UnifiedText",
        head_dim=8,
        global_head_dim=12,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    case(
        "gemma4-experts",
        "Gemma4Text",
        head_dim=8,
        global_head_dim=12,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=5.0,
    ),
    case("hunyuan", "HunYuanDenseV1", head_dim=8, rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}),
    case("apertus", "Apertus"),
    # Heads whose number is no power of two have slopes of two series.
    case("bloom", "Bloom", **OLD, num_attention_heads=6),
    case("mpt", "Mpt", **OLD, num_attention_heads=6, max_seq_len=64, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3}),
    case("mixtral", "Mixtral", num_local_experts=4),
    case("qwen3-moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8),
    case("olmo", "Olmo"),
    case("olmo2", "Olmo2"),
    case("olmo3", "Olmo3", **WINDOWED),
    case("phi", "Phi", num_key_value_heads=4, rope_parameters={**PARTIAL["rope_parameters"], "partial_rotary_factor": 0.34}),
    case("phi3", "Phi3", sliding_window=4),
    case("phimoe", "Phimoe", num_local_experts=4, sliding_window=4, router_jitter_noise=0.4, head_dim=8),
    case("smollm3", "SmolLM3", no_rope_layers=[1, 0]),
    case(
        "granite",
        "Granite",
        embedding_multiplier=3.0,
        logits_scaling=0.5,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
    ),
    case("starcoder2", "Starcoder2", sliding_window=4),
    case("glm", "Glm", head_dim=8),
    case("glm4", "Glm4", head_dim=8),
    case("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    case("cohere", "Cohere", logit_scale=2.0),
    case("cohere2", "Cohere2", logit_scale=2.0, **WINDOWED),
    case("exaone4", "Exaone4", **WINDOWED),
    case("exaone4-full", "Exaone4", sliding_window=4, layer_types=["full_attention"] * 2),
    case("seed-oss", "SeedOss", head_dim=8, attention_dropout=0.0, residual_dropout=0.0),
    case("arcee", "Arcee", mlp_bias=True),
    case("ernie4-5", "Ernie4_5", head_dim=8),
    case("ernie4-5-moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=12, moe_num_shared_experts=2),
    case("stablelm", "StableLm", rope_parameters={**PARTIAL["rope_parameters"], "partial_rotary_factor": 0.34}),
    case("ministral", "Ministral", head_dim=6, **WINDOWED),
    case("ministral3", "Ministral3", head_dim=6, rope_parameters=GROWING),
    case("gpt-oss", "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.5, sliding_window=4),
    case(
        "qwen2-moe",
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[0],
    ),
    case(
        "deepseek-v2",
        "DeepseekV2",
        **LATENT,
        q_lora_rank=None,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.0,
    ),
    case("deepseek-v3", "DeepseekV3", **LATENT, q_lora_rank=14, n_group=4, topk_group=2),
    case("glm4-moe", "Glm4Moe", head_dim=8, use_qk_norm=True, attention_bias=True, **ROUTED, n_group=4, topk_group=2),
    case(
        "glm4-moe-lite", "Glm4MoeLite", **{**LATENT, **ROUTED}, q_lora_rank=14, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    case("qwen3-next", "Qwen3Next", **HYBRID, **SPARSE, mlp_only_layers=[0], attention_bias=True),
    case("qwen3-5", "Qwen3_5Text", **HYBRID, tie_word_embeddings=True),
    case("qwen3-5-moe", "Qwen3_5MoeText", **HYBRID, **SPARSE),
    case(
        "minimax-m2",
        "MiniMaxM2",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=PARTIAL["rope_parameters"],
    ),
    case("lfm2", "Lfm2", **CONV, block_multiple_of=8),
    case(
        "lfm2-moe",
        "Lfm2Moe",
        **{**CONV, "conv_L_cache": 4},
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
    ),
    case(
        "mistral4",
        "Mistral4",
        **{**LATENT, "rope_parameters": GROWING},
        q_lora_rank=14,
    ),
    case("dots1", "Dots1", **ROUTED, norm_topk_prob=True),
    case("granite-moe", "GraniteMoe", num_local_experts=4, attention_multiplier=0.3, logits_scaling=0.5),
    case("granite-4", "GraniteMoeHybrid", **ATTENTION, num_local_experts=0, position_embedding_type="rope"),
    case("granite-4-experts", "GraniteMoeHybrid", **ATTENTION, num_local_experts=4, attention_multiplier=0.3),
    case("granite-4-h", "GraniteMoeHybrid", **MAMBA, num_local_experts=4, attention_multiplier=0.3),
    case("nemotron-h", "NemotronH", **PARTS, routed_scaling_factor=1.5, n_group=2),
    case("bamba", "Bamba", **LISTED, head_dim=8),
    case("falcon-h1", "FalconH1", **BESIDE, **MUP),
    case("falcon-h1-norms", "FalconH1", **BESIDE, mamba_rms_norm=True, mamba_norm_before_gate=False, attention_bias=True),
    case("falcon-h1-norms-first", "FalconH1", **BESIDE, mamba_rms_norm=True, key_multiplier=0.7, mlp_bias=True),
    case("falcon-new", "Falcon", num_kv_heads=2, new_decoder_architecture=True, alibi=False),
    case("falcon", "Falcon", bias=True, ffn_hidden_size=40),
    case("falcon-alibi", "Falcon", num_attention_heads=6, multi_query=False, parallel_attn=False, bias=True, alibi=True),
    case("falcon-serial", "Falcon", multi_query=False, parallel_attn=False),
    case("gpt-bigcode", "GPTBigCode", **OLD, n_inner=36),
    case("gpt-bigcode-heads", "GPTBigCode", **OLD, multi_query=False),
    case("mamba2", "Mamba2", **OLD, **PLAIN),
    case("mamba", "Mamba", **OLD, **SCANNED, time_step_rank=3),
    case("falcon-mamba", "FalconMamba", **OLD, **SCANNED, use_conv_bias=False, tie_word_embeddings=False),
    case("jamba", "Jamba", **EVERY, num_experts=4, mamba_d_conv=3),
    case("jamba-dense", "Jamba", **EVERY, num_experts=1, mamba_expand=1, mamba_dt_rank=5),
    case("biogpt", "BioGpt", num_key_value_heads=None, activation_dropout=0.0),
    case("codegen", "CodeGen", **OLD, rotary_dim=4, n_inner=36, n_positions=64),
    case("persimmon", "Persimmon", num_key_value_heads=None, hidden_size=32, **PARTIAL),
    case("vaultgemma", "VaultGemma", head_dim=8, query_pre_attn_scalar=12, sliding_window=4),
    case("cwm", "Cwm", head_dim=8, num_hidden_layers=3, sliding_window=4),
    case("granite-moe-shared", "GraniteMoeShared", num_local_experts=4, shared_intermediate_size=20),
    case("flex-olmo", "FlexOlmo", num_experts=4, num_experts_per_tok=2),
    case("jais2", "Jais2"),
    case("solar-open", "SolarOpen", head_dim=8, **WHOLE, intermediate_size=None, n_group=4, topk_group=2),
    case(
        "exaone-moe",
        "ExaoneMoe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        **MIXED,
    ),
    case(
        "afmoe",
        "Afmoe",
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        num_shared_experts=2,
        route_scale=1.5,
        mup_enabled=True,
        **MIXED,
    ),
    case(
        "exaone-moe-dense",
        "ExaoneMoe",
        num_experts=8,
        moe_intermediate_size=12,
        first_k_dense_replace=3,
        **MIXED,
    ),
    case("exaone3", "Exaone"),
    case("internlm3", "InternLM3", head_dim=8, attention_bias=True, mlp_bias=True),
    case("iquestcoder", "IQuestCoder", head_dim=8),
    case(
        "hyperclovax",
        "HyperCLOVAX",
        embedding_multiplier=3.0,
        logits_scaling=0.5,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
    ),
    case("hyperclovax-pre", "HyperCLOVAX", use_post_norm=False),
    case("youtu", "Youtu", **DENSE, q_lora_rank=14, attention_bias=True, pad_token_id=None),  # a folder's row is set to zero
    case("minicpm3", "MiniCPM3", **DENSE, q_lora_rank=14, dim_model_base=8),
    case("sarvam-mla", "SarvamMLA", **LATENT),
    case("sarvam-moe", "SarvamMoE", head_dim=8, **ROUTED, n_group=4, topk_group=2),
    case(
        "flint",
        "Flint",
        head_dim=8,
        num_hidden_layers=5,
        sliding_window=4,
        mlp_only_layers=[0],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    case(
        "mellum",
        "Mellum",
        **MIXED,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    case("hunyuan-moe", "HunYuanMoEV1", head_dim=8, num_experts=4, moe_topk=2),
    case("granite-swa", "GraniteSWA", **MIXED, layer_rope_theta=[100.0, 0, 100.0], embedding_multiplier=3.0),
    case(
        "granite-moe-swa",
        "GraniteMoeSWA",
        **MIXED,
        num_local_experts=4,
        shared_intermediate_size=20,
        layer_rope_theta=[100.0, 1000.0, 0],
    ),
    case("xglm", "XGLM", num_key_value_heads=None, intermediate_size=None, ffn_dim=36, pad_token_id=4),
    case("xglm-odd", "XGLM", num_key_value_heads=None, hidden_size=27, num_attention_heads=3, scale_embedding=False),
    case(
        "hy3",
        "HYV3",
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        num_shared_experts=2,
    ),
    case("nanochat", "NanoChat"),
    case("axk1", "AXK1", **LATENT, q_lora_rank=14, n_group=4, topk_group=2),
    case("aria-text", "AriaText", moe_num_experts=4, moe_topk=2, attention_bias=True),
    case(
        "kolibri",
        "Kolibri1",
        **MIXED,
        intermediate_size=None,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    case(
        "cohere2-moe",
        "Cohere2Moe",
        num_hidden_layers=5,
        head_dim=8,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
        prefix_dense_intermediate_size=20,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
        logit_scale=2.0,
    ),
    case(
        "cohere2-moe-softmax",
        "Cohere2Moe",
        num_hidden_layers=3,
        head_dim=8,
        sliding_window=4,
        sliding_window_pattern=2,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        rms_norm_eps=1e-3,
        num_experts=4,
        logit_scale=2.0,
    ),
    case(
        "lara-mini",
        "LaraMini",
        **{**HYBRID, **SPARSE, "num_hidden_layers": 5, "intermediate_size": None},
        layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"],
        sliding_window=4,
    ),
    case("lfm3", "Lfm3", num_hidden_layers=5, head_dim=8, sliding_window=4, conv_L_cache=3),
    case("gpt-neo", "GPTNeo", **NEO, window_size=4, attention_types=[[["local", "global"], 1]]),
    case("nemotron", "Nemotron", hidden_size=32),
    case("helium", "Helium", head_dim=6, attention_bias=True),
    case("phi3-long", "Phi3", original_max_position_embeddings=4, rope_parameters=LONG),
    case(
        "phimoe-long",
        "Phimoe",
        num_local_experts=4,
        attention_bias=True,
        lm_head_bias=True,
        rope_parameters={**LONG, "original_max_position_embeddings": 32, "short_mscale": 1.2, "long_mscale": 1.2},
    ),
    case("gpt-neox", "GPTNeoX", num_key_value_heads=None, hidden_size=32, rope_parameters=PARTIAL["rope_parameters"]),
    case("gpt-neox-serial", "GPTNeoX", num_key_value_heads=None, hidden_size=32, use_parallel_residual=False),
]
# Heads for classes, and others whose tokens of `generate` are not compared.
HEADED = [
    embedding(
        "embedding-gemma",
        "Gemma3Text",
        head_dim=8,
        query_pre_attn_scalar=12,
        use_bidirectional_attention=True,
        **WINDOWED,
    ),
    embedding("mistral-embeddings", "Mistral", sliding_window=4),
    embedding("gpt-neox-embeddings", "GPTNeoX", num_key_value_heads=None, hidden_size=32),
    case("qwen2-both-sides", "Qwen2", is_causal=False),
    case("nemotron-h-steps", "NemotronH", **PARTS, time_step_min=0.5),  # which transformers ignores in decoding
    case("openai-gpt", "OpenAIGPT", **OLD, afn="swish"),  # its `generate` counts positions of padding
    headed("llama-classes", "Llama", "Sequence"),
    headed("gpt2-classes", "GPT2", "Sequence", num_key_value_heads=None, tie_word_embeddings=True),
    headed("opt-classes", "OPT", "Sequence", num_key_value_heads=None, ffn_dim=36, word_embed_proj_dim=16),
    headed("gemma3-classes", "Gemma3Text", "Sequence", head_dim=8, num_labels=1, **WINDOWED),
    headed("qwen3-token-classes", "Qwen3", "Token", head_dim=8),
    headed("biogpt-token-classes", "BioGpt", "Token", num_key_value_heads=None, scale_embedding=False),
    headed("persimmon-classes", "Persimmon", "Sequence", num_key_value_heads=None, qk_layernorm=False, hidden_size=32),
    headed("gpt-neox-token-classes", "GPTNeoX", "Token", num_key_value_heads=None, hidden_size=32),
]


def main(names):
    """Stores the outputs of transformers for the cases of these names, or for all, and our largest difference from them."""
    import torch

    from redeqx.models import from_pretrained

    GOLDEN.mkdir(exist_ok=True)
    differences = json.loads(DIFFERENCES.read_text()) if DIFFERENCES.exists() else {}
    older = [x for x in collect("CASES") if x.name.startswith(("gpt2", "gptj", "opt", "llama", "mistral", "qwen"))]
    for each in (*CASES, *HEADED, *older):
        if names and each.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            found = each.run(torch_folder(each, Path(folder)), each.inputs).numpy()
            path = weights_file(Path(folder))
            record = {
                "config": json.loads((Path(folder) / "config.json").read_text()),
                "tensors": shapes(path),
                "outputs": [float(f"{x:.6g}") for x in np.asarray(found, np.float64).ravel()],
            }
            counts = slice(None) if each.counts is None else each.counts
            difference = np.abs(outputs(each, from_pretrained(Path(folder))[0]) - found)[counts].max()
        differences[each.name] = float(f"{difference:.0e}")
        if each not in older:
            (GOLDEN / f"{each.name}.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
        DIFFERENCES.write_text(json.dumps(dict(sorted(differences.items())), indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
