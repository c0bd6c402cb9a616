from ._deployer import Deployer as Deployer
from ._load import load as load
from ._predictor import Predictor as Predictor
from ._trainer import Trainer as Trainer
from .dry_run import DryRun as DryRun
from .machine import described as described, simulate_devices as simulate_devices
from .partition import LeafPlan as LeafPlan, Plan as Plan, register_attention as register_attention
from .training import Loss as Loss
