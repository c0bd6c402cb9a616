from ._deployer import Deployer as Deployer
from ._load import load as load
from ._predictor import Predictor as Predictor
from ._trainer import Trainer as Trainer
from ._version import __version__ as __version__
from .distributed import PeerError as PeerError, Preempted as Preempted
from .dry_run import DryRun as DryRun
from .kernels import attention as attention
from .machine import described as described, simulate_devices as simulate_devices
from .monitor import Tracker as Tracker
from .partition import LeafPlan as LeafPlan, Plan as Plan, register_attention as register_attention
from .training import (
    EMA as EMA,
    Callback as Callback,
    EarlyStopping as EarlyStopping,
    Loss as Loss,
    Precision as Precision,
    Profile as Profile,
    SaveEvery as SaveEvery,
)
