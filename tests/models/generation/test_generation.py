"""`generation_config.json`: a folder's defaults of `generate`, refused keys, and that all keys are written back."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.models import from_pretrained, generate, save_pretrained
from redeqx.models.generation import Generation
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.hf import ConfigReader
from redeqx.models.nn import Cache
from redeqx.models.t5 import T5Config
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoderConfig
from tests.models.families._case import random_model

VOCAB = 24
CONFIG = GPT2Config(VOCAB, 16, d_model=16, n_layers=2, n_heads=4, init_std=0.4, eos_token_id=None).without_dropout()
MODEL = random_model(GPT2, CONFIG, std=0.4)
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 5))
KEY = jax.random.key(1)
IGNORED = ["token_healing", "suppress_tokens"]


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(MODEL, CONFIG, tmp_path / "gpt2")


def says(folder, **keys):
    """Returns the model of a folder with these keys in its generation config."""
    (folder / "generation_config.json").write_text(json.dumps(keys))
    return from_pretrained(folder)[0]


class Table(eqx.Module):
    """A model whose next token depends only on its position: its programs take little time to compile."""

    logits: jax.Array  # [places, vocab]
    config: GPT2Config = eqx.field(static=True)

    def init_cache(self, length):
        return Cache.empty(1, length, 1, 1, jnp.float32)

    def decode(self, ids, cache, *, mask=None):
        return self.logits[cache.index + len(ids) - 1], cache.end(len(ids))


TABLE = Table(jnp.asarray(np.random.default_rng(1).normal(size=(16, VOCAB)), jnp.float32), CONFIG)


def said(**keys):
    """Returns the table with such a generation config, without a folder."""
    return Table(TABLE.logits, dataclasses.replace(CONFIG, generation=Generation(keys, "a/generation_config.json")))


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        pytest.param(
            {"max_length": 11, "min_length": 3, "early_stopping": True},
            {"max_new_tokens": 6, "early_stopping": True},
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 2, "num_return_sequences": 2, "eos_token_id": [2, 5]},
            {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 2, "eos_token_id": (2, 5)},
            marks=pytest.mark.sweep,
        ),
        (
            {"max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "num_beams": 1},
            {"max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "key": KEY},
        ),
    ],
)  # fmt: skip
def test_generate_uses_the_options_of_the_folder(keys, options, folder):
    model = says(folder, **keys)
    expected = generate(MODEL, IDS, **options)
    given: dict[str, Any] = {"key": KEY} if "key" in options else {}
    found = generate(model, IDS, **given)
    np.testing.assert_array_equal(found, expected)


def test_lengths_have_their_order_and_sampling_its_options():
    expected = generate(TABLE, IDS, max_new_tokens=6)
    for keys in ({"max_new_tokens": 6, "max_length": 7}, {"max_length": 11, "temperature": 0.1, "top_k": 3, "top_p": 0.2}):
        np.testing.assert_array_equal(generate(said(**keys), IDS), expected)


def test_arguments_take_precedence_over_the_folder():
    model = said(max_length=9, num_beams=3, do_sample=True, temperature=0.3, top_k=2, num_return_sequences=1, min_length=11)
    found = generate(model, IDS, max_new_tokens=6, num_beams=1, do_sample=False)
    np.testing.assert_array_equal(found, generate(TABLE, IDS, max_new_tokens=6))
    drawn: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 1, "key": KEY}
    found = generate(model, IDS, **drawn, temperature=2.0, top_k=VOCAB)
    np.testing.assert_array_equal(found, generate(TABLE, IDS, **drawn, do_sample=True, temperature=2.0))


@pytest.mark.sweep
def test_models_with_different_generation_configs_are_compiled_separately():
    """A predictor must not reuse the program of one for the other."""

    def pred_fn(model, batch, key):
        return generate(model, batch, max_new_tokens=None)

    for n_new in (2, 3):
        model = said(max_new_tokens=n_new)
        predictor = redeqx.Predictor(redeqx.Deployer(verbose=False), model=model, collate_fn=np.stack, pred_fn=pred_fn)
        assert np.stack(predictor.predict([*IDS], 1)).shape == (3, n_new)
    one, other = (eqx.filter_jit(pred_fn)(said(max_new_tokens=n), IDS, None).shape for n in (2, 3))
    assert (one, other) == ((3, 2), (3, 3))


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (
            {"guidance_scale": 3, "token_healing": True},
            {},
            r"`a/generation_config\.json`: `guidance_scale` \(and `token_healing`\): expected none, since "
            r"`generate` does not implement it, got 3\. Pass `ignore=\('guidance_scale', 'token_healing'\)`",
        ),
        ({"sequence_bias": [3]}, {"ignore": ("bad_words_ids",)}, r"`sequence_bias`: expected none, .* got \[3\]"),
        ({"temprature": 0.5}, {}, r"`temprature`: expected none, .* got 0\.5\. Did you mean `temperature`\?"),
        ({"do_sample": True, "top_h": 0.9}, {"key": KEY}, r"`top_h`: expected none, .* got 0\.9"),
        ({"num_beam_groups": 2, "num_beams": 4}, {}, r"`num_beam_groups`: expected none, .* got 2"),
        (
            {"bad_words_ids": [3]},
            {},
            r"`bad_words_ids`: expected a list of words, each .*, got \(3,\)\..* Here `bad_words_ids` is",
        ),
        ({"suppress_tokens": ["a"]}, {}, r"`suppress_tokens`: expected a list of token ids, got \('a',\)"),
        ({"penalty_alpha": 0.6, "top_k": 4}, {}, r"`penalty_alpha`: expected none, .* got 0\.6"),
        (
            {},
            {"ignore": ("repetition_penalti",)},
            r"`ignore`: expected keys of `.*`, got 'repetition_penalti'\. Did you mean",
        ),
        (
            {"do_sample": True},
            {},
            r"`key`: expected a key .*Here `do_sample` is `do_sample` of `a/generation_config\.json`\.",
        ),
        (
            {"do_sample": True, "temperature": 0.0},
            {"key": KEY},
            r"`temperature`: expected more than 0, got 0\.0\..* Here `temperature` is `temperature` of `a/gen",
        ),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            {},
            r"`num_return_sequences`: expected at most `num_beams`=2, got 3\..* Here `num_return_sequences` is `num_return",
        ),
        (
            {"max_length": 4},
            {"max_new_tokens": None},
            r"`max_new_tokens`: expected at least 1, got -1\..* Here `max_new_tokens` is `max_length` of `a/gen",
        ),
        ({}, {"max_new_tokens": None}, r"`max_new_tokens`: expected the number of tokens to generate, got None"),
    ],
)
def test_unsupported_options_are_refused(keys, options, message):
    with pytest.raises(ValueError, match=message):
        generate(said(**keys), IDS, **{"max_new_tokens": 4, **options})


def test_options_without_effect_are_accepted():
    neutral = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "typical_p": 0.9,  # without sampling
        "top_h": 0.9,
        "num_beam_groups": 4,  # without beams
        "use_cache": False,
        "transformers_version": "5.23.0",
        "decoder_start_token_id": 3,
    }
    expected = generate(TABLE, IDS, max_new_tokens=6)
    np.testing.assert_array_equal(generate(said(**neutral), IDS, max_new_tokens=6), expected)
    ignored = generate(said(token_healing=True, suppress_tokens=[1]), IDS, max_new_tokens=6, ignore=IGNORED)
    np.testing.assert_array_equal(ignored, expected)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"num_beams": "4"}, TypeError, r"`num_beams`: expected int, got '4'"),
        ({"do_sample": 1}, TypeError, r"`do_sample`: expected bool, got 1"),
        ({"max_length": -1}, ValueError, r"`max_length`: expected a whole number from 0 to 2147483647, got -1"),
        ({"temperature": float("inf")}, ValueError, r"`temperature`: expected a finite number of at least 0, got inf"),
        ({"early_stopping": "often"}, ValueError, r"`early_stopping`: expected true, false or 'never', got 'often'"),
        ({"repetition_penalty": 0}, ValueError, r"`repetition_penalty`: expected a finite number above 0, got 0"),
        ({"bad_words_ids": 3}, TypeError, r"`bad_words_ids`: expected list, got 3"),
        ({"eos_token_id": "x"}, TypeError, r"`eos_token_id`: expected int, got 'x'"),
        ({"forced_bos_token_id": [1]}, TypeError, r"`forced_bos_token_id`: expected int, got \[1\]"),
    ],
)
def test_invalid_values(keys, error, message, folder):
    with pytest.raises(error, match=r"`.*/generation_config\.json`: " + message):
        says(folder, **keys)


def test_the_special_tokens_are_those_of_the_file(folder):
    config = says(folder, eos_token_id=[7, 9], pad_token_id=None, top_k=50).config
    assert config.eos_token_id == (7, 9) and config.bos_token_id == CONFIG.bos_token_id
    assert "top_k" not in config.extra


def test_ends_and_padding_are_those_of_the_file_alone(folder):
    """transformers' `generate` does not read `config.json` if there is a `generation_config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7, "pad_token_id": 5}))
    read = lambda: from_pretrained(folder)[1]  # noqa: E731
    assert (read().eos_token_id, read().pad_token_id) == (7, 5)
    config = says(folder, top_k=50).config
    assert (config.eos_token_id, config.pad_token_id) == (None, None)
    # A classifier does not generate: it reads the token before padding.
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["GPT2ForSequenceClassification"]}))
    config = GPT2Config.from_hf(ConfigReader(json.loads(path.read_text()), generation=Generation({"top_k": 50})))
    assert (config.eos_token_id, config.pad_token_id) == (7, 5)


def test_the_generation_config_is_written_back_completely(folder, tmp_path):
    keys = {"no_repeat_ngram_size": 3, "custom": {"a": 1}, "num_beams": 2, "eos_token_id": [7, 9], "max_length": 12}
    model = says(folder, **keys)
    written = save_pretrained(model, model.config, tmp_path / "again")
    assert json.loads((written / "generation_config.json").read_text()) == {**keys, "bos_token_id": 50256}
    assert from_pretrained(written)[1] == model.config
    # A changed token is written too. Without a generation config, that of another model is removed.
    save_pretrained(model, dataclasses.replace(model.config, eos_token_id=3), written)
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == 3
    save_pretrained(MODEL, CONFIG, written)
    assert not (written / "generation_config.json").exists()
    _, config = from_pretrained(folder, generation=None)
    assert config.generation is None


@pytest.mark.sweep
def test_old_keys_of_the_config_are_moved_to_a_separate_file(folder, tmp_path):
    path = folder / "config.json"
    old = {"num_beams": 3, "max_length": 11, "no_repeat_ngram_size": 0, "task_specific_params": {"x": {"num_beams": 9}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **old}))
    model, config = from_pretrained(folder)
    assert config.generation == Generation({"num_beams": 3, "max_length": 11, "no_repeat_ngram_size": 0})
    np.testing.assert_array_equal(generate(model, IDS), generate(MODEL, IDS, max_new_tokens=6, num_beams=3))
    written = save_pretrained(model, config, tmp_path / "again")
    assert "num_beams" not in json.loads((written / "config.json").read_text())
    assert "task_specific_params" in json.loads((written / "config.json").read_text())
    assert from_pretrained(written)[1] == config
    # If the separate file exists, transformers ignores the old keys.
    assert says(folder, max_length=9).config.generation.keys == {"max_length": 9}


def test_options_of_a_captioners_decoder_are_the_defaults():
    half = {"num_beams": 2, "max_length": 30, "add_cross_attention": True, "model_type": "gpt2"}
    fields = {"encoder": {"model_type": "vit"}, "decoder": half, "max_length": 16, "decoder_start_token_id": 1}
    config = VisionEncoderDecoderConfig.from_hf(ConfigReader(fields))
    assert config.generation == Generation({"num_beams": 2, "max_length": 16})
    assert config.decoder.generation is None
    assert VisionEncoderDecoderConfig.from_hf(ConfigReader({**config.extra, **config.to_hf()})).decoder == config.decoder


def test_forced_tokens_are_read_only_from_the_generation_config():
    generation = Generation({"forced_eos_token_id": 4})
    keys = {"model_type": "t5"}
    assert T5Config.from_hf(ConfigReader(keys, generation=generation)).generation == generation
    model = said(max_new_tokens=3, forced_eos_token_id=4, forced_bos_token_id=5)
    found = np.asarray(generate(model, IDS))
    assert np.all(found[:, 2] == 4) and not np.all(found[:, 0] == 5)  # the prompt of five tokens contains the first one
    np.testing.assert_array_equal(generate(model, IDS[:, :1])[:, 0], [5, 5, 5])
