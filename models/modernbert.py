"""ModernBERT: a pre-norm encoder with rotary positions and gated MLPs, most of whose layers attend within a window.

Source: Warner et al. 2024, *Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder* (arXiv:2412.13663), and its
code, github.com/AnswerDotAI/ModernBERT. It differs from that code in one point: initial weights are not truncated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from ._kinds import OBJECT, POSITIVE, RATE, SIZE, TEXT
from .encoder import Encoder, EncoderConfig, MaskedLM, Names, SequenceClassifier, TokenClassifier, rows
from .hf import ConfigReader, Field, Fields, Only, Row, published
from .nn import check_rates

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
# The fields of the rotary bases, the kinds of layers, and the older keys.
_ROPES = (("rope_theta", _GLOBAL, "global_rope_theta"), ("local_rope_theta", _LOCAL, "local_rope_theta"))
_PERIOD = 3  # every third layer attends to all tokens, the first one among them


class _LayerTypes(Row):
    """The layers with a window: `layer_types`, or the older `global_attn_every_n_layers`."""

    keys = MappingProxyType({"windowed_layers": "layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, types = known["n_layers"], reader.get("layer_types", None)
        period = reader.get("global_attn_every_n_layers", _PERIOD, SIZE)
        windowed = tuple(i for i in range(n_layers) if i % period)
        if types is not None:
            if not isinstance(types, list) or len(types) != n_layers or not set(types) <= {_GLOBAL, _LOCAL}:
                raise reader.refuse("layer_types", types, f"{_GLOBAL} or {_LOCAL} for each of {n_layers} layers")
            windowed = tuple(i for i in range(n_layers) if types[i] == _LOCAL)
        return {"windowed_layers": None if windowed == _usual(n_layers) else windowed}

    def write(self, config: Any) -> dict[str, Any]:
        return {"layer_types": [_LOCAL if is_local else _GLOBAL for is_local in config.local_layers]}


class _Rope(Row):
    """The bases of the rotary frequencies: those in `rope_parameters`, or the older keys of one number each."""

    keys = MappingProxyType({"rope_theta": "rope_parameters", "local_rope_theta": "rope_parameters"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        reader.only("rope_scaling", None)
        nested = reader.get("rope_parameters", {})
        if not set(nested) <= {_GLOBAL, _LOCAL}:
            raise reader.refuse("rope_parameters", nested, f"an object for each of {_GLOBAL} and {_LOCAL}")
        kinds = reader.nested("rope_parameters", nested)
        found = {}
        for name, kind, key in _ROPES:
            rope = kinds.nested(kind, kinds.get(kind, {}, OBJECT))
            rope.only("rope_type", "default")
            rope.only("partial_rotary_factor", 1.0, None)
            # Without a base of their own, layers with a window have that of the others, as in transformers 4.
            default = found.get("rope_theta", known[name]) if reader.has(key) else known[name]
            found[name] = rope.get("rope_theta", reader.get(key, default, POSITIVE), POSITIVE)
        return found

    def write(self, config: Any) -> dict[str, Any]:
        ropes = {kind: {"rope_theta": getattr(config, name)} for name, kind, _ in _ROPES}
        return {"rope_parameters": {kind: {"rope_type": "default", **rope} for kind, rope in ropes.items()}}


def _usual(n_layers: int) -> tuple[int, ...]:
    return tuple(i for i in range(n_layers) if i % _PERIOD)


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The sizes and dropout rates of a ModernBERT: an `EncoderConfig` with other defaults, which are those of `transformers`
    and of the smaller published model.

    **Arguments:**

    - `dropout`: the dropout rate of embeddings; that of attention weights is also that of the attention's output.
    - `mlp_dropout`: the dropout rate inside of an MLP.
    - `windowed_layers`: None for all but every third.
    - `n_layers`: at least 2.

    Raises ValueError as `EncoderConfig` does.
    """

    vocab_size, n_positions, n_token_types = 50368, 8192, 0
    n_layers = 22
    d_ff = 1152
    attention_bias = False
    layer_norm_eps = 1e-5
    position_kind = "rotary"
    rope_theta = 160000.0
    norm_bias, norm_places = False, "pre"
    is_gated, mlp_bias = True, False
    dropout = attention_dropout = classifier_dropout = 0.0
    has_pooler = False
    head_activation, head_bias = "gelu", False
    bos_token_id, eos_token_id, pad_token_id = 50281, 50282, 50283
    model_type = "modernbert"
    mlp_dropout: float = 0.0

    architectures = MappingProxyType({"modernbert": "ModernBert"})
    has_transform = has_head_norm = True
    names = Names(
        base="model.",
        encoder={"embedding": "embeddings.tok_embeddings", "norm": "embeddings.norm", "final_norm": "final_norm"},
        layers="layers.{}.",
        block={
            "attention_norm": "attn_norm",
            "attention.query attention.key attention.value": "attn.Wqkv",
            "attention.output": "attn.Wo",
            "mlp_norm": "mlp_norm",
            "mlp.gate mlp.up": "mlp.Wi",
            "mlp.down": "mlp.Wo",
        },
        masked={"transform": "head.dense", "norm": "head.norm", "logits_bias": "decoder.bias"},
        texts={"transform": "head.dense", "norm": "head.norm", "classifier": "classifier"},
        tokens={"transform": "head.dense", "norm": "head.norm", "classifier": "classifier"},
        heads=("head.*", "decoder.*", "classifier.*"),
        unused=(),
        decoder="decoder",
        aliases=(),
    )
    rows = rows(
        {"modernbert": {}},
        Field("hidden_activation", "activation", TEXT),
        _LayerTypes(),
        _Rope(),
        # The file has the width of the window, of which a token is the middle.
        Field(
            "local_attention",
            "window",
            default=128,
            load=lambda width, known: width // 2,
            save=lambda config: 2 * config.window or 1,
        ),
        # transformers also takes half the width under this name.
        Only("sliding_window", lambda known: (known["window"],), is_written=False),
        *Fields("attention_bias", "mlp_bias", "norm_bias", layer_norm_eps="norm_eps"),
        *Fields("attention_dropout", "mlp_dropout", kind=RATE, dropout="embedding_dropout"),
        Only("classifier_pooling", "cls", "mean", name="pooling"),
        Field("classifier_activation", "head_activation", TEXT),
        *Fields(head_bias="classifier_bias", logits_bias="decoder_bias"),
        without=("n_token_types",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_layers < 2:
            raise wrong("n_layers", "at least 2", self.n_layers, "The first layer differs from the others.")
        check_rates(self, "mlp_dropout")

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer has the window."""
        has = _usual(self.n_layers) if self.windowed_layers is None else self.windowed_layers
        return tuple(i in has for i in range(self.n_layers))

    block_dropouts = property(lambda config: (config.attention_dropout, config.mlp_dropout, 0.0))
    masked_activation = property(lambda config: config.head_activation)
    output_std = property(lambda config: config.init_std * (2 * config.n_layers) ** -0.5)  # that of heads, too

    sizes = published({"base": {}, "large": {"d_model": 1024, "d_ff": 2624, "n_layers": 28, "n_heads": 16}})


class ModernBert(Encoder, config=ModernBertConfig, init=False):
    """ModernBERT without a head, from token ids to hidden states: see `Encoder`."""


class ModernBertForMaskedLM(MaskedLM, config=ModernBertConfig, init=False):
    """ModernBERT for masked language modeling: see `MaskedLM`."""


class ModernBertForSequenceClassification(SequenceClassifier, config=ModernBertConfig, init=False):
    """ModernBERT with a classification head for texts: see `SequenceClassifier`."""


class ModernBertForTokenClassification(TokenClassifier, config=ModernBertConfig, init=False):
    """ModernBERT with a classification head for tokens: see `TokenClassifier`."""
