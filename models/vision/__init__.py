"""The one encoder of images, and models of images with texts. A family is a table: sizes, keys, names of weights.

This package owns the values that an image encoder can have (`_config.py`), what it computes (`_model.py`, `_resize.py`), and
pairs of an image and a text encoder with a common embedding space (`_pair.py`, whose texts `_text.py` encodes). A family's
file says what differs. Open `_config.py` first, then `_model.py`, then a family, such as ViT.
"""

from ._config import PATCHES as PATCHES, TEXTS as TEXTS, TRANSFORMER as TRANSFORMER, VIT as VIT, VisionConfig as VisionConfig
from ._model import ImageClassifier as ImageClassifier, VisionEncoder as VisionEncoder
from ._names import Names as Names, text_names as text_names
from ._pair import Pair as Pair, PairConfig as PairConfig, Submodel as Submodel
from ._text import TextConfig as TextConfig, TextEncoder as TextEncoder
