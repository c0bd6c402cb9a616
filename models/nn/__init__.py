"""Layers that all model families share: attention with a cache, mixtures of experts, stacks, rotary positions, losses.

This package does not depend on folders, config files or generation. Start with `_attention.py`, then `_stack.py`.
"""

from ._activations import ACTIVATIONS as ACTIVATIONS, Xielu as Xielu
from ._attention import (
    Attention as Attention,
    Mask as Mask,
    SegmentMask as SegmentMask,
    attend_jointly as attend_jointly,
    causal_mask as causal_mask,
    distance_bias as distance_bias,
    learned_positions as learned_positions,
    near_mask as near_mask,
    sinusoids as sinusoids,
    token_mask as token_mask,
    token_positions as token_positions,
)
from ._blocks import (
    Block as Block,
    BlockStds as BlockStds,
    Mlp as Mlp,
    normal_attention as normal_attention,
    normal_mlp as normal_mlp,
    pre_norm_block as pre_norm_block,
)
from ._cache import Cache as Cache, LatestKeys as LatestKeys, States as States
from ._checks import (
    check_choice as check_choice,
    check_heads as check_heads,
    check_length as check_length,
    check_patches as check_patches,
    check_rates as check_rates,
    check_segments as check_segments,
    check_sizes as check_sizes,
)
from ._conv import ShortConv as ShortConv
from ._delta import GatedDelta as GatedDelta
from ._experts import MixtureOfExperts as MixtureOfExperts
from ._latent import LatentAttention as LatentAttention
from ._layers import (
    GroupRMSNorm as GroupRMSNorm,
    OffsetLayerNorm as OffsetLayerNorm,
    OffsetRMSNorm as OffsetRMSNorm,
    embed as embed,
    finite as finite,
    linear as linear,
    norm as norm,
    normal_embedding as normal_embedding,
    normal_linear as normal_linear,
    soft_cap as soft_cap,
    times as times,
)
from ._losses import cross_entropy as cross_entropy
from ._mamba import Mamba1 as Mamba1, Mamba2 as Mamba2
from ._recurrence import Recurrence as Recurrence
from ._rope import (
    AlphaScaling as AlphaScaling,
    DynamicScaling as DynamicScaling,
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    LongScaling as LongScaling,
    ProportionalScaling as ProportionalScaling,
    Scaling as Scaling,
    YarnScaling as YarnScaling,
    apply_rotary as apply_rotary,
    rotation as rotation,
)
from ._routing import Routing as Routing, add_routing as add_routing
from ._stack import Stack as Stack
