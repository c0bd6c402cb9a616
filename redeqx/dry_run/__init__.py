"""Dry runs: compile a training step for described devices, and report whether it fits into their memory.

Owns the compilation and the report; `memory` owns the search for strategies that fit. Open `_forecast.py` first.
"""

from ._figures import Step as Step
from ._forecast import (
    OPTIMIZATIONS as OPTIMIZATIONS,
    SEARCHES as SEARCHES,
    DryRunDone as DryRunDone,
    dry_run as dry_run,
)
from ._report import DryRun as DryRun
from ._workload import Workload as Workload
