"""Kernels: memory-efficient attention, computed by each platform's fused kernel.

Owns the attention primitive, its derivatives, and the kernel of each platform. Knows nothing of meshes, plans or losses.
Open `_attention.py` first, then `_primitive.py`.
"""

from ._attention import attend as attend, attention as attention
from ._primitive import KERNELS as KERNELS, dense_bytes as dense_bytes, formula as formula, kernel_of as kernel_of
from ._setting import AttentionSetting as AttentionSetting
