"""Forecasts: a training step compiled for devices that need not be there, and whether it fits.

Owns the compilation, the search for settings that fit, and the report. Open `_forecast.py` first.
"""

from ._forecast import DryRunDone as DryRunDone, dry_run as dry_run
from ._report import DryRun as DryRun
