"""LoRA: low-rank adapters on the linear layers of any Equinox model, in PEFT's format.

Source: Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models* (arXiv:2106.09685). The folder format is that of
Hugging Face's `peft`. An adapted layer computes `W x + b + scale * B A x`. Only `A` and `B` are trained; the rest is frozen.

```python
model = lora.add(model, rank=8, alpha=16, where=("*.attention.query", "*.attention.value"), key=key)
trainer = Trainer(deployer, model=model, trainable=lora.trainable(model), ...)
lora.save_adapter(trainer.model, "adapter")  # PEFT loads it over the same base
model = lora.merge(trainer.model)  # the plain model again
```

Start with `_layers.py` and `_adapters.py`. `_save.py` and `_load.py` write and read PEFT's folders.
"""

from ._adapters import add as add, merge as merge, plus as plus, trainable as trainable, with_keys as with_keys
from ._choices import choose as choose, combine as combine
from ._layers import LoraEmbedding as LoraEmbedding, LoraLinear as LoraLinear
from ._load import load_adapter as load_adapter
from ._quantise import dequantise as dequantise, quantise as quantise
from ._save import save_adapter as save_adapter
