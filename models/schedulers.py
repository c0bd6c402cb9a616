"""Noise schedulers: DDPM and DDIM, and the denoising loop. They are implemented in `diffusion`."""

from .diffusion import DDIM as DDIM, DDPM as DDPM, Scheduler as Scheduler, denoise as denoise, guided as guided
