"""`ConfigReader`: reads a `config.json` key by key and checks each value's type and range."""

import copy
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from redeqx._tree import nearest
from redeqx.errors import brief

from .._kinds import OBJECT, SIZE, TOKEN, Kind, kind_of
from ..generation import Generation

_MISSING = object()
_MAX_LAYERS = 10**4  # the limit if there are no tensors to count, as in a dry run: tracing takes time for each layer

Config = TypeVar("Config")


class Extra(dict[str, Any]):
    """Content of a folder that does not change the model but is saved with it: keys of `config.json`, and further files.

    **Arguments:**

    - `keys`: values by key.
    - `files`: contents by file name.
    """

    def __init__(self, keys: Mapping[str, Any] = MappingProxyType({}), files: Mapping[str, bytes] = MappingProxyType({})):
        super().__init__(keys)
        self.files = files


class ConfigReader:
    """Reads the keys of one `config.json`. Each key may have a default for its absence.

    Keys that are never read do not change the model. `rest` returns them, so that they are saved with it.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        path: Any = "config.json",
        *,
        generation: Generation | None = None,
        n_tensors: int | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ):
        """**Arguments:**

        - `fields`: the parsed file.
        - `path`: the path of the file, for error messages.
        - `generation`: the folder's `generation_config.json`, if it has one.
        - `n_tensors`: the number of tensors in the folder, if it has any. No model has more layers than that.
        - `files`: the contents of the folder's further files, by name, for `rest`.
        """
        self._fields = dict(fields)
        self._read = {"architectures", "dtype", "torch_dtype", "model_type", "_class_name"}
        self._generation = generation
        self._n_tensors, self._files = n_tensors, files
        self.path = path

    def aliased(self, aliases: Mapping[str, str]) -> "ConfigReader":
        """Returns the same reader, with each alternative key renamed to its first name. Alternative names are not written
        back.

        **Arguments:**

        - `aliases`: maps alternative names to first names, as the `attribute_map` of a config in `transformers` does.

        Raises ValueError if a file has both names with different values.
        """
        keys = copy.copy(self)
        keys._fields = {name: value for name, value in self._fields.items() if name not in aliases}
        for alias, name in aliases.items():
            value, known = self._fields.get(alias), keys._fields.get(name)
            if value is None:
                continue
            if known is not None and (known != value or isinstance(known, bool) != isinstance(value, bool)):
                raise ValueError(
                    f"`{self.path}`: `{name}`: expected one value, got {brief(known)}, and {brief(value)} as `{alias}`, its "
                    "other name. Correct one of the two, or remove it."
                )
            keys._fields[name] = value
        return keys

    def part(self, name: str, *, generates: bool = False) -> "ConfigReader":
        """Returns a reader for an object inside the file. Raises if the key is absent or not an object.

        **Arguments:**

        - `generates`: whether the part is a language model, whose options are those of the folder.
        """
        found = self.nested(name, self.get(name, kind=OBJECT))
        found._generation = self._generation if generates else None
        return found

    def nested(self, name: str, fields: Mapping[str, Any]) -> "ConfigReader":
        """Returns a reader for an object that the file holds under this name. The class that it may name was that of another
        folder."""
        fields = {key: value for key, value in fields.items() if key != "architectures"}
        return ConfigReader(fields, f"{self.path}: {name}", n_tensors=self._n_tensors, files=self._files)

    def get(self, name: str, default: Any = _MISSING, kind: Kind | None = None) -> Any:
        """Returns the value of a key, or `default` if it is absent.

        **Arguments:**

        - `default`: the value that `transformers` or `diffusers` uses for an absent key. Without it, the key is required. If
            the default is not None, null counts as absent.
        - `kind`: the valid values. By default, they have the default's type: for an int, a size; for a float, a finite
            number that is not negative.

        Raises ValueError if a required key is absent or a value is out of range, and TypeError for a value of another type.
        """
        self._read.add(name)
        value = self._fields.get(name)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"`{self.path}`: expected the key `{name}`, got none.{nearest(name, self._fields)} Add it.")
            return default
        if kind is None and (default is _MISSING or default is None):
            return value
        return (kind or kind_of(default)).check(self.path, name, value)

    def layers(self, name: str, default: Any) -> int:
        """Reads a number of layers, as `get` does. It is at most the number of tensors, as each layer has at least one."""
        return self.check_layers(name, self.get(name, default, SIZE))

    def check_layers(self, name: str, n_layers: int) -> int:
        """Returns a number of layers. Raises ValueError if it exceeds the number of tensors."""
        limit = _MAX_LAYERS if self._n_tensors is None else self._n_tensors
        if n_layers > limit:
            there = "" if self._n_tensors is None else ", the number of tensors in the folder"
            raise ValueError(f"`{self.path}`: `{name}`: expected at most {limit}{there}, got {n_layers}. Correct the file.")
        return n_layers

    def has(self, name: str) -> bool:
        """Returns whether the file has a key, even with the value null, which for some keys differs from absence."""
        return name in self._fields

    def only(self, name: str, *accepted: Any, default: Any = _MISSING) -> Any:
        """Returns the value of a key for which this family implements only some values.

        **Arguments:**

        - `default`: the value of an absent key; the first of `accepted` if not given.

        Raises ValueError, with the key, for any other value.
        """
        self._read.add(name)
        value = self._fields.get(name, accepted[0] if default is _MISSING else default)
        if value not in accepted or isinstance(value, bool) != any(isinstance(a, bool) and a == value for a in accepted):
            raise self.refuse(name, value, " or ".join(map(repr, accepted)))
        return value

    @property
    def architecture(self) -> str:
        """The class of transformers of the folder's model; empty if the file does not say."""
        return str((self.get("architectures", []) or [""])[0])

    @property
    def is_classifier(self) -> bool:
        """Whether the folder's model has a head for classes."""
        return self.architecture.endswith("Classification")

    def refuse(self, name: str, value: Any, expected: str) -> ValueError:
        """Returns the error for a value that this family does not implement, for checks that `only` cannot express."""
        return ValueError(
            f"`{self.path}`: `{name}`: expected {expected}, which this family implements, got {brief(value)}. "
            "Load another checkpoint, or write the model as your own module."
        )

    def tokens(
        self,
        *,
        bos: int | None = None,
        eos: int | tuple[int, ...] | None = None,
        pad: int | None = None,
        generates: bool = True,
        **others: int | None,
    ) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_id` (a tuple if several ids end a text) and `pad_token_id`, for a config's fields.

        Values of `generation_config.json` take precedence over those of `config.json`, because `transformers` generates with
        them. Ends, padding and forced tokens of a language model are read from that file alone if it exists.

        **Arguments:**

        - `bos`, `eos`, `pad`: the defaults of absent keys. A key that is present but null means that there is no such token.
        - `generates`: whether the config is that of a language model, instead of an encoder or a classifier.
        - `others`: further tokens and their defaults: `forced_eos=2` reads `forced_eos_token_id`.
        """
        found: dict[str, Any] = {}
        for token, default in {"bos": bos, "eos": eos, "pad": pad, **others}.items():
            name = f"{token}_token_id"
            self._read.add(name)
            value, path = self._fields.get(name, default), self.path
            alone = (generates and token in ("eos", "pad")) or token.startswith("forced")
            if self._generation is not None and (alone or self._generation.keys.get(name) is not None):
                value, path = self._generation.keys.get(name), self._generation.path
            if token == "decoder_start" and value is None and default is not None:
                value = found["bos_token_id"]  # as in transformers
                if value is None:
                    raise ValueError(f"`{path}`: `{name}`: expected a token id, got null. Set the first token of a text.")
            if token == "eos" and isinstance(value, list | tuple):
                found[name] = tuple(TOKEN.check(path, name, id) for id in value)
            else:
                found[name] = None if value is None else TOKEN.check(path, name, value)
        return found

    def generation(self, inner: "ConfigReader | None" = None) -> Generation | None:
        """Returns the generation options of `generation_config.json`, or, without that file, of the old keys of
        `config.json`. The special tokens that `tokens` has read are omitted.

        **Arguments:**

        - `inner`: a reader for the decoder's keys in the file, which are used if the file itself has none.
        """
        if self._generation is not None:
            said = {name: value for name, value in self._generation.keys.items() if name not in self._read}
            return Generation(said, self._generation.path)
        old: dict[str, Any] = {}
        for keys in (self,) if inner is None else (inner, self):
            names = [name for name in keys._fields if name in Generation.known() - keys._read]  # in the order of the file
            found = {name: keys._fields[name] for name in names}
            keys._read.update(found)
            old |= {name: value for name, value in found.items() if value is not None}
        return Generation(old, self.path) if old else None

    def n_classes(self) -> int:
        """Returns the number of classes of a classifier: the length of `id2label`, which stays in `rest` with `label2id`.

        Raises ValueError if `num_labels` differs.
        """
        labels = self._fields.get("id2label")
        if labels is not None:
            OBJECT.check(self.path, "id2label", labels)
        n_classes = self.get("num_labels", 2 if labels is None else len(labels), SIZE)
        if labels is not None and len(labels) != n_classes:
            raise ValueError(
                f"`{self.path}`: `num_labels`: expected the length of `id2label`, {len(labels)}, got {n_classes}. "
                "Correct one of the two."
            )
        return n_classes

    def rest(self) -> "Extra":
        """Returns the keys that were not read, and the folder's further files."""
        return Extra({name: value for name, value in self._fields.items() if name not in self._read}, self._files)

    def build(self, cls: Callable[..., Config], *, key_of: Callable[[str], str], **values: Any) -> Config:
        """Builds a config with these fields. Errors of its own checks are raised with this file's path and key names.

        **Arguments:**

        - `key_of`: maps the name of a field to its key.
        """
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            told = re.sub(r"`(\w+)`", lambda match: f"`{key_of(match[1])}`", str(error))
            raise type(error)(f"`{self.path}`: {told}") from error
