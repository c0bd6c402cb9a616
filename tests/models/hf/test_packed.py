"""Folders of quantized weights are read as folders of their numbers, also by devices that each read a part."""

import functools
import json
import shutil
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.bloom import Bloom, BloomConfig
from redeqx.models.granite import GraniteMoe, GraniteMoeConfig
from redeqx.models.llama import Llama, LlamaConfig
from tests.models.families._case import random_model

SIZES = {"vocab_size": 32, "n_positions": 16, "d_model": 24, "n_layers": 2, "n_heads": 4}
MODELS = {
    "llama": (Llama, LlamaConfig(d_mlp=36, **SIZES)),
    "bloom": (Bloom, BloomConfig(**SIZES)),  # fused layers, by head
    "granitemoe": (GraniteMoe, GraniteMoeConfig(d_mlp=20, n_experts=4, **SIZES)),  # one tensor for all experts
}
NAMES = ("proj.weight", "query_key_value.weight", "h_to_4h.weight", "4h_to_h.weight", "dense.weight", "_linear.weight")
BLOCK = (16, 10)  # the last blocks are smaller


def eight_bits(shape, rng, *, end=".weight_scale", block=(None, None), codes=jnp.float8_e4m3fn, dtype=np.float32, others=()):
    """Returns tensors by the end of their names, and the numbers that they hold.

    **Arguments:**

    - `block`: of matrices; None for all rows, or columns. Without both, the factor has no dims.
    - `others`: the ends of the names of further tensors.
    """
    numbers = (10 * rng.normal(size=shape)).astype(codes)
    n_rows, n_columns = shape[-2:]
    height, width = block[0] or n_rows, block[1] or n_columns
    grid = () if block == (None, None) else (*shape[:-2], -(-n_rows // height), -(-n_columns // width))
    scales = rng.uniform(0.01, 2, grid).astype(dtype)
    each = np.atleast_2d(scales)[..., np.arange(n_rows)[:, None] // height, np.arange(n_columns) // width]
    parts = {".weight": numbers, end: np.asarray(scales)} | {other: np.ones((), np.float32) for other in others}
    return parts, numbers.astype(np.float32) * each.astype(np.float32)


def four_bits(shape, rng, *, is_nested):
    n, size, outer_size = int(np.prod(shape)), 10, 4
    codes, table = rng.integers(0, 16, n).astype(np.uint8), rng.normal(size=16).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "float32", "shape": shape}
    factors = rng.uniform(0.01, 2, -(-n // size)).astype(np.float32)
    tensors = {".weight": (codes[::2] << 4 | codes[1::2])[:, None], ".weight.quant_map": table, ".weight.absmax": factors}
    if is_nested:
        state |= {"nested_blocksize": outer_size, "nested_offset": 0.25, "nested_dtype": "float32"}
        short, inner = rng.integers(0, 256, len(factors)).astype(np.uint8), rng.normal(size=256).astype(np.float32)
        outer = rng.uniform(0.1, 1, -(-len(short) // outer_size)).astype(np.float32)
        tensors |= {".weight.absmax": short, ".weight.nested_absmax": outer, ".weight.nested_quant_map": inner}
        factors = np.array([inner[code] * outer[i // outer_size] + np.float32(0.25) for i, code in enumerate(short)])
    tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, np.array([table[code] * factors[i // size] for i, code in enumerate(codes)]).reshape(shape)


FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(kind="float", **weights):
    args = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, "group_size": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": {"dynamic": True}}}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


CHANNELS = compressed(strategy="channel")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
FORMATS = {
    "fp8": (FP8, functools.partial(eight_bits, end=".weight_scale_inv", block=BLOCK)),
    "fp8-powers": (FP8, functools.partial(eight_bits, end=".weight_scale_inv", block=BLOCK, dtype=jnp.float8_e8m0fnu)),
    "fp8-static": (STATIC, functools.partial(eight_bits, end=".weight_scale_inv", others=(".activation_scale",))),
    "channels": (CHANNELS, functools.partial(eight_bits, block=(1, None), dtype=jnp.bfloat16)),
    "int8-groups": (
        compressed("int", strategy="group", group_size=10),
        functools.partial(eight_bits, block=(1, 10), codes=np.int8),
    ),
    "modelopt": (MODELOPT, functools.partial(eight_bits, others=(".input_scale", ".k_scale"))),
    "nf4": (NF4, functools.partial(four_bits, is_nested=False)),
    "nf4-nested": (NF4, functools.partial(four_bits, is_nested=True)),
}


def write(folder, form, family="llama", changes=MappingProxyType({})):
    """Writes a folder of a tiny model in this format, and a folder of the same numbers; returns both.

    `changes` are other tensors, or None, by the end of the name of one matrix.
    """
    plain, packed = folder / "plain", folder / "packed"
    cls, config = MODELS[family]
    save_pretrained(random_model(cls, config), config, plain)
    shutil.copytree(plain, packed)
    said, encode = FORMATS[form]
    dense, codes, rng = load_file(plain / "model.safetensors"), {}, np.random.default_rng(0)
    for name, tensor in dense.items():
        end = ".weight" if name.endswith(".weight") else ""
        parts, dense[name] = encode(tensor.shape, rng) if name.endswith(NAMES) else ({end: tensor}, tensor)
        codes |= {name.removesuffix(".weight") + end: np.asarray(part, order="C") for end, part in parts.items()}
    codes |= {f"model.layers.1.mlp.up_proj{end}": tensor for end, tensor in changes.items()}
    codes = {name: tensor for name, tensor in codes.items() if tensor is not None}
    assert any(str(tensor.dtype) in ("uint8", "int8", "float8_e4m3fn") for tensor in codes.values())
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, packed / "model.safetensors", metadata={"format": "pt"})
    change(packed, quantization_config=said, dtype="bfloat16")
    return plain, packed


def change(folder, **keys):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | keys))


@pytest.mark.parametrize(
    ("form", "family"),
    [
        *(("fp8", "llama"), ("fp8", "bloom"), ("fp8", "granitemoe"), ("fp8-powers", "llama"), ("fp8-static", "llama")),
        *(("channels", "bloom"), ("channels", "granitemoe"), ("int8-groups", "llama"), ("modelopt", "llama")),
        *(("nf4", "bloom"), ("nf4-nested", "llama"), ("nf4-nested", "bloom")),
    ],
)
def test_quantized_weights_are_read_as_their_numbers(form, family, tmp_path):
    plain, packed = write(tmp_path, form, family)
    wanted = jax.tree.leaves(from_pretrained(plain)[0])
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=4, verbose=False)
    model, config = from_pretrained(packed, dtype=jnp.float32, deployer=deployer)
    for ours, theirs in zip(jax.tree.leaves(model), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    save_pretrained(model, config, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, load_file(plain / "model.safetensors")[name])


def test_numbers_have_the_dtype_that_the_folder_says(tmp_path):
    """FP8 that of the config, and 4 bits that of their own state."""
    for form, dtype in (("fp8", jnp.bfloat16), ("nf4", jnp.float32)):
        plain, packed = write(tmp_path / form, form)
        read, wanted = from_pretrained(packed)[0], from_pretrained(plain)[0]
        ours, theirs = read.stack.blocks.mlp.up.weight, wanted.stack.blocks.mlp.up.weight
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, theirs.astype(dtype))


def test_older_folders_of_modelopt_say_so_in_a_file(tmp_path):
    plain, packed = write(tmp_path, "modelopt")
    change(packed, quantization_config=None)
    path = packed / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    read, wanted = (from_pretrained(folder, dtype=jnp.float32)[0] for folder in (packed, plain))
    np.testing.assert_array_equal(read.stack.blocks.mlp.up.weight, wanted.stack.blocks.mlp.up.weight)
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json`: `quantization_config`: expected .* got .*NVFP4"):
        from_pretrained(packed)


DAMAGES = [
    (
        "fp8",
        {".weight_scale_inv": None},
        r"up_proj\.weight_scale_inv`: expected floats \(3, 3\) or \(36, 1\) or \(1, 1\) for .*float8.*got none\. Fetch",
    ),
    (
        "fp8",
        {".weight_scale_inv": np.ones((2, 3), np.float32)},
        r"_scale_inv`: expected floats \(3, 3\) .*got float32 \(2, 3\)",
    ),
    (
        "nf4",
        {".weight.absmax": None},
        r"up_proj\.weight\.absmax`: expected 87 numbers for `.*`, \(36, 24\), got none",
    ),
    (
        "nf4",
        {".weight": np.zeros((7, 1), np.uint8)},
        r"up_proj\.weight`: expected uint8, two of the 864 .*got uint8 \(7, 1",
    ),
]


@pytest.mark.parametrize(("form", "changes", "message"), DAMAGES)
def test_codes_without_their_scales_are_refused(form, changes, message, tmp_path):
    _, packed = write(tmp_path, form, changes=changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(packed)


@pytest.mark.parametrize(
    "said",
    [
        {**FP8, "weight_block_size": [16]},
        {**FP8, "weight_block_size": [16, 0]},
        {**MODELOPT, "quant_algo": "NVFP4"},
        compressed(strategy="channel", num_bits=4),
        compressed(strategy="channel", symmetric=False),
        compressed(strategy="block", block_structure="16x10"),
        {**CHANNELS, "format": "mxfp8-quantized"},
        {**CHANNELS, "config_groups": {"group_0": None}},
        {**CHANNELS, "transform_config": {"config_groups": {"R4": {}}}},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        {"quant_method": "awq", "bits": 4},
    ],
)
def test_other_quantized_folders_are_refused(said, tmp_path):
    _, packed = write(tmp_path, "fp8")
    change(packed, quantization_config=said)
    with pytest.raises(ValueError, match=r"`quantization_config`: expected none, mxfp4, .* got .*\. Load the weights"):
        from_pretrained(packed)
