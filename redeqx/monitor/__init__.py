"""Output of a run: the console, its speed, metrics.jsonl, images and texts, TensorBoard and other trackers.

Knows nothing of how numbers are computed. Open `_console.py` first, and `_records.py` for what is stored.
"""

from ._console import Console as Console
from ._jsonl import to_json as to_json
from ._live import ProgressLine as ProgressLine, Work as Work
from ._records import RECORDS as RECORDS, Records as Records
from ._trackers import TRACKERS as TRACKERS, Tracker as Tracker
from ._units import aligned as aligned, size_text as size_text
