"""Memory: what a step needs on a device, and the search for a strategy with which it fits.

Owns the levels of recomputation, the order in which strategies are tried, and how a compiled step's need is read. A run with
`memory="auto"` searches the strategies of its own mesh; a dry run those of all meshes. Does not know models. Open
`_strategy.py` first.
"""

from ._need import (
    Memory as Memory,
    choose as choose,
    least_memory as least_memory,
    memory_of as memory_of,
    refused_bytes as refused_bytes,
    try_step as try_step,
)
from ._search import SearchSpace as SearchSpace, matmul_seconds as matmul_seconds
from ._strategy import (
    REMATS as REMATS,
    Strategy as Strategy,
    Tried as Tried,
    fastest as fastest,
    may_cut as may_cut,
)
