"""Checkpoints: folders of safetensors files. A crash leaves the old checkpoint or the new one, both complete.

Owns the format, the manifest, writing by one or several processes, reading of slices, and the lock of a folder. Does not
know steps, losses or optimizers. Open `_folder.py` first, which reads, then `_manager.py`, which writes.
"""

from ._base import Base as Base, is_worth_naming as is_worth_naming
from ._folder import CheckpointFolder as CheckpointFolder, find_checkpoint as find_checkpoint
from ._lock import Lock as Lock, LockedError as LockedError
from ._manager import CheckpointManager as CheckpointManager
from ._manifest import MANIFEST as MANIFEST, kind_of as kind_of, read_manifest as read_manifest
from ._reader import (
    INDEX as INDEX,
    TensorReader as TensorReader,
    check_tree as check_tree,
    load_tree as load_tree,
    read_sharded as read_sharded,
)
from ._safetensors import (
    check_savable as check_savable,
    file_size as file_size,
    to_host as to_host,
    write_tensors as write_tensors,
)
