"""Rules on the traced step: they replace some equations of a loss, with the same values and gradients.

Each file is one `tracing.Rule`: draws by the numbers of rows, gathering weights at use, dequantising them there, exchanging
what is looked up in tables, splitting a head by its vocabulary, resharding equal parts of a split dim, convolutions, pools,
pads and lookups, Fourier transforms by rows, splitting products that have lost the rows, fused attention, grouped matmuls,
label picking by comparison, products with weights and their gradients, rematerialisation, unrolling loops, and stacking
equal blocks into one loop. The package is independent of optimizers, batches and files. Open `_gather.py` first.
"""

from ._attention_report import attentions as attentions, describe_attention as describe_attention
from ._convolutions import FixConvolutions as FixConvolutions
from ._custom_derivatives import InCustomDerivatives as InCustomDerivatives
from ._dequantise import DequantiseAtUse as DequantiseAtUse
from ._draw_by_row import Rows as Rows, by_row as by_row, of_whole as of_whole
from ._exchange_lookups import ExchangeLookups as ExchangeLookups
from ._exchanged_rows import expert_stacks as expert_stacks
from ._fourier import SplitFourier as SplitFourier
from ._fuse_attention import FuseAttention as FuseAttention
from ._gather import (
    GRADIENT as GRADIENT,
    GatherAtUse as GatherAtUse,
    Shardings as Shardings,
    sum_gradient as sum_gradient,
)
from ._group_matmuls import GroupMatmuls as GroupMatmuls
from ._lookups import FixLookups as FixLookups
from ._pads import FixPads as FixPads
from ._pick import PickByComparison as PickByComparison
from ._pools import FixPools as FixPools
from ._remat import (
    Measure as Measure,
    RematLoops as RematLoops,
    with_remats as with_remats,
)
from ._reshard import Reshard as Reshard
from ._split_positions import SplitPositions as SplitPositions
from ._split_repeated import SplitRepeated as SplitRepeated
from ._split_residual import SplitResidual as SplitResidual, describe_residual as describe_residual
from ._split_vocabulary import (
    HEAD_INPUT as HEAD_INPUT,
    SplitVocabulary as SplitVocabulary,
    by_vocabulary as by_vocabulary,
    with_own_rows as with_own_rows,
)
from ._stack_blocks import StackBlocks as StackBlocks
from ._unroll import UnrollLoops as UnrollLoops
from ._weight_products import (
    WeightProducts as WeightProducts,
    fp8_products as fp8_products,
    wide_products as wide_products,
)
