"""Whisper: an encoder-decoder from speech to text, pre-norm, whose encoder reads log-mel features by two convolutions.

Source: Radford et al. 2022, *Robust Speech Recognition via Large-Scale Weak Supervision* (arXiv:2212.04356), and its code,
github.com/openai/whisper. A recording of up to 30 seconds is read at once, a longer one by `transcribe`, window by window.

`_config.py` has the config, `_model.py` the model, `_prompt.py` the tokens that its text begins with, `_features.py` the
features, `_long.py` long recordings, and `_trials.py` the texts of their windows. Open `_model.py` first.
"""

from ._config import WhisperConfig as WhisperConfig
from ._features import LogMel as LogMel, read_wav as read_wav
from ._long import Segment as Segment, transcribe as transcribe
from ._model import Whisper as Whisper
from ._prompt import Timestamps as Timestamps
