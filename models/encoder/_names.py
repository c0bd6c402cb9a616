"""The names of an encoder's tensors in files, and the weight map that follows from them and from the model's leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..hf import WeightMap, layers, stored, within


def _table(**names: str) -> Any:
    """Returns a field whose default is this table. Paths have dots, so their names have `__` here."""
    table = MappingProxyType({path.replace("__", "."): disk for path, disk in names.items()})
    return field(default_factory=lambda: table)


@dataclass(frozen=True)
class Names:
    """Names on disk, by the paths of the modules or arrays that they store. What a model lacks has no tensors. Several
    paths, with spaces between them, are layers of one size that are stored as one.

    **Arguments:**

    - `base`: the prefix of the encoder's tensors in the folder of a model with a head.
    - `encoder`: the encoder outside of its blocks.
    - `layers`: the prefix of the names of a block, with `{}` for its index.
    - `block`: a block.
    - `masked`, `texts`, `tokens`: the heads for masked tokens, and for classes of texts and of tokens.
    - `heads`: globs for the tensors of all heads.
    - `unused`: globs for tensors in folders with a head for masked tokens that are not needed.
    - `decoder`: the layer that is tied to the embedding, and to the bias of the logits.
    - `aliases`: as in `WeightMap`.
    """

    base: str = "bert."
    encoder: Mapping[str, str] = _table(
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings.weight",
        token_types="embeddings.token_type_embeddings.weight",
        norm="embeddings.LayerNorm",
        pooler="pooler.dense",
    )
    layers: str = "encoder.layer.{}."
    block: Mapping[str, str] = _table(
        attention__query="attention.self.query",
        attention__key="attention.self.key",
        attention__value="attention.self.value",
        attention__output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        mlp__up="intermediate.dense",
        mlp__down="output.dense",
        mlp_norm="output.LayerNorm",
    )
    masked: Mapping[str, str] = _table(
        transform="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        logits_bias="cls.predictions.bias",
    )
    texts: Mapping[str, str] = _table(classifier="classifier")
    tokens: Mapping[str, str] = _table(classifier="classifier")
    heads: tuple[str, ...] = ("cls.*", "classifier.*")
    unused: tuple[str, ...] = ("cls.seq_relationship.*",)
    decoder: str = "cls.predictions.decoder"
    # As in files of TensorFlow.
    aliases: tuple[tuple[str, str], ...] = (
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    )

    def weight_map(self, leaves: Mapping[str, Any], n_layers: int, head: str | None) -> WeightMap:
        """Returns the weight map of a model.

        **Arguments:**

        - `leaves`: the model's arrays, or their shapes, by path.
        - `head`: the field with the names of the model's head; None for an encoder without one.
        """
        base, path = ("", "") if head is None else (self.base, "encoder.")
        encoder = stored(self.encoder, leaves, path)
        first = stored(self.block, leaves, f"{path}first.")
        encoder += within(self.layers.format(0), "first.", first)
        blocks = stored(self.block, leaves, f"{path}stack.blocks.")
        rest = layers(self.layers, "stack.blocks.", n_layers - bool(first), blocks)
        encoder += [replace(tensor, first_layer=len(first) > 0) for tensor in rest]
        tensors = within(base, path, encoder)
        # A counter in old files, and an unwanted pooler.
        ignored = [f"{base}embeddings.position_ids"]
        if f"{path}pooler.weight" not in leaves and "pooler" in self.encoder:
            ignored.append(f"{base}{self.encoder['pooler']}.*")
        if head is None:
            return WeightMap(
                tensors=tensors, ignored=(*ignored, *self.heads), aliases=(*self.aliases, (rf"^{self.base[:-1]}\.", ""))
            )
        held = getattr(self, head)
        tensors += stored(held, leaves)
        copies = {}
        if head == "masked":
            ignored += self.unused
            copies = {f"{self.decoder}.weight": f"{base}{self.encoder['embedding']}.weight"}
            if held["logits_bias"] != f"{self.decoder}.bias":
                copies[f"{self.decoder}.bias"] = held["logits_bias"]
        return WeightMap(tensors=tensors, ignored=tuple(ignored), copies=copies, aliases=self.aliases)
