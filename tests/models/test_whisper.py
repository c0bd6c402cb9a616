"""Whisper beyond parity of outputs: recordings, features, what a text begins with, and times."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, generate, save_pretrained
from redeqx.models.generation import Generation
from redeqx.models.hf import ConfigReader
from redeqx.models.whisper import LogMel, Timestamps, Whisper, WhisperConfig, read_wav, transcribe
from tests.models._speech import FEATURES, PROMPTING, RATE, SPECIAL, chirp, write_wav
from tests.models.families._case import is_shape, random_model

CONFIG = WhisperConfig(
    *(47, 24, 16, 2, 2, 2, 2, 24, 24),
    n_mels=8,
    n_source_positions=50,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=2,
    decoder_start_token_id=4,
    generation=Generation({name: value for name, value in PROMPTING.items() if name not in SPECIAL}),
)


@pytest.fixture(scope="module")
def model():
    return random_model(Whisper, CONFIG)


@pytest.fixture(scope="module")
def features():
    return jnp.asarray(LogMel(8, chunk_length=1)(chirp()))[None]


@pytest.mark.parametrize(
    ("size", "n_parameters"),
    [
        ("tiny", 37_760_640),
        ("base", 72_593_920),
        ("small", 241_734_912),
        ("medium", 763_857_920),
        ("large", 1_543_304_960),
        ("large-v3", 1_543_490_560),
        ("large-v3-turbo", 808_878_080),
    ],
)
def test_presets_have_the_published_number_of_parameters(size, n_parameters):
    model = eqx.filter_eval_shape(Whisper, WhisperConfig.of(size), key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_wav_file_of_any_width_is_read(width, tmp_path):
    write_wav(tmp_path / "speech.wav", chirp(), width=width, n_channels=2)
    samples = read_wav(tmp_path / "speech.wav")
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, chirp(), atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_refuses_other_recordings(tmp_path):
    write_wav(tmp_path / "speech.wav", chirp(), rate=8000)
    with pytest.raises(ValueError, match=r"speech.wav`: expected 16000 samples a second, got 8000\. Resample the recording"):
        read_wav(tmp_path / "speech.wav")
    (tmp_path / "text.wav").write_text("no recording")
    with pytest.raises(ValueError, match=r"text.wav`: expected a WAV file of integers, got .*\. Convert the recording"):
        read_wav(tmp_path / "text.wav")
    make = LogMel(chunk_length=1)
    with pytest.raises(ValueError, match=r"`samples`: expected at most 16000, 1 seconds, got 16001\. Cut the recording"):
        make(np.zeros(16001))
    assert make(np.zeros(16160), is_long=True).shape == (80, 101)
    with pytest.raises(ValueError, match=r"`samples`: expected floats of one channel, got int16\[2, 5\]\. Take the mean"):
        make(np.zeros((2, 5), np.int16))


def test_a_tone_is_in_its_band():
    """Of 80 bands, the one whose center is nearest to 1000 Hz has the most power; silence has the least."""
    make = LogMel(chunk_length=1)
    found = make(np.sin(2 * np.pi * 1000 * np.arange(RATE // 2) / RATE))
    assert found.shape == (80, 100) and found.dtype == np.float32
    log_step = np.log(6.4) / 27
    centers = np.linspace(0, 15 + np.log(8) / log_step, 82)[1:-1]  # in mels; 1000 Hz are 15
    assert found[:, 20].argmax() == np.abs(centers - 15).argmin()
    assert found[:, 20].max() == pytest.approx(found.max(), abs=1e-3)
    np.testing.assert_allclose(found[:, 60:], found.max() - 2)  # clamped at 8 powers of ten, divided by 4


def test_a_folder_round_trips_and_has_its_features(model, tmp_path):
    save_pretrained(model, CONFIG, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**FEATURES, "dither": 0.0, "padding_side": "right"}))
    again, config = from_pretrained(tmp_path)
    assert config == CONFIG and isinstance(again, Whisper)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert LogMel.from_pretrained(tmp_path) == LogMel(8, chunk_length=1)
    save_pretrained(again, config, tmp_path / "again")
    assert LogMel.from_pretrained(tmp_path / "again") == LogMel(8, chunk_length=1)
    said = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert said["lang_to_id"] == PROMPTING["lang_to_id"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"dither": 0.1}))
    with pytest.raises(ValueError, match=r"`dither`: expected 0.0, which this family implements, got 0.1"):
        LogMel.from_pretrained(tmp_path)


def test_a_long_recording_must_be_one(model, features):
    with pytest.raises(ValueError, match=r"`features`: expected 8 bands of frames, got \(4, 100\)\. Pass one recording"):
        transcribe(model, features[0, :4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": ()}, r"`temperature`: expected numbers from 0, got \(\)"),
        ({"temperature": (0.0, -1.0)}, r"`temperature`: expected numbers from 0, got \(0.0, -1.0\)"),
        ({"no_speech_threshold": 0.6}, r"`logprob_threshold`: expected a number with `no_speech_threshold`, got None"),
        ({"logprob_threshold": -1.0, "num_beams": 2}, r"`num_beams`: expected 1 with `logprob_threshold`, got 2"),
    ],
)
def test_thresholds_must_fit_together(model, features, options, message):
    with pytest.raises(ValueError, match=message):
        transcribe(model, features[0], language="en", **options)


@pytest.mark.sweep
def test_an_unlikely_text_is_read_again(model, features):
    """Unless nothing is said: each probability is above 0."""

    def read(**options):
        more = {"language": "en", "max_new_tokens": 6, "temperature": (0.0, 1.0), "key": jax.random.key(0)}
        return transcribe(model, features[0], **more | options)

    likeliest = read(temperature=0.0, key=None)
    assert read(logprob_threshold=-1e9, compression_ratio_threshold=1e9, no_speech_threshold=0.0) == likeliest
    drawn = read(logprob_threshold=0.1, no_speech_threshold=1.0)
    assert drawn != likeliest
    assert read(compression_ratio_threshold=0.0) == drawn
    assert read(logprob_threshold=0.1, no_speech_threshold=0.0) == []
    with pytest.raises(ValueError, match="`key`: expected a key to sample with, got None"):
        read(logprob_threshold=0.1, key=None)


@pytest.mark.sweep
def test_texts_begin_with_the_language_the_task_and_times(model, features):
    prompt = lambda **options: model.prompt(features, **options).tolist()[0]  # noqa: E731
    assert prompt(language="en") == [4, 32, 34, 40]
    assert prompt(language="<|de|>", task="translate") == [4, 31, 35, 40]
    assert prompt(language="de", timestamps=True) == [4, 31, 34]
    assert prompt(language="de", prompt_ids=[39, 11, 12]) == [39, 11, 12, 4, 31, 34, 40]
    logits = eqx.nn.inference_mode(model)(features[0], jnp.array([4]))[0]
    likeliest = 31 if logits[31] > logits[32] else 32
    assert prompt() == [4, likeliest, 40]
    with pytest.raises(ValueError, match=r"`language`: expected 'de' or 'en', got 'fr'"):
        prompt(language="fr")
    with pytest.raises(ValueError, match=r"`task`: expected 'transcribe' or 'translate', got 'sum'"):
        prompt(task="sum")


@pytest.mark.sweep
def test_generation_begins_with_the_prompt_and_suppresses_tokens(model, features):
    """With a cache, as the likeliest allowed token of each prefix without one."""
    start = model.prompt(features, language="en")
    found = generate(model, features, decoder_input_ids=start, max_new_tokens=6)[0]
    quiet = eqx.nn.inference_mode(model)
    run = eqx.filter_jit(lambda ids: quiet(features[0], ids))
    text = np.zeros(10, np.int32)
    text[:4] = start[0]
    for i in range(6):
        scores = np.array(run(jnp.asarray(text))[3 + i])
        scores[PROMPTING["suppress_tokens"] + (PROMPTING["begin_suppress_tokens"] if i == 0 else [])] = -np.inf
        text[4 + i] = scores.argmax()
        assert found[i] == text[4 + i]
        if text[4 + i] == 2:
            break
    with pytest.raises(ValueError, match=r"`decoder_input_ids`: expected token ids, at least one for each of 1 rows, got"):
        generate(model, features, decoder_input_ids=np.zeros((2, 3), int), max_new_tokens=2)
    times = dataclasses.replace(CONFIG, generation=Generation({**PROMPTING, "return_timestamps": True}))
    with pytest.raises(ValueError, match=r"`decoder_input_ids`: expected tokens, since the folder has `return_timestamps`"):
        generate(eqx.tree_at(lambda m: m.convolution1, random_model(Whisper, times), model.convolution1), features)


def test_times_come_in_pairs_and_never_decrease():
    scores = np.zeros(47, np.float32)
    scores[3] = 9
    rule = jax.jit(Timestamps(first=41, eos=2, begin=1, max_initial=2))

    def allowed(*new):
        text = np.array([4, *new, *[-1] * (7 - len(new))], np.int32)
        return set(np.flatnonzero(np.isfinite(rule(text, scores, np.int32(1 + len(new))))).tolist())

    texts = set(range(40))
    assert allowed() == {41, 42, 43}  # a time first
    assert allowed(42) == texts  # then text
    assert allowed(42, 3) == texts | {43, 44, 45, 46}  # no time again
    assert allowed(42, 3, 44) == (texts - {0, 1}) | {44, 45, 46}  # the same time, a later one, or the end
    assert allowed(42, 3, 44, 44) == texts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale_embedding": True}, r"`scale_embedding`: expected False, which this family implements, got True"),
        ({"apply_spec_augment": True}, r"`apply_spec_augment`: expected False, which this family implements, got True"),
        ({"activation_function": "prelu"}, r"`activation_function`: expected 'gelu', .* got 'prelu'"),
        ({"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3}, r"`d_model`: expected an even number"),
        ({"num_mel_bins": 0}, r"`num_mel_bins`: expected a whole number from 1"),
    ],
)
def test_refuses_what_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        WhisperConfig.from_hf(ConfigReader(fields))
