"""Hugging Face folders: `config.json`, safetensors and the tokenizer's files, read and written.

Owns how a config is read key by key, how tensors on disk become leaves, and the base class of models that a folder holds.
Knows nothing of the families: each brings its table of keys and its weight map. Open `_pretrained.py` first.
"""

from ._config import (
    Classes as Classes,
    Field as Field,
    FolderConfig as FolderConfig,
    ModelType as ModelType,
    Only as Only,
    Row as Row,
    Tokens as Tokens,
    Written as Written,
)
from ._files import (
    CONFIG as CONFIG,
    read_config as read_config,
    replace_file as replace_file,
    replace_json as replace_json,
    type_key as type_key,
)
from ._load import is_on_disk as is_on_disk, is_tied_on_disk as is_tied_on_disk
from ._pretrained import Pretrained as Pretrained
from ._reader import ConfigReader as ConfigReader
from ._rope import rope_from_hf as rope_from_hf
from ._save import save_pretrained as save_pretrained
from ._weight_map import (
    StoredTensor as StoredTensor,
    WeightMap as WeightMap,
    fused as fused,
    layers as layers,
    reshaped as reshaped,
    same as same,
    same_layer as same_layer,
    within as within,
)
