"""`config.json` key by key: alternative names, types and ranges, and that each error names file, key and value."""

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models._families import _model_class
from redeqx.models.bart import BartConfig
from redeqx.models.distilbert import DistilBertConfig
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.gptj import GPTJConfig
from redeqx.models.hf import ConfigReader, Pretrained
from redeqx.models.llama import LlamaConfig
from redeqx.models.t5 import T5Config
from tests.models.families._case import random_model

CONFIG = GPT2Config(40, 12, d_model=16, n_layers=3, n_heads=2)
MODEL = random_model(GPT2, CONFIG)


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(MODEL, CONFIG, tmp_path / "gpt2")


def edit_config(folder, **changes):
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def test_rest_returns_the_unread_keys():
    keys = ConfigReader({"new": 3, "none": None, "rest": 1, "architectures": ["X"]})
    assert keys.get("new", 1) == 3
    assert keys.get("none", 7) == 7 and keys.get("none", None) is None
    assert keys.get("absent", 0.5) == 0.5
    assert keys.rest() == {"rest": 1}
    assert isinstance(ConfigReader({"x": 1}).get("x", 1.0), float)
    with pytest.raises(
        ValueError, match=r"`config\.json`: expected the key `rset`, got none\. Did you mean `rest`\? Add it"
    ):
        keys.get("rset")


def test_a_plain_assignment_changes_the_default_of_an_inherited_field():
    @dataclass(frozen=True)
    class Small(LlamaConfig):
        n_layers, n_heads = 2, 4
        d_model: int = 16  # as a dataclass by itself needs it
        new: int = 7

        sizes = {"tiny": {"n_layers": 1}}  # noqa: RUF012  # read only

    config = Small(n_heads=2)
    assert (config.n_layers, config.n_heads, config.d_model, config.new) == (2, 2, 16, 7)
    assert Small.of("tiny").n_layers == 1 and Small() != Small(n_layers=3)
    assert LlamaConfig().n_layers == 32 and "7b" not in Small.sizes


def test_a_plain_assignment_changes_the_default_of_a_field_of_any_base():
    @dataclass(frozen=True)
    class Named:
        name: str = "none"

    @dataclass(frozen=True)
    class Small(LlamaConfig, Named):
        n_layers, name = 2, "small"

    assert (Small().n_layers, Small().name) == (2, "small")


@pytest.mark.parametrize("make", [lambda function: function, property, cached_property, classmethod])
def test_a_method_cannot_have_the_name_of_an_inherited_field(make):
    with pytest.raises(TypeError, match=r"`Small.n_layers`: expected the default of a field, got \w+. Rename it"):
        type("Small", (LlamaConfig,), {"n_layers": make(lambda config: 2)})


def test_published_sizes_are_not_inherited():
    @dataclass(frozen=True)
    class Other(LlamaConfig):
        pass

    with pytest.raises(ValueError, match="`size`: expected one of"):
        Other.of("7b")


def test_only_distinguishes_true_from_one():
    assert ConfigReader({}).only("x", True) is True
    assert ConfigReader({"x": False}).only("x", True, False) is False
    with pytest.raises(ValueError, match=r"`x`: expected True, which this family implements, got 1"):
        ConfigReader({"x": 1}).only("x", True)
    with pytest.raises(ValueError, match=r"`x`: expected 'a', .* got 'b'"):
        ConfigReader({}).only("x", "a", default="b")


def test_token_ids():
    assert ConfigReader({"eos_token_id": [1, 2]}).tokens(bos=5) == {
        "bos_token_id": 5,
        "eos_token_id": (1, 2),
        "pad_token_id": None,
    }
    assert ConfigReader({"bos_token_id": None}).tokens(bos=5)["bos_token_id"] is None


# --- alternative names ------------------------------------------------------------------------------------------------

# The `attribute_map` of each family's config in transformers; `test_parity.py` compares.
ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "gptj": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "t5": {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "bart": {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
}
CONFIGS = {
    "gpt2": GPT2Config(d_model=48, n_layers=3, n_heads=4, n_positions=77),
    "gptj": GPTJConfig(d_model=48, n_layers=3, n_heads=4, n_positions=77, rope_share=1 / 3),
    "t5": T5Config(d_model=48, n_layers=3, n_heads=3, d_kv=7),
    "distilbert": DistilBertConfig(d_model=48, n_layers=3, n_heads=3),
    "bart": BartConfig(d_model=48, n_layers=3, n_heads=3, n_decoder_heads=3),
}


@pytest.mark.parametrize("family", ALIASES)
def test_alternative_names_are_accepted_and_not_written_back(family):
    config, aliases = CONFIGS[family], ALIASES[family]
    names = {name: alias for alias, name in aliases.items()}
    written = config.to_hf()
    read = type(config).from_hf(ConfigReader({names.get(name, name): value for name, value in written.items()}))
    assert read == config and not read.extra
    both = {**written, **{alias: written[name] for alias, name in aliases.items()}}
    assert type(config).from_hf(ConfigReader(both)) == config
    for alias, name in aliases.items():
        message = (
            rf"`a/config\.json`: `{name}`: expected one value, got {written[name]}, and 999 as `{alias}`, its other name\."
        )
        with pytest.raises(ValueError, match=message):
            type(config).from_hf(ConfigReader({**written, alias: 999}, "a/config.json"))


def test_a_folder_with_alternative_names_is_the_same_model(folder):
    edit_config(folder, n_head=..., num_attention_heads=2, n_layer=None, num_hidden_layers=3)
    model, config = from_pretrained(folder)
    assert config == CONFIG and model.stack.blocks.attention.n_heads == 2
    edit_config(folder, n_head=4)
    with pytest.raises(
        ValueError, match=r"config\.json`: `n_head`: expected one value, got 4, and 2 as `num_attention_heads`"
    ):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
            r"`rope_theta`: expected one value, got 500000",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}},
            r"`factor`: expected one value, got 4, and 2 in `rope_scaling`\. Correct one of the two",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
            r"rope_parameters`: `rope_type`: expected one value, got 'yarn', and 'linear' as `type`",
        ),
    ],
)
def test_contradictory_rotary_keys(changes, message):
    fields = {"model_type": "llama", **changes}
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(ConfigReader(fields))


# --- types and ranges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pad_token_id": "x"}, TypeError, r"`pad_token_id`: expected int, got 'x'\. Correct the file"),
        ({"eos_token_id": [1, 2.5]}, TypeError, r"`eos_token_id`: expected int, got 2\.5"),
        ({"bos_token_id": 2**40}, ValueError, r"`bos_token_id`: expected a token id up to 2147483647, got 1099511627776"),
        ({"attn_pdrop": "none"}, TypeError, r"`attn_pdrop`: expected float, got 'none'"),
        ({"embd_pdrop": 1}, ValueError, r"`embd_pdrop`: expected a rate in \[0, 1\), got 1\. Correct the file"),
        ({"resid_pdrop": float("nan")}, ValueError, r"`resid_pdrop`: expected a rate in \[0, 1\), got nan"),
        (
            {"layer_norm_epsilon": -1e-5},
            ValueError,
            r"`layer_norm_epsilon`: expected a finite number of at least 0, got",
        ),
        ({"n_embd": 0}, ValueError, r"`n_embd`: expected a whole number from 1 to 2147483647, got 0"),
        ({"vocab_size": 2**31}, ValueError, r"`vocab_size`: expected a whole number from 1 to 2147483647, got 2147483648"),
        (
            {"n_layer": 2**31 - 1},
            ValueError,
            r"`n_layer`: expected at most 40, the number of tensors in the folder, got",
        ),
        ({"n_layer": 10**400}, ValueError, r"`n_layer`: expected a whole number from 1 to 2147483647, got 1000"),
        ({"tie_word_embeddings": 1}, TypeError, r"`tie_word_embeddings`: expected bool, got 1"),
    ],
)
def test_invalid_values(changes, error, message, folder):
    edit_config(folder, **changes)
    start = time.process_time()
    with pytest.raises(error, match=r"`.*/config\.json`: " + message):
        from_pretrained(folder)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            T5Config(),
            {"relative_attention_max_distance": 8},
            r"`relative_attention_max_distance`: expected more than half of `relative_attention_num_buckets`=32, got 8",
        ),
        (
            T5Config(),
            {"relative_attention_max_distance": 2**30},
            r"`relative_attention_max_distance`: expected at most 1048576",
        ),
        (T5Config(), {"relative_attention_num_buckets": 2}, r"`relative_attention_num_buckets`: expected at least 4, got 2"),
        (
            LlamaConfig(),
            {"num_key_value_heads": 5},
            r"`num_key_value_heads`: expected a divisor of `num_attention_heads`",
        ),
        (LlamaConfig(), {"head_dim": "wide"}, r"`head_dim`: expected int, got 'wide'"),
        (LlamaConfig(), {"num_hidden_layers": 2**31 - 1}, r"`num_hidden_layers`: expected at most 10000, got 2147483647"),
        (BartConfig(), {"forced_eos_token_id": [2, 3]}, r"`forced_eos_token_id`: expected int, got \[2, 3\]"),
    ],
)
def test_errors_of_the_config_use_the_names_of_the_file(config, changes, message):
    with pytest.raises((ValueError, TypeError), match=r"`a/config\.json`: " + message):
        type(config).from_hf(ConfigReader({**config.to_hf(), **changes}, "a/config.json"))


# --- arbitrary values ----------------------------------------------------------------------------------------------------

HOSTILE = ["x", -1, 0, 1.5, True, None, [], [1, 2], {}, 2**31 - 1, 2**31, 2**40, 10**400, 1e308, float("nan"), float("inf")]
# For a key that a folder before this one has: another family may read it in its own way, but seldom has its own arithmetic.
HOSTILE_AGAIN = ["x", -1, None, {}, 10**400]
QUICK = ("gpt2", "t5")  # the other families in the sweep


def with_new_keys():
    """Yields folders with a key that those of its model before it lack, the longest first; these keys, and those new among
    all."""
    paths = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))
    configs = {path: json.loads(path.read_text())["config"] for path in paths}
    seen, names_seen = set(), set()
    for path in sorted(paths, key=lambda path: (path.stem not in QUICK, -len(configs[path]), path.stem)):
        model = configs[path].get("model_type", configs[path].get("_class_name"))
        names = {name for name in configs[path] if (model, name) not in seen}
        if names:
            seen |= {(model, name) for name in names}
            new, known = names - names_seen, frozenset(names_seen)
            names_seen |= new
            yield pytest.param(path, names, new, known, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.sweep)


GOLDEN = [*with_new_keys()]


def with_each_key_changed(fields, names, new, known, inner=False):
    for name, value in fields.items():
        if name not in names:
            continue
        if isinstance(value, dict) and not inner:
            for key, changed in with_each_key_changed(
                value, value.keys() - known, value if name in new else (), known, inner=True
            ):
                yield key, {**fields, name: changed}
        if name not in ("architectures", "model_type", "_class_name", "transformers_version", "_diffusers_version"):
            values = HOSTILE if name in new else HOSTILE_AGAIN
            yield from ((name, {**fields, name: hostile}) for hostile in values)


@pytest.mark.sweep
@pytest.mark.parametrize(("path", "names", "new", "known"), GOLDEN)
def test_any_value_of_any_key_is_read_or_refused_quickly(path, names, new, known):
    record = json.loads(path.read_text())
    cls = _model_class(record["config"], path, Pretrained)
    n_refused = 0
    start = time.process_time()
    for key, fields in with_each_key_changed(record["config"], names, new, known):
        try:
            config = cls.config_class.from_hf(ConfigReader(fields, "a/config.json", n_tensors=len(record["tensors"])))
        except (ValueError, TypeError) as error:
            assert str(error).startswith("`a/config.json"), (key, error)
            n_refused += 1
        else:
            assert len(cls.weight_map(config).tensors) < 1000
    assert n_refused > 1.3 * len(names)
    assert time.process_time() - start < 60  # a table of 2**31 layers takes minutes
