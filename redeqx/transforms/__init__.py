"""Rules on the traced step: what the loss computes is evaluated otherwise, with the same values.

One rule a file: weights gathered where they are used, equal parts of a split dim resharded, grouped convolutions. Knows
nothing of optimizers, batches or files. Open `_gather.py` first.
"""

from ._gather import Home as Home, gather_at_use as gather_at_use
from ._grouped_convolution import mend_grouped_convs as mend_grouped_convs
from ._reshard import exchange_parts as exchange_parts
