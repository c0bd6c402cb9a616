"""Hugging Face folders: what is read and written, how much memory it takes, and the error for each bad folder."""

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.models import Decoder, EncoderDecoder, from_pretrained, lora, save_pretrained
from redeqx.models.bert import Bert, BertConfig
from redeqx.models.dots import Dots1, Dots1Config
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.hf import WeightMap
from redeqx.models.t5 import T5, T5Config
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from redeqx.models.vit import ViT, ViTConfig
from tests._tree import named_leaves
from tests.models.families._case import random_model

CONFIG = GPT2Config(40, 12, d_model=16, n_layers=3, n_heads=2)
MODEL = random_model(GPT2, CONFIG)


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(MODEL, CONFIG, tmp_path / "gpt2")


def edit_config(folder, **changes):
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(eqx.filter(a, eqx.is_array)), jax.tree.leaves(eqx.filter(b, eqx.is_array)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# --- round trips ----------------------------------------------------------------------------------------------------


def test_round_trip_of_a_folder(folder):
    model, config = from_pretrained(folder)
    assert type(model) is GPT2 and config == CONFIG == model.config
    assert_same(model, MODEL)
    assert jax.tree.structure(model) == jax.tree.structure(MODEL)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    again, _ = GPT2.from_pretrained(str(folder))
    assert_same(again, MODEL)


def test_the_file_has_the_contents_that_transformers_expects(folder):
    tensors = load_file(folder / "model.safetensors")
    assert tensors["transformer.h.1.attn.c_attn.weight"].shape == (16, 48)
    query = MODEL.stack[1].attention.query
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_attn.weight"][:, :16], query.weight.T)
    assert "lm_head.weight" not in tensors  # tied: written once
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_are_written_by_size_and_read_through_their_index(tmp_path):
    save_pretrained(MODEL, CONFIG, tmp_path, max_shard_size="8KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / shard).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == {name: shard for shard in shards for name in load_file(tmp_path / shard)}
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert all((tmp_path / shard).stat().st_size <= max(8000, largest) + 2000 for shard in shards)
    assert_same(from_pretrained(tmp_path)[0], MODEL)

    # When saved again as one file, the shards are removed, so that they are not read instead.
    save_pretrained(MODEL, CONFIG, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("size", "n_bytes"), [("5GB", 5 * 10**9), ("200 mb", 2 * 10**8), (1234, 1234), ("1.5KiB", 1536)])
def test_sizes(size, n_bytes):
    from redeqx.models.hf._save import _bytes

    assert _bytes(size) == n_bytes


@pytest.mark.parametrize("size", ["", "many", "5XB", 0, -3])
def test_an_invalid_size(size, tmp_path):
    with pytest.raises(ValueError, match=r"`max_shard_size`: expected bytes, or a text like '5GB', got"):
        save_pretrained(MODEL, CONFIG, tmp_path, max_shard_size=size)


def test_keys_that_change_nothing_are_written_back(folder, tmp_path):
    edit_config(folder, task_specific_params={"text-generation": {"max_length": 50}}, n_ctx=12)
    _, config = from_pretrained(folder)
    save_pretrained(MODEL, config, tmp_path / "again")
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert fields["task_specific_params"] == {"text-generation": {"max_length": 50}} and fields["n_ctx"] == 12
    assert fields["model_type"] == "gpt2" and fields["architectures"] == ["GPT2LMHeadModel"]
    assert fields["dtype"] == "float32"


COMPANIONS = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "special_tokens_map.json": b"[]",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "spiece.model": bytes(range(256)),
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "preprocessor_config.json": b'{"size": 3}',
}


def test_tokenizers_and_templates_are_written_back(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    for name, content in COMPANIONS.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("of the model as it was")
    _, config = from_pretrained(folder)
    config = dataclasses.replace(config, remat=True)
    shutil.rmtree(folder)  # the files are the config's
    save_pretrained(MODEL, config, tmp_path / "again")
    found = {path.relative_to(tmp_path / "again").as_posix() for path in (tmp_path / "again").rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", *COMPANIONS}
    assert all((tmp_path / "again" / name).read_bytes() == content for name, content in COMPANIONS.items())
    save_pretrained(MODEL, config, tmp_path / "again")  # over the same

    # A user's own tokenizer is kept unchanged, and not mixed with the other.
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text("mine")
    with pytest.warns(UserWarning, match=r"`.*own/tokenizer\.json`: kept, and no file added, .*Remove it and save"):
        save_pretrained(MODEL, config, tmp_path / "own")
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "own" / "tokenizer.json").read_text() == "mine"
    save_pretrained(MODEL, CONFIG, tmp_path / "own")  # a config without a folder has no files


def test_companions_that_are_links_out_of_the_folder_are_left_out(folder, tmp_path):
    (tmp_path / "secret").write_text("a private key")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "private.jinja").write_text("a private text")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    (folder / "merges.txt").write_text("a b")
    (folder / "vocab.txt").symlink_to("merges.txt")  # within the folder
    os.mkfifo(folder / "vocab.json")  # would block
    (tmp_path / "tokens.json").write_text('{"top_k": 3, "password": "12345"}')
    (folder / "generation_config.json").symlink_to(tmp_path / "tokens.json")
    with pytest.warns(UserWarning, match="is left out when the model is saved") as warned:
        _, config = from_pretrained(folder)
    assert [str(each.message).split("`")[3] for each in warned] == [
        "additional_chat_templates/private.jinja",
        "tokenizer.json",
    ]
    assert f"expected a file of this folder, got a link to {tmp_path / 'secret'}. It" in str(warned[1].message)
    save_pretrained(MODEL, config, tmp_path / "again")
    found = {path.name: path.read_text() for path in (tmp_path / "again").rglob("*.txt")}
    assert found == {"merges.txt": "a b", "vocab.txt": "a b"}
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        "config.json", "generation_config.json", "merges.txt", "model.safetensors", "vocab.txt"
    ]  # fmt: skip
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation["top_k"] == 3 and "password" not in generation


def test_companions_in_the_cache_of_the_hub_are_kept(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "0ab1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for path in folder.iterdir():
        path.rename(blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-{path.name}")
    _, config = from_pretrained(snapshot)
    save_pretrained(MODEL, config, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_a_huge_companion_is_not_read(folder, tmp_path):
    with open(folder / "tokenizer.json", "wb") as file:
        file.truncate(3 * 2**30)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.warns(
        UserWarning, match="`tokenizer.json`: expected a file of this folder, got 3221225472 bytes, more than"
    ):
        from_pretrained(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_names_in_memory_are_those_on_disk_except_for_some_families():
    weight_map = WeightMap(tensors=[], modules=((r"layer\.(\{\}|\d+)\.", r"layers.\1."),))
    assert weight_map.in_memory("encoder.layer.{}.query") == "encoder.layers.{}.query"
    assert weight_map.in_memory("encoder.norm") == "encoder.norm"


def test_dtypes(folder, tmp_path):
    half, config = from_pretrained(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(half, eqx.is_array))} == {jnp.dtype(jnp.bfloat16)}
    save_pretrained(half, config, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    again, _ = from_pretrained(tmp_path / "half")  # keeps the file's dtype
    assert_same(again, half)
    for given in ("float8_e4m3fn", jnp.float8_e5m2, "float4_e2m1fn"):
        with pytest.raises(ValueError, match=r"`dtype`: expected a floating dtype of 16 bits or more, got float(8|4)_e"):
            from_pretrained(folder, dtype=given)
    for given in ("nonsense", 3, object()):
        with pytest.raises(TypeError, match=r"`dtype`: expected a floating dtype or None, got .*\. Pass 'bfloat16'\."):
            from_pretrained(folder, dtype=given)
    with pytest.raises(
        ValueError, match=r"`dtype`: expected a dtype of JAX's 32-bit mode, got float64\. Set `jax_enable_x64`"
    ):
        from_pretrained(folder, dtype="float64")
    with pytest.raises(ValueError, match=r"`dtype`: expected a floating dtype, got int32"):
        from_pretrained(folder, dtype=jnp.int32)


def test_routers_that_choose_by_float32_stay_so(tmp_path):
    """As in transformers, which also reads the dtype of all others from the config."""
    sizes = {"vocab_size": 32, "n_positions": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 16, "d_expert": 8}
    config = Dots1Config(**sizes, n_experts=4, n_chosen=2, d_shared=8, n_dense=1, head_size=8)
    wide = random_model(Dots1, config)
    save_pretrained(wide, config, tmp_path / "wide")
    for dtype in ("bfloat16", "float16"):
        half, _ = from_pretrained(tmp_path / "wide", dtype=dtype)
        found = {name: leaf for name, leaf in named_leaves(half).items() if eqx.is_array(leaf)}
        kept = [name for name, leaf in found.items() if leaf.dtype != dtype]
        assert kept == ["stack.blocks.mlp.router.weight", "stack.blocks.mlp.correction"]
        assert all(np.array_equal(found[name], named_leaves(wide)[name]) for name in kept)
        save_pretrained(half, config, tmp_path / dtype)
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
        assert_same(from_pretrained(tmp_path / dtype)[0], half)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16") if eqx.is_array(leaf) else leaf, wide)
    save_pretrained(rounded, config, tmp_path / "rounded")
    assert_same(from_pretrained(tmp_path / "rounded")[0], rounded)  # the file's dtypes, without another


def test_narrow_floats_are_cast_only_on_request(folder):
    def both(tensors):
        for i, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].astype([jnp.float16, jnp.bfloat16][i % 2])

    edit_tensors(folder, both)
    message = (
        r"`.*model\.safetensors`: expected one kind of 16-bit floats, got float16 in `transformer\..*` and bfloat16 in "
        r"`transformer\..*`\. Pass the `dtype=` to cast both to"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
    model, _ = from_pretrained(folder, dtype=jnp.float32)
    np.testing.assert_allclose(model.embedding.weight, MODEL.embedding.weight, rtol=1e-2)


def test_stacked_layers_have_the_widest_dtype_of_theirs(folder):
    def narrow(tensors):
        name = "transformer.h.0.mlp.c_fc.weight"
        tensors[name] = tensors[name].astype(np.float16)

    edit_tensors(folder, narrow)
    found, expected = (model.stack.blocks.mlp.up.weight for model in (from_pretrained(folder)[0], MODEL))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[1:], expected[1:])
    np.testing.assert_array_equal(found[0], expected[0].astype(jnp.float16))


def test_8_bit_floats_are_cast_only_on_request(tmp_path):
    model = eqx.tree_at(lambda m: m.embedding.weight, MODEL, MODEL.embedding.weight.astype(jnp.float8_e4m3fn))
    save_pretrained(model, CONFIG, tmp_path)
    message = r"`.*`: `transformer\.wte\.weight`: expected floats of 16 bits or more, got float8_e4m3fn\. Pass the `dtype=`"
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
    read, _ = from_pretrained(tmp_path, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(read.embedding.weight, model.embedding.weight.astype(jnp.bfloat16))


def test_quantized_weights(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"json`: `quantization_config`: expected none, .*got \{.*gptq.*\}\. Load the"):
        from_pretrained(folder)


def test_fields_may_differ_from_the_folders(folder):
    model, config = from_pretrained(folder, remat=True, attention_dropout=0.0)
    assert config.remat and model.stack.remat and config.attention_dropout == 0.0
    with pytest.raises(ValueError, match=r"`rematerialise`: expected a field of GPT2Config\."):
        from_pretrained(folder, rematerialise=True)


# --- meshes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_model", "n_fsdp"), [(2, 4), *(pytest.param(*mesh, marks=pytest.mark.sweep) for mesh in ((4, 1), (1, 8)))]
)
def test_loads_onto_any_mesh_and_saves_from_it(n_model, n_fsdp, folder, tmp_path):
    deployer = redeqx.Deployer(n_model_shards=n_model, n_fsdp_shards=n_fsdp, verbose=False)
    model, config = from_pretrained(folder, deployer=deployer)
    plan = deployer.plan(MODEL)
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items():
        assert leaf.sharding == plan.sharding(name), name
    assert_same(model, MODEL)
    save_pretrained(model, config, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert_same(from_pretrained(tmp_path)[0], MODEL)


def test_a_users_plan_is_used(folder):
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    plan = deployer.plan(MODEL, overrides={"stack.blocks.mlp.up.weight": (None, None, "model")})
    model, _ = from_pretrained(folder, deployer=deployer, plan=plan)
    assert model.stack.blocks.mlp.up.weight.sharding.spec == P(None, None, "model")
    with pytest.raises(ValueError, match=r"`deployer`: expected one with `plan`, got None"):
        from_pretrained(folder, plan=plan)


MEASURE = """
import resource, sys, jax
import redeqx
from redeqx.models import from_pretrained

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

redeqx.simulate_devices(8)
deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
from_pretrained(sys.argv[1], deployer=deployer)  # compiles, imports
before = peak()
model, _ = from_pretrained(sys.argv[2], deployer=deployer)
held = sum(shard.data.nbytes for leaf in jax.tree.leaves(model) if hasattr(leaf, "addressable_shards")
           for shard in leaf.addressable_shards)
print(before, peak(), held)
"""


@pytest.mark.sweep
def test_loading_holds_at_most_the_largest_tensor(tmp_path):
    """Measured by the process's peak memory beyond the model, which the simulated devices hold in the same memory."""
    small, large = (
        GPT2Config(512, 8, d_model=64, n_layers=12, n_heads=4),
        GPT2Config(512, 8, d_model=768, n_layers=12, n_heads=12),
    )
    rng = np.random.default_rng(0)

    def fill(leaf):
        return rng.random(leaf.shape, np.float32) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    for name, config in (("small", small), ("large", large)):
        shapes = eqx.filter_eval_shape(GPT2, config, key=jax.random.key(0))
        save_pretrained(jax.tree.map(fill, shapes), config, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"],
        env={**os.environ, "NPROC": "16"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    before, peak, held = map(int, done.stdout.split())
    n_file = (tmp_path / "large" / "model.safetensors").stat().st_size
    largest = 4 * 768 * 4 * 768  # bytes of an MLP's matrix; a stack of twelve has 113 MB
    assert n_file > 300e6 and held > 2 * n_file * 0.9
    assert peak - before < held + 4 * largest


T5_CONFIG = T5Config(16, 8, 4, 8, 1, 1, 2, mlp="gated-gelu", is_scaled=False)
VIT_CONFIG = ViTConfig(8, 4, 3, 8, 8, 1, 2)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        pytest.param(T5, T5_CONFIG, marks=pytest.mark.sweep),
        (T5, dataclasses.replace(T5_CONFIG, is_tied=False)),
        (Bert, BertConfig(16, 8, 2, 8, 8, 1, 2)),
        pytest.param(ViT, VIT_CONFIG, marks=pytest.mark.sweep),
        pytest.param(
            VisionEncoderDecoder,
            VisionEncoderDecoderConfig(VIT_CONFIG, GPT2Config(16, 8, 8, 1, 2, has_cross_attention=True), 0, 1, 2, 0),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["tied", "untied", "bert", "vit", "captioner"],
)
def test_without_tensors_the_config_says_what_else_only_they_show(cls, config, tmp_path):
    """Heads and poolers, in a dry run of a folder that has only its config."""
    model = random_model(cls, config)
    save_pretrained(model, config, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with redeqx.described("cpu:8"):
        found, read = from_pretrained(tmp_path)
    assert read == config
    zeros, arrays = eqx.filter(found, eqx.is_array), eqx.filter(model, eqx.is_array)
    assert [leaf.shape for leaf in jax.tree.leaves(zeros)] == [leaf.shape for leaf in jax.tree.leaves(arrays)]


# --- bad folders ----------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"`.*/nowhere`: expected a folder, got nothing there\. Pass the folder"):
        from_pretrained(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`.*/file`: expected a folder, got a file"):
        from_pretrained(tmp_path / "file")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"`.*/config\.json`: expected a file, got model\.safetensors\. Pass the folder"):
        from_pretrained(folder)


@pytest.mark.parametrize(("text", "found"), [("{", "Expecting property name"), ("[1]", "a JSON object, got list")])
def test_a_config_that_is_not_json(text, found, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"`.*/config\.json`: expected .*{found}"):
        from_pretrained(folder)


@pytest.mark.parametrize("model_type", ["rwkv", None])
def test_an_unknown_model(model_type, folder):
    edit_config(folder, model_type=model_type)
    message = rf"`.*/config\.json`: `model_type`: expected one of .*gpt2.*, got {model_type!r}\. Write other models"
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_a_model_of_another_kind(folder):
    assert_same(from_pretrained(folder, kind=Decoder)[0], MODEL)
    message = (
        r"`.*/config\.json`: `model_type`: expected one of bart, mt5, t5, vision-encoder-decoder, whisper "
        r"\(EncoderDecoder\), got 'gpt2'\. Pass the folder of such a model\."
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder, kind=EncoderDecoder)
    with pytest.raises(ValueError, match=r"`.*/config\.json`: `model_type`: expected bert for Bert, got 'gpt2'\. Pass the"):
        Bert.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"expected t5 or mt5 for T5, got 'gpt2'\."):
        T5.from_pretrained(folder)


def test_an_unknown_class(folder):
    edit_config(folder, architectures=["GPT2ForQuestionAnswering"])
    message = r"expected one of GPT2LMHeadModel, GPT2Model, .*, got 'GPT2ForQuestionAnswering'\. Replace it"
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
    edit_config(folder, architectures=...)
    assert_same(from_pretrained(folder)[0], MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "swiglu"}, r"`activation_function`: expected 'gelu', .* or 'tanh', got 'swiglu'"),
        ({"scale_attn_weights": False}, r"`scale_attn_weights`: expected True, which this family implements, got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, r"`scale_attn_by_inverse_layer_idx`: expected False, .* got True"),
        ({"n_inner": 0}, r"`n_inner`: expected a whole number from 1 to \d+, got 0"),
        ({"n_head": "two"}, r"`n_head`: expected int, got 'two'\. Correct the file"),
        ({"resid_pdrop": True}, r"`resid_pdrop`: expected float, got True"),
        ({"n_head": 3}, r"config\.json`: `n_head`: expected a divisor of `n_embd`=16, got 3"),
    ],
)
def test_a_config_that_is_not_implemented(changes, message, folder):
    edit_config(folder, **changes)
    with pytest.raises((ValueError, TypeError), match=message):
        from_pretrained(folder)


def test_tensors_that_contradict_the_config(folder):
    edit_config(folder, n_embd=32)
    message = (
        r"model\.safetensors`: expected the tensors that `.*config\.json` describes, got 40 that differ:\n"
        r"  - `transformer\.wte\.weight`: expected \(40, 32\), as in `config\.json`, got \(40, 16\)\.\n(.|\n)*"
        r"and 30 more\nLoad the weights with their own config"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_missing_and_unknown_tensors(folder):
    def rename(tensors):
        tensors["transformer.h.1.ln_3.weight"] = tensors.pop("transformer.h.1.ln_2.weight")

    edit_tensors(folder, rename)
    message = (
        r"got 2 that differ:\n"
        r"  - `transformer\.h\.1\.ln_2\.weight`: expected for `stack\.blocks\.mlp_norm\.weight`, got none\. "
        r"Did you mean `transformer\.h\.1\.ln_3\.weight`\?\n"
        r"  - `transformer\.h\.1\.ln_3\.weight`: expected no tensor of this name, got \(16,\)\. Did you mean"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_fewer_layers_in_the_config_than_in_the_file(folder):
    edit_config(folder, n_layer=2)
    with pytest.raises(ValueError, match=r"got 12 that differ:\n  - `transformer\.h\.2\..*expected no tensor of this name"):
        from_pretrained(folder)


def test_old_names_and_buffers_are_accepted(folder):
    def as_of_old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tri(12, dtype=np.float32)[None, None]
        tensors["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)

    edit_tensors(folder, as_of_old)
    assert_same(from_pretrained(folder)[0], MODEL)


def test_one_tensor_with_two_names(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"wpe.weight": tensors["transformer.wpe.weight"]}))
    with pytest.raises(ValueError, match=r"expected one tensor `transformer\.wpe\.weight`, got `.*wpe\.weight` too"):
        from_pretrained(folder)


def test_a_tied_tensor_that_differs(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].copy()}))
    assert_same(from_pretrained(folder)[0], MODEL)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    message = (
        r"`lm_head\.weight`: expected the same values as `transformer\.wte\.weight`, .*Set `tie_word_embeddings` to false"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
    edit_config(folder, tie_word_embeddings=False)
    model, config = from_pretrained(folder)
    assert not config.is_tied and not np.array_equal(model.head.weight, model.embedding.weight)


def test_a_tied_tensor_that_differs_in_its_last_row(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=1500)
    folder = save_pretrained(random_model(GPT2, config), config, tmp_path / "large")

    def change(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
        tensors["lm_head.weight"][-1] += 1

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=r"`lm_head\.weight`: expected the same values as `transformer\.wte\.weight`"):
        from_pretrained(folder)


def test_a_variant_is_named(folder):
    """Such as diffusers' files of float16, which it too loads on demand only."""
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    message = (
        r"`.*/model\.safetensors`: expected .*, got model\.fp16\.safetensors\. Rename the file .* to `model\.safetensors`"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = (
        r"`.*/model\.safetensors`: expected safetensors, .*, got pytorch_model\.bin\. Convert it .*: pickled weights can run"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"expected safetensors, or `model\.safetensors\.index\.json` .*, got none\. Pass"):
        from_pretrained(folder)


@pytest.fixture
def sharded(tmp_path):
    return save_pretrained(MODEL, CONFIG, tmp_path / "sharded", max_shard_size="8KB")


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"`.*/{shard.name}`: expected the shard that `.*index\.json` names, got none"):
        from_pretrained(sharded)


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", ".."])
def test_an_index_that_points_outside(outside, sharded):
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / "other.safetensors")
    index = sharded / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["transformer.wte.weight"] = outside
    index.write_text(json.dumps(fields))
    message = r"index\.json`: `transformer\.wte\.weight`: expected a file of this folder, got '.*', which points outside"
    with pytest.raises(ValueError, match=message):
        from_pretrained(sharded)


def test_a_file_next_to_shards_is_read_and_must_match_them(sharded, tmp_path):
    single = save_pretrained(MODEL, CONFIG, tmp_path / "single")
    shutil.copy(single / "model.safetensors", sharded)
    assert_same(from_pretrained(sharded)[0], MODEL)
    edit_tensors(sharded, lambda tensors: tensors.update({"transformer.ln_f.bias": np.ones(16, np.float32)}))
    message = (
        r"`.*/model\.safetensors\.index\.json`: expected shards with the same contents as `model\.safetensors` next to it, "
        r"got another `transformer\.ln_f\.bias` \(float32 \(16,\) there, float32 \(16,\) in the shards\)\. Remove the index"
    )
    with pytest.raises(ValueError, match=message):
        from_pretrained(sharded)
    edit_tensors(sharded, lambda tensors: tensors.pop("transformer.ln_f.bias"))
    with pytest.raises(ValueError, match=r"got another `transformer\.ln_f\.bias` \(none there, float32"):
        from_pretrained(sharded)
    shutil.copy(single / "model.safetensors", sharded)
    for shard in sharded.glob("model-*.safetensors"):  # the index of missing shards is ignored
        shard.unlink()
    assert_same(from_pretrained(sharded)[0], MODEL)


def test_an_index_of_one_file_is_accepted(folder):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    assert_same(from_pretrained(folder)[0], MODEL)


def test_an_invalid_index(sharded):
    index = sharded / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["transformer.wpe.weight"] = fields["weight_map"]["transformer.ln_f.bias"]
    index.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r"expected the tensor `transformer\.wpe\.weight`, as `.*index\.json` says, got none"
    ):
        from_pretrained(sharded)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json`: expected JSON with a `weight_map`, got KeyError"):
        from_pretrained(sharded)


def test_a_damaged_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors`: expected \d+ bytes of tensors, as the header says"):
        from_pretrained(folder)


# --- saving ---------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match=r"`model`: expected one of redeqx\.models, got MLP\. Save other models with"):
        save_pretrained(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), None, tmp_path)
    shapes = eqx.filter_eval_shape(GPT2, CONFIG, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"`embedding\.weight`: expected an array, got only its shape"):
        save_pretrained(shapes, CONFIG, tmp_path)


def test_unmerged_adapters_are_not_dropped(tmp_path):
    model = lora.add(MODEL, rank=2, where="*.attention.query", key=jax.random.key(1))
    message = (
        r"`stack\.blocks\.attention\.query\.lora_a`: expected a leaf that folders of GPT2 contain, got one of 2 "
        r"of adapters\. Save the merged model, `save_pretrained\(lora\.merge\(model\), \.\.\.\)`, or .*`lora\.save_adapter\("
    )
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, CONFIG, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    save_pretrained(lora.merge(model), CONFIG, tmp_path / "model")
    assert_same(from_pretrained(tmp_path / "model")[0], MODEL)
    lora.save_adapter(model, tmp_path / "adapter")


def test_a_leaf_without_a_tensor_is_not_dropped(tmp_path):
    wider = eqx.tree_at(lambda m: m.stack.blocks.attention.output, MODEL, eqx.nn.MLP(16, 16, 8, 1, key=jax.random.key(0)))
    message = (
        r"`stack\.blocks\.attention\.output\.layers\.0\.weight`: expected a leaf that folders of GPT2 contain, got one of 4"
    )
    with pytest.raises(ValueError, match=message):
        save_pretrained(wider, CONFIG, tmp_path)
    without = eqx.tree_at(lambda m: m.norm.bias, MODEL, None)
    with pytest.raises(
        ValueError,
        match=r"`norm\.bias`: expected an array, as in folders of GPT2 .*, got .*Pass the model's own config",
    ):
        save_pretrained(without, CONFIG, tmp_path)
    untied = dataclasses.replace(CONFIG, is_tied=False)
    with pytest.raises(ValueError, match=r"`head\.weight`: expected an array, as in folders of GPT2 with this config"):
        save_pretrained(MODEL, untied, tmp_path)
    larger = eqx.tree_at(lambda m: m.embedding.weight, MODEL, jnp.zeros((48, 16)))
    with pytest.raises(ValueError, match=r"`embedding\.weight`: expected \(40, 16\), as in `config`, got \(48, 16\)"):
        save_pretrained(larger, CONFIG, tmp_path)
    assert not list(tmp_path.iterdir())
    save_pretrained(larger, dataclasses.replace(CONFIG, vocab_size=48), tmp_path)
    assert from_pretrained(tmp_path)[0].embedding.weight.shape == (48, 16)


def test_an_interrupted_save_leaves_the_old_folder(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("redeqx.models.hf._save.write_tensors", fail)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, MODEL), CONFIG, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
