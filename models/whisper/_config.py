"""`WhisperConfig`: the sizes and special tokens of a Whisper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redeqx.errors import wrong

from ..bart import SIDES, BartConfig
from ..hf import Field, Fields, Fixed, Only, Tokens, Written, published
from ..nn import check_sizes
from ._prompt import KEYS


def _size(d_model: int, n_layers: int, n_heads: int, **others: int) -> dict[str, int]:
    """Returns the fields of a model whose encoder and decoder have the same size, but for the others."""
    decoder = {"n_decoder_layers": n_layers, "n_decoder_heads": n_heads, "d_ff": 4 * d_model, "d_decoder_ff": 4 * d_model}
    return {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, **decoder, **others}


@dataclass(frozen=True)
class WhisperConfig(BartConfig):
    """The sizes and dropout rates of a Whisper. The defaults are those of `transformers`, with the sizes of the smallest
    multilingual model. The other fields are those of `BartConfig`, and `n_positions` is that of texts.

    **Arguments:**

    - `n_mels`: the number of bands of the features.
    - `n_source_positions`: the number of positions of the encoder, two frames of features each: 1500 are 30 seconds.
    """

    vocab_size, n_positions = 51865, 448
    d_model, n_layers, n_heads = 384, 4, 6
    n_decoder_layers, n_decoder_heads, d_ff, d_decoder_ff = 4, 6, 1536, 1536
    dropout = 0.0
    bos_token_id = eos_token_id = pad_token_id = 50256
    decoder_start_token_id, forced_eos_token_id = 50257, None
    n_mels: int = 80
    n_source_positions: int = 1500

    is_pre_norm = True
    has_key_bias = False
    first_position = 0
    prompt_keys = KEYS
    rows = (
        Written("model_type", "whisper"),
        Only("is_encoder_decoder", True),
        Only("is_causal", True, is_written=False),
        *Fixed(tie_word_embeddings=True, scale_embedding=False, apply_spec_augment=False),
        *Fields("vocab_size", "d_model", n_mels="num_mel_bins", n_source_positions="max_source_positions"),
        Field("max_target_positions", "n_positions"),
        *SIDES,
        Tokens("decoder_start"),
        Field("init_std"),
    )
    # The multilingual models, with 38 to 1543 million parameters.
    sizes = published(
        {
            "tiny": _size(384, 4, 6),
            "base": _size(512, 6, 8),
            "small": _size(768, 12, 12),
            "medium": _size(1024, 24, 16),
            "large": _size(1280, 32, 20),
            "large-v3": _size(1280, 32, 20, n_mels=128, vocab_size=51866),
            "large-v3-turbo": _size(1280, 32, 20, n_decoder_layers=4, n_mels=128, vocab_size=51866),
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "n_mels", "n_source_positions")
        if self.d_model % 2:
            raise wrong("d_model", "an even number", self.d_model, "Positions are sines and cosines.")

    @property
    def n_frames(self) -> int:
        """The number of frames of a recording's features."""
        return 2 * self.n_source_positions

    @property
    def prompting(self) -> Mapping[str, Any]:
        """The keys of `generation_config.json` that say what a text begins with."""
        old = {key: self.extra[key] for key in KEYS if key in self.extra}
        return old if self.generation is None else {**old, **self.generation.keys}
