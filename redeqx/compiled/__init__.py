"""Compiled programs: analyses of their HLO text.

Owns the parser of HLO, the lists of a program's collectives and buffers, the check for work that devices repeat, and the
operations of a profile. It is independent of models and plans. Open `_hlo.py` first.
"""

from ._buffers import (
    Buffer as Buffer,
    bytes_moved as bytes_moved,
    host_bytes as host_bytes,
    temporaries as temporaries,
    workspace_allowance as workspace_allowance,
)
from ._collectives import Collective as Collective, collectives as collectives
from ._hlo import Module as Module, own_line as own_line, split_name as split_name, words_of as words_of
from ._profile import Operation as Operation, Profile as Profile, profile_of as profile_of
from ._repeated_work import checked as checked, excess as excess, flops_by_line as flops_by_line
