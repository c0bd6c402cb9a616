"""The one decoder of the families that are tables: their sizes, keys of `config.json` and names of weights.

This package owns the values that a decoder can have, what it computes from them, and the default rows and names, which are
LLaMA's. A family's file says what differs. Open `_config.py` first, then `_model.py` and `_block.py`, then a family such as
`models.gemma`.
"""

from ._block import Block as Block
from ._config import DecoderConfig as DecoderConfig, GPTConfig as GPTConfig, every as every
from ._factors import Factors as Factors
from ._heads import SequenceClassifier as SequenceClassifier, TokenClassifier as TokenClassifier
from ._layer_rows import (
    GlobalHeads as GlobalHeads,
    LayerTypes as LayerTypes,
    MlpTypes as MlpTypes,
    Window as Window,
    layer_types as layer_types,
    read_layer_types as read_layer_types,
)
from ._mixer_rows import (
    DELTA as DELTA,
    OLDER as OLDER,
    DrawnSteps as DrawnSteps,
    MixedLayers as MixedLayers,
    MixerLayers as MixerLayers,
    ScanWidth as ScanWidth,
    StateHeads as StateHeads,
    StepLimits as StepLimits,
    StepRank as StepRank,
    mamba_rows as mamba_rows,
)
from ._mixers import make_conv as make_conv, make_delta as make_delta, make_mamba as make_mamba, make_mamba1 as make_mamba1
from ._model import FAMILIES as FAMILIES, Decoder as Decoder
from ._names import (
    DELTA_NAMES as DELTA_NAMES,
    LATENT_NAMES as LATENT_NAMES,
    PART_OF_LARGER as PART_OF_LARGER,
    ByHead as ByHead,
    Experts as Experts,
    Names as Names,
    Taps as Taps,
    Wide as Wide,
    expert_names as expert_names,
    mamba1_names as mamba1_names,
    mamba_names as mamba_names,
)
from ._rope import KINDS as KINDS, Rope as Rope
from ._rows import (
    EXPERTS as EXPERTS,
    GPT_ALIASES as GPT_ALIASES,
    GPT_ROWS as GPT_ROWS,
    GROUPED as GROUPED,
    LATENT as LATENT,
    ROUTED as ROUTED,
    Choice as Choice,
    FirstLayers as FirstLayers,
    Inner as Inner,
    LogitScale as LogitScale,
    Shared as Shared,
    SharedExperts as SharedExperts,
    Switched as Switched,
    rows as rows,
)
from ._steps import InitialSteps as InitialSteps
