"""Layers that all model families share: attention with a cache, mixtures of experts, stacks, rotary positions, losses.

This package does not depend on folders, config files or generation. Start with `_attention.py`, then `_stack.py`.
"""

from ._activations import ACTIVATIONS as ACTIVATIONS
from ._attention import (
    Attention as Attention,
    Cache as Cache,
    Mask as Mask,
    SegmentMask as SegmentMask,
    causal_mask as causal_mask,
    learned_positions as learned_positions,
    token_mask as token_mask,
    token_positions as token_positions,
)
from ._blocks import PreNormBlock as PreNormBlock
from ._checks import (
    check_choice as check_choice,
    check_heads as check_heads,
    check_length as check_length,
    check_patches as check_patches,
    check_rates as check_rates,
    check_segments as check_segments,
    check_sizes as check_sizes,
)
from ._experts import MixtureOfExperts as MixtureOfExperts, Routing as Routing, add_routing as add_routing
from ._layers import (
    OffsetRMSNorm as OffsetRMSNorm,
    embed as embed,
    linear as linear,
    norm as norm,
    normal_embedding as normal_embedding,
    normal_linear as normal_linear,
    soft_cap as soft_cap,
    weight_decay_mask as weight_decay_mask,
)
from ._losses import cross_entropy as cross_entropy
from ._rope import (
    DynamicScaling as DynamicScaling,
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    LongScaling as LongScaling,
    Scaling as Scaling,
    YarnScaling as YarnScaling,
    apply_rotary as apply_rotary,
    rotation as rotation,
)
from ._stack import Stack as Stack
