"""`FolderConfig`: a config and its `config.json`, both read and written by one table of rows.

A row stands for one key of the file, or for a few related keys. `.._kinds` defines which values are valid, and `_reader.py`
reads a single key.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from redeqx.errors import wrong

from .._kinds import RATE, TEXT, Kind
from ._reader import ConfigReader

_UNSET: Any = object()
Self = TypeVar("Self", bound="FolderConfig")


class Row:
    """One row of a table. Rows are read and written in order."""

    keys: Any = MappingProxyType({})  # the key of each field, for error messages

    @abstractmethod
    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of a config that the file determines.

        **Arguments:**

        - `known`: the fields of the previous rows, and the defaults of all others; and the `config_class`.
        """

    @abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Returns the keys of the file."""

    def check(self, config: Any) -> None:
        """Raises ValueError for fields that the file cannot hold together."""


@dataclass(frozen=True)
class Field(Row):
    """A key of the file that holds a field of the config: `Field("hidden_size", "d_model")`.

    **Arguments:**

    - `key`: the name in the file.
    - `name`: the name of the config's field. If it is None, the field has the name of the key.
    - `kind`: the valid values. By default, they follow from the type of the default.
    - `default`: the value of an absent key, or a function of the known fields; the field's own default if not given.
    - `null`: the same for a key that is present but null, if that means something else.
    - `via`: a function of the reader, the key and the default that reads the value instead of `ConfigReader.get`.
    - `load`: a function of the value and the known fields that returns the field.
    - `save`: a function of the config that returns the value.
    - `is_written`: whether the key is written. Keys of old files are not.
    """

    key: str
    name: str | None = None
    kind: Kind | None = None
    default: Any = _UNSET
    null: Any = _UNSET
    via: Callable[[ConfigReader, str, Any], Any] | None = None
    load: Callable[[Any, Mapping[str, Any]], Any] = lambda value, known: value
    save: Callable[[Any], Any] | None = None
    is_written: bool = True

    @property
    def field(self) -> str:
        return self.key if self.name is None else self.name

    @property
    def keys(self) -> dict[str, str]:
        return {self.field: self.key} if self.is_written else {}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        default = known[self.field] if self.default is _UNSET else _resolve(self.default, known)
        if self.null is not _UNSET and reader.has(self.key):
            default = _resolve(self.null, known)
        value = reader.get(self.key, default, self.kind) if self.via is None else self.via(reader, self.key, default)
        return {self.field: self.load(value, known)}

    def write(self, config: Any) -> dict[str, Any]:
        if not self.is_written:
            return {}
        value = getattr(config, self.field) if self.save is None else self.save(config)
        return {self.key: list(value) if isinstance(value, tuple) else value}


def Fields(*same: str, kind: Kind | None = None, **keys: str) -> tuple[Field, ...]:
    """Returns a row for each of several fields: `Fields("d_model", n_experts="num_experts")`.

    **Arguments:**

    - `same`: the fields that have the names of their keys in the file.
    - `kind`: the valid values of all fields.
    - `keys`: the name in the file for each other field, by the name of the config's field.
    """
    others = (Field(key, None if key == name else name, kind) for name, key in keys.items())
    return (*(Field(key, kind=kind) for key in same), *others)


class Only(Row):
    """A key for which only some values are implemented. The first one is written, unless the config has a field for it."""

    def __init__(
        self,
        key: str,
        *accepted: Any,
        name: str | None = None,
        default: Any = _UNSET,
        save: Callable[[Any], Any] | None = None,
        is_written: bool = True,
    ):
        """**Arguments:**

        - `key`: the name of the key.
        - `accepted`: the accepted values, or one function of the known fields that returns them.
        - `name`: the field that holds the value, if any.
        - `default`: the value of an absent key; if not given, the field's default, or else the first accepted value.
        - `save`: a function of the config that returns the value to write.
        - `is_written`: whether the key is written.
        """
        self.key, self.name, self.default, self.save, self.is_written = key, name, default, save, is_written
        self.accepted: Any = accepted[0] if callable(accepted[0]) else accepted

    @property
    def keys(self) -> dict[str, str]:
        return {} if self.name is None else {self.name: self.key}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        accepted = _resolve(self.accepted, known)
        default = known[self.name] if self.name is not None else self.default
        value = reader.only(self.key, *accepted, default=accepted[0] if default is _UNSET else default)
        return {} if self.name is None else {self.name: value}

    def write(self, config: Any) -> dict[str, Any]:
        if not self.is_written:
            return {}
        if self.save is not None:
            return {self.key: self.save(config)}
        return {self.key: self.accepted[0] if self.name is None else getattr(config, self.name)}


def Fixed(*, is_written: bool = True, **values: Any) -> tuple[Only, ...]:
    """Returns a row for each of several keys of which only one value is implemented: `Fixed(use_bias=False)`. The names are
    those in the file; the config has no field for them."""
    return tuple(Only(key, value, is_written=is_written) for key, value in values.items())


def Aliases(**first: str) -> Mapping[str, str]:
    """Returns `aliases` of a table: the first name of each alternative one. Both are names in the file."""
    return MappingProxyType(first)


@dataclass(frozen=True)
class Written(Row):
    """A key that is written but not checked, such as the type of the file."""

    key: str
    value: Any

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        return {self.key: _resolve(self.value, config)}


@dataclass(frozen=True)
class ModelType(Row):
    """The `model_type` of a family that has several, with each type's own defaults for some fields."""

    defaults: Mapping[str, Mapping[str, Any]]

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        model_type = reader.only("model_type", *self.defaults)
        return {"model_type": model_type, **self.defaults[model_type]}

    def write(self, config: Any) -> dict[str, Any]:
        return {"model_type": config.model_type}


class Tokens(Row):
    """The ids of special tokens. The fields have the names of the keys. A tuple of ids is a list in the file."""

    def __init__(self, *others: str):
        """**Arguments:**

        - `others`: tokens other than `bos`, `eos` and `pad`, such as `decoder_start`.
        """
        self.names = ("bos", "eos", "pad", *others)

    @property
    def keys(self) -> dict[str, str]:
        return {f"{name}_token_id": f"{name}_token_id" for name in self.names}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        generates = "generation" in known and not reader.is_classifier
        return reader.tokens(generates=generates, **{name: known[f"{name}_token_id"] for name in self.names})

    def write(self, config: Any) -> dict[str, Any]:
        ids = {f"{name}_token_id": getattr(config, f"{name}_token_id") for name in self.names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in ids.items()}


class Classes(Row):
    """`n_classes` of a classifier: the length of `id2label`. The names of the classes are in `extra`."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        return {"n_classes": reader.n_classes()}

    def write(self, config: Any) -> dict[str, Any]:
        held = config.extra.get("id2label")
        if config.n_classes == (2 if held is None else len(held)):
            return {}
        labels = [f"LABEL_{i}" for i in range(config.n_classes)]  # transformers' names for classes without a name
        return {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }


@dataclass(frozen=True)
class FolderConfig:
    """The base of a model's config. Its table of rows defines `from_hf` and `to_hf`. A subclass, itself a frozen dataclass,
    changes the default of an inherited field by a plain assignment: `n_heads = 16`.

    **Arguments:**

    - `extra`: keys of the folder's file that do not change the model. They are saved with it.
    """

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False, kw_only=True)

    rows: ClassVar[tuple[Row, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}  # alternative names of keys, which transformers accepts too
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the fields of published models, for `of`; not inherited
    part: ClassVar[str | None] = None  # the object with this config in the `config.json` of a larger model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.sizes = vars(cls).get("sizes", {})
        bases = [base for base in reversed(cls.__bases__) if is_dataclass(base)]
        types = {known.name: known.type for base in bases for known in fields(base) if known.name in vars(cls)}
        for name in types:
            if hasattr(value := vars(cls)[name], "__get__"):  # a method or property would become the default
                step = f"Rename it: `{name}` is a field of a base, and its default is a plain value."
                raise wrong(f"{cls.__name__}.{name}", "the default of a field", type(value).__name__, step, TypeError)
        if types:  # of fields that are inherited, and assigned here: `dataclass` reads the annotated ones alone
            cls.__annotations__ = {**types, **inspect.get_annotations(cls)}

    @classmethod
    def from_hf(cls: type[Self], reader: ConfigReader) -> Self:
        """Returns the config that a `config.json` describes.

        Raises ValueError or TypeError, with the file and the key, for values that are not implemented.
        """
        known: dict[str, Any] = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        if cls.part is not None and reader.get(cls.part, None) is not None:
            reader = reader.part(cls.part, generates="generation" in known)
        reader = reader.aliased(cls.aliases)
        known["config_class"] = cls
        found: dict[str, Any] = {}
        for row in cls.rows:
            found |= row.read(reader, {**known, **found})
        if "generation" in known:
            found["generation"] = reader.generation()
        return reader.build(cls, key_of=cls.key_of, **found, extra=reader.rest())

    def to_hf(self) -> dict[str, Any]:
        """Returns the `config.json` that describes this config."""
        return {key: value for row in self.rows for key, value in row.write(self).items()}

    def without_dropout(self: Self) -> Self:
        """The same config without dropout, also in the configs that it holds."""
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        quiet = {name: value.without_dropout() for name, value in values.items() if isinstance(value, FolderConfig)}
        return replace(self, **quiet, **{name: 0.0 for name in values if name.endswith("dropout")})

    @classmethod
    def of(cls: type[Self], size: str) -> Self:
        """Returns the config of a published model of this family, by its size, such as `"7b"`.

        Raises ValueError, with the known sizes, for another.
        """
        if size not in cls.sizes:
            raise wrong("size", f"one of {', '.join(cls.sizes)}", repr(size), "For other sizes set the fields.")
        return cls(**cls.sizes[size])

    @classmethod
    def key_of(cls, field: str) -> str:
        """Returns the key of `config.json` that holds a field; the field's own name if there is no such key."""
        return {name: key for row in reversed(cls.rows) for name, key in row.keys.items()}.get(field, field)


# The keys of encoders of texts and images that hold the sizes of their blocks, and those of dropout in BERT's names.
BLOCKS: tuple[Row, ...] = (
    Field("hidden_size", "d_model"),
    Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
    Field("num_attention_heads", "n_heads"),
    Field("hidden_act", "activation", TEXT),
    Field("layer_norm_eps"),
)
DROPOUT: tuple[Row, ...] = (
    Field("hidden_dropout_prob", "dropout", RATE),
    Field("attention_probs_dropout_prob", "attention_dropout", RATE),
)


def published(sizes: Mapping[str, Mapping[str, Any]], **common: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns the fields of published models by size, with those that all of them have in `common`."""
    return MappingProxyType({size: MappingProxyType({**common, **fields}) for size, fields in sizes.items()})


def check_fixed(config: Any, free: Collection[str]) -> None:
    """Raises ValueError for a field that the family's `config.json` cannot hold, so that no folder is another model.

    **Arguments:**

    - `free`: fields that may have any value although no row holds them.
    """
    held = {name for row in config.rows for name in row.keys}.union(free)
    for known in fields(config):
        value = getattr(config, known.name)
        if known.name not in held and value != known.default:
            step = "Its `config.json` has no key for another value: make another family's config."
            raise wrong(known.name, f"{known.default!r}, as in every {config.model_type!r} model", repr(value), step)


def _resolve(value: Any, known: Any) -> Any:
    """Returns `value`, or, if it is a function, its result for the known fields."""
    return value(known) if callable(value) else value
