"""Generating tokens: `generate`, the methods that it needs of a model, and a folder's defaults for its arguments.

Knows nothing of the families, nor of how a folder is read. Open `_generate.py` first.
"""

from ._config import GENERATION as GENERATION, Generation as Generation
from ._generate import generate as generate
from ._language_model import Decoder as Decoder, EncoderDecoder as EncoderDecoder, shift_right as shift_right
