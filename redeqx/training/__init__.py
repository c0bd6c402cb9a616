"""Training: the engine that takes updates, the fit around it, and checkpoints.

Owns arrays, fits, callbacks, and how a run is saved and resumed; the computation of a step belongs to `steps`. It does not
know the command line, described machines, or the classes above it. Open `_fit.py` first, then `_engine.py`.
"""

from ._callbacks import (
    Callback as Callback,
    EarlyStopping as EarlyStopping,
    Profile as Profile,
)
from ._checkpointer import Checkpointer as Checkpointer
from ._compilation import CalledSteps as CalledSteps
from ._engine import Engine as Engine
from ._fit import Fit as Fit, FitOptions as FitOptions
from ._loops import evaluate as evaluate, in_order as in_order, warn_of_large_batch as warn_of_large_batch
from ._progress import Position as Position, start as start
from ._save_every import SaveEvery as SaveEvery
