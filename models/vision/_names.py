"""The names of the tensors of an image or text encoder in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..hf import StoredTensor, layers, reshaped, stored

# The blocks of CLIP and SigLIP.
BLOCK: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "layer_norm1",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
)


@dataclass(frozen=True)
class Names:
    """Names on disk, by the paths of the modules or arrays that they store. What a model lacks has no tensors. Several
    paths, with spaces between them, are layers of one size that are stored as one.

    **Arguments:**

    - `encoder`: the encoder outside of its blocks.
    - `base`: the prefix of the encoder's tensors in the folder of a larger model.
    - `layers`: the prefix of the names of a block, with `{}` for its index.
    - `block`: a block.
    - `leading`: the number of dims of size 1 that an array has on disk before its own.
    - `others`: globs for the other tensors of larger models, and for what is not needed.
    - `modules`: as in `WeightMap`.
    """

    encoder: Mapping[str, str]
    base: str
    layers: str = "encoder.layers.{}."
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    leading: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def tensors(self, leaves: Mapping[str, Any], n_layers: int, path: str = "") -> list[StoredTensor]:
        """Returns the tensors of an encoder.

        **Arguments:**

        - `leaves`: the model's arrays, or their shapes, by path.
        - `path`: the prefix of the encoder's paths.
        """
        found = []
        for tensor in stored(self.encoder, leaves, path):
            shape = tuple(leaves[path + tensor.leaves[0]].shape)
            if tensor.leaves[0] == "patches.bias":  # of a convolution
                tensor = reshaped(tensor.disk, "patches.bias", shape[:1], shape)
            elif n := self.leading.get(tensor.leaves[0]):
                tensor = reshaped(tensor.disk, tensor.leaves[0], (1,) * n + shape, shape)
            found.append(tensor)
        return found + layers(self.layers, "stack.blocks.", n_layers, stored(self.block, leaves, f"{path}stack.blocks."))


def text_names(*joint: str) -> Names:
    """Returns the names of a pair's text encoder; `joint` are the pair's other tensors."""
    encoder = {
        "embedding": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding.weight",
        "norm": "final_layer_norm",
        "projection": "head",
    }
    return Names(encoder, base="text_model.", others=("embeddings.position_ids", "vision_model.*", *joint))
