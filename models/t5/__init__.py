"""T5: a pre-norm encoder-decoder without biases in its layers, with relative position biases.

Source: Raffel et al. 2020, *Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer*
(arXiv:1910.10683), and its code, github.com/google-research/text-to-text-transfer-transformer. Version 1.1, with gated MLPs
and a separate output head, is Shazeer 2020, *GLU Variants Improve Transformer* (arXiv:2002.05202). mT5 (arXiv:2010.11934) is
version 1.1 with another vocabulary. As in transformers, each stack has one table of position biases, which its layers share.
Positions enter only as distances, so examples may have any length.

`_config.py` has the config and `_model.py` the models: open the latter first.
"""

from ._config import T5Config as T5Config
from ._model import T5 as T5, T5Encoder as T5Encoder
