"""Memory: what a step needs on a device, and the search for a strategy with which it fits.

Owns the levels of recomputation, the order in which strategies are tried, and how a compiled step's need is read. A run with
`memory="auto"` searches the strategies of its own mesh; a dry run those of all meshes. Does not know models. Open
`_strategy.py` first.
"""

from ._choose import choose as choose
from ._need import (
    Memory as Memory,
    Tried as Tried,
    fastest as fastest,
    least_memory as least_memory,
    memory_of as memory_of,
    refused_bytes as refused_bytes,
    try_step as try_step,
)
from ._search import SearchSpace as SearchSpace, levels_of as levels_of, matmul_seconds as matmul_seconds
from ._strategy import REMATS as REMATS, Strategy as Strategy, may_cut as may_cut
