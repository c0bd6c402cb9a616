"""The one encoder of all models that read a text in both directions. A family is a table: sizes, keys, names of weights.

This package owns the values that an encoder can have (`_config.py`), what it computes (`_model.py`; `_heads.py` for masked
tokens and classes), and the default rows and names, which are BERT's (`_rows.py`, `_names.py`). A family's file says what
differs. Open `_config.py` first, then `_model.py`, then a family, such as RoBERTa.
"""

from ._config import EncoderConfig as EncoderConfig
from ._heads import MaskedLM as MaskedLM, SequenceClassifier as SequenceClassifier, TokenClassifier as TokenClassifier
from ._model import Encoder as Encoder
from ._names import Names as Names
from ._rows import BERT as BERT, rows as rows
