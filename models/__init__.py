"""Reference models: plain Equinox modules, one family a file. They use redeqx; redeqx never imports them.

`from_pretrained` and `save_pretrained` read and write Hugging Face folders, `generate` goes on from prompts,
`cross_entropy` is a loss whose logits stay split, `weight_decay_mask` says what decays, `lora` holds adapters. Each family
is a module: `redeqx.models.llama`, `redeqx.models.t5`, ...; its language models are a `Decoder` or an `EncoderDecoder`.
"""

from . import lora as lora
from ._folder import save_pretrained as save_pretrained
from ._generate import generate as generate
from ._language_model import Decoder as Decoder, EncoderDecoder as EncoderDecoder
from ._layers import weight_decay_mask as weight_decay_mask
from ._losses import cross_entropy as cross_entropy
from ._pretrained import from_pretrained as from_pretrained
