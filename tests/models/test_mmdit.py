"""Stable Diffusion 3's transformer: behavior beyond parity of outputs."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx._tree import is_array_like, named_leaves
from redeqx.models.hf import ConfigReader
from redeqx.models.mmdit import MMDiT, MMDiTConfig, positions_of
from tests.models.families import mmdit
from tests.models.families._case import random_model

# Only in the sweep: `make test` compares the family's outputs with diffusers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = dataclasses.replace(mmdit.CONFIG, n_layers=3)


@pytest.mark.parametrize(
    ("config", "n"),
    [
        (MMDiTConfig.of("sd3-medium"), 2_028_328_000),
        (MMDiTConfig.of("sd3.5-medium"), 2_243_171_520),
        (MMDiTConfig.of("sd3.5-large"), 8_056_627_520),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, n):
    """Without positions, which are constants."""
    shapes = eqx.filter_eval_shape(MMDiT, config, key=jax.random.key(0))
    sizes = {name: leaf.size for name, leaf in named_leaves(shapes).items() if is_array_like(leaf)}
    assert sizes.pop("positions") == config.max_patches**2 * config.d_model
    assert sum(sizes.values()) == n


def test_equal_blocks_are_one_stack():
    assert MMDiTConfig.of("sd3.5-medium").runs == ((13, True, False), (10, False, False), (1, False, True))
    config = dataclasses.replace(CONFIG, n_layers=5, dual_layers=(1, 4))
    assert config.runs == ((1, False, False), (1, True, False), (2, False, False), (1, True, True))
    names = {name for tensor in MMDiT.weight_map(config).tensors for name in tensor.on_disk}
    assert {f"transformer_blocks.{i}.attn.to_q.weight" for i in range(5)} <= names
    assert {name for name in names if "attn2.to_v.weight" in name} == {
        f"transformer_blocks.{i}.attn2.to_v.weight" for i in (1, 4)
    }
    leaves = {name for name, leaf in named_leaves(random_model(MMDiT, config)).items() if is_array_like(leaf)}
    assert {leaf for tensor in MMDiT.weight_map(config).tensors for leaf in tensor.leaves} == leaves


def test_positions_are_sines_and_cosines_of_column_and_row():
    table = positions_of(dataclasses.replace(CONFIG, max_patches=6)).reshape(6, 6, 32)
    row, column, spacing = 2, 5, (8 // 2) / 6
    for start, place in ((0, column), (16, row)):
        angles = place * spacing / 10000 ** (np.arange(8) / 8)
        np.testing.assert_allclose(table[row, column, start : start + 8], np.sin(angles), atol=1e-6)
        np.testing.assert_allclose(table[row, column, start + 8 : start + 16], np.cos(angles), atol=1e-6)


def test_a_new_model_begins_as_the_identity_and_positions_have_no_gradient():
    model = MMDiT(CONFIG, key=jax.random.key(0))
    row = {name: value for name, value in mmdit.example().items() if name != "noise"}
    other = row | {"context": 2 * row["context"], "pooled": row["pooled"] + 1, "timestep": row["timestep"] / 2}
    call = eqx.filter_jit(lambda model, row: model(**row))
    np.testing.assert_allclose(call(model, row), call(model, other), rtol=0, atol=1e-6)
    assert np.abs(call(model, row | {"sample": -row["sample"]}) - call(model, row)).max() > 1e-3

    random = random_model(MMDiT, CONFIG)
    remat = eqx.filter_eval_shape(MMDiT, dataclasses.replace(CONFIG, remat=True), key=jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(random, eqx.is_array))
    arrays, rest = eqx.partition(remat, is_array_like)
    remat = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), rest)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, row: jnp.square(model(**row)).sum()))
    found, again = (named_leaves(gradient(model, row)) for model in (random, remat))
    assert not np.any(found.pop("positions"))
    # What the text asks in the last block is not used: only the patches' output is needed there.
    zero = {name for name, leaf in found.items() if leaf is not None and not np.any(leaf)}
    assert zero == {f"runs.2.blocks.context_attn.{name}" for name in ("query.weight", "query.bias", "query_norm.weight")}
    for name, leaf in found.items():
        if leaf is None:
            continue
        np.testing.assert_allclose(leaf, again[name], rtol=1e-3, atol=1e-4 * np.abs(leaf).max())


def test_the_plan_follows_the_two_rules():
    (training,) = mmdit.TRAININGS
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    batch = {name: np.stack([row[name] for row in training.examples]) for name in training.examples[0]}
    leaves = deployer.plan(eqx.filter_eval_shape(training.make, jax.random.key(0)), training.loss_fn, batch).leaves
    columns, rows = P(None, "model", None), P(None, None, "model")
    for run in range(2):
        for name, spec in {
            **dict.fromkeys(("attn.query", "attn.key", "attn.value", "context_attn.query", "context_attn.key"), columns),
            "context_attn.value": columns,
            "attn.output": rows,
            "ff.up": columns,
            "ff.down": rows,
            **({} if run == 1 else {"context_attn.output": rows, "ff_context.up": columns, "ff_context.down": rows}),
            **({} if run else {"attn2.query": columns, "attn2.value": columns, "attn2.output": rows}),
        }.items():
            assert leaves[f"runs.{run}.blocks.{name}.weight"].spec == spec, f"{run}: {name}"


def test_checks_the_shape_of_latents():
    model = random_model(MMDiT, CONFIG)
    for shape in ((4, 7, 8), (4, 8, 10), (4, 0, 8)):
        with pytest.raises(ValueError, match=r"`sample`: expected a height and width .* `patch_size`=2, of at most 8, got"):
            model(jnp.zeros(shape), 5.0, jnp.zeros((3, 12)), jnp.zeros(16))


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MMDiTConfig(), CONFIG, MMDiTConfig.of("sd3-medium"), MMDiTConfig.of("sd3.5-large")])
def test_config_round_trip(config):
    fields = config.to_hf()
    assert fields["_class_name"] == "SD3Transformer2DModel"
    assert fields["caption_projection_dim"] == config.d_model
    assert MMDiTConfig.from_hf(ConfigReader(fields)) == config


def test_absent_keys_get_the_defaults_of_diffusers():
    assert MMDiTConfig.from_hf(ConfigReader({})) == MMDiTConfig()
    assert MMDiTConfig.from_hf(ConfigReader({"out_channels": None, "in_channels": 5})).out_channels == 5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qk_norm", "layer_norm", "`qk_norm`: expected None or 'rms_norm', .* got 'layer_norm'"),
        ("caption_projection_dim", 1000, "`caption_projection_dim`: expected 1152, .* got 1000"),
        ("dual_attention_layers", [18], r"`dual_attention_layers`: expected indices below `num_layers`=18, got \(18,\)"),
        ("dual_attention_layers", [-1], "`dual_attention_layers`: expected a whole number from 0"),
        ("pos_embed_max_size", None, None),
        ("num_layers", 10**6, "`num_layers`: expected at most"),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    if message is None:  # as absent
        assert MMDiTConfig.from_hf(ConfigReader({key: value})) == MMDiTConfig()
        return
    with pytest.raises((ValueError, TypeError), match=message):
        MMDiTConfig.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_heads": 3, "head_size": 2}, "`n_heads`: expected a width `n_heads * head_size` that 4 divides, got 6"),
        ({"head_norm": "layer"}, "`head_norm`: expected None or 'rms_norm', got 'layer'"),
        ({"patch_size": 0}, "`patch_size`: expected at least 1, got 0"),
        (
            {"max_patches": 2**20},
            "`max_patches`: expected positions of at most 2147483648 numbers, got 1048576**2 vectors of",
        ),
        ({"patch_size": 2**20}, "`sample_size`: expected at least `patch_size`=1048576, got"),
    ],
)
def test_rejects_a_wrong_config(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CONFIG, **fields)
