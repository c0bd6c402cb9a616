"""The keys of `config.json` that decoders share, in LLaMA's names, and those of experts, latent attention and GPT-2.

Rows of what differs between layers are in `_layer_rows.py` and `_mixer_rows.py`, those of rotary positions in `_rope.py`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from .._kinds import COUNT, LIST, POSITIVE, RATE, SIZE, TEXT, Kind
from ..hf import Aliases, Classes, ConfigReader, Field, Fields, Only, Row, Tokens, Written
from ..nn import DynamicScaling
from ._rope import Rope


def _head_size(size: int | None, known: Mapping[str, Any]) -> int | None:
    """Reads `head_size`: None if it follows from the width, unless the family has a size of its own."""
    is_own = known["head_size"] is not None
    return size if is_own or size is None or size != known["d_model"] // known["n_heads"] else None


def _n_positions(config: Any) -> int:
    """Returns `max_position_embeddings`, which for a dynamic scaling is the original length."""
    scaling = config.rope_scaling
    return scaling.n_original if isinstance(scaling, DynamicScaling) else config.n_positions


class Shared(Row):
    """A key for several fields, which always have the same value."""

    def __init__(self, key: str, *fields: str):
        self.key, self.fields = key, fields

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.fields, self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(self.fields, reader.get(self.key, known[self.fields[0]]))

    def write(self, config: Any) -> dict[str, Any]:
        return {self.key: getattr(config, self.fields[0])}

    def check(self, config: Any) -> None:
        values = {name: getattr(config, name) for name in self.fields}
        if len({*values.values()}) > 1:
            said = ", ".join(f"{name}={value}" for name, value in values.items())
            raise wrong(self.fields[0], f"the same as {', '.join(values)}", said, "Set all.")


def FirstLayers(key: str = "mlp_only_layers") -> Field:
    """Returns the row of the indices of layers without experts. Only the first ones are implemented."""

    def read(reader: ConfigReader, key: str, default: int) -> int:
        layers = reader.get(key, [*range(default)], LIST)
        if layers != [*range(len(layers))]:
            raise reader.refuse(key, layers, "the first layers, [0, 1, ...]")
        return len(layers)

    return Field(key, "n_dense", via=read, save=lambda config: [*range(config.n_dense)])


def SharedExperts(key: str = "n_shared_experts") -> Field:
    """Returns the row of the number of experts that all tokens are sent to. They are computed as one, of their common
    width. It comes after the row of `d_expert`."""
    return Field(
        key,
        "d_shared",
        COUNT,
        default=lambda known: known["d_shared"] // known["d_expert"],
        load=lambda n, known: n * known["d_expert"],
        save=lambda config: config.d_shared // config.expert,
    )


class _Head(Row):
    """The model's head, which the folder's class says: the output head, none, or one for classes."""

    keys = MappingProxyType(
        {"n_classes": "num_labels", "classifier_dropout": "classifier_dropout", "has_head": "architectures"}
    )

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        if not reader.is_classifier:
            return {"has_head": reader.architecture != known["config_class"].base_architecture()}
        dropout = reader.get("classifier_dropout", None, RATE)
        usual = known["classifier_dropout"]
        dropout = reader.get("hidden_dropout", usual, RATE) if dropout is None else dropout  # as transformers
        return {"n_classes": reader.n_classes(), "classifier_dropout": dropout}

    def write(self, config: Any) -> dict[str, Any]:
        if config.n_classes is None:
            return {}
        return {**Classes().write(config), "classifier_dropout": config.classifier_dropout}


# The keys of latent attention, and of experts, as DeepSeek names them.
LATENT: tuple[Row, ...] = (
    Field("kv_lora_rank", "latent_size"),
    Field("q_lora_rank", "query_latent_size", SIZE, null=None),
    *Fields(plain_size="qk_nope_head_dim", shared_rotary_size="qk_rope_head_dim", value_size="v_head_dim"),
    Only("num_key_value_heads", lambda known: (known["n_heads"], None), save=lambda config: config.n_heads),
)
ROUTED: tuple[Row, ...] = (
    *Fields(d_expert="moe_intermediate_size", n_experts="n_routed_experts", n_chosen="num_experts_per_tok"),
    SharedExperts(),
    Field("routed_scaling_factor", "router_scale"),
)
EXPERTS: tuple[Row, ...] = (  # in Qwen's names
    *Fields(d_expert="moe_intermediate_size", n_experts="num_experts", n_chosen="num_experts_per_tok"),
    Field("norm_topk_prob", "renormalize"),
    Only("decoder_sparse_step", 1),
    FirstLayers(),
)
GROUPED: tuple[Row, ...] = (
    *ROUTED,
    *Fields(n_expert_groups="n_group", n_chosen_groups="topk_group", renormalize="norm_topk_prob"),
)


def Inner(key: str, kind: Kind | None = SIZE, **options: Any) -> Field:
    """Returns the row of the inner width of the MLPs, which is four times the width by default."""
    return Field(key, "d_mlp", kind, load=lambda size, known: None if size == 4 * known["d_model"] else size, **options)


def LogitScale(key: str, default: float = 1.0) -> Field:
    """Returns the row of a factor of logits, of which `logit_divisor` is the inverse.

    **Arguments:**

    - `default`: the value of an absent key.
    """

    def save(config: Any) -> float:
        inverse = 1 / config.logit_divisor
        near = [float(f"{inverse:.{n}g}") for n in range(1, 18)] + [math.nextafter(inverse, end) for end in (0, math.inf)]
        return next((value for value in near if 1 / value == config.logit_divisor), inverse)  # the shortest one

    return Field(key, "logit_divisor", POSITIVE, default=default, load=lambda value, known: 1 / value, save=save)


# The keys of GPT-2 that GPT-J has too, and alternative names of them.
GPT_ROWS: tuple[Row, ...] = (
    Field("activation_function", "activation", TEXT),
    *Fields("n_positions", d_model="n_embd"),
    Inner("n_inner"),
    Field("n_layer", "n_layers", via=ConfigReader.layers),
    Field("n_head", "n_heads"),
    *Fields(kind=RATE, embedding_dropout="embd_pdrop", attention_dropout="attn_pdrop", residual_dropout="resid_pdrop"),
    Field("layer_norm_epsilon", "norm_eps"),
)
GPT_ALIASES: Mapping[str, str] = Aliases(
    hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head", num_hidden_layers="n_layer"
)


class Choice(Row):
    """A key that is true or false, for a field or two with one of two values."""

    def __init__(self, key: str, fields: Mapping[str, tuple[Any, Any]], *, default: bool):
        """**Arguments:**

        - `fields`: the values of each field, if the key is false, and if it is true.
        - `default`: the value of an absent key.
        """
        self.key, self.fields, self.default = key, fields, default

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.fields, self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        value = reader.get(self.key, self.default)
        return {name: values[value] for name, values in self.fields.items()}

    def write(self, config: Any) -> dict[str, Any]:
        name, values = next(iter(self.fields.items()))
        return {self.key: getattr(config, name) == values[1]}


class Switched(Row):
    """Keys of sizes that count if another key is true."""

    def __init__(self, switch: str, **fields: str):
        """**Arguments:**

        - `fields`: the key of each field. The first one is 0 if the switch is off.
        """
        self.switch, self.fields = switch, fields

    @property
    def keys(self) -> dict[str, str]:
        return self.fields

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        is_on = reader.get(self.switch, False)
        default = () if is_on else (None,)
        found = {field: reader.get(key, *default, kind=SIZE) for field, key in self.fields.items()}
        return found if is_on else {}

    def write(self, config: Any) -> dict[str, Any]:
        values = {key: getattr(config, field) or None for field, key in self.fields.items()}
        return {self.switch: getattr(config, next(iter(self.fields))) > 0, **values}


class _Causal(Row):
    """Whether tokens attend only to those before them. transformers reads `is_causal` for all decoders; folders of models of
    embeddings have it."""

    keys = MappingProxyType({"is_causal": "is_causal"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        return {"is_causal": reader.get("is_causal", True)}

    def write(self, config: Any) -> dict[str, Any]:
        return {} if config.is_causal else {"is_causal": False}

    def check(self, config: Any) -> None:
        if not config.is_causal and any(config.windows):  # transformers gives it twice the width of Gemma 3's
            raise wrong("is_causal", f"True with `window`={config.window}", "False", "Set `window` to None.")


ROWS: tuple[Row, ...] = (
    Written("model_type", lambda config: config.model_type),
    Field("vocab_size"),
    Field("max_position_embeddings", "n_positions", save=_n_positions),
    *Fields(d_model="hidden_size", d_mlp="intermediate_size"),
    Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
    Field("num_attention_heads", "n_heads"),
    Field("num_key_value_heads", "n_kv_heads", SIZE, null=None, save=lambda config: config.groups),
    Field("head_dim", "head_size", SIZE, load=_head_size, save=lambda config: config.size),
    Rope(),
    Field("hidden_act", "activation", TEXT),
    Field("rms_norm_eps", "norm_eps"),
    Field("attention_dropout", kind=RATE),
    Field("tie_word_embeddings", "is_tied"),
    Tokens(),
    Field("initializer_range", "init_std"),
    _Head(),
    _Causal(),
)


def rows(*changed: Row, without: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Returns LLaMA's rows with some changed or added: a row replaces those that hold one of its fields.

    **Arguments:**

    - `without`: fields whose rows are left out.
    """
    replaced = {name for row in changed for name in row.keys} | set(without)
    return (*(row for row in ROWS if replaced.isdisjoint(row.keys)), *changed)
