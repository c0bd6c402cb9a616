"""The captioner of ViT and GPT-2: behavior beyond parity of outputs."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.hf import ConfigReader
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from redeqx.models.vit import ViT, ViTConfig
from tests._tree import named_leaves
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

ENCODER = ViTConfig(8, 4, d_model=16, d_ff=24, n_layers=2, n_heads=2, dropout=0.2, init_std=0.3)
DECODER = GPT2Config(41, 10, d_model=24, n_layers=2, n_heads=2, has_cross_attention=True, init_std=0.3)
CONFIG = VisionEncoderDecoderConfig(
    ENCODER, DECODER, bos_token_id=1, eos_token_id=(2, 3), pad_token_id=0, decoder_start_token_id=1
)
IDS = jnp.array([1, 0, 31, 7, 40, 12, 5])
PIXELS = jax.random.normal(jax.random.key(5), (3, 8, 8))


def make(cls, config):
    return random_model(cls, config)


@eqx.filter_jit
def run(model, *args, **kwargs):
    return model(*args, **kwargs)


@pytest.fixture(scope="module")
def logits():
    return run(eqx.nn.inference_mode(make(VisionEncoderDecoder, CONFIG)), PIXELS, IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pretrained(make(VisionEncoderDecoder, CONFIG), CONFIG, tmp_path_factory.mktemp("captioner"))


def test_the_preset_has_the_published_number_of_parameters():
    model = eqx.filter_eval_shape(VisionEncoderDecoder, VisionEncoderDecoderConfig.of("239m"), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == 239_195_904


def test_decoding_in_pieces_equals_a_call(logits):
    model = eqx.nn.inference_mode(make(VisionEncoderDecoder, CONFIG))
    memory = eqx.filter_jit(VisionEncoderDecoder.encode)(model, PIXELS)
    assert memory.shape == (5, 24)
    decode = eqx.filter_jit(VisionEncoderDecoder.decode)
    cache = model.init_cache(9, memory)
    padding = jnp.array([False, False, True, True])
    found, cache = decode(model, jnp.concatenate([jnp.zeros(2, int), IDS[:2]]), cache, mask=padding)
    np.testing.assert_allclose(found, logits[1], rtol=1e-4, atol=1e-4)
    for i in range(2, 7):
        found, cache = decode(model, IDS[i : i + 1], cache)
        np.testing.assert_allclose(found, logits[i], rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing_and_the_image_does(logits):
    model = eqx.nn.inference_mode(make(VisionEncoderDecoder, CONFIG))
    padded, mask = jnp.concatenate([jnp.zeros(2, int), IDS]), jnp.arange(9) >= 2
    np.testing.assert_allclose(run(model, PIXELS, padded, decoder_mask=mask)[2:], logits, rtol=1e-4, atol=1e-4)
    assert not np.isclose(run(model, -PIXELS, IDS), logits, atol=1e-2).all(axis=-1).any()


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(logits):
    model = make(VisionEncoderDecoder, CONFIG)
    a, same, b = (run(model, PIXELS, IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(PIXELS, IDS)
    assert not np.allclose(
        *(eqx.filter_jit(VisionEncoderDecoder.encode)(model, PIXELS, key=jax.random.key(i)) for i in (0, 1))
    )
    quiet = make(VisionEncoderDecoder, CONFIG.without_dropout())
    np.testing.assert_array_equal(run(quiet, PIXELS, IDS, key=jax.random.key(0)), logits)


def test_remat_changes_neither_value_nor_gradients():
    config = CONFIG.without_dropout()
    halves = {half: dataclasses.replace(getattr(config, half), remat=True) for half in ("encoder", "decoder")}

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jax.nn.log_softmax(model(PIXELS, IDS[:-1])).take(IDS[1:], axis=1).mean()

    remat = dataclasses.replace(config, **halves)
    (value, grads), (other, other_grads) = (loss(make(VisionEncoderDecoder, c)) for c in (config, remat))
    np.testing.assert_allclose(value, other, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_bfloat16_stays_bfloat16(logits):
    model = eqx.nn.inference_mode(make(VisionEncoderDecoder, CONFIG))
    half = run(jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model), PIXELS, IDS)
    assert half.dtype == jnp.bfloat16
    assert jnp.abs(half.astype(jnp.float32) - logits).mean() < 0.05 * logits.std()


# --- joining two pretrained models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves():
    alone = dataclasses.replace(DECODER, has_cross_attention=False, bos_token_id=1, eos_token_id=2)
    return make(ViT, ENCODER), make(GPT2, alone)


def test_joins_two_pretrained_models_and_initializes_the_rest(halves, tmp_path):
    encoder, decoder = halves
    model = VisionEncoderDecoder.from_encoder_decoder(encoder, decoder, pad_token_id=0, key=jax.random.key(1))
    assert model.config == VisionEncoderDecoderConfig(ENCODER, model.decoder.config, 1, 2, 0, 1)
    assert model.decoder.config == dataclasses.replace(decoder.config, has_cross_attention=True)
    found = named_leaves(eqx.filter(model, eqx.is_array))
    for half, given in (("encoder", encoder), ("decoder", decoder)):
        for name, leaf in named_leaves(eqx.filter(given, eqx.is_array)).items():
            np.testing.assert_array_equal(found.pop(f"{half}.{name}"), leaf)
    assert {name.split(".blocks.")[-1].split(".")[0] for name in found} == {"projection", "cross_norm", "cross_attention"}
    blocks = model.decoder.stack.blocks
    assert blocks.cross_attention.query.weight.std() == pytest.approx(0.3, rel=0.1)
    assert blocks.cross_attention.output.weight.std() == pytest.approx(0.15, rel=0.1)
    assert model.projection.weight.std() == pytest.approx(0.3, rel=0.1)
    assert np.all(blocks.cross_norm.weight == 1)
    assert np.all(model.projection.bias == 0)

    save_pretrained(model, model.config, tmp_path)
    again, config = VisionEncoderDecoder.from_pretrained(tmp_path)
    assert config == model.config
    np.testing.assert_array_equal(*(run(eqx.nn.inference_mode(m), PIXELS, IDS) for m in (model, again)))


def test_keeps_existing_cross_attentions_and_the_decoders_dtype(halves):
    decoder = make(GPT2, DECODER)
    model = VisionEncoderDecoder.from_encoder_decoder(
        halves[0], decoder, decoder_start_token_id=4, pad_token_id=5, key=jax.random.key(1)
    )
    assert (model.config.decoder_start_token_id, model.config.pad_token_id) == (4, 5)
    np.testing.assert_array_equal(
        model.decoder.stack.blocks.cross_attention.query.weight, decoder.stack.blocks.cross_attention.query.weight
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, decoder)
    model = VisionEncoderDecoder.from_encoder_decoder(halves[0], half, key=jax.random.key(1))
    assert model.projection.weight.dtype == jnp.bfloat16


def test_requires_a_first_token(halves):
    decoder = make(GPT2, dataclasses.replace(DECODER, bos_token_id=None))
    with pytest.raises(
        ValueError, match=r"`decoder_start_token_id`: expected a token, since the decoder has no `bos_token_id`"
    ):
        VisionEncoderDecoder.from_encoder_decoder(halves[0], decoder, key=jax.random.key(1))


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_pooler_and_with_old_buffers(folder, tmp_path):
    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if ".pooler." not in name}
    tensors["decoder.lm_head.weight"] = tensors["decoder.transformer.wte.weight"]
    for layer in (0, 1):
        tensors[f"decoder.transformer.h.{layer}.attn.bias"] = np.ones((1, 1, 10, 10), np.uint8)
        tensors[f"decoder.transformer.h.{layer}.crossattention.masked_bias"] = np.array([-1e4], np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model, config = VisionEncoderDecoder.from_pretrained(tmp_path)
    assert not config.encoder.has_pooler
    assert config == dataclasses.replace(CONFIG, encoder=config.encoder)
    found = named_leaves(eqx.filter(model, eqx.is_array))
    for name, leaf in named_leaves(eqx.filter(make(VisionEncoderDecoder, CONFIG), eqx.is_array)).items():
        if not name.startswith("encoder.pooler"):
            np.testing.assert_array_equal(found.pop(name), leaf)
    assert not found


def test_a_pooler_can_be_dropped(folder):
    config = VisionEncoderDecoder.read_config(folder)
    assert config == CONFIG
    changed = dataclasses.replace(config.encoder, has_pooler=False)
    assert VisionEncoderDecoder.from_pretrained(folder, encoder=changed)[0].encoder.pooler is None


def test_unread_keys_of_encoder_and_decoder_are_written_back(folder, tmp_path):
    fields = json.loads((folder / "config.json").read_text())
    fields["encoder"]["encoder_stride"] = 16
    fields["decoder"]["use_cache"] = True
    save_pretrained(make(VisionEncoderDecoder, CONFIG), VisionEncoderDecoderConfig.from_hf(ConfigReader(fields)), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == fields


@pytest.mark.parametrize("config", [CONFIG, VisionEncoderDecoderConfig(), VisionEncoderDecoderConfig.of("239m")])
def test_config_round_trip(config):
    assert VisionEncoderDecoderConfig.from_hf(ConfigReader(config.to_hf())) == config


def test_tokens_default_to_the_decoders():
    decoder = {"add_cross_attention": True, "bos_token_id": 7, "eos_token_id": 8, "pad_token_id": None}
    config = VisionEncoderDecoderConfig.from_hf(ConfigReader({"encoder": {}, "decoder": decoder}))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.decoder_start_token_id) == (7, 8, None, 7)
    fields = {"encoder": {}, "decoder": {**decoder, "decoder_start_token_id": 9}, "eos_token_id": 3, "pad_token_id": 4}
    config = VisionEncoderDecoderConfig.from_hf(ConfigReader(fields))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.decoder_start_token_id) == (7, 3, 4, 9)


def test_shift_right():
    model = make(VisionEncoderDecoder, CONFIG)
    np.testing.assert_array_equal(model.shift_right(jnp.array([5, 6, 2, -100, -100])), [1, 5, 6, 2, 0])
    unpadded = make(VisionEncoderDecoder, dataclasses.replace(CONFIG, pad_token_id=None))
    with pytest.raises(ValueError, match=r"`pad_token_id`: expected a token, got None\. Set it in the config"):
        unpadded.shift_right(jnp.array([5, 6]))


CROSS = {"add_cross_attention": True}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder": {}}, r"`config.json`: expected the key `decoder`, got none"),
        ({"decoder": CROSS}, r"`config.json`: expected the key `encoder`, got none"),
        (
            {"encoder": {"model_type": "deit"}, "decoder": CROSS},
            r"`config.json: encoder`: `model_type`: expected 'vit', .*deit",
        ),
        (
            {"encoder": {}, "decoder": {"model_type": "bert"}},
            r"`config.json: decoder`: `model_type`: expected 'gpt2', .*bert",
        ),
        ({"encoder": {}, "decoder": {}}, r"`decoder`: expected one with `has_cross_attention`=True, got False\. Set it, or"),
        (
            {"encoder": {}, "decoder": {**CROSS, "cross_attention_hidden_size": 768}},
            r"`config.json: decoder`: `cross_attention_hidden_size`: expected None, .* got 768",
        ),
        ({"encoder": {"hidden_act": "prelu"}, "decoder": CROSS}, r"`hidden_act`: expected 'gelu', .* got 'prelu'"),
        (
            {"encoder": {}, "decoder": {**CROSS, "bos_token_id": None}},
            r"`config.json`: expected the key `decoder_start_token_id`, got none",
        ),
    ],
)
def test_refuses_a_config_that_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        VisionEncoderDecoderConfig.from_hf(ConfigReader(fields))


def test_rejects_inputs_of_a_wrong_shape():
    model = eqx.nn.inference_mode(make(VisionEncoderDecoder, CONFIG))
    with pytest.raises(ValueError, match=r"`pixels`: expected \(3, 8, 8\), got \(8, 8, 3\)\. Resize the image"):
        model.encode(jnp.zeros((8, 8, 3)))
    with pytest.raises(ValueError, match=r"expected at most `n_positions`=10 tokens, got 11\. Cut the example"):
        model(PIXELS, jnp.zeros(11, int))
    with pytest.raises(ValueError, match=r"`length`: expected at most `n_positions`=10 tokens, got 11"):
        model.init_cache(11, jnp.zeros((5, 24)))
