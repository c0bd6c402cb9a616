"""Updates: the loss, the compiled step, and the state it carries.

Owns what a step computes, its program on a mesh, and the arrays that it carries. Knows nothing of files, command lines or
machines that are not there. Open `_step.py` first, then `_program.py`.
"""

from ._job import Job as Job, Setting as Setting
from ._nonfinite import why_nonfinite as why_nonfinite
from ._program import (
    Program as Program,
    make_program as make_program,
    placed as placed,
    placed_shapes as placed_shapes,
    shard_bytes as shard_bytes,
)
from ._state import TrainState as TrainState
from ._step import (
    Functions as Functions,
    Loss as Loss,
    Parts as Parts,
    as_sums as as_sums,
    make_predict_step as make_predict_step,
)
