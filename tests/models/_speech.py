"""A recording, and the settings of a folder whose tiny Whisper transcribes it."""

import wave

import numpy as np

RATE, SECONDS = 16000, 1
FEATURES = {"feature_size": 8, "chunk_length": SECONDS, "sampling_rate": RATE, "n_fft": 400, "hop_length": 160}
SIZES = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 24}
SPECIAL = {"decoder_start_token_id": 4, "eos_token_id": 2, "bos_token_id": 2, "pad_token_id": 1}
# As a multilingual folder has them: two languages, two tasks, times from token 41.
PROMPTING = {
    "lang_to_id": {"<|de|>": 31, "<|en|>": 32},
    "task_to_id": {"transcribe": 34, "translate": 35},
    "no_timestamps_token_id": 40,
    "is_multilingual": True,
    "max_initial_timestamp_index": 3,
    "suppress_tokens": [5, 6, 7, 31, 32, 34, 35],
    "begin_suppress_tokens": [8, 9, 2],
    "max_length": 12,
    **SPECIAL,
}


def chirp(n=12000):
    """A rising tone, float in [-1, 1]."""
    seconds = np.arange(n) / RATE
    return 0.5 * np.sin(2 * np.pi * (200 + 900 * seconds) * seconds) + 0.1 * np.sin(2 * np.pi * 3000 * seconds)


def write_wav(path, samples, *, width=2, n_channels=1, rate=RATE):
    """Writes samples in [-1, 1) to a WAV file of integers."""
    integers = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    octets = (integers + (128 if width == 1 else 0)).astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    with wave.open(str(path), "wb") as file:
        file.setparams((n_channels, width, rate, 0, "NONE", "not compressed"))
        file.writeframes(np.repeat(octets, n_channels, 0).tobytes())
