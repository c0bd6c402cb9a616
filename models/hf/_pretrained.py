"""`Pretrained`: the base class of models that a Hugging Face folder can hold."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx

from redeqx import Deployer, Plan
from redeqx._tree import nearest
from redeqx.storage import Location, location

from ._files import CONFIG, companions, read_config, read_generation, type_key, weights_of
from ._load import load
from ._packed import read_quantization
from ._reader import ConfigReader
from ._weight_map import WeightMap, shapes_of


class Pretrained(eqx.Module):
    """The base of a model that a Hugging Face folder can hold. A subclass defines its model types and its weight map."""

    config_class: ClassVar[Any]  # with `from_hf(ConfigReader)`, `to_hf()` and `extra`
    model_types: ClassVar[Collection[str]]  # `model_type` in `config.json`; for diffusers, `_class_name`
    architectures: ClassVar[tuple[str, ...]]  # classes of transformers; `architecture` returns the one to write
    weights_name: ClassVar[str] = "model"  # the start of the weight files' names; diffusers uses another

    config: eqx.AbstractVar[Any]

    def __init_subclass__(cls, *, config: Any = None, init: bool = True, **kwargs: Any) -> None:
        """**Arguments:**

        - `config`: the class of a family's config.
        - `init`: False for a class whose `__init__` is that of its base: type checkers infer another one from the fields.
        """
        super().__init_subclass__(**kwargs)
        if config is not None:
            cls.config_class = config
            if "model_types" not in cls.__dict__:
                cls.model_types = (config.model_type,)

    @staticmethod
    def weight_map(config: Any) -> WeightMap:
        """Maps the tensors of a folder to the leaves of a model with this config."""
        raise NotImplementedError

    @classmethod
    def config_of(cls, model_type: str) -> Any:
        """Returns the class of the config of a model type."""
        del model_type
        return cls.config_class

    @classmethod
    def architectures_of(cls, model_type: str) -> tuple[str, ...]:
        """Returns the classes of transformers of a model type."""
        del model_type
        return cls.architectures

    @classmethod
    def architecture(cls, config: Any) -> str:
        """Returns the name of the `transformers` class that loads a saved folder."""
        del config
        return cls.architectures[0]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Location,
        *,
        dtype: Any = None,
        deployer: Deployer | None = None,
        plan: Plan | None = None,
        **changes: Any,
    ) -> tuple[Any, Any]:
        """Loads a model of this class and its config from a folder. See `redeqx.models.from_pretrained`."""
        folder = location(folder, "folder")
        config = cls.read_config(folder)
        if changes:
            fields = config.__dataclass_fields__
            for name in changes:
                if name not in fields or name == "extra":
                    raise ValueError(f"`{name}`: expected a field of {type(config).__name__}.{nearest(name, fields)}")
            config = replace(config, **changes)
        shapes, weight_map, stem = shapes_of(cls, config), cls.weight_map(config), cls.weights_name
        options: dict[str, Any] = {"dtype": dtype, "deployer": deployer, "plan": plan, "config_path": folder / CONFIG}
        return load(shapes, weight_map, folder, stem=stem, **options), config

    @classmethod
    def read_config(cls, folder: Location) -> Any:
        """Returns the config of a folder.

        Raises ValueError if the folder holds another model type.
        """
        fields = read_config(folder)
        key = type_key(fields)
        model_type = fields.get(key, next(iter(cls.model_types)))
        if model_type not in cls.model_types:
            raise ValueError(
                f"`{folder / CONFIG}`: `{key}`: expected {' or '.join(cls.model_types)} for {cls.__name__}, "
                f"got {fields[key]!r}. Pass the folder of such a model."
            )
        config_class = cls.config_of(model_type)
        read_quantization(folder, fields)
        fields.pop("quantization_config", None)
        source = weights_of(folder, cls.weights_name)
        keys = ConfigReader(
            fields,
            folder / CONFIG,
            generation=read_generation(folder),
            n_tensors=None if source is None else len([*source.names()]),
            files=companions(folder),
        )
        return config_class.from_hf(keys)
