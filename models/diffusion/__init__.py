"""Diffusion: noise schedulers, and the blocks and config keys of the UNet and its autoencoder.

This package does not depend on the two models. Start with `_schedulers.py`; `_blocks.py` has the layers.
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
