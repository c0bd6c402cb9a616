"""CLIP: a text and a vision transformer with a common embedding space, and each of them alone.

Source: Radford et al. 2021, *Learning Transferable Visual Models From Natural Language Supervision*, and its code,
github.com/openai/CLIP. The text model is also the text encoder of Stable Diffusion. Only the layout differs from that code:
query, key and value are three layers instead of one, so that a plan shards each of them by whole heads.

`_config.py` has the configs and `_model.py` the models: open the latter first.
"""

from ._config import (
    CLIPConfig as CLIPConfig,
    CLIPTextConfig as CLIPTextConfig,
    CLIPVisionConfig as CLIPVisionConfig,
)
from ._model import CLIP as CLIP, CLIPText as CLIPText, CLIPVision as CLIPVision
