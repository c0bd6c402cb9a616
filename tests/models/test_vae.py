"""The autoencoder of latent diffusion: behavior beyond parity of outputs."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx._tree import is_array_like, named_leaves
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.hf import ConfigReader
from redeqx.models.vae import VAE, Posterior, VAEConfig

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = VAEConfig(block_channels=(8, 16), latent_channels=2, norm_groups=4)
IMAGE = jax.random.normal(jax.random.key(1), (3, 8, 6))


@eqx.filter_jit
def run(model, image=IMAGE, key=None):
    return model(image, key=key)


def make_model(config=CONFIG, dtype=jnp.float32):
    """Returns a model with random values in all leaves, the same for configs of the same sizes. It needs no compilation."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        if not is_array_like(leaf):
            return leaf
        scale = np.prod(leaf.shape[1:]) ** -0.5 if len(leaf.shape) > 1 else 0.3
        return jnp.asarray(scale * rng.normal(size=leaf.shape) + (len(leaf.shape) == 1), dtype)

    return jax.tree.map(fill, eqx.filter_eval_shape(VAE, config, key=jax.random.key(0)))


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_a_call_decodes_the_mode_or_a_sample(model):
    @eqx.filter_jit
    def expected(model, key):
        posterior = model.encode(IMAGE)
        return model.decode(posterior.mode), model.decode(posterior.sample(key))

    likeliest, drawn = expected(model, jax.random.key(0))
    np.testing.assert_allclose(run(model), likeliest, rtol=0, atol=1e-6)
    np.testing.assert_allclose(run(model, key=jax.random.key(0)), drawn, rtol=0, atol=1e-6)
    assert not np.allclose(likeliest, drawn, atol=1e-3)


def test_latents_are_drawn_from_the_posterior():
    mean, log_variance = jnp.array([[[0.5, -2.0]]]), jnp.log(jnp.array([[[4.0, 0.01]]]))
    posterior = Posterior(mean, log_variance)
    drawn = jax.vmap(posterior.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(drawn.std(0), jnp.exp(log_variance / 2), rtol=0.02)
    np.testing.assert_array_equal(posterior.mode, mean)
    # The mean of log p - log q is the divergence; `kl` is its closed form.
    log_q = -jnp.square(drawn - mean) / jnp.exp(log_variance) / 2 - log_variance / 2
    np.testing.assert_allclose(posterior.kl(), (log_q + jnp.square(drawn) / 2).mean(0).sum(), rtol=0.02)
    assert Posterior(jnp.zeros((1, 2, 2)), jnp.zeros((1, 2, 2))).kl() == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_divergence_of_narrow_latents_is_that_of_float64(dtype):
    """Near the standard normal, differences of numbers near 1 are left; of many latents, a sum beyond float16."""
    mean, log_variance = jnp.asarray(0.05 * np.random.default_rng(0).normal(size=(2, 4, 16, 16)), dtype)
    wide = [np.asarray(x, np.float64) for x in (mean, log_variance)]
    expected = (wide[0] ** 2 + np.exp(wide[1]) - 1 - wide[1]).sum() / 2
    np.testing.assert_allclose(Posterior(mean, log_variance).kl(), expected, rtol=1e-4)
    far = jnp.full((1, 256, 256), 2, dtype)
    assert Posterior(far, 0 * far).kl() == 2 * far.size


def test_log_variances_are_clipped(model):
    bias = jnp.array([0.0, 0.0, 1e3, -1e3])[:, None, None]
    posterior = eqx.tree_at(lambda m: m.quant_conv.bias, model, bias).encode(IMAGE[:, :2, :2])
    np.testing.assert_array_equal(posterior.log_variance, [[[20.0]], [[-30.0]]])


def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.square(model(IMAGE.astype(jnp.float64), key=jax.random.key(0))).sum()

    configs = [dataclasses.replace(CONFIG, remat=remat) for remat in (False, True)]
    with jax.enable_x64(True):  # in float64, another order of sums differs less than a wrong derivative
        results = [loss(make_model(config, jnp.float64)) for config in configs]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-7)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.any(np.asarray(a))  # every leaf has a gradient


def test_bfloat16_stays_bfloat16(model):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    found, wanted = run(half, IMAGE.astype(jnp.bfloat16)), run(model)
    assert found.dtype == jnp.bfloat16
    assert jnp.abs(found.astype(jnp.float32) - wanted).mean() < 0.05 * wanted.std()


def test_the_preset_has_the_published_number_of_parameters():
    shapes = eqx.filter_eval_shape(VAE, VAEConfig.of("sd"), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes) if is_array_like(leaf)) == 83_653_863
    latents = eqx.filter_eval_shape(VAE.encode, shapes, jax.ShapeDtypeStruct((3, 512, 512), jnp.float32))
    assert latents.mean.shape == (4, 64, 64)


def test_each_leaf_has_one_name_on_disk(model):
    names = VAE.weight_map(CONFIG).tensors
    assert sorted(leaf for name in names for leaf in name.leaves) == sorted(named_leaves(eqx.filter(model, eqx.is_array)))
    assert len({name.disk for name in names}) == len(names)


def test_loads_the_names_of_old_folders(model, tmp_path):
    save_pretrained(model, CONFIG, tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        named = [name for name in tensors if f"attentions.0.{new}." in name]
        assert len(named) == 4  # weight and bias of the encoder's and the decoder's
        for name in named:
            tensors[name.replace(new, old)] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    again, config = from_pretrained(tmp_path)
    assert config == CONFIG
    assert eqx.tree_equal(again, model)


@pytest.mark.parametrize(
    "config",
    [
        VAEConfig(),
        VAEConfig.of("sd"),
        CONFIG,
        VAEConfig(has_quant_conv=False, has_post_quant_conv=False, has_mid_attention=False, shift_factor=0.1),
        VAEConfig(sample_size=(32, 48), latent_channels=16, scaling_factor=0.3),
    ],
)
def test_config_round_trip(config):
    fields = config.to_hf()
    assert fields["_class_name"] == "AutoencoderKL"
    assert VAEConfig.from_hf(ConfigReader(fields)) == config
    other = VAEConfig.from_hf(ConfigReader({**fields, "force_upcast": False, "use_tiling": True}))
    assert other == dataclasses.replace(config, needs_float32=False) and other.extra["use_tiling"] is True


def test_absent_keys_get_the_defaults_of_diffusers():
    assert VAEConfig.from_hf(ConfigReader({"_class_name": "AutoencoderKL"})) == VAEConfig()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("act_fn", "gelu", "`act_fn`: expected 'silu' or 'swish', .* got 'gelu'"),
        (
            "down_block_types",
            ["AttnDownEncoderBlock2D"],
            r"`down_block_types`: expected \['DownEncoderBlock2D'\], .* got \['A",
        ),
        ("up_block_types", ["UpDecoderBlock2D"] * 2, r"`up_block_types`: expected \['UpDecoderBlock2D'\], .* got \['UpDe"),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    with pytest.raises(ValueError, match=message):
        VAEConfig.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent_channels": 0}, "`latent_channels`: expected at least 1, got 0"),
        ({"norm_groups": 3}, "`block_channels`: expected multiples of `norm_groups`=3, got (8, 16)"),
    ],
)
def test_rejects_a_wrong_config(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CONFIG, **fields)
