"""Hugging Face folders: reads and writes `config.json`, safetensors and tokenizer files.

This package owns the reading of configs, the conversion between tensors on disk and leaves, and the base class of models
that a folder can hold. It does not depend on the families; each family provides its config rows and its weight map. Start
with `_pretrained.py`.
"""

from ._compare import Differences as Differences, compare_weights as compare_weights, load_weights as load_weights
from ._config import (
    BLOCKS as BLOCKS,
    DROPOUT as DROPOUT,
    Aliases as Aliases,
    Classes as Classes,
    Field as Field,
    Fields as Fields,
    Fixed as Fixed,
    FolderConfig as FolderConfig,
    ModelType as ModelType,
    Only as Only,
    Row as Row,
    Tokens as Tokens,
    Written as Written,
    check_fixed as check_fixed,
    published as published,
)
from ._files import (
    CONFIG as CONFIG,
    companions as companions,
    read_config as read_config,
    replace_json as replace_json,
    type_key as type_key,
)
from ._load import is_on_disk as is_on_disk, is_tied_on_disk as is_tied_on_disk
from ._pretrained import Pretrained as Pretrained
from ._reader import ConfigReader as ConfigReader
from ._save import save_pretrained as save_pretrained
from ._weight_map import (
    StoredTensor as StoredTensor,
    WeightMap as WeightMap,
    layers as layers,
    leaves_of as leaves_of,
    reshaped as reshaped,
    same as same,
    same_layer as same_layer,
    shapes_of as shapes_of,
    stored as stored,
    within as within,
)
