"""Memory: what a step needs on a device, and the search for a strategy with which it fits.

Owns the levels of recomputation, the order in which strategies are tried, and how a compiled step's need is read. A run with
`memory="auto"` searches the strategies of its own mesh; a dry run those of all meshes. Does not know models. Open
`_strategy.py` first.
"""

from ._estimate import estimated_bytes as estimated_bytes
from ._need import (
    Memory as Memory,
    choose as choose,
    least_memory as least_memory,
    memory_of as memory_of,
    refused_bytes as refused_bytes,
    sizes_of as sizes_of,
    try_step as try_step,
)
from ._saved import (
    HOST as HOST,
    KEPT as KEPT,
    Candidate as Candidate,
    Loop as Loop,
    Row as Row,
    describe_saved as describe_saved,
    is_named as is_named,
    key_of as key_of,
    loop_of as loop_of,
    saved_at as saved_at,
    share_again as share_again,
)
from ._search import SearchSpace as SearchSpace, matmul_seconds as matmul_seconds
from ._shards import Shards as Shards
from ._strategy import (
    AUTO as AUTO,
    REMATS as REMATS,
    Strategy as Strategy,
    Tried as Tried,
    bytes_of as bytes_of,
    fastest as fastest,
    may_cut as may_cut,
)
