"""Kernels: memory-efficient attention and grouped matmuls, computed by each platform's kernel.

Owns the primitives of both, their derivatives, and the kernels of each platform. Knows nothing of plans or losses. Open
`_attention.py` first, then `_primitive.py`; `_sequence.py` is for positions that are split over devices, and `_grouped.py`
for grouped matmuls.
"""

from ._attention import attend as attend, attention as attention
from ._dense import InBlocks as InBlocks
from ._grouped import (
    grouped_gradient_p as grouped_gradient_p,
    grouped_matmul as grouped_matmul,
    grouped_matmul_p as grouped_matmul_p,
)
from ._grouped_lowering import GroupedSetting as GroupedSetting
from ._offset import WithOffset as WithOffset
from ._primitive import KERNELS as KERNELS, formula as formula, kernel_of as kernel_of
from ._sequence import (
    backward_by_positions as backward_by_positions,
    constrain_positions as constrain_positions,
    forward_by_positions as forward_by_positions,
)
from ._setting import AttentionSetting as AttentionSetting
from ._shared import on_each_device as on_each_device, pad as pad
