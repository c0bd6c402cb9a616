"""Noise schedulers: DDPM, DDIM, PNDM, Euler, and flow matching; the loop and loss of denoising. See package `diffusion`."""

from .diffusion import (
    DDIM as DDIM,
    DDPM as DDPM,
    PNDM as PNDM,
    BetaScheduler as BetaScheduler,
    Euler as Euler,
    FlowMatchEuler as FlowMatchEuler,
    Scheduler as Scheduler,
    denoise as denoise,
    denoising_loss as denoising_loss,
    guided as guided,
)
