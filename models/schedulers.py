"""Noise schedulers: DDPM, DDIM, Euler and flow matching, and the loop and the loss of denoising, of package `diffusion`."""

from .diffusion import (
    DDIM as DDIM,
    DDPM as DDPM,
    BetaScheduler as BetaScheduler,
    Euler as Euler,
    FlowMatchEuler as FlowMatchEuler,
    Scheduler as Scheduler,
    denoise as denoise,
    denoising_loss as denoising_loss,
    guided as guided,
)
