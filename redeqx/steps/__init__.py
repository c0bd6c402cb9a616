"""Steps: the loss, the gradient, the optimizer's update and a prediction as jitted programs, for every mesh.

Owns the task of a Trainer: the user's functions as sums over rows, their dtypes and rules. Owns what a step carries, too.
It creates no array, and does not know engines, fits or checkpoints. Open `_step.py` first, then `_task.py`.
"""

from ._compute import Compute as Compute
from ._functions import weak_types as weak_types, with_weak_types as with_weak_types
from ._loss import Loss as Loss, as_sums as as_sums, n_rows as n_rows
from ._micro_batches import accumulate as accumulate, number_rows as number_rows, row_span as row_span
from ._precision import (
    AS_GIVEN as AS_GIVEN,
    Precision as Precision,
    round_stochastically as round_stochastically,
)
from ._program import (
    Program as Program,
    make_program as make_program,
    placed_shape as placed_shape,
    placed_shapes as placed_shapes,
    shard_bytes as shard_bytes,
)
from ._rules import effective_specs as effective_specs, plan_rules as plan_rules
from ._state import TrainState as TrainState, stream_dtype as stream_dtype, stream_key as stream_key
from ._step import UNMOVED as UNMOVED, make_predict_step as make_predict_step, prediction as prediction
from ._structure import Structure as Structure
from ._task import Task as Task, plan_model as plan_model
