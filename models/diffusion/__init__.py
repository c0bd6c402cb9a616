"""Diffusion: noise schedulers, and the blocks and config keys that a UNet and its autoencoder share.

Knows nothing of the two models. Open `_schedulers.py` first, and `_blocks.py` for the layers.
"""

from ._blocks import (
    DIFFUSERS as DIFFUSERS,
    Resnet as Resnet,
    apply as apply,
    as_json as as_json,
    check_groups as check_groups,
    check_layers as check_layers,
    mirrored as mirrored,
    one_or_many as one_or_many,
    sample_size as sample_size,
    sizes as sizes,
    upsample as upsample,
)
from ._schedulers import DDIM as DDIM, DDPM as DDPM, Scheduler as Scheduler, denoise as denoise, guided as guided
