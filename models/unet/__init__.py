"""The UNet of latent diffusion (`UNet2DConditionModel`): predicts the noise in latents.

Its inputs are noisy latents, a timestep and the hidden states of a text.

Source: Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*, and its code,
github.com/CompVis/latent-diffusion. Weights are stored as in `diffusers`. Only the layout differs from that code: the gate
of each MLP is a separate layer, and the 1x1 convolutions around attention are linear layers.

`_config.py` has the config and `_model.py` the model: open the latter first.
"""

from ._config import UNetConfig as UNetConfig
from ._model import UNet as UNet
