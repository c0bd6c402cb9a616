"""Diffusion: noise schedulers, and the blocks and config keys of denoising models and of their autoencoder.

This package does not depend on the models. Start with `_scheduler.py`, the base of the schedulers in `_schedulers.py`,
`_pndm.py` and `_flow.py`; `_blocks.py` has the layers.
"""

from ._blocks import (
    Resnet as Resnet,
    TimeEmbedding as TimeEmbedding,
    apply as apply,
    attention as attention,
    check_groups as check_groups,
    diffusers as diffusers,
    layers_of_blocks as layers_of_blocks,
    mirrored as mirrored,
    one_or_many as one_or_many,
    sinusoids as sinusoids,
    size_of_sample as size_of_sample,
    sizes_of_blocks as sizes_of_blocks,
    upsample as upsample,
)
from ._flow import FlowMatchEuler as FlowMatchEuler
from ._pndm import PNDM as PNDM
from ._scheduler import Scheduler as Scheduler, denoise as denoise, denoising_loss as denoising_loss, guided as guided
from ._schedulers import DDIM as DDIM, DDPM as DDPM, BetaScheduler as BetaScheduler, Euler as Euler
