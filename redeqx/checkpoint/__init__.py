"""Checkpoints: folders of safetensors files. A crash leaves the old checkpoint or the new one, both complete.

Owns the format, the manifest, writing by one or several processes, reading of slices, and the lock of a folder. Knows
nothing of steps, losses or optimizers. Open `_manager.py` first.
"""

from ._manager import Checkpoints as Checkpoints
from ._manifest import MANIFEST as MANIFEST
from ._reader import INDEX as INDEX, TensorReader as TensorReader, load_tree as load_tree
from ._safetensors import (
    array_leaves as array_leaves,
    file_size as file_size,
    to_host as to_host,
    write_tensors as write_tensors,
)
