"""Command A+: Command R7B with experts, whose outputs and that of a shared one are averaged, after layers without experts.

Of those first layers, the ones without a window may have rotary positions, too.

Source: the models' cards, huggingface.co/CohereLabs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from ._kinds import COUNT, NOT_NEGATIVE, SIZE
from .cohere import CohereConfig
from .decoder import Decoder, LayerTypes, LogitScale, MlpTypes, Names, SharedExperts, expert_names, read_layer_types, rows
from .hf import Aliases, ConfigReader, Field, Fields, Row


class _Layers(LayerTypes):
    """The layers with a window. Files have two distances of those without it, of which one is for the first layers: if it is
    1, these have rotary positions."""

    keys = MappingProxyType({**LayerTypes.keys, "unrotated_layers": "prefix_dense_sliding_window_pattern"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, n_dense = known["n_layers"], known["n_dense"]
        window = reader.get("sliding_window", None if reader.has("sliding_window") else known["window"], SIZE)
        of_first, period = reader.get("prefix_dense_sliding_window_pattern", 1), reader.get("sliding_window_pattern", 4)
        n_first = reader.get("first_k_dense_replace", 0, COUNT)
        found = [i for i in range(n_layers) if ((i + 1) % of_first if i < n_first else (i + 1 - n_first) % period)]
        windowed = read_layer_types(reader, n_layers, tuple(found), has_window=window is not None)
        windowed = () if window is None else windowed
        lacks = tuple(i for i in range(n_layers) if i not in windowed)
        usual = window is None or windowed == known["config_class"].default_layers(n_layers)
        is_same = of_first == 1 or not lacks or lacks[0] >= n_dense
        return {
            "window": window,
            "windowed_layers": None if usual else windowed,
            "unrotated_layers": None if is_same else lacks,
        }

    def check(self, config: Any) -> None:
        lacks = tuple(i for i, window in enumerate(config.windows) if window is None)
        if config.unrotated_layers not in (None, lacks):
            rule = f"None or those without a window, {lacks}"
            raise wrong("unrotated_layers", rule, config.unrotated_layers, "Files hold one of the two.")

    def write(self, config: Any) -> dict[str, Any]:
        return {**super().write(config), "prefix_dense_sliding_window_pattern": 1 if config.unrotated_layers is None else 2}


class _Norm(Row):
    """The kind of the norms, which the key that is not null says."""

    keys = MappingProxyType({"norm": "rms_norm_eps", "norm_eps": "layer_norm_eps"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        of_layer, of_rms = reader.get("layer_norm_eps", 1e-5), reader.get("rms_norm_eps", None, NOT_NEGATIVE)
        return {"norm": "layer", "norm_eps": of_layer} if of_rms is None else {"norm": "rms", "norm_eps": of_rms}

    def check(self, config: Any) -> None:
        if config.norm not in ("layer", "rms"):
            raise wrong("norm", "'layer' or 'rms'", repr(config.norm), "Files hold one of the two.")

    def write(self, config: Any) -> dict[str, Any]:
        key, other = ("rms_norm_eps", {}) if config.norm == "rms" else ("layer_norm_eps", {"rms_norm_eps": None})
        return {key: config.norm_eps, **other}


class _Router(Row):
    """The scores of the experts. A softmax is one of those that are chosen."""

    keys = MappingProxyType({"router_score": "expert_selection_fn", "renormalize": "norm_topk_prob"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        score, renormalize = reader.only("expert_selection_fn", "softmax", "sigmoid"), reader.get("norm_topk_prob", True)
        return {"router_score": score, "renormalize": renormalize or score == "softmax"}

    def check(self, config: Any) -> None:
        if config.router_score not in ("softmax", "sigmoid"):
            raise wrong("router_score", "'softmax' or 'sigmoid'", repr(config.router_score), "Files hold one of the two.")
        if config.router_score == "softmax" and not config.renormalize:
            raise wrong("renormalize", "True with a softmax", False, "It is one of the chosen experts.")

    def write(self, config: Any) -> dict[str, Any]:
        return {"expert_selection_fn": config.router_score, "norm_topk_prob": config.renormalize}


def _combination(reader: ConfigReader, key: str, default: bool) -> bool:
    return reader.only(key, "average", "sum", default="average" if default else "sum") == "average"


@dataclass(frozen=True)
class Cohere2MoeConfig(CohereConfig):
    """The sizes of a Command A+. The defaults are those of transformers. See `DecoderConfig`."""

    head_size = 128
    window = 4096
    rope_theta = 10000.0
    n_experts, n_chosen, d_expert = 8, 2, 22528
    averages_shared = True

    model_type = "cohere2_moe"
    window_period = 4
    router_eps = 0.0
    chooses_by_logits = True
    rows = rows(
        *Fields("attention_bias", d_expert="intermediate_size", n_experts="num_experts", n_chosen="num_experts_per_tok"),
        Field(
            "prefix_dense_intermediate_size",
            "d_mlp",
            SIZE,
            default=lambda known: known["d_expert"],
            null=lambda known: known["d_expert"],
        ),
        SharedExperts("num_shared_experts"),
        Field(
            "shared_expert_combination_strategy",
            "averages_shared",
            via=_combination,
            save=lambda config: "average" if config.averages_shared else "sum",
        ),
        LogitScale("logit_scale", 0.0625),
        MlpTypes("first_k_dense_replace"),
        _Layers(),
        _Norm(),
        _Router(),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(expert_names())

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions: those with a window, and the first ones without experts."""
        n_first = self.n_dense if self.unrotated_layers is None else 0
        return tuple(i < n_first or window is not None for i, window in enumerate(self.windows))


class Cohere2Moe(Decoder, config=Cohere2MoeConfig, init=False):
    """A Command A+, from token ids to the logits of each next token. See `Decoder`."""
