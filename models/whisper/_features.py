"""Log-mel features of speech, in numpy: what Whisper reads, from the samples of a recording, and WAV files.

Source: the features of github.com/openai/whisper, as `WhisperFeatureExtractor` of `transformers` computes them.

Dims: samples, frames = samples / hop_length, bins = frequencies of a Fourier transform, mels.
"""

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped

from redeqx.errors import check_count, wrong
from redeqx.storage import Location, location

from ..hf import ConfigReader, read_config

PREPROCESSOR = "preprocessor_config.json"
_MAX_FREQUENCY = 8000.0  # Hz


@dataclass(frozen=True)
class LogMel:
    """The settings of the features. The defaults are those of all published models but the newest, which have 128 mels.

    **Arguments:**

    - `n_mels`: the number of bands.
    - `sampling_rate`: samples in a second.
    - `n_fft`: samples of a window; `hop_length`: samples from one window to the next.
    - `chunk_length`: seconds that the model reads at once. Shorter recordings are padded with silence.

    Raises ValueError for numbers below 1.
    """

    n_mels: int = 80
    sampling_rate: int = 16000
    n_fft: int = 400
    hop_length: int = 160
    chunk_length: int = 30

    def __post_init__(self) -> None:
        for name in ("n_mels", "sampling_rate", "n_fft", "hop_length", "chunk_length"):
            check_count(getattr(self, name), name)

    @classmethod
    def from_pretrained(cls, folder: str | Location) -> "LogMel":
        """Reads the settings from a model's folder: its `preprocessor_config.json`.

        Raises ValueError for a missing file, and for settings that are not implemented.
        """
        folder = location(folder, "folder")
        reader = ConfigReader(read_config(folder, PREPROCESSOR), folder / PREPROCESSOR)
        for name, accepted in {"dither": 0.0, "padding_value": 0.0, "do_normalize": False, "padding_side": "right"}.items():
            if reader.get(name, None) is not None:
                reader.only(name, accepted)
        return cls(
            n_mels=reader.get("feature_size", 80),
            sampling_rate=reader.get("sampling_rate", 16000),
            n_fft=reader.get("n_fft", 400),
            hop_length=reader.get("hop_length", 160),
            chunk_length=reader.get("chunk_length", 30),
        )

    # Another dtype or number of dims raises an error below.
    def __call__(self, samples: Shaped[np.ndarray, "..."], *, is_long: bool = False) -> Float[np.ndarray, "mels frames"]:
        """Returns the features of a recording, float32, padded to `chunk_length` seconds.

        **Arguments:**

        - `samples`: floats in [-1, 1], one channel, at `sampling_rate`.
        - `is_long`: whether there may be more, for `transcribe`; otherwise that is an error.

        Raises ValueError for more than one channel, for integers, and for recordings that are too long.
        """
        samples = np.asarray(samples)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            step = "Take the mean of the channels, and divide integers by their largest value; `read_wav` does both."
            raise wrong("samples", "floats of one channel", f"{samples.dtype}{list(samples.shape)}", step)
        longest = self.chunk_length * self.sampling_rate
        if len(samples) > longest and not is_long:
            rule = f"at most {longest}, {self.chunk_length} seconds"
            raise wrong("samples", rule, len(samples), "Cut the recording or pass `is_long=True`, for `transcribe`.")
        longest = max(longest, len(samples))
        wave = np.pad(samples.astype(np.float32).astype(np.float64), (0, longest - len(samples)))
        wave = np.pad(wave, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(wave, self.n_fft)[:: self.hop_length][
            : longest // self.hop_length
        ]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        powers = np.abs(np.fft.rfft(windows * hann)) ** 2  # [frames, bins]
        logs = np.log10(np.maximum(self._bands() @ powers.T, 1e-10))
        return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)

    def _bands(self) -> Float[np.ndarray, "mels bins"]:
        """Returns the weights of frequencies in each band: triangles that overlap, of area 1, as in Slaney's toolbox."""
        edges = _hertz(np.linspace(0, _mel(_MAX_FREQUENCY), self.n_mels + 2))
        bins = np.linspace(0, self.sampling_rate // 2, 1 + self.n_fft // 2)
        low, center, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        rising, falling = (bins - low) / (center - low), (high - bins) / (high - center)
        return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


# Slaney's scale: linear up to 1000 Hz, then logarithmic.
_LOG_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < 1000 else 15 + np.log(hertz / 1000) / _LOG_STEP


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(_LOG_STEP * (mel - 15)))


def read_wav(path: str | Path, sampling_rate: int = 16000) -> Float[np.ndarray, " samples"]:
    """Reads a WAV file of integers: float32 samples in [-1, 1), the mean of all channels.

    **Arguments:**

    - `sampling_rate`: what the file must have, in samples a second.

    Raises ValueError for another rate, and for files that are no WAV files of integers.
    """
    try:
        with wave.open(str(path), "rb") as file:
            rate, n_channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise wrong(path, "a WAV file of integers", error, "Convert the recording.") from error
    if rate != sampling_rate:
        raise wrong(path, f"{sampling_rate} samples a second", rate, "Resample the recording.")
    octets = np.frombuffer(content, np.uint8).reshape(-1, n_channels, width)
    if width == 1:  # without sign
        samples = octets[..., 0].astype(np.float64) / 128 - 1
    else:
        shifted = np.zeros((*octets.shape[:2], 4), np.uint8)
        shifted[..., 4 - width :] = octets
        samples = np.ascontiguousarray(shifted).view("<i4")[..., 0] / 2**31
    return samples.mean(1).astype(np.float32)
