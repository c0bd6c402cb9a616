"""Compares where models apply dropout in training, and at which rates, with `transformers`; needs the `parity` extra.

Each dropout multiplies by a number that depends on its rate, in place of random ones, so that the outputs must be equal.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import redeqx.models.nn._attention as attention
from redeqx.models import from_pretrained
from tests.models.families._case import assert_equal, collect, torch_folder
from tests.models.families._decoders import CASES, HEADED

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
BY_NAME = {case.name: case for case in (*CASES, *HEADED, *collect("CASES"))}
# One of each way to have them; the names of other families are keys of the same fields.
NAMES = ("gpt2", "opt", "llama", "gpt-neo", "gpt-neox", "bloom", "starcoder2", "bart", "t5", "whisper", "bert-classes")
NAMES += ("distilbert-classes", "distilbert-tokens", "modernbert-classes", "gpt-neox-token-classes", "phi3")


@pytest.fixture
def factors(monkeypatch):
    """Replaces each dropout of rate p by a factor of 1 - p / 2."""
    import torch

    def theirs(x, p=0.5, training=True, inplace=False):
        return x * (1 - p / 2) if training else x

    def ours(self, x, *, key=None):
        return x if self.inference else x * jnp.asarray(1 - self.p / 2, x.dtype)

    def fused(queries, keys, values, given, setting, attend=attention.attend):
        given = {name: array for name, array in given.items() if name != "key"}
        return attend(queries, keys, values, given, dataclasses.replace(setting, dropout=0.0)) * (1 - setting.dropout / 2)

    monkeypatch.setattr(torch.nn.functional, "dropout", theirs)
    monkeypatch.setattr(eqx.nn.Dropout, "__call__", ours)
    monkeypatch.setattr(attention, "attend", fused)


@pytest.mark.parametrize("name", NAMES)
def test_dropouts(name, factors, tmp_path):
    """All rates of the config differ."""
    import torch

    case = BY_NAME[name]
    base = case.make().config.to_dict()
    keys = [key for key, value in base.items() if "drop" in key and "layer" not in key and not isinstance(value, bool)]
    rates = {key: round(0.1 + 0.07 * i, 2) for i, key in enumerate(keys)}
    module = torch_folder(dataclasses.replace(case, make=functools.partial(case.make, **rates)), tmp_path)
    module.set_attn_implementation("eager")
    model, _ = from_pretrained(tmp_path)
    with torch.no_grad():
        without = case.run(module, case.inputs).numpy()
        expected = case.run(module.train(), case.inputs).numpy()
    assert np.abs(expected - without).max() > 0.01

    @eqx.filter_jit
    def run(model, inputs):
        keyed = functools.partial(model, key=jax.random.key(0))
        return jax.vmap(lambda row: case.call(keyed, row))(inputs)

    assert_equal(case, np.asarray(run(model, jax.tree.map(jnp.asarray, case.inputs))), expected)


@pytest.mark.parametrize(("name", "key"), [("falcon", "attention_dropout"), ("stablelm", "hidden_dropout")])
def test_dropouts_in_other_places_are_refused(name, key, tmp_path):
    case = BY_NAME[name]
    torch_folder(dataclasses.replace(case, make=functools.partial(case.make, **{key: 0.1})), tmp_path)
    with pytest.raises(ValueError, match=f"`{key}`: expected 0.0"):
        from_pretrained(tmp_path)
