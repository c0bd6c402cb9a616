"""Gemma 4 (text): two kinds of layers with heads of different sizes, some of which share keys and values.

Layers with a window have smaller heads. In the larger models, values of the others are their keys; in the smaller ones, the
last layers attend to keys and values of earlier ones, and each layer has an embedding of its own. One model has experts
beside its MLPs. Folders of `gemma4` and `gemma4_unified` also read images and sound: only their text model is here.

Source: the models' cards, and *Gemma 3n*, for the embeddings of each layer.
"""

from dataclasses import dataclass

from redeqx.errors import wrong

from ._kinds import COUNT, POSITIVE, SIZE, TEXT
from .decoder import Decoder, Experts, GlobalHeads, LayerTypes, Names, Rope, Switched, rows
from .gemma import Gemma3Config
from .hf import Field, Only, published
from .nn import ProportionalScaling

_BLOCK = {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
    "per_layer_input_gate": "layer_input.gate",
    "per_layer_projection": "layer_input.output",
    "post_per_layer_input_norm": "layer_input.norm",
    "layer_scalar": "layer_scale",
}
_EXPERTS = {
    **{f"mlp.{layer}_proj": f"mlp.mlp.{layer}" for layer in ("gate", "up", "down")},
    "post_feedforward_layernorm_1": "mlp.mlp_post_norm",
    "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_2": "mlp.experts_post_norm",
    "router.scale": "mlp.router_norm.weight",
    "router.proj": "mlp.experts.router",
    "router.per_expert_scale": "mlp.experts.factors",
    "experts.gate_up_proj": Experts(("mlp.experts.experts.gate", "mlp.experts.experts.up"), ends=("", "_bias")),
    "experts.down_proj": Experts(("mlp.experts.experts.down",), ends=("", "_bias")),
}
# In folders of larger models: the encoders, and the name of the text model.
_ENCODERS = tuple(
    f"model.{name}.*" for name in ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")
)
_ALIASES = ((r"^model\.language_model\.", "model."),)
_LARGE = {"n_positions": 262144, "window": 1024, "keys_are_values": True, "d_layer_input": 0}
_PROPORTIONAL = ProportionalScaling(0.25)
_WITHOUT = {"d_layer_input", "n_layer_inputs", "n_experts", "use_bidirectional_attention"}


@dataclass(frozen=True)
class Gemma4Config(Gemma3Config):
    """The sizes of a Gemma 4 for text. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 262144
    n_layers = 30
    window = 512
    attention_scale = 1.0
    global_head_size = 512
    has_value_norm = has_layer_scale = True
    rope_scaling = _PROPORTIONAL
    norm = "rms"
    d_layer_input, n_layer_inputs = 256, 262144
    adds_experts = True

    model_type = "gemma4_text"
    by_kind = True
    window_period = 6
    rows = rows(
        Field("hidden_activation", "activation", TEXT),
        Field("attention_bias"),
        Field("final_logit_softcapping", "logit_cap", POSITIVE, null=None),
        Only("use_bidirectional_attention", None, "vision"),  # the latter differs for images alone
        LayerTypes(),
        Rope(has_local=True, kinds=("default", "proportional")),
        Field("attention_k_eq_v", "keys_are_values"),
        GlobalHeads(),
        Field("num_kv_shared_layers", "n_shared", COUNT),
        Field("use_double_wide_mlp", "widens_shared"),
        Field("hidden_size_per_layer_input", "d_layer_input", COUNT),
        Field("vocab_size_per_layer_input", "n_layer_inputs", SIZE),
        Switched("enable_moe_block", n_experts="num_experts", n_chosen="top_k_experts", d_expert="moe_intermediate_size"),
    )
    sizes = published(
        {
            "e2b": {"d_model": 1536, "d_mlp": 6144, "n_layers": 35, "n_kv_heads": 1, "n_shared": 20, "widens_shared": True,
                    "windowed_layers": tuple(i for i in range(35) if (i + 1) % 5)},
            "e4b": {"d_model": 2560, "d_mlp": 10240, "n_layers": 42, "n_kv_heads": 2, "n_shared": 18},
            "26b-a4b": {"d_model": 2816, "d_mlp": 2112, "n_heads": 16, "n_kv_heads": 8, "global_kv_heads": 2,
                        "n_experts": 128, "n_chosen": 8, "d_expert": 704, **_LARGE},
            "31b": {"d_model": 5376, "d_mlp": 21504, "n_layers": 60, "n_heads": 32, "n_kv_heads": 16, "global_kv_heads": 4}
            | _LARGE,
        },
        logit_cap=30.0,
    )  # fmt: skip

    @classmethod
    def stem(cls) -> str:
        """Returns the start of the names of transformers' classes."""
        return "Gemma4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.windows[-1] is not None:
            raise wrong("windowed_layers", "a last layer without the window", self.windowed_layers, "Leave it out.")

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window, which the last one never has."""
        return tuple(i for i in super().default_layers(n_layers) if i < n_layers - 1)

    def disk_names(self) -> Names:
        """Returns the names of tensors on disk. Folders may have keys and values of layers that share them, unused."""
        unused = (
            f"model.layers.{i}.self_attn.{name}.*"
            for i in range(self.n_layers - self.n_shared, self.n_layers)
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        block = _BLOCK | _EXPERTS if self.n_experts else _BLOCK
        others = {
            "model.embed_tokens_per_layer": "layer_inputs.embedding",
            "model.per_layer_model_projection": "layer_inputs.projection",
            "model.per_layer_projection_norm": "layer_inputs.norm",
        }
        return Names(block, experts="experts", others=others, ignored=(*_ENCODERS, *unused), aliases=_ALIASES)


class Gemma4(Decoder, config=Gemma4Config, init=False):
    """A Gemma 4 for text, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("gemma4_text", "gemma4")


@dataclass(frozen=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """The sizes of a Gemma 4 for text whose images have no encoder of their own. It has neither experts nor embeddings of
    each layer. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 262144
    window = 1024
    d_layer_input, n_layer_inputs = 0, None

    model_type = "gemma4_unified_text"
    rows = (
        *(row for row in Gemma4Config.rows if _WITHOUT.isdisjoint((*row.keys, getattr(row, "key", "")))),
        Only("use_bidirectional_attention", "vision", None),
    )

    @classmethod
    def stem(cls) -> str:
        """Returns the start of the names of transformers' classes."""
        return "Gemma4Unified"


class Gemma4Unified(Decoder, config=Gemma4UnifiedConfig, init=False):
    """A Gemma 4 for text of that kind, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("gemma4_unified_text", "gemma4_unified")
