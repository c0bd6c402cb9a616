"""LoRA: low-rank adapters on the linear layers of any Equinox model, in PEFT's format.

Source: Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models* (arXiv:2106.09685). The folder format is that of
Hugging Face's `peft`. An adapted layer computes `W x + b + scale * B A x`. Only `A` and `B` are trained; the rest is frozen.

```python
model = lora.add(model, rank=8, alpha=16, where=("*.attention.query", "*.attention.value"), key=key)
trainer = Trainer(deployer, model=model, trainable=lora.trainable(model), ...)
lora.save_adapter(trainer.model, "adapter")  # PEFT loads it over the same base
model = lora.merge(trainer.model)  # the plain model again
```

Dropout on an adapter's input is not implemented. It is not part of the trained function.

Start with `_adapters.py`. `_save.py` and `_load.py` write and read PEFT's folders.
"""

from ._adapters import LoraLinear as LoraLinear, add as add, merge as merge, trainable as trainable
from ._load import load_adapter as load_adapter
from ._save import save_adapter as save_adapter
