"""Dry runs: compile a training step for described devices, and report whether it fits into their memory.

Owns the compilation, the search for settings that fit, and the report. Open `_forecast.py` first.
"""

from ._forecast import DryRunDone as DryRunDone, dry_run as dry_run
from ._report import DryRun as DryRun
