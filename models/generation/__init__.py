"""Token generation: `generate` and `stream`, the methods they need from a model, and a folder's default options.

This package does not depend on the model families or on the code that reads folders. Start with `_generate.py`.
"""

from ._config import GENERATION as GENERATION, Generation as Generation
from ._generate import generate as generate, stream as stream
from ._language_model import EncoderDecoder as EncoderDecoder, shift_right as shift_right
from ._loop import Generated as Generated
from ._options import SAMPLING as SAMPLING
