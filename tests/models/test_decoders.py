"""The families of the one decoder: stored outputs of a tiny folder of each, presets, configs, errors."""

import json
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.models import cross_entropy, from_pretrained, save_pretrained
from redeqx.models._families import MODELS
from redeqx.models.apertus import ApertusConfig
from redeqx.models.aria import AriaText
from redeqx.models.axk1 import AXK1, AXK1Config
from redeqx.models.bamba import Bamba, BambaConfig
from redeqx.models.bloom import Bloom
from redeqx.models.cohere import Cohere, Cohere2
from redeqx.models.cohere_moe import Cohere2Moe
from redeqx.models.cwm import CwmConfig
from redeqx.models.decoder import Decoder, Factors, InitialSteps, SequenceClassifier, TokenClassifier
from redeqx.models.deepseek import DeepseekV2
from redeqx.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from redeqx.models.dots import Dots1Config
from redeqx.models.ernie import Ernie4_5, Ernie4_5Moe
from redeqx.models.exaone import Exaone4
from redeqx.models.exaone3 import Exaone
from redeqx.models.falcon import Falcon
from redeqx.models.falcon_h1 import FalconH1
from redeqx.models.gemma import Gemma2, Gemma3
from redeqx.models.gemma4 import Gemma4
from redeqx.models.glm import Glm
from redeqx.models.glm_flash import Glm4MoeLite
from redeqx.models.glm_moe import Glm4Moe
from redeqx.models.gpt_bigcode import GPTBigCode
from redeqx.models.gpt_neo import GPTNeo
from redeqx.models.gpt_neox import GPTNeoX
from redeqx.models.gpt_oss import GptOss, GptOssConfig
from redeqx.models.granite_hybrid import GraniteMoeHybrid
from redeqx.models.granite_swa import GraniteSWA
from redeqx.models.hf import ConfigReader
from redeqx.models.hunyuan import HunyuanMoe
from redeqx.models.hy3 import HYV3
from redeqx.models.internlm import InternLM3, IQuestCoder
from redeqx.models.jamba import Jamba, JambaConfig
from redeqx.models.lara import LaraMini
from redeqx.models.lfm import Lfm2, Lfm2Config
from redeqx.models.lfm3 import Lfm3
from redeqx.models.lfm_moe import Lfm2Moe
from redeqx.models.mamba import FalconMamba, FalconMambaConfig, Mamba, MambaConfig
from redeqx.models.mamba2 import Mamba2, Mamba2Config
from redeqx.models.mellum import Mellum
from redeqx.models.minicpm import MiniCPM3
from redeqx.models.minimax import MiniMaxM2, MiniMaxM2Config
from redeqx.models.mistral import Ministral3, Mistral, Mixtral, MixtralConfig
from redeqx.models.mistral4 import Mistral4
from redeqx.models.mpt import Mpt
from redeqx.models.nemotron_h import NemotronH, NemotronHConfig
from redeqx.models.nn import Attention, DynamicScaling, LinearScaling, LongScaling, add_routing, distance_bias, rotation
from redeqx.models.olmo import Olmo
from redeqx.models.olmoe import Olmoe
from redeqx.models.openai_gpt import OpenAIGPT
from redeqx.models.phi import Phi, Phi3, Phi3Config
from redeqx.models.phi_moe import Phimoe
from redeqx.models.qwen3_5 import Qwen3_5, Qwen3_5Moe
from redeqx.models.qwen_moe import Qwen2Moe, Qwen3Moe
from redeqx.models.qwen_next import Qwen3Next, Qwen3NextConfig
from redeqx.models.smollm import SmolLM3
from redeqx.models.stablelm import StableLm
from redeqx.models.starcoder2 import Starcoder2
from redeqx.models.xglm import XGLM
from tests.models.families._case import assert_equal, fill, is_shape, outputs, random_model
from tests.models.families._decoders import CASES, GOLDEN, HEADED, LONG
from tests.models.families._table import END, README, START, table

FAMILIES = [cls for cls in MODELS if issubclass(cls, Decoder)]


# Each has something that no other has. The others are in the sweep.
QUICK = (
    "gpt-oss",
    "deepseek-v3",
    "mixtral",
    "gemma3",
    "olmo2",
    "phi3-long",
    "falcon",
    "gpt-neox",
    "smollm3",
    "llama-classes",
)
EACH = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.sweep) for case in (*CASES, *HEADED)
]


@pytest.mark.parametrize("case", EACH)
def test_outputs(case, tmp_path):
    golden = json.loads((GOLDEN / f"{case.name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    fill(tmp_path / "model.safetensors", golden["tensors"])
    model, config = from_pretrained(tmp_path)
    said = {**config.extra, **config.to_hf(), "architectures": [type(model).architecture(config)]}
    assert type(config).from_hf(ConfigReader(said)) == config
    found = outputs(case, model)
    assert_equal(case, found, np.array(golden["outputs"]).reshape(found.shape))


def test_every_golden_file_has_a_case():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {case.name for case in (*CASES, *HEADED)}


def test_the_table_of_families_is_up_to_date():
    assert START + table() + END in README.read_text(), "python -m tests.models.families._table"


# --- presets and configs ----------------------------------------------------------------------------------------------

# The number of parameters of the published weights.
PUBLISHED = {
    "mistral": {"7b": 7_241_732_096},
    "ministral3": {"3b": 3_429_006_336, "8b": 8_489_553_920, "14b": 13_506_073_600},
    "lfm2": {"350m": 354_483_968, "700m": 742_489_344, "1.2b": 1_170_340_608, "2.6b": 2_569_272_320},
    "lfm2_moe": {"8b-a1b": 8_339_930_560},  # with the 704 numbers that correct the routers
    "mistral4": {"small": 118_972_826_624},
    "biogpt": {"base": 346_763_264},
    "codegen": {"350m": 356_712_448, "2b": 2_779_356_160, "6b": 7_064_213_504, "16b": 16_032_155_648},
    "openai-gpt": {"117m": 116_534_784},
    "xglm": {"564m": 564_463_616, "1.7b": 1_732_907_008, "2.9b": 2_941_505_536, "7.5b": 7_492_771_840},
    "internlm3": {"8b": 8_804_241_408},
    "exaone": {
        "3-7.8b": 7_818_448_896,
        "3.5-2.4b": 2_405_327_360,
        "3.5-7.8b": 7_818_448_896,
        "3.5-32b": 32_003_200_000,
    },
    "bamba": {"9b": 9_780_235_392},
    "falcon_h1": {"0.5b": 521_411_104, "1.5b-deep": 1_554_874_768, "7b": 7_585_654_880, "34b": 33_642_516_224},
    "falcon_mamba": {"7b": 7_272_665_088},
    "jamba": {"v0.1": 51_570_323_328, "1.5-large": 398_555_145_696},
    "mamba": {
        "130m": 129_135_360,
        "370m": 371_516_416,
        "790m": 793_204_224,
        "1.4b": 1_372_178_432,
        "2.8b": 2_768_345_600,
    },
    "gpt_bigcode": {"1b": 1_137_207_296, "3b": 3_043_311_104, "7b": 7_327_263_232, "15b": 15_517_456_384},
    "mamba2": {"codestral-7b": 7_285_403_648},
    "granitemoehybrid": {"350m": 352_379_904, "1b": 1_631_750_144, "micro": 3_402_836_480}
    | {
        "h-350m": 340_332_224,
        "h-1b": 1_461_538_368,
        "h-micro": 3_191_396_096,
        "h-tiny": 6_939_037_248,
        "h-small": 32_207_337_984,
    },
    "nemotron_h": {"nano-9b-v2": 8_888_227_328, "3-nano-30b-a3b": 31_577_940_288},  # with the numbers that correct routers
    "minimax_m2": {"m2": 228_689_764_864},
    "mixtral": {"8x7b": 46_702_792_704, "8x22b": 140_630_071_296},
    "qwen2": {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "72b": 72_706_203_648},
    "qwen3": {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    },
    "qwen3_5_text": {"0.8b": 752_393_024, "9b": 8_953_803_264, "27b": 26_895_998_464},
    "qwen3_5_moe_text": {"35b-a3b": 34_660_610_688},
    "qwen3_next": {"80b-a3b": 79_674_391_296},
    "qwen3_moe": {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560},
    "gpt_oss": {"20b": 20_914_757_184, "120b": 116_829_156_672},
    "qwen2_moe": {"1.5-a2.7b": 14_315_784_192, "57b-a14b": 57_408_658_944},
    "deepseek_v2": {"lite": 15_706_484_224, "236b": 235_741_434_880},
    "deepseek_v3": {"671b": 671_026_419_200},
    "glm4_moe": {"4.5-air": 106_852_251_264, "4.5": 352_797_829_024},
    "dots1": {"142b": 142_774_381_696},
    "granitemoe": {"3.0-1b-a400m": 1_334_628_352},
    "falcon": {"7b": 6_921_720_704, "40b": 41_303_293_952, "rw-1b": 1_311_625_216, "rw-7b": 7_455_727_616},
    "gpt_neo": {"125m": 125_198_592, "1.3b": 1_315_575_808, "2.7b": 2_651_307_520},
    "nemotron": {"minitron-4b": 4_190_509_056},
    "gemma": {"2b": 2_506_172_416, "7b": 8_537_680_896},
    "gemma2": {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320},
    "gemma3_text": {"270m": 268_098_176, "1b": 999_885_952, "embedding-300m": 302_863_104},
    # Those of the cards (5.1B, 8B, 25.2B, 30.7B) without encoders, and with a number in each layer that is not trained.
    "gemma4_text": {"e2b": 4_628_569_379, "e4b": 7_463_013_418, "26b-a4b": 25_233_141_790, "31b": 30_697_345_340},
    "apertus": {"8b": 8_053_338_240, "70b": 70_599_864_640},  # with two numbers in each layer that are not trained
    "bloom": {
        "560m": 559_214_592,
        "1b1": 1_065_314_304,
        "1b7": 1_722_408_960,
        "3b": 3_002_557_440,
        "7b1": 7_069_016_064,
        "176b": 176_247_271_424,
    },
    "mpt": {"7b": 6_649_286_656, "30b": 29_957_200_896},
    "olmo": {"1b": 1_176_764_416, "7b": 6_888_095_744},
    "olmo2": {"1b": 1_484_916_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936},
    "olmo3": {"7b": 7_298_011_136},
    "phi": {"1.5": 1_418_270_720, "2": 2_779_683_840},
    "phi3": {"3-mini-4k": 3_821_079_552, "4": 14_659_507_200},
    "phimoe": {"3.5": 41_873_153_344, "tiny": 3_755_220_288},
    "smollm3": {"3b": 3_075_098_624},
    "granite": {"3.1-2b": 2_533_531_648, "3.1-8b": 8_170_848_256},
    "starcoder2": {"3b": 3_030_371_328, "7b": 7_173_923_840, "15b": 15_957_889_024},
    "glm": {"9b": 9_399_951_360},
    "glm4": {"9b": 9_400_279_040},
    "olmoe": {"1b-7b": 6_919_161_856},
    "cohere": {"command-r": 34_980_831_232},
    "cohere2": {"7b": 8_028_033_024},
    "exaone4": {"1.2b": 1_279_391_488},
    "seed_oss": {"36b": 36_151_104_512},
    "ernie4_5": {"0.3b": 360_748_032},
    "ernie4_5_moe": {"21b-a3b": 21_825_437_888},
    "stablelm": {"2-1.6b": 1_644_515_328},
    "gpt_neox": {
        "pythia-160m": 162_322_944,
        "pythia-1.4b": 1_414_647_808,
        "pythia-6.9b": 6_857_302_016,
        "20b": 20_554_567_680,
    },
}


@pytest.mark.sweep
@pytest.mark.parametrize("cls", FAMILIES, ids=lambda cls: cls.config_class.model_type)
def test_presets_have_the_published_number_of_parameters(cls):
    config_class = cls.config_class
    if config_class.model_type in ("llama", "gpt2", "gptj", "opt"):  # in their own files
        return
    assert config_class.sizes.keys() == PUBLISHED.get(config_class.model_type, {}).keys()
    for size in config_class.sizes:
        config = config_class.of(size)
        shapes = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
        n_parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes) if is_shape(leaf))
        assert n_parameters == PUBLISHED[config_class.model_type][size], size
        assert config_class.from_hf(ConfigReader(config.to_hf())) == config
    assert config_class.from_hf(ConfigReader({**config_class().to_hf()})) == config_class()


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (
            Mixtral,
            {"router_jitter_noise": 0.1},
            r"`router_jitter_noise`: expected 0\.0, which this family implements, got 0\.1",
        ),
        (Mamba, {"use_bias": True}, r"`use_bias`: expected False, .* got True"),
        (Mamba, {"time_step_rank": 0}, r"`time_step_rank`: expected a whole number from 1"),
        (Mamba, {"time_step_init_scheme": "zeros"}, r"`time_step_init_scheme`: expected 'random' or 'constant', .*'zeros'"),
        (Mamba, {"time_step_floor": -1.0}, r"`time_step_floor`: expected a finite number of at least 0, got -1\.0"),
        (FalconMamba, {"mixer_rms_eps": 1e-5}, r"`mixer_rms_eps`: expected 1e-06, .* got 1e-05"),
        (Jamba, {"attn_layer_offset": 8}, r"`attn_layer_offset`: expected less than `attn_layer_period`=8, .* got 8"),
        (Jamba, {"mamba_proj_bias": True}, r"`mamba_proj_bias`: expected False, .* got True"),
        (Lfm2, {"conv_bias": True}, r"`conv_bias`: expected False, .* got True"),
        (Lfm2, {"layer_types": ["conv"] * 31}, r"`layer_types`: expected conv or full_attention for each of 32 layers"),
        (Lfm2, {"block_ff_dim": 8, "intermediate_size": 9}, r"expected one value, got 9, and 8 as `block_ff_dim`"),
        (Lfm2Moe, {}, r"expected the key `layer_types`, got none"),
        (MiniMaxM2, {"scoring_func": "softmax"}, r"`scoring_func`: expected 'sigmoid', .* got 'softmax'"),
        (MiniMaxM2, {"rotary_dim": 256}, r"`partial_rotary_factor`: expected an even number of rotary dims, got 256"),
        (Mistral, {"text_config": {"model_type": "ministral3"}}, r"`model_type`: expected 'mistral', .* got 'ministral3'"),
        (Ministral3, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"expected the key `llama_4_scaling_beta`"),
        (
            Ministral3,
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"`rope_parameters`: expected one with `n_original`, after which queries grow, got None",
        ),
        (Ministral3, {"rope_theta": 5e5}, r"`rope_theta`: expected 1000000\.0 or None, .* got 500000\.0"),
        (InternLM3, {"qkv_bias": True}, r"`mlp_bias`: expected the same as `attention_bias`, True, got False\. Set both"),
        (IQuestCoder, {"clip_qkv": 8.0}, r"`clip_qkv`: expected None, .* got 8\.0"),
        (IQuestCoder, {"use_sliding_window": True}, r"`use_sliding_window`: expected False or None, .* got True"),
        (OpenAIGPT, {"afn": "tanh"}, r"`afn`: expected 'gelu_new', 'silu' or 'relu', got 'tanh'"),
        (HunyuanMoe, {"moe_topk": [1, 2]}, r"`moe_topk`: expected the same number for all layers, .* got \[1, 2\]"),
        (AriaText, {"mlp_bias": True}, r"`mlp_bias`: expected False, .* got True"),
        (AriaText, {"hidden_act": "gelu"}, r"`hidden_act`: expected 'silu', got 'gelu'"),
        (Lfm3, {"conv_bias": True}, r"`conv_bias`: expected False, .* got True"),
        (
            Lfm3,
            {"layer_types": ["conv"]},
            r"`layer_types`: expected conv or full_attention or sliding_attention for each of 24",
        ),
        (LaraMini, {"sliding_window": None}, r"`layer_types`: expected linear_attention or full_attention for each of 34"),
        (
            Cohere2Moe,
            {"expert_selection_fn": "tanh"},
            r"`expert_selection_fn`: expected 'softmax' or 'sigmoid', .* got 'tanh'",
        ),
        (
            Cohere2Moe,
            {"shared_expert_combination_strategy": "max"},
            r"`shared_expert_combination_strategy`: expected 'average' or 'sum', .* got 'max'",
        ),
        (HYV3, {"mlp_bias": True}, r"`mlp_bias`: expected False, .* got True"),
        (XGLM, {"add_cross_attention": True}, r"`add_cross_attention`: expected False, .* got True"),
        (XGLM, {"layerdrop": 0.1}, r"`layerdrop`: expected 0\.0, .* got 0\.1"),
        (Mellum, {"mlp_layer_types": ["sparse", "dense"]}, r"`mlp_layer_types`: expected dense layers, and then"),
        (
            GraniteSWA,
            {"num_hidden_layers": 2, "layer_rope_theta": [1.0]},
            r"`layer_rope_theta`: expected 2 numbers: 0, one for",
        ),
        (
            GraniteSWA,
            {"num_hidden_layers": 3, "layer_rope_theta": [0, 10.0, 20.0]},
            r"`layer_rope_theta`: expected 3 numbers: 0, one for layers with a window, .* got \[0\.0, 10\.0, 20\.0\]",
        ),
        (Mistral4, {"head_dim": 64}, r"`head_dim`: expected 128 or None, .* got 64"),
        (Mistral4, {"n_group": 2}, r"`n_group`: expected 1, .* got 2"),
        (
            Mistral4,
            {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.25}},
            r"`partial_rotary_factor`: expected 0\.5 or None, .* got 0\.25",
        ),
        (
            Mistral4,
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"`rope_type`: expected 'yarn', .* got 'default'",
        ),
        (Mistral, {"is_causal": False}, r"`is_causal`: expected True with `sliding_window`=4096, got False\. Set"),
        (Gemma3, {"is_causal": False}, r"`is_causal`: expected True, .* got False"),
        (Qwen3Moe, {"mlp_only_layers": [1]}, r"`mlp_only_layers`: expected the first layers, .* got \[1\]"),
        (Qwen2Moe, {"use_sliding_window": True}, r"`use_sliding_window`: expected False, .* got True"),
        (GptOss, {"swiglu_alpha": 1.0}, r"`swiglu_alpha`: expected 1\.702, .* got 1\.0"),
        (GptOss, {"hidden_act": "gelu"}, r"`hidden_act`: expected 'silu', .* got 'gelu'"),
        (DeepseekV2, {"topk_method": "noaux_tc"}, r"`topk_method`: expected 'greedy' or 'group_.*, .* got 'noaux_tc'"),
        (DeepseekV2, {"num_key_value_heads": 8}, r"`num_key_value_heads`: expected 32 or None, .* got 8"),
        (Falcon, {"new_decoder_architecture": True, "parallel_attn": False}, r"`parallel_attn`: expected true with"),
        (GPTNeo, {"attention_types": [[["global"], 3]]}, r"`attention_types`: expected .* of 24 layers, .* got \[\[\["),
        (Glm4Moe, {"num_nextn_predict_layers": 2}, r"`num_nextn_predict_layers`: expected 0 or 1, .* got 2"),
        (Glm4MoeLite, {"mlp_layer_types": ["sparse", "dense"]}, r"`mlp_layer_types`: expected dense layers, and then"),
        (DeepseekV3, {"num_nextn_predict_layers": 2}, r"`num_nextn_predict_layers`: expected 0 or 1, .* got 2"),
        (DeepseekV3, {"first_k_dense_replace": 62}, r"`first_k_dense_replace`: expected at most `num_hidden_layers`=61"),
        (Ernie4_5Moe, {"moe_layer_interval": 2}, r"`moe_layer_interval`: expected 1, .* got 2"),
        (Qwen3Moe, {"decoder_sparse_step": 2}, r"`decoder_sparse_step`: expected 1, .* got 2"),
        (Qwen3Next, {"mlp_only_layers": [1]}, r"`mlp_only_layers`: expected the first layers, .* got \[1\]"),
        (Qwen3Next, {"layer_types": ["sliding_attention"] * 48}, r"`layer_types`: expected linear_attention or full_att"),
        (Qwen3Next, {"linear_num_value_heads": 24}, r"`linear_num_value_heads`: expected a multiple of `linear_num_key_h"),
        (Qwen3_5, {"attn_output_gate": False}, r"`attn_output_gate`: expected True, .* got False"),
        (
            Gemma2,
            {"use_bidirectional_attention": True},
            r"`use_bidirectional_attention`: expected False or None, .* got True",
        ),
        (
            Gemma2,
            {"layer_types": ["full_attention"]},
            r"`layer_types`: expected full_attention or sliding_attention for each",
        ),
        (
            Gemma3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"sliding_attention`: `rope_type`: expected 'default', .* got 'linear'",
        ),
        (Gemma3, {"attn_logit_softcapping": 50.0}, r"`attn_logit_softcapping`: expected None, .* got 50\.0"),
        (
            Gemma4,
            {"use_bidirectional_attention": "all"},
            r"`use_bidirectional_attention`: expected None or 'vision', .* got",
        ),
        (
            Gemma4,
            {"layer_types": ["sliding_attention"] * 30},
            r"`layer_types`: expected a last layer without the window, got",
        ),
        (
            Gemma4,
            {"per_layer_config": {"05": {"head_dim": 64}}},
            r"`per_layer_config`: expected the same heads in all layers",
        ),
        (
            Gemma4,
            {"num_kv_shared_layers": 29},
            r"`num_kv_shared_layers`: expected a layer with keys and values for each kind",
        ),
        (
            Gemma4,
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            r"`num_global_key_value_heads`: expected a divisor of `num_attention_heads`=8, got 3",
        ),
        (
            Gemma4,
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"`rope_type`: expected 'default' or 'prop",
        ),
        (Gemma4, {"enable_moe_block": True}, r"expected the key `num_experts`, got none"),
        (
            Bloom,
            {"apply_residual_connection_post_layernorm": True},
            r"`apply_residual_connection_post_layernorm`: expected False, .* got True",
        ),
        (Mpt, {"attn_config": {"alibi": False}}, r"attn_config`: `alibi`: expected True, .* got False"),
        (Mpt, {"attn_config": {"alibi_bias_max": 6}}, r"attn_config`: `alibi_bias_max`: expected 8, .* got 6"),
        (Mpt, {"attn_config": {"qk_ln": True}}, r"attn_config`: `qk_ln`: expected False, .* got True"),
        (Mpt, {"expansion_ratio": 2}, r"`expansion_ratio`: expected 4, .* got 2"),
        (
            GraniteMoeHybrid,
            {"layer_types": ["conv"]},
            r"`layer_types`: expected linear_attention or full_attention for each",
        ),
        (
            NemotronH,
            {"hybrid_override_pattern": "M-X"},
            r"`hybrid_override_pattern`: expected M, E, \*, - for each layer, .* got",
        ),
        (
            NemotronH,
            {"layers_block_type": ["conv"]},
            r"`layers_block_type`: expected linear_attention, moe, .* got \['conv'\]",
        ),
        (NemotronH, {"moe_latent_size": 64}, r"`moe_latent_size`: expected None, .* got 64"),
        (
            Qwen2Moe,
            {"layer_types": ["sliding_attention"] * 24},
            r"`layer_types`: expected None or \['full_attention', .* got",
        ),
        (NemotronH, {"use_bias": True}, r"`use_bias`: expected False, .* got True"),
        (GraniteMoeHybrid, {"mamba_proj_bias": True}, r"`mamba_proj_bias`: expected False, .* got True"),
        (GraniteMoeHybrid, {"mamba_d_head": 32}, r"`mamba_d_head`: expected `mamba_expand` \* .*, 64, .* got 32"),
        (GraniteMoeHybrid, {"time_step_limit": [0.1]}, r"`time_step_limit`: expected two numbers, .* got \[0\.1\]"),
        (
            GraniteMoeHybrid,
            {"num_hidden_layers": 1, "layer_types": ["attention"], "position_embedding_type": "alibi"},
            r"`position_embedding_type`: expected None or 'rope' or 'nope', .* got 'alibi'",
        ),
        (Bamba, {"partial_rotary_factor": 0.25}, r"`partial_rotary_factor`: expected 0\.5 or None, .* got 0\.25"),
        (Bamba, {"attn_layer_indices": [32]}, r"`attn_layer_indices`: expected indices of 32 layers, .* got \[32\]"),
        (Bamba, {"mamba_proj_bias": True}, r"`mamba_proj_bias`: expected False, .* got True"),
        (FalconH1, {"projectors_bias": True}, r"`projectors_bias`: expected False, .* got True"),
        (FalconH1, {"ssm_multipliers": [1.0]}, r"`ssm_multipliers`: expected 5 factors, .* got \[1\.0\]"),
        (FalconH1, {"mamba_d_head": 16}, r"`mamba_d_head`: expected `mamba_d_ssm` / `mamba_n_heads`, 8, .* got 16"),
        (GPTBigCode, {"add_cross_attention": True}, r"`add_cross_attention`: expected False, .* got True"),
        (GPTBigCode, {"scale_attn_weights": False}, r"`scale_attn_weights`: expected True, .* got False"),
        (Mamba2, {"use_bias": True}, r"`use_bias`: expected False, .* got True"),
        (Mamba2, {"rescale_prenorm_residual": True}, r"`rescale_prenorm_residual`: expected False, .* got True"),
        (Mamba2, {"head_dim": 32}, r"`head_dim`: expected `expand` \* `hidden_size` / `num_heads`, 64, .* got 32"),
        (Olmoe, {"clip_qkv": 8.0}, r"`clip_qkv`: expected None, .* got 8\.0"),
        (Cohere, {"use_qk_norm": True}, r"`use_qk_norm`: expected False or None, .* got True"),
        (StableLm, {"use_parallel_residual": True}, r"`use_parallel_residual`: expected False, .* got True"),
        (Ernie4_5, {"use_bias": "yes"}, r"`use_bias`: expected bool, got 'yes'"),
        (Olmo, {"clip_qkv": 8.0}, r"`clip_qkv`: expected None, .* got 8\.0"),
        (Phi, {"qk_layernorm": True}, r"`qk_layernorm`: expected False, .* got True"),
        (
            Phi3,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"`rope_type`: expected 'default' or 'longrope', .* got",
        ),
        (Phimoe, {"num_experts_per_tok": 1}, r"`num_experts_per_tok`: expected 2, .* got 1"),
        (
            Phimoe,
            {"rope_scaling": LONG | {"short_mscale": 1.2, "long_mscale": 1.3}},
            r"`long_mscale`: expected 1\.2, .* got 1\.3",
        ),
        (SmolLM3, {"use_sliding_window": True}, r"`use_sliding_window`: expected False, .* got True"),
        (SmolLM3, {"layer_types": ["sliding_attention"] * 36}, r"`layer_types`: expected full_attention for each of 36"),
        (SmolLM3, {"no_rope_layers": [1, 2]}, r"`no_rope_layers`: expected 0 or 1 for each of 36 layers, .* got \[1, 2\]"),
        (Glm, {"partial_rotary_factor": 1.5}, r"`partial_rotary_factor`: expected a share in \(0, 1\], got 1\.5"),
        (GPTNeoX, {"head_dim": 12}, r"`head_dim`: expected 96 or None, .* got 12"),
        (GPTNeoX, {"rotary_pct": 0.1}, r"`partial_rotary_factor`: expected an even number of rotary dims, got 9\."),
    ],
)
def test_refuses_what_it_does_not_implement(cls, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cls.config_class.from_hf(ConfigReader(fields))


@pytest.mark.parametrize("cls", [Cohere2, Exaone4, Gemma3])
def test_a_period_says_which_layers_have_a_window_if_no_list_does(cls):
    fields = {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2}
    assert cls.config_class.from_hf(ConfigReader(fields)).windows == (8, None, 8, None)
    # The published folders of EXAONE 4 have both, and a word in place of the number.
    fields |= {"sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    assert cls.config_class.from_hf(ConfigReader(fields)).windows == (8, 8, 8, None)


def test_fields_that_share_a_key_have_one_value():
    message = r"`attention_bias`: expected the same as attention_bias, mlp_bias, got attention_bias=True, mlp_bias=False"
    with pytest.raises(ValueError, match=message):
        Starcoder2.config_class(mlp_bias=False)


def test_a_file_holds_the_factor_of_logits_of_minicpm_by_a_whole_width():
    keys = {"num_hidden_layers": 10, "scale_depth": 1.3, "dim_model_base": 512}
    config = MiniCPM3.config_class.from_hf(ConfigReader(keys))
    assert (config.residual_scale, config.logit_divisor) == (1.3 / 10**0.5, 5.0)
    assert config.to_hf().items() >= keys.items()
    nulls = MiniCPM3.config_class.from_hf(ConfigReader(dict.fromkeys(("scale_depth", "dim_model_base"))))
    assert (nulls.residual_scale, nulls.logit_divisor) == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"`logit_divisor`: expected `d_model`=2560 over a whole number, got 3\.0"):
        MiniCPM3.config_class(logit_divisor=3.0)


def test_each_projection_of_a_state_space_has_a_factor():
    with pytest.raises(ValueError, match=r"`factors`: expected five `states`, got \(1\.0,\)"):
        FalconH1.config_class(factors=Factors(states=(1.0,)))


# --- positions --------------------------------------------------------------------------------------------------------


def test_a_text_longer_than_the_original_ones_changes_the_frequencies():
    positions = jnp.arange(12)
    plain = rotation(positions, 8, 100.0)
    dynamic = DynamicScaling(2.0, 8)
    np.testing.assert_array_equal(rotation(positions[:8], 8, 100.0, dynamic), rotation(positions[:8], 8, 100.0))
    # Twelve tokens: the base grows by (2 * 12 / 8 - 1) ** (8 / 6).
    np.testing.assert_allclose(rotation(positions, 8, 100.0, dynamic), rotation(positions, 8, 100 * 2 ** (8 / 6)), atol=1e-5)
    long = LongScaling((1.0,) * 4, (2.0,) * 4, 8, 1.5)
    np.testing.assert_allclose(rotation(positions[:8], 8, 100.0, long)[0], 1.5 * plain[0][:8], rtol=1e-6)
    np.testing.assert_allclose(
        rotation(positions, 8, 100.0, long)[0], 1.5 * rotation(positions, 8, 100.0, LinearScaling(2.0))[0], rtol=1e-5
    )


def test_configs_of_scalings_are_read_as_written():
    long = LongScaling((1.0, 1.5), (2.0, 3.0), 16, 1.25)
    config = Phi3Config(n_positions=64, d_model=16, n_heads=4, n_kv_heads=2, rope_scaling=long)
    assert Phi3Config.from_hf(ConfigReader(config.to_hf())) == config
    fields = {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    config = Phi.config_class.from_hf(ConfigReader(fields))
    assert (config.n_positions, config.rope_scaling) == (128, DynamicScaling(4.0, 32))
    assert config.to_hf()["max_position_embeddings"] == 32
    assert Phi.config_class.from_hf(ConfigReader(config.to_hf())) == config


@pytest.mark.parametrize("cls", [ApertusConfig, CwmConfig, GptOssConfig, Ministral3.config_class, Mistral4.config_class])
def test_a_scaling_of_null_is_that_of_the_family(cls):
    """As in transformers; the type "default" has none, and no growth of queries."""
    for key in ("rope_scaling", "rope_parameters"):
        assert cls.from_hf(ConfigReader({key: None})).rope_scaling == cls().rope_scaling is not None
    if cls().query_growth:
        return
    assert cls.from_hf(ConfigReader({"rope_parameters": {"rope_type": "default"}})).rope_scaling is None


def test_lfm2_adjusts_the_width_of_its_mlps_and_counts_layers_with_attention():
    """As the folder of LFM2-350M says it."""
    keys = {"block_ff_dim": 6656, "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    keys |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "eos_token_id": 7, "block_ffn_dim_multiplier": 1.0}
    config = Lfm2Config.from_hf(ConfigReader(keys))
    assert config == Lfm2Config.of("350m")
    assert config.to_hf()["layer_types"].count("full_attention") == 6


def test_old_files_say_how_many_dims_of_a_head_are_rotary():
    config = MiniMaxM2Config.from_hf(ConfigReader({"rotary_dim": 64, "head_dim": 128}))
    assert (config, config.rotary_size) == (MiniMaxM2Config(rope_share=0.5), 64)
    assert MiniMaxM2Config.from_hf(ConfigReader({"rotary_dim": 64, "rope_parameters": {"partial_rotary_factor": 0.25}})) == (
        MiniMaxM2Config(rope_share=0.25)
    )
    assert MiniMaxM2Config.from_hf(ConfigReader(config.to_hf())) == config


def _embedded(model, ids):
    """Returns the input of the first layer."""
    unchanged = lambda carry, *args, **kwargs: carry  # noqa: E731
    stacks = ("stack", *(["first"] if model.first is not None else []))
    for name in stacks:
        model = eqx.tree_at(lambda m, name=name: getattr(m, name), model, unchanged)
    return eqx.tree_at(lambda m: m.norm, model, None).hidden(ids)


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "afmoe", "granite"])
def test_only_gemmas_round_the_scale_of_embeddings(name, tmp_path):
    """To bfloat16, before the product. As transformers, others round the product alone."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**golden["config"], "embedding_multiplier": 4.9}))
    fill(tmp_path / "model.safetensors", golden["tensors"])
    model, config = from_pretrained(tmp_path, dtype=jnp.bfloat16)
    scale = np.float32(config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale)
    rounded = np.float32(scale.astype(jnp.bfloat16))
    assert rounded != scale
    rows = np.asarray(model.embedding.weight, np.float32)
    wanted, other = ((rows * x).astype(jnp.bfloat16) for x in ((rounded, scale) if "gemma" in name else (scale, rounded)))
    found = np.asarray(_embedded(model, jnp.arange(len(rows))))
    np.testing.assert_array_equal(found, wanted)
    assert (found != other).any()


def test_first_layers_of_command_a_have_a_distance_of_windows_of_their_own():
    keys = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "sliding_window_pattern": 3}
    config = Cohere2Moe.config_class.from_hf(ConfigReader(keys))
    assert config.windows == (None, None, 4096, 4096, None)
    assert config.rotated == (True, True, True, True, False)
    other = Cohere2Moe.config_class.from_hf(ConfigReader({**keys, "prefix_dense_sliding_window_pattern": 2}))
    assert other.windows == (4096, None, 4096, 4096, None)
    assert other.rotated == (True, False, True, True, False)
    for each in (config, other):
        assert Cohere2Moe.config_class.from_hf(ConfigReader(each.to_hf())) == each
    with pytest.raises(ValueError, match=r"`unrotated_layers`: expected None or those without a window, \(3, 7,"):
        Cohere2Moe.config_class(unrotated_layers=(0,))
    with pytest.raises(ValueError, match=r"`renormalize`: expected True with a softmax, got False"):
        Cohere2Moe.config_class(renormalize=False)


def test_published_files_of_axk1_have_no_correction_and_an_unused_norm(tmp_path):
    sizes = {"d_model": 16, "d_mlp": 24, "n_layers": 2, "n_heads": 2, "latent_size": 8, "query_latent_size": 8}
    sizes |= {"plain_size": 4, "shared_rotary_size": 4, "value_size": 4, "n_experts": 8, "d_expert": 8, "d_shared": 8}
    config = AXK1Config(vocab_size=31, n_expert_groups=1, n_chosen_groups=1, **sizes)
    model = random_model(AXK1, config)
    save_pretrained(model, config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(
        {**tensors, "model.layers.0.post_mlp_layernorm.weight": np.ones(16, np.float32)}, tmp_path / "model.safetensors"
    )
    found, _ = from_pretrained(tmp_path)
    expected = eqx.tree_at(lambda m: m.stack.blocks.mlp.correction, model, jnp.zeros((1, 8)))
    assert eqx.tree_equal(found, expected)


def test_published_files_of_exaone_have_keys_of_their_own():
    keys = {"num_layers": 30, "layer_norm_epsilon": 1e-4, "activation_function": "relu"}
    config = Exaone.config_class.from_hf(ConfigReader(keys))
    assert (config.n_layers, config.norm_eps, config.activation) == (30, 1e-4, "relu")
    assert {"ExaoneForCausalLM", "LlamaForCausalLM"} < {*Exaone.architectures_of("exaone")}


def test_falcon_h1_rounds_the_factors_of_its_mixer(tmp_path):
    """To bfloat16, before the product. transformers has these in a buffer, and its other factors as Python's numbers."""
    golden = json.loads((GOLDEN / "falcon-h1.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    fill(tmp_path / "model.safetensors", golden["tensors"])
    factors = from_pretrained(tmp_path)[1].factors
    states = tuple(float(jnp.bfloat16(factor)) for factor in factors.states)
    rounded, gate = replace(factors, states=states), replace(factors, gate=float(jnp.bfloat16(factors.gate)))
    assert rounded != factors != gate

    def logits(dtype, factors):
        return np.asarray(from_pretrained(tmp_path, dtype=dtype, factors=factors)[0](jnp.arange(9)), np.float32)

    found = logits(jnp.bfloat16, factors)
    np.testing.assert_array_equal(found, logits(jnp.bfloat16, rounded))
    assert (found != logits(jnp.bfloat16, gate)).any()
    assert (logits(jnp.float32, factors) != logits(jnp.float32, rounded)).any()


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_what_routers_did_comes_with_the_hidden_states():
    sizes = {"vocab_size": 53, "n_positions": 24, "d_model": 16, "d_mlp": 8, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2}
    model = random_model(Mixtral, MixtralConfig(**sizes, n_experts=4))
    ids = jnp.arange(10)
    mask = ids >= 2
    hidden, routing = eqx.filter_jit(lambda: model.routed(ids, mask=mask))()
    assert routing.tokens == 3 * 8  # of three layers
    assert routing.dropped == 0 and routing.imbalance >= routing.tokens
    loss = add_routing(cross_entropy(model.logits(hidden[:-1]), ids[1:]), routing, balance_loss=0.5)
    found = (loss.total - cross_entropy(model.logits(hidden[:-1]), ids[1:]).total) / 0.5
    np.testing.assert_allclose(found, routing.balance, rtol=1e-4)
    # The default of a Nemotron-H has experts, which its layers need not have.
    without = NemotronHConfig(**sizes, head_size=8, parts=("mlp", "attention", "mlp"))
    for other in (random_model(Olmo, Olmo.config_class(**sizes)), random_model(NemotronH, without)):
        with pytest.raises(ValueError, match=r"`routed`: expected a model with experts, got layers without"):
            other.routed(ids)


@pytest.mark.sweep
def test_a_folder_in_mxfp4_is_read_as_its_numbers(tmp_path):
    """Also by devices that each read a part, and it is saved without the packing."""
    sizes = {"vocab_size": 32, "n_positions": 16, "d_model": 64, "d_mlp": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2}
    config = GptOssConfig(head_size=8, n_experts=2, n_chosen=1, **sizes)
    model = random_model(GptOss, config)
    save_pretrained(model, config, tmp_path)
    tensors, rng, wanted = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, n_in, n_out = tensors.pop(name).shape
        codes = rng.integers(0, 16, (experts, n_out, n_in // 32, 32), np.uint8)
        scales = rng.integers(120, 130, (experts, n_out, n_in // 32), np.uint8)
        sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
        numbers = np.where(exponent == 0, 0.5 * mantissa, 2.0 ** (exponent - 1.0) * (1 + 0.5 * mantissa)) * (-1.0) ** sign
        numbers *= 2.0 ** (scales.astype(float) - 127)[..., None]
        wanted[name] = numbers.reshape(experts, n_out, n_in).swapaxes(1, 2)
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read, config = from_pretrained(tmp_path)
    assert read.stack.blocks.mlp.experts.down.weight.dtype == jnp.bfloat16
    save_pretrained(read, config, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == wanted.keys() | {name for name in tensors if not name.endswith(("_blocks", "_scales"))}
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(again[name].astype(float), numbers)
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=4, verbose=False)
    placed = jax.tree.leaves(from_pretrained(tmp_path, deployer=deployer, dtype=jnp.float32)[0])
    for ours, theirs in zip(placed, jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    save_file({name: x for name, x in tensors.items() if "down_proj_scales" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"down_proj_scales`: expected uint8, one number for each block of .*got none\. Fetch"
    ):
        from_pretrained(tmp_path)


@pytest.mark.sweep
def test_the_text_model_of_a_folder_with_images_is_read_by_its_class(tmp_path):
    """From names with another prefix, and from tensors of all experts. The folder's options of `generate` are kept."""
    golden = json.loads((GOLDEN / "qwen3-5-moe.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    fill(tmp_path / "model.safetensors", golden["tensors"])
    model, config = from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items() if ".experts." not in name}
    for prefix in (f"layers.{i}.mlp.experts" for i in range(config.n_layers)):
        gate, up, down = (
            np.stack([tensors[f"model.{prefix}.{expert}.{layer}_proj.weight"] for expert in range(config.n_experts)])
            for layer in ("gate", "up", "down")
        )
        whole[f"model.language_model.{prefix}.gate_up_proj"] = np.concatenate([gate, up], 1)
        whole[f"model.language_model.{prefix}.down_proj"] = down
    save_file({**whole, "model.visual.merger.weight": np.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = {"model_type": "qwen3_5_moe", "text_config": golden["config"], "vision_config": {"depth": 1}}
    fields["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2], "top_k": 20}))
    with pytest.raises(
        ValueError, match=r"got 'Qwen3_5MoeForCond.*\. Load the part that `text_config` .*qwen3_5.Qwen3_5Moe\."
    ):
        from_pretrained(tmp_path)
    read, config = Qwen3_5Moe.from_pretrained(tmp_path)
    assert config.eos_token_id == (5, 2) and config.generation.keys == {"top_k": 20}
    for ours, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    save_pretrained(read, config, tmp_path / "text")
    assert load_file(tmp_path / "text" / "model.safetensors").keys() == tensors.keys()
    assert isinstance(from_pretrained(tmp_path / "text")[0], Qwen3_5Moe)
    assert SequenceClassifier.architecture(Qwen3_5.config_class(n_classes=2)) == "Qwen3_5TextForSequenceClassification"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "cls", "prefix", "unused"),
    [
        # Without encoders, and without the keys and values of layers that share those of others.
        (
            "gemma4",
            Gemma4,
            "model.language_model.",
            ("vision_tower.patch.weight", "language_model.layers.5.self_attn.k_proj.weight"),
        ),
        (
            "gemma3",
            Gemma3,
            "model.language_model.",
            ("vision_tower.encoder.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ),
        (
            "gemma3",
            Gemma3,
            "language_model.model.",
            ("vision_tower.encoder.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ),
        ("ministral3", Ministral3, "language_model.model.", ("vision_tower.ln_pre.weight",)),
        ("mistral4", Mistral4, "language_model.model.", ("vision_tower.ln_pre.weight",)),
        (
            "../mistral",
            Mistral,
            "language_model.model.",
            ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"),
        ),
    ],
)
def test_the_text_model_of_a_larger_folder_is_read_and_saved_alone(name, cls, prefix, unused, tmp_path):
    model_type, text_type = cls.model_types[::-1]
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    folders = [tmp_path / name for name in ("text", "whole", "again")]
    for folder in folders:
        folder.mkdir()
    text, whole, again = folders
    (text / "config.json").write_text(json.dumps(golden["config"]))
    fill(text / "model.safetensors", golden["tensors"])
    part = {name: value for name, value in golden["config"].items() if name != "architectures"}
    names = {"model_type": model_type, "architectures": [f"{cls.__name__}ForConditionalGeneration"], "vision_config": {}}
    (whole / "config.json").write_text(json.dumps({**names, "text_config": part}))
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "top_k": 3}))
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    start = "model." if prefix.startswith("model.") else ""
    others = {start + name: np.zeros((2, 2)) for name in unused}
    save_file({**renamed, **others}, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"Load the part that `text_config` .*{cls.__module__}\.{cls.__name__}\.from_pr"):
        from_pretrained(whole)
    model, config = cls.from_pretrained(whole)
    assert (config.eos_token_id, config.generation.keys) == ((2, 5), {"top_k": 3})
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(from_pretrained(text)[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    save_pretrained(model, config, again)
    saved = load_file(again / "model.safetensors")
    assert saved.keys() == tensors.keys() and all(np.array_equal(saved[name], tensors[name]) for name in saved)
    assert json.loads((again / "config.json").read_text())["model_type"] == text_type


@pytest.mark.sweep
def test_folders_of_kimi_k2_are_deepseek_v3s(tmp_path):
    """Their `config.json`, and another name of the same class."""
    fields = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 163584}
    fields |= {"eos_token_id": 163585, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1}
    fields |= {"topk_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "num_attention_heads": 64}
    fields |= {"num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "vocab_size": 163840}
    fields |= {"routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    yarn = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
    fields["rope_scaling"] = {**yarn, "original_max_position_embeddings": 4096}
    config = DeepseekV3Config.from_hf(ConfigReader(fields))
    shapes = eqx.filter_eval_shape(DeepseekV3, config, key=jax.random.key(0))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes) if is_shape(leaf)) / 1e9) == 1026
    assert (config.n_chosen, config.n_dense, config.rope_scaling.factor, config.router_scale) == (8, 1, 32.0, 2.827)

    golden = json.loads((GOLDEN / "deepseek-v3.json").read_text())
    fill(tmp_path / "model.safetensors", golden["tensors"])
    read = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        (tmp_path / "config.json").write_text(json.dumps({**golden["config"], "model_type": model_type}))
        read.append(from_pretrained(tmp_path)[0])
    for ours, wanted in zip(*map(jax.tree.leaves, read), strict=True):
        np.testing.assert_array_equal(ours, wanted)


# --- heads for classes ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_classifier_of_a_language_model_scores_its_last_token(tmp_path):
    """Found by the mask, or without one by the padding id; other heads are refused by their name."""
    sizes = {"vocab_size": 53, "n_positions": 24, "d_model": 16, "d_mlp": 8, "n_layers": 2, "n_heads": 2}
    language_model = random_model(Olmo, Olmo.config_class(**sizes, pad_token_id=1))
    model = SequenceClassifier.of(language_model, 2, key=jax.random.key(0))
    ids, mask = jnp.array([5, 6, 7, 1, 1]), jnp.arange(5) < 3
    score = eqx.filter_jit(lambda ids, mask: model(ids, mask=mask))
    hidden = language_model.hidden(ids, mask=mask)
    np.testing.assert_allclose(score(ids, mask), hidden[2] @ model.score.weight.T, atol=1e-5)
    np.testing.assert_allclose(score(ids, None), score(ids, mask), atol=1e-5)
    save_pretrained(model, model.config, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["OlmoForSequenceClassification"]
    again, config = from_pretrained(tmp_path)
    assert isinstance(again, SequenceClassifier) and config == model.config
    np.testing.assert_array_equal(jax.tree.leaves(again)[-1], model.score.weight)
    assert (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["OlmoForQuestionAnswering"]}))
    with pytest.raises(ValueError, match=r"one of OlmoForCausalLM, OlmoModel, OlmoForSeq.*, OlmoForTok.*, got 'OlmoForQ"):
        from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`n_classes`: expected the number of classes, got None\. Set it"):
        TokenClassifier(language_model.config, key=jax.random.key(0))


# --- special attention ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_caps_and_sinks_of_an_attention():
    """Against the formula, with dropout of weights off."""
    key, rng = jax.random.key(0), np.random.default_rng(0)
    layers = [eqx.nn.Linear(8, 8, use_bias=False, key=k) for k in jax.random.split(key, 4)]
    x = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=2), jnp.float32)
    attention = Attention(*layers, n_heads=2, n_kv_heads=2, cap=0.3, sinks=sinks)
    mask = jnp.tri(5, dtype=bool)
    found, _ = attention(x, mask=mask)
    q, k, v = (jnp.reshape(x @ layer.weight.T, (5, 2, 4)) for layer in layers[:3])
    scores = 0.3 * jnp.tanh(jnp.einsum("qhd,khd->hqk", q, k) / 2 / 0.3)
    weights = jnp.where(mask, jnp.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None]
    wanted = jnp.einsum("hqk,khd->qhd", weights, v).reshape(5, 8) @ layers[3].weight.T
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_biases_of_scores_count_tokens_and_have_a_slope_for_each_head():
    """Slopes are powers of two; if the number of heads is not one, they are those of the next one, every other first."""
    mask = jnp.array([False, False, True, True, True])
    slopes = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
    found = distance_bias(mask, 5, n_heads=6)
    np.testing.assert_array_equal(found, slopes[:, None, None] * np.array([0, 0, 0, 1, 2]))
    np.testing.assert_array_equal(distance_bias(None, 3, n_heads=2, largest=4)[:, 0, 1], [2.0**-2, 2.0**-4])


@pytest.mark.sweep
def test_a_latent_attention_decodes_with_its_latent_vectors():
    """A step of decoding, which computes with latent vectors, equals the call, and the cache holds these alone."""
    sizes = {"vocab_size": 53, "n_positions": 24, "d_model": 16, "d_mlp": 8, "n_layers": 2, "n_heads": 2, "n_dense": 1}
    latent = {"latent_size": 6, "query_latent_size": 5, "plain_size": 4, "shared_rotary_size": 2, "value_size": 3}
    experts = {"n_experts": 4, "n_chosen": 1, "n_expert_groups": 2, "n_chosen_groups": 1, "d_expert": 4, "d_shared": 4}
    model = random_model(DeepseekV3, DeepseekV3Config(**sizes, **latent, **experts))
    ids = jnp.arange(7)
    cache = model.init_cache(9)
    assert sum(leaf.nbytes for leaf in (cache.keys, cache.values)) == 2 * 9 * (6 + 2) * 4
    decode = eqx.filter_jit(lambda ids, cache: model.decode(ids, cache))
    _, cache = decode(ids[:6], cache)
    found, cache = decode(ids[6:], cache)
    np.testing.assert_allclose(found, eqx.filter_jit(model)(ids)[-1], atol=2e-5)


@pytest.mark.sweep
def test_layers_of_two_kinds_are_one_stack_of_the_group_that_repeats():
    """Also if no group repeats. Each block reads and writes its own layer of a folder."""
    sizes = {"vocab_size": 53, "d_model": 16, "d_mlp": 8, "n_layers": 6, "n_heads": 2, "head_size": 8, "d_expert": 4}
    sizes |= {"n_experts": 2, "n_chosen": 1, "d_shared": 4, "state_groups": 1, "state_heads": 1}
    groups = {None: (6, 1), (0, 1, 3, 4): (3, 2), (0, 2, 4): (2, 3), (): (1, 6)}
    for deltas, (n, repeats) in groups.items():
        config = Qwen3NextConfig(mixer_layers=deltas, **sizes)
        stack = eqx.filter_eval_shape(Qwen3Next, config, key=jax.random.key(0)).stack
        assert (n, stack.n_layers) == (len(getattr(stack.blocks, "layers", [0])), repeats)
        tensors = Qwen3Next.weight_map(config).tensors
        names = [disk for tensor in tensors for disk in tensor.on_disk]
        assert len({*names}) == len(names)
        assert {int(name.split(".")[2]) for name in names if ".A_log" in name} == {
            i for i, is_mixer in enumerate(config.mixers) if is_mixer
        }
        assert Qwen3NextConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert Qwen3NextConfig.from_hf(ConfigReader({"num_hidden_layers": 4, "full_attention_interval": 2})).mixers == (
        True, False, True, False,
    )  # fmt: skip


def test_older_files_name_the_parts_of_layers_by_letters():
    """Also the prefix of their tensors is another one."""
    golden = json.loads((GOLDEN / "nemotron-h.json").read_text())
    parts = ("mixer", "experts", "mixer", "attention", "mlp")
    keys = {key: value for key, value in golden["config"].items() if key != "layers_block_type"}
    config = NemotronHConfig.from_hf(ConfigReader({**keys, "hybrid_override_pattern": "MEM*-"}))
    assert config.parts == parts and config == NemotronHConfig.from_hf(ConfigReader(golden["config"]))
    assert NemotronH.weight_map(config).current("backbone.layers.3.mixer.q_proj.weight") == (
        "model.layers.3.mixer.q_proj.weight"
    )
    with pytest.raises(ValueError, match=r"`parts`: expected the part of each layer, got None"):
        NemotronHConfig(parts=None)
    with pytest.raises(
        ValueError, match=r"`parts`: expected one of attention, mixer, mlp, experts for each of `n_layers`=3"
    ):
        NemotronHConfig(n_layers=3)


def test_layers_at_equal_distances_have_experts_or_attention():
    """Others have no file."""
    keys = {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_offset": 0}
    config = JambaConfig.from_hf(ConfigReader(keys))
    assert config.layer_parts == ("mixer", "mixer", "attention", "mixer", "mixer")
    assert config.dense == (False, True, False, True, False)
    assert JambaConfig.from_hf(ConfigReader(config.to_hf())) == config
    for name, message in (("mixer_layers", "or all others, "), ("expert_layers", "")):
        with pytest.raises(ValueError, match=rf"`{name}`: expected layers at equal distances, {message}got \(0, 1, 3\)"):
            JambaConfig(n_layers=5, **{name: (0, 1, 3)})
    with pytest.raises(ValueError, match=r"`state_value_size`: expected a multiple of `d_model`=4096, got 5000"):
        JambaConfig(state_value_size=5000)
    with pytest.raises(
        ValueError, match=r"`n_experts`: expected 0 or at least 2, got 1\. A file with `num_experts`=1 has MLPs"
    ):
        JambaConfig(n_experts=1, n_chosen=1)
    assert not JambaConfig(n_experts=0, n_chosen=0).has_experts
    message = r"`n_chosen`: expected 0 without experts, got 2\. Pass `n_chosen=0`, or `n_experts`\."
    with pytest.raises(ValueError, match=message):
        JambaConfig(n_experts=0)
    assert (
        MambaConfig.from_hf(ConfigReader({"expand": 16, "intermediate_size": 1536})) == MambaConfig()
    )  # as in Falcon-Mamba


SMALL = {"vocab_size": 5, "d_model": 64, "n_layers": 2}
ONE = {"n_heads": 2, "n_kv_heads": 2, "d_mlp": 8}


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (Mamba, MambaConfig(**SMALL, state_value_size=4096, initial_steps=InitialSteps(0.01, 10.0))),
        (
            FalconMamba,
            FalconMambaConfig(**SMALL, state_value_size=4096, initial_steps=InitialSteps(scale=0.5, is_constant=True)),
        ),
        (Mamba2, Mamba2Config(**SMALL, state_heads=4096, state_value_size=1, initial_steps=InitialSteps(0.1, 0.2))),
        (NemotronH, NemotronHConfig(**SMALL, parts=("mixer",) * 2, state_heads=4096, state_value_size=1)),
        (Jamba, JambaConfig(**SMALL, **ONE, n_experts=2, n_chosen=1, state_value_size=4096)),
        (Bamba, BambaConfig(**SMALL, **ONE, state_heads=4096, state_value_size=1)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_initial_steps_are_drawn_by_their_logarithms(cls, config):
    """As in the papers' code; those of Jamba, Bamba and others whose files do not say it, too."""
    steps = config.initial_steps
    mixer = eqx.filter_jit(lambda key: cls(config, key=key).stack)(jax.random.key(0)).blocks
    mixer = getattr(mixer, "layers", [mixer])[0].mixer
    drawn = np.log(np.log1p(np.exp(np.asarray(mixer.decay_bias[0], float))))
    share = (drawn - np.log(steps.least)) / np.log(steps.most / steps.least)
    np.testing.assert_allclose(np.quantile(share, [0, 0.25, 0.5, 0.75, 1]), [0, 0.25, 0.5, 0.75, 1], atol=0.03)
    if config.mixer == "mamba1":
        weight, size = mixer.decay.weight, steps.scale * config.rank**-0.5
        assert jnp.abs(weight).max() <= size * 1.001 and (steps.is_constant or weight.min() < -0.9 * size)
        assert not weight.weak_type
        assert bool((weight == weight[0, 0, 0]).all()) == steps.is_constant
    assert type(config).from_hf(ConfigReader(config.to_hf())) == config


def test_initial_steps_that_a_file_cannot_hold():
    with pytest.raises(ValueError, match=r"`initial_steps`: expected no `scale` or `is_constant`, got"):
        Mamba2Config(initial_steps=InitialSteps(scale=0.5))
    with pytest.raises(ValueError, match=r"`initial_steps`: expected the `least` of `step_limits`, 0\.5, got 0\.001"):
        NemotronHConfig(step_limits=(0.5, float("inf")))
    with pytest.raises(ValueError, match=r"`initial_steps`: expected InitialSteps\(.*, as in every 'jamba' model, got"):
        JambaConfig(initial_steps=InitialSteps(floor=0.0))
    assert jnp.isfinite(InitialSteps(least=0.0).bias(9, jax.random.key(0))).all()
    message = r"expected finite numbers of at least 0, and a positive shortest step, got InitialSteps\(.*Leave `floor` out"
    for steps in (InitialSteps(least=-1.0), InitialSteps(most=float("inf")), InitialSteps(most=0.0, floor=0.0)):
        with pytest.raises(ValueError, match=message):
            MambaConfig(initial_steps=steps)
    with pytest.raises(ValueError, match=message):
        Mamba2Config.from_hf(ConfigReader({"time_step_min": 0.0, "time_step_floor": 0.0}))
    old = {"mamba_dt_max": 0.5, "mamba_dt_init_floor": 0.01, "mamba_n_groups": 2, "mamba_d_conv": 3}
    config = NemotronHConfig.from_hf(ConfigReader(old))
    assert (config.initial_steps, config.state_groups, config.conv_kernel) == (InitialSteps(0.001, 0.5, 0.01), 2, 3)


def test_layers_without_their_kinds_have_the_window_from_the_one_that_the_file_says():
    keys = {"num_hidden_layers": 4, "sliding_window": 8, "first_k_dense_replace": 1}
    assert Dots1Config.from_hf(ConfigReader(keys)).windows == (None,) * 4
    assert Dots1Config.from_hf(ConfigReader({**keys, "max_window_layers": 2})).windows == (None, None, 8, 8)
