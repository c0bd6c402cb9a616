"""Configurations: `config.json` read key by key, each read checked, and the checks that every family's config makes."""

from collections.abc import Mapping
from typing import Any

from redeqx._paths import nearest

_MISSING = object()


class Keys:
    """The keys of one `config.json`. Each is read by name with the value that it has where the file leaves it out.

    What nobody reads changes nothing in the model; `rest` hands it on, so that it is written back.
    """

    def __init__(self, fields: Mapping[str, Any], path: Any = "config.json"):
        """**Arguments:**

        - `fields`: the parsed file.
        - `path`: of the file, for errors.
        """
        self._fields = dict(fields)
        self._read = {"architectures", "dtype", "torch_dtype", "model_type", "_class_name"}
        self.path = path

    def get(self, name: str | tuple[str, ...], default: Any = _MISSING) -> Any:
        """The value of a key, or `default` where it is absent.

        **Arguments:**

        - `name`: several spellings of one key, the newest first, are tried in turn.
        - `default`: what `transformers` or `diffusers` takes then. Without one the key is needed. A value of null is
            absent where the default is not None. The value's type is checked against the default's.

        Raises ValueError where a needed key is absent, TypeError for a value of another type than the default's.
        """
        names = (name,) if isinstance(name, str) else name
        self._read.update(names)
        for spelling in names:
            value = self._fields.get(spelling)
            if value is not None:
                return self._checked(spelling, value, default)
        if default is _MISSING:
            raise ValueError(
                f"`{self.path}`: expected the key `{names[0]}`, got none.{nearest(names[0], self._fields)} Add it."
            )
        return default

    def has(self, name: str) -> bool:
        """Whether the file has a key, be its value null: some keys mean by null what no other value says."""
        return name in self._fields

    def only(self, name: str, *accepted: Any, default: Any = _MISSING) -> Any:
        """The value of a key of which this family implements some values only; the first of `accepted` where it is absent.

        **Arguments:**

        - `default`: what an absent key means, where that is not the first of `accepted`.

        Raises ValueError for any other value, naming the key.
        """
        self._read.add(name)
        value = self._fields.get(name, accepted[0] if default is _MISSING else default)
        if value not in accepted or isinstance(value, bool) != any(isinstance(a, bool) and a == value for a in accepted):
            known = " or ".join(map(repr, accepted))
            raise ValueError(
                f"`{self.path}`: `{name}`: expected {known}, which is what this family implements, got {value!r}. "
                "Load another checkpoint, or bring the model as a module of your own."
            )
        return value

    def refuse(self, name: str, value: Any, expected: str) -> ValueError:
        """The error for a key whose value this family does not implement; for checks that `only` cannot say."""
        return ValueError(
            f"`{self.path}`: `{name}`: expected {expected}, which is what this family implements, got {value!r}. "
            "Load another checkpoint, or bring the model as a module of your own."
        )

    def tokens(
        self, *, bos: int | None = None, eos: int | None = None, pad: int | None = None, **others: int | None
    ) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_id` (a tuple, where several end a text) and `pad_token_id`, for a config's fields.

        **Arguments:**

        - `bos`, `eos`, `pad`: where absent. A key that is there and null means that there is none.
        - `others`: further tokens: `forced_eos=2` reads `forced_eos_token_id`.
        """
        found: dict[str, Any] = {}
        for token, default in {"bos": bos, "eos": eos, "pad": pad, **others}.items():
            name = f"{token}_token_id"
            self._read.add(name)
            value = self._fields.get(name, default)
            found[name] = tuple(value) if isinstance(value, list) else value
        return found

    def n_classes(self) -> int:
        """How many classes a classifier tells apart: the length of `id2label`, which stays in `rest` with `label2id`.

        Raises ValueError where `num_labels` says otherwise.
        """
        labels = self._fields.get("id2label")
        n_classes = self.get("num_labels", 2 if labels is None else len(labels))
        if labels is not None and len(labels) != n_classes:
            raise ValueError(
                f"`{self.path}`: `num_labels`: expected the length of `id2label`, {len(labels)}, got {n_classes}. "
                "Correct one of the two."
            )
        return n_classes

    def rest(self) -> dict[str, Any]:
        """The keys that were not read."""
        return {name: value for name, value in self._fields.items() if name not in self._read}

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        if default is _MISSING or default is None:
            return value
        wanted = (int, float) if isinstance(default, float) else type(default)
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, wanted):
            raise TypeError(f"`{self.path}`: `{name}`: expected {type(default).__name__}, got {value!r}. Correct the file.")
        return type(default)(value)


def token_ids(config: Any) -> dict[str, Any]:
    """The keys of `config.json` for the special tokens of a config."""
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in ids.items()}


def class_labels(config: Any) -> dict[str, Any]:
    """The keys of `config.json` that say how many classes there are: none where `extra` or the default says it already."""
    held = config.extra.get("id2label")
    if config.n_classes == (2 if held is None else len(held)):
        return {}
    labels = [f"LABEL_{i}" for i in range(config.n_classes)]  # as transformers calls classes without a name
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError for a field below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}`: expected at least 1, got {getattr(config, name)}. Pass a positive size.")


def check_heads(config: Any, width: str = "d_model", heads: str = "n_heads") -> None:
    """Raises ValueError where the heads do not divide the width."""
    if getattr(config, width) % getattr(config, heads):
        raise ValueError(
            f"`{heads}`: expected a divisor of `{width}`={getattr(config, width)}, got {getattr(config, heads)}. "
            "Choose a width that is a multiple of the heads."
        )


def check_rates(config: Any, *names: str) -> None:
    """Raises ValueError for a dropout rate outside [0, 1)."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"`{name}`: expected a rate in [0, 1), got {getattr(config, name)}. Pass 0 for none.")


def check_length(what: str, length: int, n_positions: int) -> None:
    """Raises ValueError for more tokens than a model has positions."""
    if length > n_positions:
        raise ValueError(
            f"`{what}`: expected at most `n_positions`={n_positions} tokens, got {length}. "
            "Cut the example, or make the model with more positions."
        )
