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


def make(name, **kwargs):
    import transformers

    sizes = {key: value for key, value in {**SIZES, **kwargs}.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()


rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (2, SEQ)).astype(np.int32)
LEFT = np.arange(SEQ) >= np.array([[0], [3]])  # the second row has three padding tokens on the left


def case(name, cls, **kwargs):
    inputs = {"ids": np.where(LEFT, IDS, 0).astype(np.int32), "mask": LEFT}
    return Case(name, functools.partial(make, cls, **kwargs), inputs, run_last, lambda model, row: model(**row)[-4:])


WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 4,
}
CASES = [
    case("gemma", "Gemma", head_dim=8),
    case("gemma2", "Gemma2", head_dim=8, query_pre_attn_scalar=12, sliding_window=4, attn_logit_softcapping=2.0),
    case("gemma3", "Gemma3Text", head_dim=8, query_pre_attn_scalar=12, **WINDOWED),
    case("mixtral", "Mixtral", num_local_experts=4),
    case("qwen3-moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8),
    case("olmo", "Olmo"),
    case("olmo2", "Olmo2"),
    case("olmo3", "Olmo3", **WINDOWED),
    case("phi", "Phi", num_key_value_heads=4, rope_parameters={**PARTIAL["rope_parameters"], "partial_rotary_factor": 0.34}),
    case("phi3", "Phi3", sliding_window=4),
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
    case("stablelm", "StableLm", rope_parameters={**PARTIAL["rope_parameters"], "partial_rotary_factor": 0.34}),
    case("ministral", "Ministral", head_dim=6, **WINDOWED),
    case("phi3-long", "Phi3", original_max_position_embeddings=4, rope_parameters=LONG),
    case("gpt-neox", "GPTNeoX", num_key_value_heads=None, hidden_size=32, rope_parameters=PARTIAL["rope_parameters"]),
    case("gpt-neox-serial", "GPTNeoX", num_key_value_heads=None, hidden_size=32, use_parallel_residual=False),
]


def main(names):
    """Stores the outputs of transformers for the cases of these names, or for all, and our largest difference from them."""
    import torch

    from redeqx.models import from_pretrained

    GOLDEN.mkdir(exist_ok=True)
    differences = json.loads(DIFFERENCES.read_text()) if DIFFERENCES.exists() else {}
    older = [x for x in collect("CASES") if x.name.startswith(("gpt2", "gptj", "opt", "llama", "mistral", "qwen"))]
    for each in (*CASES, *older):
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
