from ._deployer import Deployer as Deployer
from ._load import load as load
from ._predictor import Predictor as Predictor
from ._trainer import Trainer as Trainer
from ._version import __version__ as __version__
from .data import Workers as Workers
from .distributed import PeerError as PeerError, Preempted as Preempted, Timeouts as Timeouts
from .dry_run import DryRun as DryRun
from .kernels import attention as attention
from .machine import Compiler as Compiler, described as described, simulate_devices as simulate_devices
from .monitor import Tracker as Tracker
from .partition import LeafPlan as LeafPlan, Plan as Plan
from .steps import Compute as Compute, Loss as Loss, Precision as Precision
from .training import Callback as Callback, EarlyStopping as EarlyStopping, Profile as Profile, SaveEvery as SaveEvery
