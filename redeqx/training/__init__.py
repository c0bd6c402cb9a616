"""Training: the loss, the compiled step, the state it carries, the engine that takes updates, and the loop around it.

Owns the computation of a step, its program on a mesh, the arrays that it carries, fits and how they resume. It does not know
the command line, described machines, or the three classes above it. Open `_loop.py` first, then `_engine.py`, and `_step.py`
for the computation of a step.
"""

from ._agreement import agree_on_examples as agree_on_examples
from ._callbacks import (
    Callback as Callback,
    EarlyStopping as EarlyStopping,
    Profile as Profile,
    SaveEvery as SaveEvery,
)
from ._compute import REMATS as REMATS, Compute as Compute
from ._engine import Engine as Engine
from ._evaluation import evaluate as evaluate
from ._functions import (
    Sums as Sums,
    effective_specs as effective_specs,
    weak_types as weak_types,
    with_weak_types as with_weak_types,
)
from ._loop import Fit as Fit
from ._loss import Loss as Loss, trace_loss as trace_loss
from ._options import FitOptions as FitOptions, with_options as with_options
from ._parts import Parts as Parts
from ._passes import (
    as_one_step as as_one_step,
    in_order as in_order,
    train as train,
    update as update,
    warn_of_large_batch as warn_of_large_batch,
)
from ._precision import Precision as Precision
from ._program import (
    Program as Program,
    make_program as make_program,
    placed as placed,
    placed_shapes as placed_shapes,
    shard_bytes as shard_bytes,
)
from ._recipe import Recipe as Recipe, plan_model as plan_model, plan_prediction as plan_prediction
from ._resume import resume_newest as resume_newest
from ._run import Run as Run
from ._step import make_predict_step as make_predict_step, prediction as prediction, row_span as row_span
