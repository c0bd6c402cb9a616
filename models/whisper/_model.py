"""Whisper, from the log-mel features of a recording and the tokens of a text to the logits of each next token.

Dims: mels, frames = those of the features, source = frames / 2, target = tokens of one text, d = width of the model.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from redeqx.errors import wrong

from ..bart import TransformerStack, stack_tensors
from ..generation import EncoderDecoder
from ..hf import Pretrained, WeightMap, reshaped, same
from ..nn import normal_embedding
from ._config import WhisperConfig
from ._prompt import Timestamps, first_tokens


def _sinusoids(rows: int, d: int) -> Float[np.ndarray, "rows d"]:
    periods = np.exp(-np.log(10000) / max(d // 2 - 1, 1) * np.arange(d // 2))
    angles = np.arange(rows)[:, None] * periods
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def _convolution(d_in: int, d: int, stride: int, std: float, key: PRNGKeyArray) -> eqx.nn.Conv1d:
    layer = eqx.nn.Conv1d(d_in, d, 3, stride=stride, padding=1, key=key)
    weight = std * jax.random.normal(key, layer.weight.shape)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, jnp.zeros((d, 1))))


class Whisper(EncoderDecoder, Pretrained):
    """Whisper, from a recording and the tokens of a text to the logits of each next token. Call it on one pair.

    ```python
    model, config = Whisper.from_pretrained(folder)
    features = LogMel.from_pretrained(folder)(read_wav("speech.wav"))  # [mels, frames]
    tokens = generate(model, features[None])  # in the folder's language, or in the one that is detected
    logits = model(features, model.shift_right(labels), key=key)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed. Positions of the encoder have no gradient, but a
    weight decay without `mask=redeqx.optimizers.decay_mask` would shrink them. There is no mask of a recording: silence
    is attended to.
    """

    config_class = WhisperConfig
    model_types = ("whisper",)
    architectures = ("WhisperForConditionalGeneration", "WhisperModel")

    convolution1: eqx.nn.Conv1d
    convolution2: eqx.nn.Conv1d
    embedding: eqx.nn.Embedding
    encoder: TransformerStack  # its positions are sines and cosines, whose gradient is stopped
    decoder: TransformerStack
    config: WhisperConfig = eqx.field(static=True)

    def __init__(self, config: WhisperConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), the padding token's row 0, biases 0, norms 1.
        """
        embedding_key, encoder_key, decoder_key, conv1_key, conv2_key = jax.random.split(key, 5)
        d, std = config.d_model, config.init_std
        self.convolution1 = _convolution(config.n_mels, d, 1, std, conv1_key)
        self.convolution2 = _convolution(d, d, 2, std, conv2_key)
        self.embedding = normal_embedding(config.vocab_size, d, std=std, zero=config.pad_token_id, key=embedding_key)
        positions = jnp.asarray(_sinusoids(config.n_source_positions, d))
        encoder = TransformerStack(config, is_decoder=False, n_rows=config.n_source_positions, key=encoder_key)
        self.encoder = eqx.tree_at(lambda stack: stack.positions, encoder, positions)
        self.decoder = TransformerStack(config, is_decoder=True, n_rows=config.n_positions, key=decoder_key)
        self.config = config

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        with jax.named_scope("head"):
            return hidden @ self.embedding.weight.T

    def encode(self, features: Float[Array, "mels frames"], *, key: PRNGKeyArray | None = None) -> Float[Array, "source d"]:
        """Returns the encoder's output for a recording, which the decoder attends to.

        **Arguments:**

        - `features`: as `LogMel` returns them, `[n_mels, n_frames]`.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for features of another shape.
        """
        wanted = (self.config.n_mels, self.config.n_frames)
        if features.shape != wanted:
            raise wrong("features", wanted, features.shape, "Make them by `LogMel.from_pretrained`.")
        with jax.named_scope("encoder"):
            x = features.astype(self.convolution1.weight.dtype)
            for layer in (self.convolution1, self.convolution2):
                x = jax.nn.gelu(layer(x), approximate=False)
            encoder = eqx.tree_at(lambda stack: stack.positions, self.encoder, replace_fn=jax.lax.stop_gradient)
            return encoder(x.T, None, key=key)[0]

    def prompt(
        self,
        features: Float[Array, "batch mels frames"] | Float[np.ndarray, "batch mels frames"],
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        prompt_ids: Sequence[int] | None = None,
    ) -> Int[Array, "batch target"]:
        """Returns the tokens that each text begins with, the `decoder_input_ids` of `generate`.

        **Arguments:**

        - `features`: the recordings, whose language is detected if neither `language` nor the folder says it.
        - `language`: a code such as `"en"`. `task`: `"transcribe"`, or `"translate"` into English. None takes the folder's.
        - `timestamps`: whether texts have times; pass `timestamps` of the model to `generate` too.
        - `prompt_ids`: tokens of an earlier text, with its first token, `<|startofprev|>`.

        Raises ValueError for a language or a task that the folder's `generation_config.json` does not name.
        """
        keys = self.config.prompting
        tokens = first_tokens(keys, self.config.decoder_start_token_id, language=language, task=task, timestamps=timestamps)
        place = len(before := [] if prompt_ids is None else [*prompt_ids]) + (tokens.index(None) if None in tokens else 0)
        known = np.array([*before, *(0 if token is None else token for token in tokens)], np.int32)
        found = np.tile(known, (len(features), 1))
        if None not in tokens:
            return jnp.asarray(found)
        return jnp.asarray(found).at[:, place].set(_detect(self, features, tuple(sorted(keys["lang_to_id"].values()))))

    def decoder_prompt(self, features: Float[Array, "batch mels frames"]) -> Int[Array, "batch target"]:
        """Returns the tokens that `generate` begins with, as the folder says.

        Raises ValueError if the folder says that texts have times.
        """
        if self.config.prompting.get("return_timestamps"):
            step = "Pass those of `model.prompt(features, timestamps=True)`, and `logits_processor=model.timestamps(...)`."
            raise wrong("decoder_input_ids", "tokens, since the folder has `return_timestamps`", "None", step)
        return self.prompt(features)

    def timestamps(self, decoder_input_ids: Int[Array, "batch target"]) -> Timestamps:
        """Returns the `logits_processor` with which `generate` writes times into texts that begin with these tokens.

        Raises ValueError if the folder has no tokens for times.
        """
        keys, eos = self.config.prompting, self.config.eos_token_id
        if keys.get("no_timestamps_token_id") is None or not isinstance(eos, int):
            raise ValueError(
                "`no_timestamps_token_id`: expected a token in `generation_config.json`, and one `eos_token_id`, got "
                f"{keys.get('no_timestamps_token_id')} and {eos}. Pass a folder with both."
            )
        n_given = decoder_input_ids.shape[-1]
        return Timestamps(keys["no_timestamps_token_id"] + 1, eos, n_given, keys.get("max_initial_timestamp_index"))

    @staticmethod
    def weight_map(config: WhisperConfig) -> WeightMap:
        d = config.d_model
        convolutions = [
            tensor
            for i in (1, 2)
            for tensor in (
                same(f"model.encoder.conv{i}.weight", f"convolution{i}.weight"),
                reshaped(f"model.encoder.conv{i}.bias", f"convolution{i}.bias", (d,), (d, 1)),
            )
        ]
        return WeightMap(
            tensors=[
                *convolutions,
                *stack_tensors("encoder", config),
                same("model.decoder.embed_tokens.weight", "embedding.weight"),
                *stack_tensors("decoder", config),
            ],
            copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
            aliases=((r"^(?=(encoder|decoder)\.)", "model."),),  # folders of the base model
        )


@eqx.filter_jit
def _detect(model: Whisper, features: Any, languages: tuple[int, ...]) -> Int[Array, " batch"]:
    """Returns the likeliest language of each recording: the token after the first one."""
    model, start = eqx.nn.inference_mode(model), jnp.full(1, model.config.decoder_start_token_id, jnp.int32)
    logits = jax.vmap(lambda one: model(one, start)[0])(features)
    ids = np.array(languages, np.int32)
    return jnp.asarray(ids)[jnp.argmax(logits[:, ids], -1)]
