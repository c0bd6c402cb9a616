"""Sentence embeddings: one vector for a text, as the folders of sentence-transformers describe: pooling, layers, length 1.

Source: Reimers and Gurevych 2019, *Sentence-BERT* (arXiv:1908.10084), and its code, github.com/huggingface/
sentence-transformers. `modules.json` lists what follows the transformer, and each module has a folder of its own.

Dims: seq = tokens of one text, d = width of the transformer, size = width of an embedding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx import Deployer
from redeqx._rounding import at_least_float32
from redeqx.errors import brief, load_json, wrong
from redeqx.storage import Location, location, write_file

from ._families import from_pretrained
from ._kinds import SIZE
from .bert import Bert
from .decoder import FAMILIES, Decoder
from .distilbert import DistilBert
from .hf import (
    CONFIG,
    ConfigReader,
    Field,
    FolderConfig,
    Only,
    Pretrained,
    WeightMap,
    read_config,
    replace_json,
    same_layer,
    save_pretrained,
    type_key,
)
from .modernbert import ModernBert
from .nn import check_sizes
from .roberta import Roberta

MODULES = "modules.json"
# Files that say how texts become tokens and how embeddings are compared. They are saved with the model.
_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")
_EMBEDDING = "sentence_embedding"  # what modules after the pooling read and write
_ENCODERS: Sequence[type[Pretrained]] = (Bert, Roberta, DistilBert, ModernBert)
_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "torch.nn.modules.activation.Tanh": jnp.tanh,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.ReLU": jax.nn.relu,
    "torch.nn.modules.activation.GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "torch.nn.modules.activation.Sigmoid": jax.nn.sigmoid,
}


def _masked(x: Float[Array, "seq d"], mask: Bool[Array, " seq"]) -> Float[Array, "seq d"]:
    return jnp.where(mask[:, None], x, 0)


def _count(mask: Bool[Array, " seq"]) -> Int[Array, ""]:
    """Returns the number of tokens by which a sum is divided; 1 if there are none, so that a text without tokens is 0."""
    return jnp.maximum(mask.sum(), 1)


def _weighted_mean(x: Float[Array, "seq d"], mask: Bool[Array, " seq"]) -> Float[Array, " d"]:
    positions = jnp.arange(1, len(x) + 1) - jnp.argmax(mask)  # 1 for the first token
    weights = (mask * positions).astype(x.dtype)
    return weights @ _masked(x, mask) / jnp.maximum(weights.sum(), 1)


_POOLINGS: Mapping[str, Callable[[Array, Array], Array]] = {
    "cls": lambda x, mask: x[jnp.argmax(mask)],
    "max": lambda x, mask: jnp.where(mask[:, None], x, -1e9).max(0),
    "mean": lambda x, mask: _masked(x, mask).sum(0) / _count(mask),
    "mean_sqrt_len_tokens": lambda x, mask: _masked(x, mask).sum(0) / jnp.sqrt(_count(mask)),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x, mask: _masked(x, mask)[len(x) - 1 - jnp.argmax(mask[::-1])],
}
# Before sentence-transformers 6, each pooling was a flag of the file, and several were concatenated in this order.
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def _size(reader: ConfigReader, key: str, default: None) -> int:
    """Reads a size without a default."""
    del default
    return reader.get(key, kind=SIZE)


@dataclass(frozen=True)
class DenseConfig(FolderConfig):
    """The sizes of a linear layer after pooling, and its activation, by its name in torch."""

    in_size: int
    out_size: int
    use_bias: bool = True
    activation: str = "torch.nn.modules.activation.Tanh"

    rows = (
        Field("in_features", "in_size", default=None, via=_size),
        Field("out_features", "out_size", default=None, via=_size),
        Field("bias", "use_bias"),
        Only("activation_function", *_ACTIVATIONS, name="activation"),
        Only("use_residual", False, is_written=False),
        *(Only(f"module_{way}_name", _EMBEDDING, is_written=False) for way in ("input", "output")),
    )

    def __post_init__(self) -> None:
        check_sizes(self, "in_size", "out_size")


class Dense(Pretrained):
    """A linear layer with an activation, `2_Dense` in a folder of sentence-transformers."""

    config_class = DenseConfig
    model_types = ("dense",)
    architectures = ("Dense",)

    linear: eqx.nn.Linear
    config: DenseConfig = eqx.field(static=True)

    def __init__(self, config: DenseConfig, *, key: PRNGKeyArray):
        self.linear = eqx.nn.Linear(config.in_size, config.out_size, use_bias=config.use_bias, key=key)
        self.config = config

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return _ACTIVATIONS[self.config.activation](self.linear(x))

    @staticmethod
    def weight_map(config: DenseConfig) -> WeightMap:
        return WeightMap(tensors=same_layer("linear", "linear", use_bias=config.use_bias))


class SentenceEncoder(eqx.Module):
    """A transformer and what makes one vector of its hidden states. Call it on one text; `jax.vmap` it over a batch.

    ```python
    model = SentenceEncoder.from_pretrained("all-MiniLM-L6-v2")
    embeddings = jax.vmap(lambda ids, mask: model(ids, mask=mask))(ids, mask)  # [batch, size]
    similarities = embeddings @ embeddings.T  # cosines, if the folder normalizes
    ```

    The transformer is one of the encoders here, or a `Decoder`. It is trained as any module is: with `cross_entropy` of the
    similarities of pairs, say. `save_pretrained` writes a folder that sentence-transformers loads.
    """

    encoder: Any
    dense: tuple[Dense, ...]
    pooling: tuple[str, ...] = eqx.field(static=True)
    normalizes: bool = eqx.field(static=True)
    max_length: int | None = eqx.field(static=True)
    files: tuple[tuple[str, bytes], ...] = eqx.field(static=True, repr=False)

    def __init__(
        self,
        encoder: Any,
        *,
        pooling: Sequence[str] = ("mean",),
        dense: Sequence[Dense] = (),
        normalizes: bool = True,
        max_length: int | None = None,
        files: Mapping[str, bytes] | None = None,
    ):
        """**Arguments:**

        - `encoder`: a `Bert`, `Roberta`, `DistilBert`, `ModernBert` or a `Decoder`.
        - `pooling`: what represents a text: `"cls"` (the first token), `"max"`, `"mean"`, `"mean_sqrt_len_tokens"` (the sum
            divided by the root of the number of tokens), `"weightedmean"` (by position), `"lasttoken"`; several are
            concatenated in this order.
        - `dense`: layers after that.
        - `normalizes`: whether embeddings are scaled to length 1.
        - `max_length`: the number of tokens to which texts are to be cut; None for the transformer's.
        - `files`: further files of the folder, by name.

        Raises ValueError for another pooling.
        """
        unknown = [mode for mode in pooling if mode not in _POOLINGS]
        if unknown or not pooling:
            raise wrong("pooling", f"some of {', '.join(_POOLINGS)}", repr(pooling), "Pass one of them.")
        self.encoder, self.dense, self.pooling = encoder, tuple(dense), tuple(pooling)
        self.normalizes, self.max_length, self.files = normalizes, max_length, tuple(sorted((files or {}).items()))

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
        **others: Any,
    ) -> Float[Array, " size"]:
        """Returns the embedding of a text.

        **Arguments:**

        - `ids`: token ids.
        - `mask`: True for tokens, False for padding; None if all are tokens.
        - `key`: for dropout; not needed in inference.
        - `others`: further arguments of the transformer, such as `token_types`.
        """
        run = self.encoder.hidden if isinstance(self.encoder, Decoder) else self.encoder
        hidden = run(ids, mask=mask, key=key, **others)
        mask = jnp.ones(len(ids), bool) if mask is None else mask
        with jax.named_scope("pooling"):
            wide = hidden.astype(at_least_float32(hidden.dtype))  # sums over many tokens exceed float16
            x = jnp.concatenate([_POOLINGS[mode](wide, mask) for mode in self.pooling]).astype(hidden.dtype)
            for layer in self.dense:
                x = layer(x)
            if not self.normalizes:
                return x
            # The square root has no gradient at zero.
            square = jnp.sum(jnp.square(x.astype(jnp.float32)))
            return (x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))).astype(x.dtype)

    @classmethod
    def from_pretrained(
        cls, folder: str | Location, *, dtype: Any = None, deployer: Deployer | None = None, **changes: Any
    ) -> "SentenceEncoder":
        """Loads a folder of sentence-transformers: the transformer, and what `modules.json` lists after it.

        **Arguments:**

        - `dtype`, `deployer`, `changes`: as for `redeqx.models.from_pretrained`.

        Raises ValueError, with the file and a remedy, for modules and options that are not implemented.
        """
        folder = location(folder, "folder")
        paths = _read_modules(folder)
        pooling, dense, normalizes, given = (), [], False, {"dtype": dtype, "deployer": deployer}
        for i, (kind, path) in enumerate(paths):
            if kind == "Pooling":
                pooling = _read_pooling(folder / path)
            elif kind == "Dense":
                dense.append(Dense.from_pretrained(folder / path, **given)[0])
            elif kind == "Normalize":
                normalizes = True
                _read_normalize(folder / path)
            expected = ("Transformer", "Pooling")[i] if i < 2 else "Dense or Normalize"
            if kind not in expected.split(" or ") or (normalizes and i + 1 < len(paths)):
                rule = "a transformer, a pooling, then dense layers and one normalization"
                raise wrong(folder / MODULES, rule, brief([kind for kind, _ in paths]), "Write other modules as your own.")
        transformer = folder / paths[0][1] if paths[0][1] else folder
        encoder, _ = _load_encoder(transformer, **given, **changes)
        files = {name: (transformer / name).read_bytes() for name in _FILES if (transformer / name).is_file()}
        max_length = _read_max_length(transformer) if _FILES[0] in files else None
        return cls(encoder, pooling=pooling, dense=dense, normalizes=normalizes, max_length=max_length, files=files)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that sentence-transformers loads."""
        folder = save_pretrained(self.encoder, self.encoder.config, folder)
        names = ["Transformer", "Pooling", *["Dense"] * len(self.dense), *["Normalize"] * self.normalizes]
        modules = [
            {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(names)
        ]
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": self.encoder.config.d_model, "include_prompt": True}
        pooling |= {flag: mode in self.pooling for flag, mode in _FLAGS.items()}  # which all versions read
        if self.pooling != _chosen(pooling):
            pooling["pooling_mode"] = list(self.pooling)
        replace_json(folder / "1_Pooling" / CONFIG, pooling)
        for i, layer in enumerate(self.dense, 2):
            save_pretrained(layer, layer.config, folder / f"{i}_Dense")
            replace_json(folder / f"{i}_Dense" / CONFIG, layer.config.to_hf())  # other keys are errors there
        for name, content in self.files:
            write_file(folder / name, content)
        write_file(folder / MODULES, json.dumps(modules, indent=2).encode())


def _read_modules(folder: Location) -> list[tuple[str, str]]:
    """Returns the kind and the path of each module."""
    path = folder / MODULES
    if not path.is_file():
        raise wrong(path, "a file", "none", "Pass a folder of sentence-transformers.")
    modules = load_json(path, unique=False)
    if not isinstance(modules, list) or not modules or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise wrong(path, "a list of modules with a `type`", brief(modules), "Correct the file.")
    return [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]


def _read_pooling(folder: Location) -> tuple[str, ...]:
    """Returns the modes of a `1_Pooling`."""
    fields = read_config(folder)
    reader = ConfigReader(fields, folder / CONFIG)
    reader.only("include_prompt", True)
    for name in fields:
        if name.startswith("pooling_mode_") and name not in _FLAGS:
            reader.only(name, False, None)
    mode = reader.get("pooling_mode", None)
    modes = _chosen(fields) if mode is None else tuple(mode) if isinstance(mode, list) else (mode,)
    if not modes or not all(isinstance(mode, str) and mode in _POOLINGS for mode in modes):
        rule = f"a `pooling_mode` of {', '.join(_POOLINGS)}, or a `pooling_mode_` that is true"
        raise wrong(folder / CONFIG, rule, brief(mode), "Correct the file.")
    return modes


def _chosen(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the modes whose flags are true."""
    return tuple(mode for flag, mode in _FLAGS.items() if fields.get(flag))


def _read_normalize(folder: Location) -> None:
    """Raises ValueError for a normalization of something else than the embedding. Older ones have no file."""
    if (folder / CONFIG).is_file():
        reader = ConfigReader(read_config(folder), folder / CONFIG)
        for way in ("input", "output"):
            reader.only(f"module_{way}_name", _EMBEDDING, None)


def _read_max_length(folder: Location) -> int | None:
    """Returns the number of tokens to which texts are cut. Raises ValueError for a transformer whose outputs are others than
    its hidden states."""
    reader = ConfigReader(read_config(folder, _FILES[0]), folder / _FILES[0])
    reader.only("transformer_task", "feature-extraction")
    reader.only("module_output_name", "token_embeddings", None)
    return reader.get("max_seq_length", None, SIZE)


def _load_encoder(folder: Location, **given: Any) -> tuple[Any, Any]:
    """Loads the transformer. Sentence-transformers ignores the head that `architectures` names."""
    fields = read_config(folder)
    for cls in (*_ENCODERS, *FAMILIES.values()):
        if fields.get(type_key(fields)) in cls.model_types:
            given |= {"has_head": False} if issubclass(cls, Decoder) else {}
            return cls.from_pretrained(folder, **given)
    return from_pretrained(folder, kind=Decoder, **given)
