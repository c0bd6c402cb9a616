"""`from_pretrained`: selects the family of a folder. The package `hf` reads the folder."""

from types import ModuleType
from typing import Any

import equinox as eqx

from redeqx import Deployer, Plan
from redeqx.errors import brief, check_type, filter_traceback
from redeqx.partition import check_plan
from redeqx.storage import Location, location

from . import (  # noqa: F401  # each adds its language models to `FAMILIES`
    apertus,
    arcee,
    bamba,
    bert,
    bloom,
    cohere,
    deberta,
    deepseek,
    deepseek_v3,
    dinov2,
    distilbert,
    dots,
    ernie,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm_flash,
    glm_moe,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    helium,
    hunyuan,
    lfm,
    lfm_moe,
    llama,
    mamba2,
    minimax,
    mistral,
    mistral4,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    olmo,
    olmoe,
    opt,
    phi,
    phi_moe,
    qwen,
    qwen3_5,
    qwen_moe,
    qwen_next,
    roberta,
    seed_oss,
    smollm,
    stablelm,
    starcoder2,
    vit,
)
from .bart import Bart
from .clip import CLIP, CLIPText, CLIPTextWithProjection, CLIPVision
from .decoder import FAMILIES, SequenceClassifier, TokenClassifier
from .hf import CONFIG, Pretrained, read_config, type_key
from .llava import Llava
from .mmdit import MMDiT
from .siglip import Siglip, SiglipText, SiglipVision
from .t5 import T5, T5Encoder
from .unet import UNet
from .vae import VAE
from .vision_encoder_decoder import VisionEncoderDecoder
from .whisper import Whisper


def _models(*modules: ModuleType) -> tuple[type[Pretrained], ...]:
    """Returns the models that these modules define, in their order."""
    values = [(module, value) for module in modules for value in vars(module).values() if isinstance(value, type)]
    return tuple(cls for module, cls in values if issubclass(cls, Pretrained) and cls.__module__ == module.__name__)


# If a folder names no class, the first class for its model type is used.
MODELS: tuple[type[Pretrained], ...] = (
    *FAMILIES.values(),
    *(SequenceClassifier, TokenClassifier, T5, T5Encoder, Bart, Whisper, Llava, CLIP, CLIPText, CLIPTextWithProjection),
    *(CLIPVision, Siglip, SiglipText, SiglipVision, *_models(dinov2), MMDiT, UNet, VAE, *_models(vit)),
    *(VisionEncoderDecoder, *_models(bert, roberta, distilbert, deberta, modernbert)),
)


@filter_traceback
def from_pretrained(
    folder: str | Location,
    *,
    dtype: Any = None,
    deployer: Deployer | None = None,
    plan: Plan | None = None,
    kind: type[eqx.Module] = Pretrained,
    **changes: Any,
) -> tuple[Any, Any]:
    """Loads a model and its config from a Hugging Face folder. `config.json` selects the family by model type and class.

    The host holds at most one tensor at a time, since layers are read one by one. With a deployer, each device reads only
    its own slices.

    **Arguments:**

    - `folder`: contains `config.json` and safetensors, in one file or in shards with an index; on a disk or in an object
        store, such as `s3://bucket/llama` (extra `stores`).
    - `dtype`: the dtype that floating tensors are cast to, but for those that transformers keeps in float32, such as
        DeepSeek's routers; None keeps that of the files. Parameters to train should be float32: 16 bits lose most
        updates, unless `Trainer(compute=redeqx.Precision(...))` keeps them.
    - `deployer`: the model is placed on its mesh; None places the model on the first device.
    - `plan`: how the model is split; by default `deployer.plan` of the model.
    - `kind`: the required class of the model: a class of this package, `Decoder` or `EncoderDecoder`.
    - `changes`: fields of the config that replace the folder's, such as `remat=True`.

    In a dry run (`python -m redeqx dry-run`) the model is shapes, and the folder needs only `config.json`.

    Raises ValueError, with the file, the key and a remedy, for a missing folder, an unknown model, a config that the family
    does not implement, tensors that are missing, unknown or of another shape, and for pickles.
    """
    folder = location(folder, "folder")
    if deployer is not None:
        check_type(deployer, Deployer, "deployer")
    check_plan(plan)
    if not isinstance(kind, type):
        raise TypeError(f"`kind`: expected a class of models, got {brief(kind)}. Pass `redeqx.models.Decoder`, say.")
    cls = _model_class(read_config(folder), folder / CONFIG, kind)
    return cls.from_pretrained(folder, dtype=dtype, deployer=deployer, plan=plan, **changes)


def _model_class(fields: dict[str, Any], path: Location, kind: type[eqx.Module]) -> type[Pretrained]:
    key = type_key(fields)
    model_type = fields.get(key)
    of_type = [cls for cls in MODELS if model_type in cls.model_types and issubclass(cls, kind)]
    if not of_type:
        known = {name for cls in MODELS if issubclass(cls, kind) for name in cls.model_types}
        what = "" if kind is Pretrained else f" ({kind.__name__})"
        step = "Write other models as your own modules: any Equinox module works."
        if any(model_type in cls.model_types for cls in MODELS):
            step = "Pass the folder of such a model."
        raise ValueError(f"`{path}`: `{key}`: expected one of {', '.join(sorted(known))}{what}, got {model_type!r}. {step}")
    architectures = fields.get("architectures") or [of_type[0].architectures_of(str(model_type))[0]]
    if key == "_class_name":
        return of_type[0]
    for cls in of_type:
        if architectures[0] in cls.architectures_of(str(model_type)):
            return cls
    known = ", ".join(name for cls in of_type for name in cls.architectures_of(str(model_type)))
    step = "Replace it with one of them if the folder has its weights."
    part = getattr(of_type[0].config_class, "part", None)
    if part is not None and part in fields:
        inner = [cls for cls in of_type if fields[part].get("model_type") in cls.model_types] or of_type
        name = f"{inner[0].__module__}.{inner[0].__name__}"
        step = f"Load the part that `{part}` describes by its class, `{name}.from_pretrained(folder)`."
    raise ValueError(f"`{path}`: `architectures`: expected one of {known}, got {architectures[0]!r}. {step}")
