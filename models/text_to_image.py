"""Text to image: the pipelines of Stable Diffusion 1, 2, XL and 3, read and written as folders of `diffusers`.

This module owns what a pipeline does with its parts: encodes texts, predicts, denoises and decodes, and `model_index.json`,
which names the parts. The parts themselves, and their folders, are in the families.

Sources: Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*; Podell et al. 2023, *SDXL*
(arXiv:2307.01952); Esser et al. 2024 (arXiv:2403.03206); and `diffusers`, whose numbers these are.

Dims: c = channels of the latents, h x w = their height and width, seq = tokens of a text, channels x height x width = an
image, source x context = the sequence that the denoising model attends to.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from redeqx import Deployer
from redeqx.errors import is_plain, wrong
from redeqx.machine import dry
from redeqx.storage import disk_path, make_subfolder, write_file

from ._kinds import LIST
from .clip import CLIPText, CLIPTextWithProjection
from .diffusion import DDIM, DDPM, PNDM, Euler, FlowMatchEuler, Scheduler, denoise, denoising_loss, diffusers, guided
from .hf import ConfigReader, Pretrained, companions, read_config, replace_json, save_pretrained
from .mmdit import MMDiT
from .nn import norm
from .t5 import T5Encoder
from .unet import UNet
from .vae import VAE
from .vision import TextEncoder

INDEX = "model_index.json"
_N_TOKENS = 256  # of a text for T5, by default in diffusers

Self = TypeVar("Self", bound="TextToImage")
Condition = dict[str, Array]  # arguments of the denoising model, by name
Agreement = tuple[str, int | None, int | None]


@dataclass(frozen=True)
class PipelineConfig:
    """What a pipeline has besides its models.

    **Arguments:**

    - `scheduler`: how much noise there is at each timestep, and how it is removed.
    - `is_empty_zero`: whether images without a text are drawn with zeros in place of an encoded empty text.
    - `extra`: keys of `model_index.json` that do not change the pipeline. They are saved with it.
    - `files`: the files of tokenizers, by their paths in the folder. They are saved with the pipeline too.
    """

    scheduler: Scheduler
    is_empty_zero: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, hash=False, compare=False, repr=False)


class TextToImage(eqx.Module):
    """The base of the pipelines here. Call its methods on one example; `jax.vmap` them over a batch.

    ```python
    pipeline = StableDiffusionXL.from_pretrained("stable-diffusion-xl-base-1.0", deployer=deployer)

    def draw(noise, ids, ids_2):  # noise: [c, h, w], standard normal
        text = pipeline.encode(ids, ids_2, sizes=jnp.array([1024, 1024, 0, 0, 1024, 1024]))
        return pipeline.decode(pipeline.denoise(noise, text, pipeline.empty(text), guidance=5.0, n_steps=50))
    ```

    Texts are given as token ids, of the tokenizers in the folder, padded as those do it. `eqx.nn.inference_mode(pipeline)`
    turns dropout off, which only T5 has in published folders.
    """

    class_name: ClassVar[str]  # in `model_index.json`
    parts: ClassVar[Mapping[str, type[Pretrained]]]  # the models, by field and subfolder; the last one predicts
    optional: ClassVar[tuple[str, ...]] = ()  # parts that a folder may lack
    schedulers: ClassVar[tuple[type[Scheduler], ...]] = (DDIM, DDPM, PNDM, Euler)
    zero_key: ClassVar[str | None] = None  # of `model_index.json`, for `is_empty_zero`
    given: ClassVar[tuple[str, ...]] = ()  # the entries of a condition that do not depend on the text
    widens: ClassVar[bool] = False  # whether the autoencoder is computed in float32 where it needs that

    vae: eqx.AbstractVar[VAE]
    config: eqx.AbstractVar[PipelineConfig]

    # --- texts --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, *ids: Any, **given: Any) -> Condition:
        """Encodes a text. Returns the arguments of the denoising model that depend on it, and those in `given`.

        **Arguments:**

        - `ids`: the token ids of the text, by each tokenizer of the folder.
        """

    def empty(self, condition: Condition, *ids: Int[Array, " seq"]) -> Condition:
        """Returns the condition without a text, for guidance: an encoded empty text, or zeros if `is_empty_zero`.

        **Arguments:**

        - `condition`: that of the text.
        - `ids`: the token ids of an empty text, as for `encode`; not needed for zeros. Guidance leads away from this text.

        Raises ValueError if they are needed and not given.
        """
        given = {name: condition[name] for name in self.given}
        if ids:
            return self.encode(*ids, **given)
        if not self.config.is_empty_zero:
            raise wrong("ids", "those of an empty text", "none", "Pass what the tokenizers return for ''.")
        return {name: jnp.zeros_like(array) for name, array in condition.items()} | given

    # --- latents ------------------------------------------------------------------------------------------------------

    def predict(self, latents: Float[Array, "c h w"], timestep: Num[Array, ""], condition: Condition) -> Array:
        """Returns the denoising model's prediction from noisy latents."""
        return getattr(self, [*self.parts][-1])(latents, timestep, **condition)

    def loss(self, latents: Float[Array, "c h w"], condition: Condition, key: PRNGKeyArray) -> Float[Array, ""]:
        """Returns the loss of one example: the mean squared error of the prediction, with the noise of a random timestep.

        **Arguments:**

        - `latents`: as `encode_image` returns them.
        - `key`: draws the timestep and the noise.
        """
        return denoising_loss(self.scheduler_of(latents), lambda x, t: self.predict(x, t, condition), latents, key)

    def denoise(
        self,
        noise: Float[Array, "c h w"],
        condition: Condition,
        empty: Condition | None = None,
        *,
        guidance: Float[Array, ""] | float = 1.0,
        n_steps: int,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "c h w"]:
        """Returns the latents of an image for a text.

        **Arguments:**

        - `noise`: standard normal noise.
        - `condition`, `empty`: as `encode` and `empty` return them. Without `empty` there is no guidance.
        - `guidance`: the scale of classifier-free guidance (see `guided`).
        - `n_steps`: the number of steps.
        - `key`: for schedulers that draw noise.
        """
        model_fn = self.model_fn(condition, empty, guidance)
        return denoise(self.scheduler_of(noise), model_fn, noise, n_steps, key=key)

    def scheduler_of(self, latents: Float[Array, "c h w"]) -> Scheduler:
        """Returns the scheduler for latents of this size, for `denoise` of `redeqx.models.schedulers`."""
        del latents
        return self.config.scheduler

    def model_fn(
        self, condition: Condition, empty: Condition | None = None, guidance: Float[Array, ""] | float = 1.0
    ) -> Callable[[Array, Array], Array]:
        """Returns the prediction as a function of latents and timestep, for `denoise` of `redeqx.models.schedulers`. The
        arguments are those of the method `denoise`."""
        text_fn = lambda latents, timestep: self.predict(latents, timestep, condition)  # noqa: E731
        if empty is None:
            return text_fn
        return guided(text_fn, lambda latents, timestep: self.predict(latents, timestep, empty), guidance)

    def encode_image(
        self, image: Float[Array, "channels height width"], key: PRNGKeyArray | None = None
    ) -> Float[Array, "c h w"]:
        """Returns latents of an image in [-1, 1], of about variance 1: drawn with `key`, or the most likely ones."""
        vae, wide = self._vae_for(image)
        posterior = vae.encode(wide)
        return vae.config.to_diffusion(posterior.mode if key is None else posterior.sample(key)).astype(image.dtype)

    def decode(self, latents: Float[Array, "c h w"]) -> Float[Array, "channels height width"]:
        """Returns the image of latents, in [-1, 1]."""
        vae, wide = self._vae_for(latents)
        return jnp.clip(vae.decode(vae.config.from_diffusion(wide)), -1, 1)

    def _vae_for(self, x: Array) -> tuple[VAE, Array]:
        """Returns the autoencoder and its input: in float32 if they are float16, and that is too narrow."""
        if x.dtype != jnp.float16 or not (self.widens and self.vae.config.needs_float32):
            return self.vae, x
        widen = lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf  # noqa: E731
        return jax.tree.map(widen, self.vae), widen(x)

    # --- folders ------------------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> Sequence[Agreement]:
        """The sizes that must agree: a key of a part, its value, and that of the other parts."""
        raise NotImplementedError

    def __check_init__(self) -> None:
        for what, size, wanted in self._sizes:
            if size != wanted:
                raise wrong(what, f"{wanted}, as in the other parts", size, "Use parts of one pipeline.")

    @classmethod
    def from_pretrained(
        cls: type[Self],
        folder: str | Path,
        *,
        scheduler: type[Scheduler] | None = None,
        dtype: Any = None,
        deployer: Deployer | None = None,
    ) -> Self:
        """Loads the pipeline of a folder.

        **Arguments:**

        - `folder`: holds `model_index.json` and a folder for each part.
        - `scheduler`: a class that reads the folder's scheduler in place of the class that the folder names.
        - `dtype`, `deployer`: as for `redeqx.models.from_pretrained`.

        Raises ValueError, with the file, the key and a remedy, for a part that is missing or not implemented, and for parts
        that do not fit together.
        """
        path = disk_path(folder, "folder")
        reader = ConfigReader(read_config(path, INDEX), path / INDEX)
        if reader.get("_class_name", cls.class_name) != cls.class_name:
            raise reader.refuse("_class_name", reader.get("_class_name"), repr(cls.class_name))
        parts = {name: cls._part(name, reader, path, dtype, deployer) for name in cls.parts}
        named = _class_of(reader, "scheduler")
        if scheduler is None:
            scheduler = next((known for known in cls.schedulers if known.class_name == named), None)
        if scheduler is None or not issubclass(scheduler, cls.schedulers):
            known = " or ".join(known.__name__ for known in cls.schedulers)
            found = scheduler.__name__ if scheduler else named
            raise ValueError(
                f"`{path / INDEX}`: `scheduler`: expected {known}, got {found}. "
                "Pass `scheduler=`, the class that takes its place."
            )
        # In diffusers an absent key is true, and null is false.
        is_zero = cls.zero_key is not None and reader.get(cls.zero_key, not reader.has(cls.zero_key))
        extra = reader.rest()
        files = {
            f"{name}/{file}": content
            for name, listed in extra.items()
            if isinstance(listed, list) and is_plain(name) and (path / name).is_dir()
            for file, content in companions(path / name).items()
        }
        return cls(**parts, config=PipelineConfig(scheduler.from_pretrained(path / "scheduler"), is_zero, extra, files))

    @classmethod
    def _part(cls, name: str, reader: ConfigReader, folder: Path, dtype: Any, deployer: Deployer | None) -> Any:
        kind, named = cls.parts[name], _class_of(reader, name)
        if named is None and name in cls.optional:
            return None
        if named not in kind.architectures:
            raise reader.refuse(name, named, " or ".join(map(repr, kind.architectures)))
        return kind.from_pretrained(folder / name, dtype=dtype, deployer=deployer)[0]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes a folder that `diffusers` loads, with the tokenizers of the folder that the pipeline came from. Returns its
        path. In a dry run nothing is written."""
        path, config = disk_path(folder, "folder"), self.config
        if dry() is not None:
            return path
        models: dict[str, Any] = {}
        for name in self.parts:
            if (part := getattr(self, name)) is not None:
                save_pretrained(part, part.config, path / name)
                library = "diffusers" if part.weights_name.startswith("diffusion") else "transformers"
                models[name] = [library, part.architecture(part.config)]
        config.scheduler.save_pretrained(path / "scheduler")
        for name, content in config.files.items():
            make_subfolder((path / name).parent, path)
            write_file(path / name, content)
        there = {name.partition("/")[0] for name in config.files}
        absent = {
            name: [None, None]
            for name in [*self.parts, *(name for name, listed in config.extra.items() if isinstance(listed, list))]
            if name not in there
        }
        index = {**config.extra, **absent, **models, "scheduler": ["diffusers", config.scheduler.class_name]}
        index |= {key: value for row in diffusers(self.class_name) for key, value in row.write(self).items()}
        index |= {self.zero_key: config.is_empty_zero} if self.zero_key else {}
        replace_json(path / INDEX, index)
        return path


def _class_of(reader: ConfigReader, name: str) -> str | None:
    """Returns the class of a part; None for no such part."""
    listed = reader.get(name, [None, None], LIST)
    if len(listed) != 2:
        raise reader.refuse(name, listed, "a library and a class")
    return listed[1]


def _penultimate(encoder: TextEncoder, ids: Int[Array, " seq"]) -> tuple[Float[Array, "seq d"], Float[Array, " pooled"]]:
    """Returns the hidden states before the last block, and the vector that represents the text."""
    hidden, last = encoder.features(ids, [-2, -1])
    return hidden, encoder.pool(norm(encoder.norm, last), ids)


class StableDiffusion(TextToImage):
    """Stable Diffusion 1 and 2: the UNet attends to the hidden states of one text encoder. See `TextToImage`."""

    class_name = "StableDiffusionPipeline"
    parts = MappingProxyType({"vae": VAE, "text_encoder": CLIPText, "unet": UNet})

    vae: VAE
    text_encoder: CLIPText
    unet: UNet
    config: PipelineConfig = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.text_encoder.config.extra.get("use_attention_mask"):
            raise ValueError(
                "`text_encoder/config.json`: `use_attention_mask`: expected False, as padding is attended to here, got "
                "True. Call its `CLIPText` with a mask, and a `UNet` with that context."
            )

    def encode(self, ids: Int[Array, " seq"]) -> Condition:
        """Encodes a text. Returns the `context` of the UNet."""
        return {"context": self.text_encoder(ids)}

    @property
    def _sizes(self) -> Sequence[Agreement]:
        vae, text, unet = self.vae.config, self.text_encoder.config, self.unet.config
        return (
            ("unet/config.json`: `in_channels", unet.in_channels, vae.latent_channels),
            ("unet/config.json`: `cross_attention_dim", unet.context_size, text.d_model),
        )


class StableDiffusionXL(TextToImage):
    """Stable Diffusion XL: two text encoders, of whose penultimate layers the UNet sees the hidden states side by side. The
    vector of the second, and the sizes of the image, are added to the timestep. In float16 the autoencoder is computed in
    float32, as in diffusers, unless its config says that it need not be. See `TextToImage`."""

    class_name = "StableDiffusionXLPipeline"
    parts = MappingProxyType({"vae": VAE, "text_encoder": CLIPText, "text_encoder_2": CLIPTextWithProjection, "unet": UNet})
    zero_key = "force_zeros_for_empty_prompt"
    given = ("sizes",)
    widens = True

    vae: VAE
    text_encoder: CLIPText
    text_encoder_2: CLIPTextWithProjection
    unet: UNet
    config: PipelineConfig = eqx.field(static=True)

    def encode(self, ids: Int[Array, " seq"], ids_2: Int[Array, " seq"], *, sizes: Num[Array, "6"]) -> Condition:
        """Encodes a text. Returns the `context` of the UNet, and what is added to its timestep.

        **Arguments:**

        - `ids`, `ids_2`: the token ids of the text, by the folder's two tokenizers.
        - `sizes`: height and width of the original image, the top left corner that was cut from it, and height and width of
            the result, in pixels.
        """
        context, (context_2, pooled) = self.text_encoder.features(ids, [-2])[0], _penultimate(self.text_encoder_2, ids_2)
        return {"context": jnp.concatenate([context, context_2], axis=1), "pooled": pooled, "sizes": sizes}

    @property
    def _sizes(self) -> Sequence[Agreement]:
        vae, unet = self.vae.config, self.unet.config
        first, second = self.text_encoder.config, self.text_encoder_2.config
        n_added = second.d_projection + 6 * (unet.added_wave_size or 256)  # 256 in the published model
        return (
            ("unet/config.json`: `in_channels", unet.in_channels, vae.latent_channels),
            ("unet/config.json`: `cross_attention_dim", unet.context_size, first.d_model + second.d_model),
            ("unet/config.json`: `projection_class_embeddings_input_dim", unet.added_size, n_added),
        )


class StableDiffusion3(TextToImage):
    """Stable Diffusion 3 and 3.5: a transformer with flow matching, and three text encoders. The hidden states of two CLIPs,
    side by side, come before those of a T5, which may be absent. See `TextToImage`."""

    class_name = "StableDiffusion3Pipeline"
    parts = MappingProxyType(
        {
            "vae": VAE,
            "text_encoder": CLIPTextWithProjection,
            "text_encoder_2": CLIPTextWithProjection,
            "text_encoder_3": T5Encoder,
            "transformer": MMDiT,
        }
    )
    optional = ("text_encoder_3",)
    schedulers = (FlowMatchEuler,)

    vae: VAE
    text_encoder: CLIPTextWithProjection
    text_encoder_2: CLIPTextWithProjection
    text_encoder_3: T5Encoder | None
    transformer: MMDiT
    config: PipelineConfig = eqx.field(static=True)

    def encode(
        self, ids: Int[Array, " seq"], ids_2: Int[Array, " seq"], ids_3: Int[Array, " seq_3"] | None = None
    ) -> Condition:
        """Encodes a text. Returns the `context` of the transformer and its `pooled` text.

        **Arguments:**

        - `ids`, `ids_2`: the token ids of the text, by the folder's tokenizers of the CLIPs, of one length.
        - `ids_3`: those by the T5's tokenizer. Without a T5, zeros take the place of its hidden states, as many as `ids_3`
            has tokens, or 256.

        Raises ValueError if there is a T5, but no `ids_3`.
        """
        (first, pooled), (second, pooled_2) = _penultimate(self.text_encoder, ids), _penultimate(self.text_encoder_2, ids_2)
        clip, width = jnp.concatenate([first, second], axis=1), self.transformer.config.context_size
        if self.text_encoder_3 is None:
            third = jnp.zeros((_N_TOKENS if ids_3 is None else len(ids_3), width), clip.dtype)
        elif ids_3 is None:
            raise wrong("ids_3", "token ids, since the pipeline has a T5", "None", "Pass those of its tokenizer.")
        else:
            third = self.text_encoder_3(ids_3).astype(clip.dtype)
        padded = jnp.pad(clip, ((0, 0), (0, width - clip.shape[1])))
        return {"context": jnp.concatenate([padded, third]), "pooled": jnp.concatenate([pooled, pooled_2])}

    def scheduler_of(self, latents: Float[Array, "c h w"]) -> Scheduler:
        _, height, width = latents.shape
        size = self.transformer.config.patch_size
        return replace(self.config.scheduler, n_patches=(height // size) * (width // size))

    @property
    def _sizes(self) -> Sequence[Agreement]:
        vae, model = self.vae.config, self.transformer.config
        first, second = self.text_encoder.config, self.text_encoder_2.config
        third = model.context_size if self.text_encoder_3 is None else self.text_encoder_3.config.d_model
        wide = max(model.context_size, first.d_model + second.d_model)
        pooled = first.d_projection + second.d_projection
        return (
            ("transformer/config.json`: `in_channels", model.in_channels, vae.latent_channels),
            ("transformer/config.json`: `joint_attention_dim", model.context_size, third),
            ("transformer/config.json`: `joint_attention_dim", model.context_size, wide),
            ("transformer/config.json`: `pooled_projection_dim", model.pooled_size, pooled),
        )
