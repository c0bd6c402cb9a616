"""The LLaMA family: grouped key/value heads, separate head sizes, biases, head norms, windows, each scaling of rotary
positions, and layers with a gated delta rule."""

import functools

import jax
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.afmoe import Afmoe, AfmoeConfig
from redeqx.models.apertus import Apertus, ApertusConfig
from redeqx.models.bamba import Bamba, BambaConfig
from redeqx.models.bloom import Bloom, BloomConfig
from redeqx.models.decoder import Factors
from redeqx.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from redeqx.models.falcon_h1 import FalconH1, FalconH1Config
from redeqx.models.gemma import Gemma3, Gemma3Config
from redeqx.models.gemma4 import Gemma4, Gemma4Config
from redeqx.models.gpt_bigcode import GPTBigCode, GPTBigCodeConfig
from redeqx.models.gpt_oss import GptOss, GptOssConfig
from redeqx.models.granite_hybrid import GraniteMoeHybrid, GraniteMoeHybridConfig
from redeqx.models.granite_swa import GraniteMoeSWA, GraniteMoeSWAConfig
from redeqx.models.jamba import Jamba, JambaConfig
from redeqx.models.lfm_moe import Lfm2Moe, Lfm2MoeConfig
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.mamba import FalconMamba, FalconMambaConfig
from redeqx.models.mamba2 import Mamba2, Mamba2Config
from redeqx.models.minicpm import MiniCPM3, MiniCPM3Config
from redeqx.models.minimax import MiniMaxM2, MiniMaxM2Config
from redeqx.models.mistral import Mixtral, MixtralConfig
from redeqx.models.mistral4 import Mistral4, Mistral4Config
from redeqx.models.nemotron_h import NemotronH, NemotronHConfig
from redeqx.models.qwen import Qwen3, Qwen3Config
from redeqx.models.qwen_next import Qwen3Next, Qwen3NextConfig
from redeqx.models.xglm import XGLM, XGLMConfig
from tests.models.families._case import Case, Training

VOCAB, SEQ, LONG = 47, 11, 40


def make(name, **kwargs):
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **kwargs})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def run(module, inputs):
    """Uses the positions of `generate`, which do not count padding."""
    import torch

    extra = {}
    if "mask" in inputs:
        mask = torch.tensor(inputs["mask"])
        extra = {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    return module(torch.tensor(inputs["ids"]), **extra).logits


def run_last(module, inputs):
    return run(module, inputs)[:, -4:]


def call_last(model, row):
    return model(**row)[-4:]


def llama(**kwargs):
    return functools.partial(make, "Llama", **kwargs)


def stretched(name, **rope):
    """Returns a case whose positions go far beyond those of the original training."""
    module = llama(rope_parameters={"rope_type": name, "rope_theta": 200.0, **rope}, head_dim=16)
    return Case(f"llama-{name}", module, {"ids": LONG_IDS}, run_last, call_last)


rng = np.random.default_rng(0)
IDS = rng.integers(0, VOCAB, (2, SEQ)).astype(np.int32)
LONG_IDS = rng.integers(0, VOCAB, (2, LONG)).astype(np.int32)
# The first row has two padding tokens on the right, the second three on the left.
PADDED = (np.arange(SEQ) >= np.array([[0], [3]])) & (np.arange(SEQ) < np.array([[SEQ - 2], [SEQ]]))
LEFT = np.arange(SEQ) >= np.array([[0], [3]])
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}
ORIGINAL = {"original_max_position_embeddings": 16}
WINDOW = {"sliding_window": 4, "use_sliding_window": True}

CASES = [
    Case("llama", llama(), {"ids": IDS}, run, gradients=True),
    Case(
        "llama-single-kv-head",
        llama(num_key_value_heads=1, tie_word_embeddings=True),
        {"ids": IDS, "mask": PADDED},
        run,
        counts=PADDED,
    ),
    Case(
        "llama-biases",
        llama(head_dim=10, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
        {"ids": IDS},
        run,
        gradients=True,
    ),
    stretched("linear", factor=3.0),
    stretched("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    stretched("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.1, **ORIGINAL),
    Case(
        "mistral",
        functools.partial(make, "Mistral", sliding_window=4, head_dim=14),
        {"ids": IDS},
        run,
        gradients=True,
        generates=True,
    ),
    Case("qwen2", functools.partial(make, "Qwen2", tie_word_embeddings=True), {"ids": IDS}, run, gradients=True),
    Case(
        "qwen2-windowed-layers",
        functools.partial(make, "Qwen2", num_hidden_layers=3, max_window_layers=1, **WINDOW),
        {"ids": IDS, "mask": LEFT},
        run,
        counts=LEFT,
        generates=True,
    ),
    Case("qwen3", functools.partial(make, "Qwen3", head_dim=10, attention_bias=True), {"ids": IDS}, run, gradients=True),
    Case(
        "qwen3-next-padded",
        functools.partial(make, "Qwen3Next", **HYBRID),
        {"ids": IDS, "mask": LEFT},
        run_last,
        call_last,
        gradients=True,
        generates=True,
    ),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each next token."""
    del key
    inputs, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(inputs), labels)
    return Loss(losses.sum(), labels.size)


SIZES = {"vocab_size": 64, "n_positions": 16, "d_model": 32, "d_mlp": 48, "n_layers": 2, "n_heads": 4, "init_std": 0.1}
CONFIG = LlamaConfig(n_kv_heads=2, **SIZES)
QWEN3 = Qwen3Config(n_kv_heads=2, head_size=16, is_tied=True, window=4, windowed_layers=(1,), **SIZES)
GEMMA3 = Gemma3Config(n_kv_heads=2, head_size=8, window=4, windowed_layers=(0,), logit_cap=5.0, **SIZES)
MIXTRAL = MixtralConfig(n_kv_heads=2, n_experts=4, **SIZES)
MINIMAX = MiniMaxM2Config(n_kv_heads=2, head_size=8, rope_share=0.5, n_experts=4, n_chosen=2, **SIZES)
GPT_OSS = GptOssConfig(n_kv_heads=2, head_size=8, window=4, n_experts=4, n_chosen=2, **SIZES)
DEEPSEEK = DeepseekV3Config(
    latent_size=16,
    query_latent_size=24,
    plain_size=8,
    shared_rotary_size=4,
    value_size=8,
    n_experts=8,
    n_chosen=2,
    d_expert=16,
    d_shared=32,
    n_dense=1,
    n_expert_groups=4,
    n_chosen_groups=2,
    **SIZES,
)
MISTRAL4 = Mistral4Config(
    latent_size=16,
    query_latent_size=24,
    plain_size=8,
    shared_rotary_size=4,
    value_size=8,
    n_experts=4,
    n_chosen=2,
    d_expert=16,
    d_shared=16,
    **SIZES,
)
GRANITE4 = GraniteMoeHybridConfig(
    mixer_layers=(0,),
    state_groups=2,
    state_heads=4,
    state_size=8,
    state_value_size=16,
    n_kv_heads=2,
    n_experts=4,
    n_chosen=2,
    d_expert=16,
    d_shared=48,
    attention_scale=0.3,
    **SIZES,
)
STATES = {"state_groups": 2, "state_heads": 4, "state_size": 8, "state_value_size": 16}
BAMBA = BambaConfig(n_kv_heads=2, mixer_layers=(0,), **STATES, **SIZES)
FALCON_H1 = FalconH1Config(
    n_kv_heads=2,
    norms_states=True,
    factors=Factors(0.9, 1.2, 0.7, 1.1, 0.8, (0.9, 1.1, 0.8, 1.2, 0.7), 0.9, 1.1),
    **STATES,
    **SIZES,
)
ONLY = ("vocab_size", "d_model", "n_layers", "init_std")
MAMBA2 = Mamba2Config(**STATES, **{name: SIZES[name] for name in ONLY})
SCANNED = {"state_size": 4, "state_value_size": 64}
MAMBA = FalconMambaConfig(**SCANNED, **{name: SIZES[name] for name in ONLY})
JAMBA = JambaConfig(n_kv_heads=2, mixer_layers=(1,), n_experts=4, **SCANNED, **SIZES)
GPT_BIGCODE = GPTBigCodeConfig(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0, **SIZES)
QWEN3_NEXT = Qwen3NextConfig(
    n_kv_heads=2,
    head_size=16,
    mixer_layers=(0,),
    state_groups=2,
    state_heads=4,
    state_size=16,
    state_value_size=16,
    n_experts=4,
    n_chosen=2,
    d_expert=16,
    d_shared=32,
    **SIZES,
)
LFM2 = Lfm2MoeConfig(
    n_kv_heads=2, mixer_layers=(0, 2), n_dense=1, n_experts=4, n_chosen=2, d_expert=16, **{**SIZES, "n_layers": 3}
)
NEMOTRON_H = NemotronHConfig(
    parts=("mixer", "experts", "attention", "mlp"),
    state_groups=2,
    state_heads=4,
    state_size=8,
    state_value_size=16,
    n_kv_heads=2,
    head_size=8,
    n_experts=4,
    d_expert=16,
    d_shared=32,
    **{**SIZES, "n_layers": 4},
)
GEMMA4 = Gemma4Config(
    n_kv_heads=2,
    head_size=8,
    global_head_size=16,
    window=4,
    windowed_layers=(0, 2),
    n_shared=2,
    widens_shared=True,
    d_layer_input=8,
    n_layer_inputs=64,
    n_experts=4,
    n_chosen=2,
    d_expert=16,
    logit_cap=5.0,
    **{**SIZES, "n_layers": 4},
)
AFMOE = AfmoeConfig(
    n_kv_heads=2,
    head_size=8,
    window=4,
    windowed_layers=(0, 2),
    n_experts=4,
    n_chosen=2,
    d_expert=16,
    d_shared=32,
    embedding_scale=None,
    **{**SIZES, "n_layers": 3},
)
GRANITE_SWA = GraniteMoeSWAConfig(
    n_kv_heads=2, window=4, windowed_layers=(0,), unrotated_layers=(1,), n_experts=4, d_shared=32, **SIZES
)
MINICPM = MiniCPM3Config(
    latent_size=16,
    query_latent_size=16,
    plain_size=8,
    shared_rotary_size=8,
    value_size=8,
    logit_divisor=2.0,
    **SIZES,
)
XGLM_SIZES = XGLMConfig(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0, **SIZES)
APERTUS = ApertusConfig(n_kv_heads=2, rope_scaling=None, **SIZES)
BLOOM = BloomConfig(**{name: size for name, size in SIZES.items() if name != "d_mlp"})
EXAMPLES = [{"ids": row} for row in rng.integers(0, 64, (16, 9))]
TRAININGS = [
    Training("llama", lambda key: Llama(CONFIG, key=key), EXAMPLES, loss_fn),
    Training("qwen3", lambda key: Qwen3(QWEN3, key=key), EXAMPLES, loss_fn),
    Training("gemma3", lambda key: Gemma3(GEMMA3, key=key), EXAMPLES, loss_fn),
    # At a larger rate, which experts its tokens choose depends on rounding from the fifth step on.
    Training("gemma4", lambda key: Gemma4(GEMMA4, key=key), EXAMPLES, loss_fn, 0.006, zero_gradient=("*layer_scale",)),
    Training("afmoe", lambda key: Afmoe(AFMOE, key=key), EXAMPLES, loss_fn, zero_gradient=("*correction",)),
    Training("apertus", lambda key: Apertus(APERTUS, key=key), EXAMPLES, loss_fn, zero_gradient=("*beta", "*eps")),
    Training("bloom", lambda key: Bloom(BLOOM, key=key), EXAMPLES, loss_fn),
    Training("mixtral", lambda key: Mixtral(MIXTRAL, key=key), EXAMPLES, loss_fn),
    Training("granite-moe-swa", lambda key: GraniteMoeSWA(GRANITE_SWA, key=key), EXAMPLES, loss_fn),
    Training("minicpm3", lambda key: MiniCPM3(MINICPM, key=key), EXAMPLES, loss_fn, 0.4),
    Training("xglm", lambda key: XGLM(XGLM_SIZES, key=key), EXAMPLES, loss_fn),
    Training("minimax-m2", lambda key: MiniMaxM2(MINIMAX, key=key), EXAMPLES, loss_fn, zero_gradient=("*correction",)),
    Training("gpt-oss", lambda key: GptOss(GPT_OSS, key=key), EXAMPLES, loss_fn),
    Training("mistral4", lambda key: Mistral4(MISTRAL4, key=key), EXAMPLES, loss_fn),
    Training("bamba", lambda key: Bamba(BAMBA, key=key), EXAMPLES, loss_fn),
    Training("falcon-h1", lambda key: FalconH1(FALCON_H1, key=key), EXAMPLES, loss_fn),
    Training("gpt-bigcode", lambda key: GPTBigCode(GPT_BIGCODE, key=key), EXAMPLES, loss_fn),
    Training("mamba2", lambda key: Mamba2(MAMBA2, key=key), EXAMPLES, loss_fn),
    Training("mamba", lambda key: FalconMamba(MAMBA, key=key), EXAMPLES, loss_fn),
    Training("jamba", lambda key: Jamba(JAMBA, key=key), EXAMPLES, loss_fn, 0.03),
    Training("granite-4", lambda key: GraniteMoeHybrid(GRANITE4, key=key), EXAMPLES, loss_fn),
    Training("lfm2-moe", lambda key: Lfm2Moe(LFM2, key=key), EXAMPLES, loss_fn, zero_gradient=("*correction",)),
    Training("nemotron-h", lambda key: NemotronH(NEMOTRON_H, key=key), EXAMPLES, loss_fn, zero_gradient=("*correction",)),
    Training("qwen3-next", lambda key: Qwen3Next(QWEN3_NEXT, key=key), EXAMPLES, loss_fn),
    Training("deepseek-v3", lambda key: DeepseekV3(DEEPSEEK, key=key), EXAMPLES, loss_fn, zero_gradient=("*correction",)),
]
