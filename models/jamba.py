"""Jamba: LLaMA without positions, with Mamba in place of attention in most layers, and experts in every other layer.

Source: *Jamba* (arXiv:2403.19887).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redeqx.errors import wrong

from ._kinds import COUNT
from .decoder import Decoder, DecoderConfig, Names, ScanWidth, StepRank, expert_names, mamba1_names, rows
from .hf import Aliases, ConfigReader, Field, Fields, Only, Row, published


@dataclass(frozen=True)
class _Every(Row):
    """Layers at equal distances, which have what the others do not have. A file says the distance and the first index, while
    the field has the indices of all these layers.

    **Arguments:**

    - `field`: the field with the indices; None in it stands for those that follow from the defaults.
    - `key`: what the keys of the distance and of the first index begin with.
    - `period`, `offset`: their defaults.
    - `is_others`: whether the field has the indices of all other layers instead: layers at equal distances have attention,
        and `mixer_layers` has those with a mixer.
    """

    field: str
    key: str
    period: int
    offset: int
    is_others: bool = False

    @property
    def keys(self) -> dict[str, str]:
        return {self.field: f"{self.key}_period"}

    def indices(self, n_layers: int, *pair: int) -> tuple[int, ...]:
        """Returns the indices that the field has, for this distance and first index in place of the defaults."""
        period, offset = pair or (self.period, self.offset)
        return tuple(i for i in range(n_layers) if (i % period == offset) != self.is_others)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n, period = known["n_layers"], reader.get(f"{self.key}_period", self.period)
        offset = reader.get(f"{self.key}_offset", self.offset, COUNT)
        if offset >= period:
            raise reader.refuse(f"{self.key}_offset", offset, f"less than `{self.key}_period`={period}")
        found = self.indices(n, period, offset)
        return {self.field: None if found == self.indices(n) else found}

    def _distance(self, config: Any) -> tuple[int, int] | None:
        """Returns the distance and the first index that say the field's indices; None if no two numbers do."""
        n, has = config.n_layers, getattr(config, self.field)
        pairs = [(self.period, self.offset), *((p, o) for p in range(1, n + 2) for o in range(p))]
        return next((pair for pair in pairs if has in (None, self.indices(n, *pair))), None)

    def check(self, config: Any) -> None:
        if self._distance(config) is None:
            rule = f"layers at equal distances{', or all others' if self.is_others else ''}"
            raise wrong(self.field, rule, getattr(config, self.field), f"`{self.key}_period` is a single number.")

    def write(self, config: Any) -> dict[str, Any]:
        found = self._distance(config)
        assert found is not None  # by `check`
        period, offset = found
        return {f"{self.key}_period": period, f"{self.key}_offset": offset}


class _Experts(Field):
    """The number of experts, of which a file says 1 for none."""

    def check(self, config: Any) -> None:
        if config.n_experts == 1:
            step = "A file with `num_experts`=1 has MLPs. For these, pass `n_experts=0, n_chosen=0`."
            raise wrong("n_experts", "0 or at least 2", "1", step)


_MIXERS = _Every("mixer_layers", "attn_layer", 8, 4, is_others=True)
_EXPERTS = _Every("expert_layers", "expert_layer", 2, 1)


@dataclass(frozen=True)
class JambaConfig(DecoderConfig):
    """The sizes of a Jamba, whose experts have the width of the MLPs. The defaults are those of transformers, which are
    Jamba v0.1's. See `DecoderConfig`."""

    vocab_size, n_positions = 65536, 262144
    d_mlp = 14336
    n_kv_heads = 8
    mixer, conv_bias = "mamba1", True
    state_groups, state_heads, state_size, state_value_size = 1, 1, 16, 8192
    n_experts, n_chosen = 16, 2
    renormalize = False
    pad_token_id = 0

    model_type = "jamba"
    unrotated_period, scan_norm = 1, "rms"
    rows = rows(
        _MIXERS,
        _EXPERTS,
        _Experts("num_experts", "n_experts", load=lambda n, known: n * (n > 1), save=lambda config: config.n_experts or 1),
        Field("num_experts_per_tok", "n_chosen", COUNT, load=lambda n, known: n if known["n_experts"] else 0),
        *Fields(state_size="mamba_d_state", conv_kernel="mamba_d_conv", conv_bias="mamba_conv_bias"),
        ScanWidth("mamba_expand"),
        StepRank("mamba_dt_rank"),
        Only("mamba_proj_bias", False),
        without=("rope_theta",),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(
        {
            "pre_ff_layernorm": "mlp_norm",
            **{f"feed_forward.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
            **{name.replace("mlp.", "feed_forward.", 1): module for name, module in expert_names(gate="router").items()},
            **mamba1_names(),
        },
        experts="feed_forward.experts",
        norm="model.final_layernorm",
    )
    sizes = published(
        {"v0.1": {},
         "1.5-large": {"d_model": 8192, "d_mlp": 24576, "n_layers": 72, "n_heads": 64, "state_value_size": 16384}}
    )  # fmt: skip

    @classmethod
    def default_mixers(cls, n_layers: int) -> tuple[int, ...]:
        return _MIXERS.indices(n_layers)

    @classmethod
    def default_experts(cls, n_layers: int) -> tuple[int, ...]:
        return _EXPERTS.indices(n_layers)


class Jamba(Decoder, config=JambaConfig, init=False):
    """A Jamba, from token ids to the logits of each next token. See `Decoder`."""
