"""Rules on the traced step: how some equations of a loss are computed otherwise, with the same values and gradients.

One rule a file, each a `tracing.Rule`: weights gathered at use, equal parts of a split dim resharded, grouped convolutions,
fused attention, labels picked by comparison, products with weights in fp8, recomputation, unrolled loops, and equal blocks
as one loop. Knows nothing of optimizers, batches or files. Open `_gather.py` first.
"""

from ._attention_report import Attentions as Attentions, attentions as attentions
from ._fuse_attention import FuseAttention as FuseAttention
from ._gather import GRADIENT as GRADIENT, GatherAtUse as GatherAtUse, Shardings as Shardings
from ._grouped_convolution import FixGroupedConvolutions as FixGroupedConvolutions
from ._pick import PickByComparison as PickByComparison
from ._remat import KeepEverything as KeepEverything, RematLoops as RematLoops
from ._reshard import Reshard as Reshard
from ._stack_blocks import StackBlocks as StackBlocks
from ._unroll import UnrollLoops as UnrollLoops
from ._weight_products import (
    WeightProducts as WeightProducts,
    fp8_products as fp8_products,
    wide_products as wide_products,
)
