"""Compiled programs: analyses of their HLO text, and folders in which they are saved.

Owns the parser of HLO, the lists of a program's collectives and buffers, the share of the collectives behind matmuls, the
check for work that devices repeat, the operations of a profile, and the manifest of saved programs. It is independent of
models and plans. Open `_hlo.py` first.
"""

from ._buffers import (
    Buffer as Buffer,
    bytes_moved as bytes_moved,
    host_copies as host_copies,
    temporaries as temporaries,
    workspace_allowance as workspace_allowance,
)
from ._collectives import Collective as Collective, collectives as collectives
from ._hlo import Module as Module, own_line as own_line, split_name as split_name, words_of as words_of
from ._overlap import hidden_host_share as hidden_host_share, with_overlap as with_overlap
from ._profile import profile_of as profile_of
from ._repeated_work import checked as checked, excess as excess, flops_by_line as flops_by_line
from ._saved import (
    SavedPrograms as SavedPrograms,
    argument_text as argument_text,
    program_environment as program_environment,
    step_facts as step_facts,
)
