"""The table of the decoders in models/README.md, made of their rows, presets and measured differences.

`python -m tests.models.families._table` writes it, and prints how many of the types load for which transformers lists a
causal language model; `test_decoders.py` checks that it is up to date.
"""

import dataclasses
import json
from pathlib import Path

from redeqx.models._families import MODELS
from redeqx.models.decoder import Decoder, DecoderConfig
from redeqx.models.hf import Only

README = Path(__file__).parents[3] / "models" / "README.md"
GOLDEN = Path(__file__).parents[1] / "golden"
DIFFERENCES = Path(__file__).with_name("_differences.json")
START, END = "<!-- table -->\n", "<!-- end -->\n"


def table():
    """Returns the table: a line for each model type."""
    measured = {}
    for name, difference in json.loads(DIFFERENCES.read_text()).items():
        (path,) = [path for path in (GOLDEN / f"{name}.json", GOLDEN / "decoders" / f"{name}.json") if path.exists()]
        model_type = json.loads(path.read_text())["config"]["model_type"]
        measured[model_type] = max(difference, measured.get(model_type, 0.0))
    lines = [
        "| type | class | published sizes | differs from LLaMA by | keys that are refused | worst difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cls in MODELS:
        if not issubclass(cls, Decoder):
            continue
        config = cls.config_class
        module = cls.__module__.rpartition(".")[2]
        cells = (
            f"`{config.model_type}`",
            f"`{module}.{cls.__name__}`",
            ", ".join(config.sizes),
            ", ".join(_values(config)) or "nothing",
            ", ".join(_refused(config)) or "none",
            f"{measured[config.model_type]:.0e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _values(config):
    """Returns the values that all models of a family have, or can have, where LLaMA has another one."""
    usual = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}
    held = {name for row in DecoderConfig.rows for name in row.keys}
    own = {field.name: field.default for field in dataclasses.fields(config) if field.name not in held}
    options = {name for row in config.rows for name in row.keys} - held - {"attention_bias", "mlp_bias"}
    fixed = {name for name, value in own.items() if value != usual.get(name)}
    shown = {name: own[name] for name in own if name in fixed | options}
    return [f"`{name}`" if name in options else f"`{name}={value!r}`" for name, value in shown.items()]


def _refused(config):
    """Returns the keys of which only some values are implemented, with these."""
    rows = [row for row in config.rows if isinstance(row, Only)]
    said = [None if callable(row.accepted) else " or ".join(map(repr, row.accepted)) for row in rows]
    return [f"`{row.key}` but {text or 'what follows from others'}" for row, text in zip(rows, said, strict=True)]


def loaded():
    """Returns the types whose causal language model in transformers is one that we load, and all types with one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    ours = {(kind, name) for cls in MODELS for kind in cls.model_types for name in cls.architectures_of(kind)}
    return [kind for kind, name in NAMES.items() if (kind, name) in ours], [*NAMES]


if __name__ == "__main__":
    print("{} of {} types load".format(*map(len, loaded())))
    head, _, rest = README.read_text().partition(START)
    README.write_text(f"{head}{START}{table()}{END}{rest.partition(END)[2]}")
