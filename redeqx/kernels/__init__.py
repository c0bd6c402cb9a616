"""Kernels: memory-efficient attention, computed by each platform's fused kernel.

Owns the attention primitive, its derivatives, and the kernel of each platform. Knows nothing of plans or losses.
Open `_attention.py` first, then `_primitive.py`; `_sequence.py` is for positions that are split over devices.
"""

from ._attention import attend as attend, attention as attention
from ._offset import WithOffset as WithOffset
from ._primitive import KERNELS as KERNELS, dense_bytes as dense_bytes, formula as formula, kernel_of as kernel_of
from ._sequence import (
    backward_by_positions as backward_by_positions,
    constrain_positions as constrain_positions,
    forward_by_positions as forward_by_positions,
)
from ._setting import AttentionSetting as AttentionSetting
