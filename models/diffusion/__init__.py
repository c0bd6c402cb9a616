"""Diffusion: noise schedulers, and the blocks and config keys that a UNet and its autoencoder share.

Knows nothing of the two models. Open `_schedulers.py` first, and `_blocks.py` for the layers.
"""

from ._blocks import (
    Resnet as Resnet,
    apply as apply,
    check_groups as check_groups,
    diffusers as diffusers,
    layers_of_blocks as layers_of_blocks,
    mirrored as mirrored,
    one_or_many as one_or_many,
    size_of_sample as size_of_sample,
    sizes as sizes,
    upsample as upsample,
)
from ._schedulers import DDIM as DDIM, DDPM as DDPM, Scheduler as Scheduler, denoise as denoise, guided as guided
