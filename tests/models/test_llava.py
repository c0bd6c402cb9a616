"""LLaVA beyond parity of outputs: generation with images, folders, presets and refusals."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, generate, save_pretrained
from redeqx.models.clip import CLIPVisionConfig
from redeqx.models.gemma import GemmaConfig
from redeqx.models.hf import ConfigReader
from redeqx.models.llama import LlamaConfig
from redeqx.models.llava import Llava, LlavaConfig
from redeqx.models.vit import ViTConfig
from tests.models.families._case import is_shape, random_model

CONFIG = LlavaConfig(
    CLIPVisionConfig(8, 4, d_model=16, d_ff=24, n_layers=2, n_heads=2),
    LlamaConfig(vocab_size=43, n_positions=24, d_model=16, d_mlp=24, n_layers=2, n_heads=2, eos_token_id=2),
    image_token_id=40,
)
IDS = np.array([[3, 40, 40, 40, 40, 7, 9], [0, 3, 40, 40, 40, 40, 5]], np.int32)
PIXELS = np.random.default_rng(0).normal(size=(2, 1, 3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize(("size", "n_parameters"), [("7b", 7_063_427_072), ("13b", 13_351_494_656)])
def test_presets_have_the_published_number_of_parameters(size, n_parameters):
    model = eqx.filter_eval_shape(Llava, LlavaConfig.of(size), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters
    assert LlavaConfig.of(size).n_features == 576


@pytest.mark.sweep
def test_tokens_with_images_are_the_likeliest_ones():
    """With a cache and left padding, as the likeliest token of each prefix without a cache."""
    model = random_model(Llava, CONFIG)
    mask = np.arange(7) >= np.array([[0], [1]])
    found = np.asarray(generate(model, IDS, pixels=PIXELS, mask=mask, max_new_tokens=4))
    run = eqx.filter_jit(jax.vmap(lambda ids, pixels, mask: model(ids, pixels, mask=mask)))
    text, seen = np.zeros((2, 11), np.int32), np.zeros((2, 11), bool)
    text[:, :7], seen[:, :7] = IDS, mask
    for i in range(4):
        token = np.asarray(run(text, PIXELS, seen))[:, 6 + i].argmax(-1)
        done = (found[:, :i] == 2).any(1)
        np.testing.assert_array_equal(found[~done, i], token[~done])
        text[:, 7 + i], seen[:, 7 + i] = found[:, i], True
    blind = np.asarray(run(text, PIXELS[::-1].copy(), seen))
    assert not np.allclose(blind, run(text, PIXELS, seen), atol=1e-2)  # images matter
    wrong = IDS.copy()
    wrong[0, 1] = 3
    assert np.isnan(np.asarray(model(jnp.asarray(wrong[0]), jnp.asarray(PIXELS[0])))).any()
    with pytest.raises(ValueError, match=r"`pixels`: expected \[batch, images, .*\] with 2 rows, got \(2, 3, 8, 8\)\. Add"):
        generate(model, IDS, pixels=PIXELS[:, 0], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"`pixels`: expected none for Llama, which reads no images so, got some\. Omit"):
        generate(model.text, IDS, pixels=PIXELS, max_new_tokens=2)


def test_a_batch_may_have_no_images():
    model, none = random_model(Llava, CONFIG), jnp.zeros((0, 3, 8, 8))
    run = eqx.filter_jit(lambda model, ids, pixels: model(ids, pixels))
    text = jnp.array([3, 4, 5])
    np.testing.assert_array_equal(run(model, text, none), run(model, text, None))
    assert np.isnan(np.asarray(run(model, text.at[1].set(40), none))[1:]).all()


def test_a_draft_has_to_read_the_images():
    model = random_model(Llava, CONFIG)
    with pytest.raises(
        ValueError, match=r"`assistant_model`: expected one that reads images, .*, got Llama\. Pass one that"
    ):
        generate(model, IDS, pixels=PIXELS, max_new_tokens=2, assistant_model=model.text)


def test_folders_round_trip(tmp_path):
    config = dataclasses.replace(CONFIG, feature_layers=(-1, 0), drops_first=False, projector_bias=False)
    model = random_model(Llava, config)
    save_pretrained(model, config, tmp_path)
    again, found = from_pretrained(tmp_path)
    assert found == config and isinstance(again, Llava)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_layers": (-4,)}, r"`feature_layers`: expected numbers from -3 to 2, the encoder's blocks, got \(-4,\)"),
        ({"vision": ViTConfig()}, r"`vision.model_type`: expected 'clip_vision_model' or 'siglip_vision_model', got 'vit'"),
        ({"text": GemmaConfig()}, r"`text`: expected a decoder that does not scale or project embeddings, got 'gemma'"),
        ({"image_token_id": 43}, r"`image_token_id`: expected a token below `vocab_size`=43, got 43\. Enlarge"),
    ],
)
def test_rejects_a_wrong_config(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"vision_feature_select_strategy": "cls"},
            r"`vision_feature_select_strategy`: expected 'default' or 'full', which",
        ),
        ({"vision_config": {"model_type": "vit"}}, r"`model_type`: expected 'clip_vision_model' or 'siglip_vision_model', "),
        ({"text_config": {"model_type": "bert"}}, r"`model_type`: expected 'llama' or .*, got 'bert'"),
        ({"tie_word_embeddings": True}, r"`tie_word_embeddings`: expected False, which this family implements, got True"),
    ],
)
def test_refuses_what_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        LlavaConfig.from_hf(ConfigReader({**CONFIG.to_hf(), **fields}))
