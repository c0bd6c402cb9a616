"""Data: turns raw examples into the batches of steps: order, position, collation, placing and prefetch.

Owns the choice of each step's examples, and how they are placed on the mesh. Does not know models or losses. Open
`_examples.py` first, then `_streams.py`. Public: `TokenRows`, and `pack` with what it returns. The other names are internal.
"""

from ._batches import Batch as Batch, batches as batches
from ._collate import (
    collate as collate,
    collated_shapes as collated_shapes,
    n_tokens as n_tokens,
)
from ._examples import (
    Slice as Slice,
    check_examples as check_examples,
    differs_by_epoch as differs_by_epoch,
    examples_of as examples_of,
    known_size as known_size,
    n_slices as n_slices,
    sample_of as sample_of,
    size_of as size_of,
    slices as slices,
)
from ._packed_stream import pack as pack, source_of as source_of
from ._prefetch import Prefetch as Prefetch, drawn_ahead as drawn_ahead
from ._rows import (
    BatchSize as BatchSize,
    Group as Group,
    group_sharding as group_sharding,
)
from ._streams import checksum as checksum
from ._tokens import TokenRows as TokenRows
from ._workers import CollatePool as CollatePool, Workers as Workers
