"""`FolderConfig`: reading and writing a `config.json` by one table of rows."""

from dataclasses import dataclass
from types import MappingProxyType

import pytest

from redeqx.models.hf import ConfigReader, Field, FolderConfig, ModelType, Only, Tokens, Written


@dataclass(frozen=True)
class Config(FolderConfig):
    model_type: str = "small"
    width: int = 8
    inner: int | None = None
    n_groups: int | None = None
    activation: str = "relu"
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self):
        if self.n_groups == 7:
            raise ValueError("`n_groups`: expected a divisor of `width`, got 7. Choose another.")

    rows = (
        Written("version", 3),
        ModelType({"small": {}, "large": {"width": 64}}),
        Only("kind", "a", "b"),
        Only("ratio", lambda known: (None, 2 * known["width"]), is_written=False),
        Field("hidden", "width"),
        Field("inner", default=lambda known: 4 * known["width"], save=lambda config: config.inner or 0),
        Field("groups", "n_groups", default=4, null=None),
        Only("act", "relu", "gelu", name="activation"),
        Tokens(),
    )
    aliases = MappingProxyType({"dim": "hidden"})


def read(**keys):
    return Config.from_hf(ConfigReader(keys))


def test_absent_keys_get_the_defaults_of_the_field_or_model_type():
    assert read() == Config(inner=32, n_groups=4)
    assert read(model_type="large") == Config("large", 64, inner=256, n_groups=4)
    assert read(model_type="large", dim=16).width == 16


def test_null_may_differ_from_absence():
    assert read(groups=None).n_groups is None and read(groups=2).n_groups == 2


def test_writes_the_rows_in_order():
    written = Config(inner=5, n_groups=2, activation="gelu", eos_token_id=(2, 3)).to_hf()
    assert list(written.items()) == [
        ("version", 3),
        ("model_type", "small"),
        ("kind", "a"),
        ("hidden", 8),
        ("inner", 5),
        ("groups", 2),
        ("act", "gelu"),
        ("bos_token_id", 1),
        ("eos_token_id", [2, 3]),
        ("pad_token_id", None),
    ]
    assert Config.from_hf(ConfigReader(written)) == Config(inner=5, n_groups=2, activation="gelu", eos_token_id=(2, 3))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ratio": 3}, r"`config\.json`: `ratio`: expected None or 16, which this family implements, got 3"),
        ({"kind": "c"}, r"`kind`: expected 'a' or 'b', .* got 'c'"),
        ({"model_type": "tiny"}, r"`model_type`: expected 'small' or 'large', .* got 'tiny'"),
        ({"groups": 7}, r"`config\.json`: `groups`: expected a divisor of `hidden`, got 7"),
        ({"hidden": 0}, r"`hidden`: expected a whole number from 1"),
    ],
)
def test_errors_name_the_keys(keys, message):
    with pytest.raises(ValueError, match=message):
        read(**keys)
