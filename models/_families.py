"""`from_pretrained`: selects the family of a folder. The package `hf` reads the folder."""

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import equinox as eqx

from redeqx import Deployer, Plan
from redeqx.errors import brief, check_type, filter_traceback, wrong
from redeqx.partition import check_plan
from redeqx.storage import Location, location

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

# Each file of a family adds its language models to `FAMILIES`. These files are none; some of them import this one.
_OTHERS = ("evaluation", "schedulers", "sentence", "text_to_image")
for _file in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if not _file.name.startswith("_") and _file.name not in _OTHERS:
        importlib.import_module(f".{_file.name}", __package__)


def _models(*names: str) -> tuple[type[Pretrained], ...]:
    """Returns the models that these modules define, in their order."""
    modules = [sys.modules[f"{__package__}.{name}"] for name in names]
    values = [(module, value) for module in modules for value in vars(module).values() if isinstance(value, type)]
    return tuple(cls for module, cls in values if issubclass(cls, Pretrained) and cls.__module__ == module.__name__)


# If a folder names no class, the first class for its model type is used.
MODELS: tuple[type[Pretrained], ...] = (
    *sorted(FAMILIES.values(), key=lambda cls: cls.__module__),
    SequenceClassifier, TokenClassifier, T5, T5Encoder, Bart, Whisper, Llava, CLIP, CLIPText, CLIPTextWithProjection,
    CLIPVision, Siglip, SiglipText, SiglipVision, *_models("dinov2"), MMDiT, UNet, VAE, *_models("vit"),
    VisionEncoderDecoder, *_models("bert", "roberta", "distilbert", "deberta", "modernbert"),
)  # fmt: skip


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
        raise wrong("kind", "a class of models", brief(kind), "Pass `redeqx.models.Decoder`, say.", TypeError)
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
