"""The one decoder of the families that are tables: their sizes, keys of `config.json` and names of weights.

This package owns the values that a decoder can have, what it computes from them, and the default rows and names, which are
LLaMA's. A family's file says what differs. Open `_config.py` first, then `_model.py`, then a family such as `models.gemma`.
"""

from ._config import CausalLMConfig as CausalLMConfig, every as every, published as published, sized as sized
from ._model import (
    Block as Block,
    CausalLM as CausalLM,
    Mlp as Mlp,
    make_attention as make_attention,
    make_norm as make_norm,
)
from ._names import ByHead as ByHead, Names as Names
from ._rows import (
    LayerTypes as LayerTypes,
    Rope as Rope,
    Shared as Shared,
    Window as Window,
    layer_types as layer_types,
    read_layer_types as read_layer_types,
    rows as rows,
)
