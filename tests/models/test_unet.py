"""The UNet of latent diffusion: behavior beyond parity of outputs."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx._tree import is_array_like, named_leaves
from redeqx.models.diffusion import sinusoids
from redeqx.models.hf import ConfigReader
from redeqx.models.unet import UNet, UNetConfig

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = UNetConfig(
    block_channels=(8, 16),
    down_attention=(False, True),
    up_attention=(True, False),
    layers_per_block=1,
    n_heads=2,
    context_size=6,
    norm_groups=4,
)
SAMPLE = jax.random.normal(jax.random.key(1), (4, 6, 4))
CONTEXT = jax.random.normal(jax.random.key(2), (5, 6))


@eqx.filter_jit
def run(model, sample=SAMPLE, timestep=7, context=CONTEXT, mask=None, key=None):
    return model(sample, timestep, context, mask=mask, key=key)


def make_model(config=CONFIG, dtype=jnp.float32):
    """Returns a model with random values in all leaves, the same for configs of the same sizes. It needs no compilation."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        if not is_array_like(leaf):
            return leaf
        scale = np.prod(leaf.shape[1:]) ** -0.5 if len(leaf.shape) > 1 else 0.3
        return jnp.asarray(scale * rng.normal(size=leaf.shape) + (len(leaf.shape) == 1), dtype)

    return jax.tree.map(fill, eqx.filter_eval_shape(UNet, config, key=jax.random.key(0)))


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_masked_context_tokens_have_no_effect(model):
    expected = run(model, context=CONTEXT[:3])
    mask = jnp.arange(5) < 3
    np.testing.assert_allclose(run(model, mask=mask), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(run(model, mask=mask), run(model, context=CONTEXT.at[3:].set(9.0), mask=mask))
    assert not np.allclose(run(model), expected, atol=1e-3)


def test_timesteps_may_be_of_any_number_type(model):
    np.testing.assert_allclose(run(model, timestep=jnp.array(7.0)), run(model), rtol=0, atol=1e-6)
    embed = lambda timestep: sinusoids(jnp.asarray(timestep), 8)  # noqa: E731
    for timestep in (7.0, np.uint8(7), jnp.array(7, jnp.bfloat16)):
        np.testing.assert_array_equal(embed(timestep), embed(7))
    assert np.abs(embed(8) - embed(7)).max() > 1e-3


def test_samples_in_0_to_1_are_centred_if_configured():
    class Seen(Exception):
        pass

    def see(x):
        raise Seen(x)

    for config, expected in ((CONFIG, SAMPLE), (dataclasses.replace(CONFIG, centers_input=True), 2 * SAMPLE - 1)):
        watched = eqx.tree_at(lambda m: m.conv_in, make_model(config), see)
        with pytest.raises(Seen) as seen:
            watched(SAMPLE, 7, CONTEXT)
        np.testing.assert_array_equal(seen.value.args[0], expected)


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(model):
    dropping = make_model(dataclasses.replace(CONFIG, dropout=0.5))
    assert dropping.config.without_dropout() == CONFIG
    a, same, b = (run(dropping, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b, atol=1e-3)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        dropping(SAMPLE, 7, CONTEXT)
    np.testing.assert_allclose(run(eqx.nn.inference_mode(dropping)), run(model), rtol=0, atol=1e-6)


def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, key):
        sample, context = SAMPLE.astype(jnp.float64), CONTEXT.astype(jnp.float64)
        return jnp.square(model(sample, 7, context, key=key)).sum()

    configs = [dataclasses.replace(CONFIG, dropout=0.1, remat=remat) for remat in (False, True)]
    with jax.enable_x64(True):  # in float64, another order of sums differs less than a wrong derivative
        results = [loss(make_model(config, jnp.float64), jax.random.key(0)) for config in configs]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-7)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.any(np.asarray(a))  # every leaf has a gradient


def test_bfloat16_stays_bfloat16(model):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    found, wanted = run(half, SAMPLE.astype(jnp.bfloat16), 7, CONTEXT.astype(jnp.bfloat16)), run(model)
    assert found.dtype == jnp.bfloat16
    assert jnp.abs(found.astype(jnp.float32) - wanted).mean() < 0.05 * wanted.std()


PUBLISHED = {"sd1": 859_520_964, "sd2": 865_910_724, "sdxl": 2_567_463_684, "sdxl-refiner": 2_259_526_660}


@pytest.mark.parametrize(("size", "n"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(size, n):
    shapes = eqx.filter_eval_shape(UNet, UNetConfig.of(size), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes) if is_array_like(leaf)) == n


def test_each_leaf_has_one_name_on_disk(model):
    names = UNet.weight_map(CONFIG).tensors
    assert sorted(leaf for name in names for leaf in name.leaves) == sorted(named_leaves(eqx.filter(model, eqx.is_array)))
    on_disk = {name.disk for name in names}
    assert len(on_disk) == len(names)
    assert {
        "down_blocks.0.downsamplers.0.conv.weight",
        "up_blocks.0.upsamplers.0.conv.bias",
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0.weight",
        "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj.weight",
        "mid_block.attentions.0.transformer_blocks.0.ff.net.2.bias",
    } <= on_disk


# --- configurations -------------------------------------------------------------------------------------------------

UNEVEN = UNetConfig(
    block_channels=(8, 12, 16),
    down_attention=(True, False, True),
    layers_per_block=(1, 2, 1),
    n_heads=(2, 3, 4),
    only_cross_attention=(True, False, True),
    up_attention=(False, True, False),
    norm_groups=4,
    sample_size=(32, 48),
    dropout=0.1,
    centers_input=True,
)


@pytest.mark.parametrize("config", [UNetConfig(), *map(UNetConfig.of, UNetConfig.sizes), CONFIG, UNEVEN])
def test_config_round_trip(config):
    fields = config.to_hf()
    assert fields["_class_name"] == "UNet2DConditionModel"
    assert UNetConfig.from_hf(ConfigReader(fields)) == config
    assert UNetConfig.from_hf(ConfigReader({**fields, "act_fn": "swish", "upcast_attention": True})).extra[
        "upcast_attention"
    ]


def test_absent_keys_get_the_defaults_of_diffusers():
    assert UNetConfig.from_hf(ConfigReader({"_class_name": "UNet2DConditionModel"})) == UNetConfig()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "mid_block_type",
            "UNetMidBlock2D",
            "`mid_block_type`: expected 'UNetMidBlock2DCrossAttn', .* got 'UNetMidBlock2D'",
        ),
        ("mid_block_type", None, "`mid_block_type`: expected 'UNetMidBlock2DCrossAttn', .* got None"),
        ("act_fn", "gelu", "`act_fn`: expected 'silu' or 'swish', .* got 'gelu'"),
        ("class_embed_type", "timestep", "`class_embed_type`: expected None, .* got 'timestep'"),
        ("num_class_embeds", 1000, "`num_class_embeds`: expected None, .* got 1000"),
        ("addition_embed_type", "image", "`addition_embed_type`: expected None or 'text_time', .* got 'image'"),
        ("addition_embed_type", "text_time", "expected the key `addition_time_embed_dim`, got none"),
        ("encoder_hid_dim", 768, "`encoder_hid_dim`: expected None, .* got 768"),
        ("encoder_hid_dim_type", "text_proj", "`encoder_hid_dim_type`: expected None, .* got 'text_proj'"),
        ("resnet_time_scale_shift", "scale_shift", "`resnet_time_scale_shift`: expected 'default', .* got 'scale_shift'"),
        ("dual_cross_attention", True, "`dual_cross_attention`: expected False, .* got True"),
        ("time_embedding_type", "fourier", "`time_embedding_type`: expected 'positional', .* got 'fourier'"),
        ("time_cond_proj_dim", 256, "`time_cond_proj_dim`: expected None, .* got 256"),
        ("timestep_post_act", "silu", "`timestep_post_act`: expected None, .* got 'silu'"),
        ("attention_type", "gated", "`attention_type`: expected 'default', .* got 'gated'"),
        ("mid_block_scale_factor", 1.4, "`mid_block_scale_factor`: expected 1, .* got 1.4"),
        ("downsample_padding", 0, "`downsample_padding`: expected 1, .* got 0"),
        (
            "down_block_types",
            ["AttnDownBlock2D"] * 4,
            "`down_block_types`: expected 'DownBlock2D' or 'CrossAttnDownBlock2D', .* got 'AttnDownBlock2D'",
        ),
        (
            "transformer_layers_per_block",
            [[1, 2], 1, 1, 1],
            r"`transformer_layers_per_block`: expected one int, or a list of one int per block, .* got \(\[1, 2\], 1",
        ),
        ("cross_attention_dim", [8] * 4, None),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    with pytest.raises((ValueError, TypeError), match=message or "`cross_attention_dim`: expected int, got"):
        UNetConfig.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_size": 0}, "`context_size`: expected at least 1, got 0"),
        ({"dropout": 1.0}, "`dropout`: expected a rate in [0, 1), got 1.0"),
        ({"norm_groups": 3}, "`block_channels`: expected multiples of `norm_groups`=3, got (8, 16)"),
        ({"block_channels": ()}, "`block_channels`: expected multiples of `norm_groups`=4, got ()"),
        ({"n_heads": 3}, "`n_heads`: expected a divisor of `block_channels[1]`=16, got 3"),
        ({"added_size": 8}, "`added_size` and `added_wave_size`: expected both or neither, got 8 and None"),
        ({"n_heads": (2, 0)}, "`n_heads`: expected at least 1, got (2, 0)"),
        ({"n_heads": (2, 2, 2)}, "`n_heads`: expected 2, one per block of `block_channels`, got (2, 2, 2)"),
        ({"up_attention": (True,)}, "`up_attention`: expected 2, one per block of `block_channels`, got (True,)"),
    ],
)
def test_rejects_a_wrong_config(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CONFIG, **fields)
