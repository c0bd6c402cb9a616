"""Reference models: plain Equinox modules, one family a file. They use redeqx; redeqx never imports them.

`from_pretrained` and `save_pretrained` read and write Hugging Face folders; `compare_weights` and `load_weights` hold a
module of your own against one. `generate` and `stream` continue prompts. `cross_entropy` is a loss whose logits stay sharded
over the vocabulary. `lora` adds adapters. Each family is a module, such as `redeqx.models.llama`; its language models are a
`Decoder` or an `EncoderDecoder`.

The families use the packages `nn`, `generation`, `hf`, `diffusion` and `lora`. Open `gpt2.py` first.
"""

from . import lora as lora
from ._families import from_pretrained as from_pretrained
from .decoder import Decoder as Decoder
from .generation import EncoderDecoder as EncoderDecoder, generate as generate, stream as stream
from .hf import (
    Differences as Differences,
    compare_weights as compare_weights,
    load_weights as load_weights,
    save_pretrained as save_pretrained,
)
from .nn import cross_entropy as cross_entropy
