"""`T5Config`: the sizes and dropout rates of T5."""

from dataclasses import dataclass
from typing import Any

from redeqx.errors import wrong

from .._kinds import RATE
from ..generation import Generation
from ..hf import Aliases, ConfigReader, Field, Fields, Fixed, FolderConfig, ModelType, Only, Tokens, published
from ..nn import check_rates, check_sizes

_MLPS = ("relu", "gated-gelu", "gated-silu")
# The defaults of each `model_type` for keys that are absent from `config.json`, where they are not the config's own
# defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {},
    "mt5": {"vocab_size": 250112, "d_ff": 1024, "n_layers": 8, "n_heads": 6, "mlp": "gated-gelu"},
}


def _layers(n: int, **sizes: int) -> dict[str, int]:
    return {"n_layers": n, "n_decoder_layers": n, **sizes}


# T5 with 61, 223 and 738 million, 2.9 and 11.3 billion parameters; and version 1.1, as Flan-T5, with 77, 248 and 783
# million, 2.8 and 11.1 billion.
_SIZES = {
    "small": {},
    "base": _layers(12, d_model=768, d_ff=3072, n_heads=12),
    "large": _layers(24, d_model=1024, d_ff=4096, n_heads=16),
    "3b": _layers(24, d_model=1024, d_kv=128, d_ff=16384, n_heads=32),
    "11b": _layers(24, d_model=1024, d_kv=128, d_ff=65536, n_heads=128),
    **published(
        {
            "v1.1-small": _layers(8, d_model=512, d_ff=1024, n_heads=6),
            "v1.1-base": _layers(12, d_model=768, d_ff=2048, n_heads=12),
            "v1.1-large": _layers(24, d_model=1024, d_ff=2816, n_heads=16),
            "v1.1-xl": _layers(24, d_model=2048, d_ff=5120, n_heads=32),
            "v1.1-xxl": _layers(24, d_model=4096, d_ff=10240, n_heads=64),
        },
        mlp="gated-gelu",
        is_tied=False,
        is_scaled=False,
    ),
}
_MAX_DISTANCE = 2**20  # in tokens; the maximum size of the table of distances


def _activation(mlp: str) -> str:
    """Returns the name of an MLP's activation in `transformers`."""
    return "gelu_new" if mlp == "gated-gelu" else mlp.removeprefix("gated-")


@dataclass(frozen=True)
class T5Config(FolderConfig):
    """The sizes and the dropout rate of a T5. The defaults are those of the smallest published model of the original
    version.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `d_model`, `d_ff`: the width of the model, and the inner width of its MLPs.
    - `d_kv`: the width of one head. `n_heads * d_kv` may differ from `d_model`.
    - `n_layers`, `n_decoder_layers`: the number of blocks of the encoder and of the decoder.
    - `n_heads`: the number of heads in each attention.
    - `mlp`: `"relu"` as in the original, `"gated-gelu"` (by tanh) as in version 1.1, or `"gated-silu"`.
    - `n_buckets`, `max_distance`: the number of position biases of each head, at least 4, and the distance above which all
        tokens share one. Half of the buckets (a quarter in each direction in the encoder) contain one distance each; the
        others contain ranges of increasing length.
    - `dropout`: the rate of all dropouts, in [0, 1).
    - `layer_norm_eps`: added to the mean square in norms.
    - `is_tied`: whether the output head shares the embedding's weight; not in version 1.1.
    - `is_scaled`: whether logits are multiplied by `d_model ** -0.5`; not in version 1.1.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first token (T5 uses none) and last token, and of
        padding.
    - `decoder_start_token_id`: the id of the decoder's first token.
    - `init_factor`: multiplies the standard deviations of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `model_type`: `"t5"`, or `"mt5"`, whose logits are never scaled in transformers.
    - `generation`: the folder's defaults for the arguments of `generate`.

    Raises ValueError for sizes below 1, rates outside [0, 1), buckets that do not fit `max_distance`, and any other MLP.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    n_layers: int = 6
    n_decoder_layers: int = 6
    n_heads: int = 8
    mlp: str = "relu"
    n_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    layer_norm_eps: float = 1e-6
    is_tied: bool = True
    is_scaled: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    decoder_start_token_id: int = 0
    init_factor: float = 1.0
    remat: bool = False
    model_type: str = "t5"
    generation: Generation | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "d_model", "d_kv", "d_ff", "n_layers", "n_decoder_layers", "n_heads")
        check_rates(self, "dropout")
        if self.n_buckets < 4:
            raise wrong("n_buckets", "at least 4", self.n_buckets, "Each direction needs two.")
        if self.max_distance <= self.n_buckets // 2:
            rule = f"more than half of `n_buckets`={self.n_buckets}"
            raise wrong("max_distance", rule, self.max_distance, "That many distances have their own bucket.")
        if self.max_distance > _MAX_DISTANCE:
            raise wrong("max_distance", f"at most {_MAX_DISTANCE}", self.max_distance, "Lower it.")
        if self.mlp not in _MLPS:
            raise wrong("mlp", f"one of {', '.join(_MLPS)}", repr(self.mlp), "Pass one of them.")
        if self.model_type not in _DEFAULTS:
            raise wrong("model_type", "'t5' or 'mt5'", repr(self.model_type), "Pass one of them.")
        if self.model_type == "mt5" and self.is_scaled:
            raise wrong("is_scaled", "False with `model_type`='mt5'", "True", "Make it a 't5'.")

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs have a gate."""
        return self.mlp.startswith("gated-")

    @property
    def activation(self) -> str:
        """The activation in the MLPs, by its name in `transformers`."""
        return _activation(self.mlp)

    sizes = _SIZES
    rows = (
        ModelType(_DEFAULTS),
        *Fixed(is_written=False, is_decoder=False, is_causal=True),
        *Fields("vocab_size", "d_model", "d_kv", "d_ff"),
        Field("num_layers", "n_layers", via=ConfigReader.layers),
        Field("num_decoder_layers", "n_decoder_layers", via=ConfigReader.layers, default=lambda known: known["n_layers"]),
        Field("num_heads", "n_heads"),
        Only("feed_forward_proj", *_MLPS, name="mlp"),
        # transformers derives these two keys from `feed_forward_proj`. If a file has them, they take precedence there.
        Only("dense_act_fn", lambda known: (_activation(known["mlp"]),), is_written=False),
        Only("is_gated_act", lambda known: (known["mlp"].startswith("gated-"),), is_written=False),
        *Fields(n_buckets="relative_attention_num_buckets", max_distance="relative_attention_max_distance"),
        Field("dropout_rate", "dropout", RATE),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        # transformers 4 scales the logits of a tied head. transformers 5 ties by the tensors in the file (see
        # `T5.read_config`) and scales by `scale_decoder_outputs`.
        Field("tie_word_embeddings", "is_tied"),
        Field(
            "scale_decoder_outputs",
            "is_scaled",
            default=lambda known: known["is_tied"],
            load=lambda is_scaled, known: is_scaled and known["model_type"] == "t5",
        ),
        Tokens("decoder_start"),
        Field("initializer_factor", "init_factor"),
    )
    aliases = Aliases(
        hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv"
    )
