from ._deployer import Deployer as Deployer
from ._devices import described as described, simulate_devices as simulate_devices
from ._plan import LeafPlan as LeafPlan, Plan as Plan
from ._predictor import Predictor as Predictor
from ._report import DryRun as DryRun
from ._step import Loss as Loss
from ._trainer import Trainer as Trainer
from ._walk import register_attention as register_attention
