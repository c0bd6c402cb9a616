"""Compares Whisper's features and the tokens of a recording with `transformers`; needs the `parity` extra."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from redeqx.models import from_pretrained, generate
from redeqx.models.whisper import LogMel, read_wav, transcribe
from tests.models._speech import FEATURES, PROMPTING, SIZES, chirp, write_wav
from tests.models.families import whisper
from tests.models.families._case import Case, torch_folder

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features(n_mels):
    import transformers

    extract = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    for samples in (chirp(), np.random.default_rng(0).normal(size=480_000) * 0.1):
        wanted = extract(samples.astype(np.float32), sampling_rate=16000, return_tensors="np").input_features[0]
        np.testing.assert_allclose(LogMel(n_mels)(samples), wanted, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder, its torch module and our model, and the features that each side makes of two WAV files."""
    import transformers

    folder = tmp_path_factory.mktemp("whisper")
    case = Case("whisper", lambda: whisper.make(**SIZES), {}, whisper.run)
    torch_folder(case, folder)
    (folder / "generation_config.json").write_text(json.dumps(PROMPTING))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**FEATURES, "feature_extractor_type": "WhisperFeatureExtractor"})
    )
    module = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extract = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    for name, samples in {"a": chirp(), "b": chirp(9000)[::-1]}.items():
        write_wav(folder / f"{name}.wav", samples)
    recordings = [read_wav(folder / f"{name}.wav") for name in "ab"]
    theirs = extract(recordings, sampling_rate=16000, return_tensors="pt").input_features
    features = np.stack([LogMel.from_pretrained(folder)(samples) for samples in recordings])
    return module, from_pretrained(folder)[0], theirs, features


def theirs(module, features, n_given, **options):
    """Returns the tokens of one call. Without times, transformers would begin again at each time that this model writes."""
    return module.generate(features, force_unique_generate_call=True, **options).numpy()[:, n_given:]


def same(found, wanted):
    """Compares texts up to their ends: transformers cuts the batch at its longest text."""
    assert len(found) == len(wanted)
    for ours, other in zip(np.asarray(found), wanted, strict=True):
        ours, other = ([token for token in row.tolist() if token not in (1, 2)] for row in (ours, other))
        assert ours == other and len(ours) > 2


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_a_recording_is_transcribed(recorded, options):
    """In the language that is detected, up to the folder's length."""
    module, model, features, ours = recorded
    same(generate(model, ours, **options), theirs(module, features, 3, **options))


def test_in_a_language_after_a_prompt(recorded):
    import torch

    module, model, features, ours = recorded
    prompt, options = [39, 11, 12], {"language": "de", "task": "translate"}
    start = model.prompt(ours, prompt_ids=prompt, **options)
    found = generate(model, ours, decoder_input_ids=start, max_new_tokens=8)
    wanted = theirs(module, features, start.shape[1], prompt_ids=torch.tensor(prompt), max_new_tokens=8, **options)
    same(found, wanted)


@pytest.fixture(scope="module")
def long():
    """The features of 3.25 seconds, of which a window reads one: transformers' and ours."""
    import transformers

    samples = (chirp(52_000) + 0.2 * np.sin(np.arange(52_000) ** 1.3 / 50)).astype(np.float32)
    extract = transformers.WhisperFeatureExtractor(**FEATURES)
    options = {"sampling_rate": 16000, "truncation": False, "padding": "longest", "return_tensors": "pt"}
    features = extract(samples, **options).input_features
    log_mel = LogMel(FEATURES["feature_size"], chunk_length=FEATURES["chunk_length"])
    ours = log_mel(samples, is_long=True)
    np.testing.assert_allclose(ours, features[0].numpy(), rtol=0, atol=2e-4)
    return features, ours


def segments(module, features, **options):
    return module.generate(features, return_timestamps=True, return_segments=True, **options)["segments"][0]


def same_segments(found, wanted):
    assert [segment.tokens for segment in found] == [segment["tokens"].tolist() for segment in wanted]
    times = [(float(segment["start"]), float(segment["end"])) for segment in wanted]
    np.testing.assert_allclose([(segment.start, segment.end) for segment in found], times, atol=1e-9)


@pytest.mark.parametrize("language", ["en", "de"])
def test_a_long_recording(recorded, long, language):
    """Some windows end at a time before their end, so that the next one begins there."""
    module, model, _, _ = recorded
    features, ours = long
    found = transcribe(model, ours, language=language, max_new_tokens=20)
    same_segments(found, segments(module, features, language=language, max_new_tokens=20))
    assert len(found) > 3 + (language == "en")


@pytest.mark.parametrize("sot", [None, 39])
def test_texts_that_depend_on_earlier_ones(recorded, long, sot, tmp_path):
    """Of which up to 11 tokens are given, after a token that the folder may not name."""
    import transformers

    model = recorded[1]
    features, ours = long
    folder = shutil.copytree(model.config.generation.path.parent, tmp_path, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({**PROMPTING, "prev_sot_token_id": sot}))
    again = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    options = {"language": "en", "max_new_tokens": 9}
    found = transcribe(from_pretrained(folder)[0], ours, condition_on_prev_tokens=True, **options)
    same_segments(found, segments(again, features, condition_on_prev_tokens=True, **options))
    assert found != transcribe(model, ours, **options)


def test_texts_that_are_read_again(recorded, long):
    """Any number of the windows are unlikely, silent or not. Drawn texts are the likeliest too, as no other token is left:
    only whether the next text depends on them shows that they were drawn."""
    import torch

    module, model, _, _ = recorded
    features, ours = long
    options = {"language": "en", "max_new_tokens": 9, "temperature": 0.0}  # transformers needs one with thresholds
    windows = {
        id(segment["result"]): segment["result"] for segment in segments(module, features, logprob_threshold=-9.0, **options)
    }
    means = sorted(float(torch.stack(result["scores"]).log_softmax(-1).amax(-1).mean()) for result in windows.values())
    limits = [sum(pair) / 2 for pair in itertools.pairwise(means)]
    options["logprob_threshold"] = limits[len(limits) // 2]
    again = {"temperature": (0.0, 0.8), "top_k": 1, "condition_on_prev_tokens": True}
    cases = [
        *({"no_speech_threshold": threshold} for threshold in (0.0, 0.01, 0.02, 0.03, 1.0)),
        *({"no_speech_threshold": 0.0, "logprob_threshold": limit} for limit in limits),
        again,
        *({**again, "logprob_threshold": limit} for limit in limits),
        *({**again, "compression_ratio_threshold": threshold} for threshold in (0.4, 0.55)),
        {**again, "logprob_threshold": None, "compression_ratio_threshold": 0.55},
        {**again, "no_speech_threshold": 0.02},
    ]
    seen = []
    for case in cases:
        found = transcribe(model, ours, key=jax.random.key(0), **options | case)
        same_segments(found, segments(module, features, **options | case))
        seen.append(str(found))
    assert len(set(seen)) > 3


def test_with_times(recorded):
    module, model, features, ours = recorded
    start = model.prompt(ours, language="en", timestamps=True)
    found = generate(model, ours, decoder_input_ids=start, logits_processor=model.timestamps(start), max_new_tokens=10)
    same(found, theirs(module, features, start.shape[1], language="en", return_timestamps=True, max_new_tokens=10))
