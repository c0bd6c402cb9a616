"""Rules on the traced step: they replace some equations of a loss, with the same values and gradients.

Each file is one `tracing.Rule`: draws by the numbers of rows, gathering weights at use, resharding equal parts of a split
dim, grouped convolutions, splitting products that have lost the rows, fused attention, grouped matmuls, label picking by
comparison, products with weights in fp8, rematerialisation, unrolling loops, and stacking equal blocks into one loop. The
package is independent of optimizers, batches and files. Open `_gather.py` first.
"""

from ._attention_report import Attentions as Attentions, attentions as attentions
from ._draw_by_row import Rows as Rows, by_row as by_row, of_whole as of_whole
from ._fuse_attention import FuseAttention as FuseAttention
from ._gather import GRADIENT as GRADIENT, GatherAtUse as GatherAtUse, Shardings as Shardings
from ._group_matmuls import GroupMatmuls as GroupMatmuls
from ._grouped_convolution import FixGroupedConvolutions as FixGroupedConvolutions
from ._pick import PickByComparison as PickByComparison
from ._remat import KeepEverything as KeepEverything, RematLoops as RematLoops
from ._reshard import Reshard as Reshard
from ._split_positions import SplitPositions as SplitPositions
from ._split_repeated import SplitRepeated as SplitRepeated
from ._split_residual import SplitResidual as SplitResidual, describe_residual as describe_residual
from ._stack_blocks import StackBlocks as StackBlocks
from ._unroll import UnrollLoops as UnrollLoops
from ._weight_products import (
    WeightProducts as WeightProducts,
    fp8_products as fp8_products,
    wide_products as wide_products,
)
