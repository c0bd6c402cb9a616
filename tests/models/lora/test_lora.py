"""Adapters on users' models and on ours: the function, training, meshes, folders. `test_lora_parity.py` compares with
`peft`."""

import contextlib
import dataclasses
import json
import re
import shutil
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx._origins import CHANGED, set_origin
from redeqx.compiled import Module, collectives
from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.lora import LoraLinear
from redeqx.models.mistral import Mixtral, MixtralConfig
from redeqx.models.qwen_next import Qwen3Next, Qwen3NextConfig
from redeqx.models.vit import ViTConfig, ViTForImageClassification
from redeqx.partition import place
from redeqx.steps import Structure
from tests._tree import drawn, named_leaves

KEY = jax.random.key(0)
CONFIG = GPT2Config(vocab_size=48, n_positions=16, d_model=32, n_layers=2, n_heads=4).without_dropout()
IDS = jnp.array([5, 0, 47, 7, 7, 31, 2, 9])


class Residual(eqx.Module):
    """A user's model: layers under `vmap`, an attention, a custom stack, and "scalar" sizes."""

    inner: eqx.nn.MLP
    attention: eqx.nn.MultiheadAttention
    stacked: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, 4)
        self.inner = eqx.nn.MLP(8, 8, 16, 1, use_final_bias=False, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(keys[2], 3))
        self.head = eqx.nn.Linear(8, "scalar", key=keys[3])

    def __call__(self, x):
        x = x + jax.vmap(self.inner)(x)
        x = x + self.attention(x, x, x)
        arrays, static = eqx.partition(self.stacked, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (x + jax.vmap(eqx.combine(layer, static))(x), None), x, arrays)
        return jax.vmap(self.head)(x)


X = jax.random.normal(jax.random.key(9), (5, 8))


def shapes(make, *args):
    return eqx.filter_eval_shape(lambda key: make(*args, key=key), KEY)


@pytest.fixture(scope="module")
def gpt2():
    return drawn(shapes(GPT2, CONFIG), 0.3)


@pytest.fixture(scope="module")
def residual():
    return drawn(shapes(Residual), 0.3)


def filled(model, seed=0):
    """Returns the model with random values in all entries of its adapters."""
    rng = np.random.default_rng(seed)

    def fill(is_adapter, leaf):
        return jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype) if is_adapter else leaf

    return jax.tree.map(fill, lora.trainable(model), model)


def arrays(model):
    return {name: leaf for name, leaf in named_leaves(model).items() if eqx.is_array(leaf)}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for name, leaf in arrays(expected).items():
        assert arrays(found)[name].dtype == leaf.dtype, name
        np.testing.assert_array_equal(arrays(found)[name], leaf, err_msg=name)


@eqx.filter_jit
def run(model, x):
    return model(x)


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_size", [6, "scalar"])
@pytest.mark.parametrize("out_size", [4, "scalar"])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.sweep
def test_a_layer_adds_the_scaled_product_to_its_weight(in_size, out_size, use_bias):
    layer = eqx.nn.Linear(in_size, out_size, use_bias=use_bias, key=KEY)
    new = lora.add(layer, rank=3, alpha=5, where="*", key=KEY)
    assert type(new) is LoraLinear and new.scale == 5 / 3 and not new.lora_b.any()
    new = filled(new)
    x = jax.random.normal(KEY, (2, 7) if in_size == "scalar" else (2, 7, 6))
    rows = x[..., None] if in_size == "scalar" else x
    expected = rows @ (layer.weight + 5 / 3 * new.lora_b @ new.lora_a).T + (layer.bias if use_bias else 0)
    expected = expected[..., 0] if out_size == "scalar" else expected
    np.testing.assert_allclose(new(x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.vmap(new))(x), expected, rtol=1e-5, atol=1e-5)
    assert_same(eqx.tree_at(lambda l: l.weight, lora.merge(new), layer.weight), layer)
    np.testing.assert_allclose(jax.vmap(jax.vmap(lora.merge(new)))(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["residual", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_new_adapters_change_nothing_and_trained_ones_can_be_merged(name, request):
    base, x = request.getfixturevalue(name), X if name == "residual" else IDS
    model = lora.add(base, rank=2, where="*", key=KEY)
    before = run(base, x)
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=1e-5)
    model = filled(model)
    after = run(model, x)
    assert np.abs(after - before).max() > 0.1
    merged = lora.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(run(merged, x), after, rtol=1e-4, atol=1e-4)


def test_adapters_are_initialized_as_in_peft(residual):
    model = lora.add(residual, rank=4, where=["stacked", "inner.*"], key=KEY)
    drawn = {name: leaf for name, leaf in arrays(model).items() if name.endswith("lora_a")}
    assert {name: leaf.shape for name, leaf in drawn.items()} == {
        "inner.layers.0.lora_a": (4, 8),
        "inner.layers.1.lora_a": (4, 16),
        "stacked.lora_a": (3, 4, 8),
    }
    for leaf in drawn.values():
        bound = leaf.shape[-1] ** -0.5
        assert 0.85 * bound < np.abs(leaf).max() <= bound and leaf.min() < -0.8 * bound
    assert len({float(leaf[..., 0, 0].ravel()[0]) for leaf in drawn.values()}) == 3
    assert model.stacked.lora_b.shape == (3, 8, 4)
    assert not np.allclose(model.stacked.lora_a[0], model.stacked.lora_a[1])


def test_where_accepts_globs_and_a_function(residual):
    def adapted(where):
        names = arrays(lora.add(residual, rank=1, where=where, key=KEY))
        return {name.removesuffix(".lora_a") for name in names if name.endswith(".lora_a")}

    assert adapted("*query*") == {"attention.query_proj"}
    assert adapted(("*.layers.0", "head")) == {"inner.layers.0", "head"}
    assert adapted(lambda path, layer: layer.in_features == 16) == {"inner.layers.1"}


def test_a_second_call_adapts_further_layers_with_another_rank(residual):
    model = lora.add(residual, rank=2, where="head", key=KEY)
    model = lora.add(model, rank=5, alpha=1, where="inner.*", key=KEY)
    assert (model.head.lora_a.shape, model.inner.layers[0].lora_a.shape) == ((2, 8), (5, 8))
    assert (model.head.scale, model.inner.layers[0].scale) == (1.0, 0.2)


def test_add_works_on_abstract_models_and_under_jit(residual):
    def add(model):
        return lora.add(model, rank=2, where="*", key=KEY)

    assert jax.tree.structure(eqx.filter_eval_shape(add, shapes(Residual))) == jax.tree.structure(add(residual))
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    made = deployer.init(lambda: add(eqx.nn.MLP(8, 8, 16, 1, key=KEY)))
    assert made.layers[0].lora_b.sharding.mesh == deployer.mesh


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_adapters_of_16_bit_weights_are_float32(dtype):
    """Small updates would be rounded away. Outputs and merged weights keep the 16 bits."""
    layer = eqx.nn.Linear(8, 4, dtype=dtype, key=KEY)
    adapted = lora.add([layer], rank=2, where="*", key=KEY)[0]
    assert adapted.lora_a.dtype == adapted.lora_b.dtype == jnp.float32
    assert adapted(jnp.ones(8, dtype)).dtype == lora.merge([adapted])[0].weight.dtype == dtype


@pytest.mark.parametrize("base", [jnp.float32, jnp.bfloat16])
@pytest.mark.sweep
def test_dtypes(base, gpt2):
    """Adapters of a 16-bit base are float32, and its activations keep their dtype; if all is cast, all is 16-bit."""
    cast = lambda model, dtype: jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, model)  # noqa: E731
    model = filled(lora.add(cast(gpt2, base), rank=2, where="*", key=KEY))
    assert {arrays(model)[f"stack.blocks.mlp.up.lora_{which}"].dtype for which in "ab"} == {jnp.dtype(jnp.float32)}
    logits = run(model, IDS)
    assert logits.dtype == base
    merged = lora.merge(model)
    assert merged.stack.blocks.mlp.up.weight.dtype == base
    scale = float(np.abs(logits).max())
    np.testing.assert_allclose(
        run(merged, IDS), logits.astype(np.float32), atol=scale * (1e-5 if base == jnp.float32 else 0.1)
    )
    structure = Structure.of(model, lora.trainable(model))
    computed = structure.put(*structure.take(model), compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in arrays(computed).values()} == {jnp.dtype(jnp.bfloat16)}
    assert run(computed, IDS).dtype == jnp.bfloat16


@pytest.mark.sweep
def test_remat_changes_no_gradient(gpt2):
    @eqx.filter_jit
    def gradient(model):
        model = filled(lora.add(model, rank=2, where="*", key=KEY))
        params, frozen = eqx.partition(model, lora.trainable(model))
        return jax.grad(lambda params: jnp.mean(eqx.combine(params, frozen)(IDS) ** 2))(params)

    remat = drawn(shapes(GPT2, dataclasses.replace(CONFIG, remat=True)), 0.3)
    for found, expected in zip(*(jax.tree.leaves(gradient(model)) for model in (remat, gpt2)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert np.abs(expected).max() > 0


# --- what is refused ----------------------------------------------------------------------------------------------------


def message(fn, *args, **kwargs):
    with pytest.raises(ValueError) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


def test_errors_of_add(residual, gpt2):
    add = lambda model, **kwargs: message(lora.add, model, **{"rank": 2, "where": "*", "key": KEY, **kwargs})  # noqa: E731
    assert add(residual, rank=0) == "`rank`: expected at least 1, got 0. Pass a positive rank."
    text = add(gpt2, where=["*.up", "*.atention.query"])
    assert text.startswith(
        "`where`: expected the path of a linear layer, got '*.atention.query'. Did you mean `stack.blocks.attention.query`? "
        "The model's linear layers: stack.blocks.attention.query, stack.blocks.attention.key, "
    )
    assert add(residual, where=lambda path, layer: False).startswith(
        "`where`: expected a function that selects linear layers, got none. The model's linear layers: inner.layers.0, "
    )
    assert add(eqx.nn.LayerNorm(3)).endswith("got '*'. The model's linear layers: none.")
    text = add(lora.add(residual, rank=3, where="head", key=KEY))
    assert text == (
        "`head`: expected a layer without an adapter, got one of rank 3. Leave it out, or `lora.merge` the model first."
    )
    assert add([eqx.nn.Linear(2, 2, key=KEY)] * 12, where="x").endswith("8, 9, and 2 more.")


def test_layers_of_other_classes_are_not_adapted():
    class Noisy(eqx.nn.Linear):
        pass

    model = [Noisy(3, 3, key=KEY), eqx.nn.Linear(3, 3, key=KEY)]
    model = lora.add(model, rank=1, where="*", key=KEY)
    assert [type(layer) for layer in model] == [Noisy, LoraLinear]


@pytest.mark.parametrize("fn", [lora.merge, lora.trainable, lambda model: lora.save_adapter(model, "unused")])
def test_a_model_without_adapters_is_refused(fn, residual):
    assert message(fn, residual) == "`model`: expected adapted layers, got none. Add adapters with `lora.add` first."


# --- training -----------------------------------------------------------------------------------------------------------


def test_trainable_selects_adapters_and_named_leaves(residual):
    model = lora.add(residual, rank=1, where=["inner.*", "head"], key=KEY)
    adapters = {f"{path}.lora_{which}" for path in ("inner.layers.0", "inner.layers.1", "head") for which in "ab"}

    def marked(**kwargs):
        return {name for name, mark in named_leaves(lora.trainable(model, **kwargs)).items() if mark}

    assert marked() == adapters
    assert marked(also="head.*") == adapters | {"head.weight", "head.bias"}
    assert marked(also=["stacked.bias", "*.query_proj.*"]) == adapters | {"stacked.bias", "attention.query_proj.weight"}
    text = message(lora.trainable, model, also="attention.query_proj.wieght")
    assert text == (
        "`also`: expected a path of the model, got 'attention.query_proj.wieght'. "
        "Did you mean `attention.query_proj.weight`?"
    )


EXAMPLES = list(np.random.default_rng(0).integers(0, 48, (16, 9)).astype(np.int32))
WHERE = ("*.query", "*.output", "*.up", "*.down")


def loss_fn(model, batch, key):
    logits = jax.vmap(lambda ids: model(ids))(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch[:, 1:]).mean()


class Log:
    def __init__(self, stop_at=None):
        self.losses, self.stop_at = [], stop_at

    def log(self, metrics, step):
        if step == self.stop_at:
            raise InterruptedError
        self.losses.append(metrics["loss"])


def trainer_of(base, n_model_shards, n_fsdp_shards, *, log=None, rank=16, optimizer=None, adapted=True, **kwargs):
    deployer = redeqx.Deployer(0, n_model_shards, n_fsdp_shards, verbose=False, loggers=[log or Log()], **kwargs)
    model = lora.add(base, rank=rank, alpha=32, where=WHERE, key=KEY) if adapted else base
    return redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optimizer or optax.sgd(0.2, momentum=0.9),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        **({"trainable": lora.trainable(model)} if adapted else {}),
    )


def fit(trainer, n_epochs=6):
    saving = {} if trainer.deployer.workdir is None else {"save_every_n_steps": 2}
    trainer.fit(EXAMPLES, 8 // trainer.deployer.n_batch_shards, n_epochs, **saving)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains on (data=2, fsdp=2, model=2): the base, the trainer after 12 steps, and its losses."""
    config = dataclasses.replace(CONFIG, d_model=64)
    base = eqx.filter_jit(GPT2)(config, key=KEY)
    log = Log()
    trainer = trainer_of(base, 2, 2, log=log, workdir=tmp_path_factory.mktemp("run"))
    fit(trainer)
    return base, trainer, log.losses


@pytest.mark.sweep
def test_training_on_a_mesh_equals_training_on_one_device(trained):
    base, trainer, losses = trained
    assert dict(trainer.deployer.mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "model": 2}
    assert losses[-1] < 0.95 * losses[0]
    log = Log()
    single = trainer_of(base, 1, 1, log=log)
    fit(single)
    np.testing.assert_allclose(losses, log.losses, rtol=1e-5)
    found, expected = arrays(trainer.model), arrays(single.model)
    changed = 0
    for name, leaf in expected.items():
        if ".lora_" in name:
            error = np.linalg.norm(np.asarray(found[name]) - np.asarray(leaf))
            assert error <= 1e-5 * np.linalg.norm(leaf) + 1e-7, name
            changed += bool(np.any(leaf))
        else:  # frozen: the same bits as before
            before = arrays(base)[name]
            assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes() == np.asarray(before).tobytes(), name
    assert changed == 2 * len(WHERE)


@pytest.mark.sweep
def test_only_adapters_have_an_optimizer_state_and_it_is_sharded_with_them(trained):
    _, trainer, _ = trained
    state = {name: leaf for name, leaf in arrays(trainer.opt_state).items() if leaf.ndim}
    assert len(state) == 2 * len(WHERE)
    for name, leaf in state.items():
        (owner,) = (path for path in trainer.plan.leaves if name.endswith(path))
        assert ".lora_" in owner and leaf.sharding.spec == trainer.plan[owner].spec


@pytest.mark.sweep
def test_adapters_are_split_as_their_layers(trained):
    _, trainer, _ = trained
    specs = {name: leaf.spec for name, leaf in trainer.plan.leaves.items() if ".lora_" in name}
    column, row = P(None, None, "model"), P(None, "model", None)
    blocks = "stack.blocks"
    assert specs == {  # the fsdp axis does not split leaves below 4096 entries
        f"{blocks}.attention.query.lora_a": P(None, None, None),
        f"{blocks}.attention.query.lora_b": row,
        f"{blocks}.attention.output.lora_a": column,
        f"{blocks}.attention.output.lora_b": P(None, None, None),
        f"{blocks}.mlp.up.lora_a": P(None, None, None),
        f"{blocks}.mlp.up.lora_b": P(None, "model", "fsdp"),
        f"{blocks}.mlp.down.lora_a": P(None, "fsdp", "model"),
        f"{blocks}.mlp.down.lora_b": P(None, None, None),
    }
    for name, leaf in arrays(trainer.model).items():
        assert leaf.sharding.spec == trainer.plan[name].spec


@pytest.mark.sweep
def test_a_run_that_was_killed_resumes_to_the_same_bits(trained, tmp_path):
    base, whole, _ = trained
    with pytest.raises(InterruptedError):
        fit(trainer_of(base, 2, 2, log=Log(stop_at=7), workdir=tmp_path))
    trainer = trainer_of(base, 2, 2, workdir=tmp_path)
    fit(trainer)
    for name, leaf in arrays(whole.model).items():
        assert np.asarray(arrays(trainer.model)[name]).tobytes() == np.asarray(leaf).tobytes(), name


@pytest.mark.sweep
def test_adapters_add_small_all_reduces_and_no_other_collective_over_the_model_axis():
    """Only for layers whose weight contracts split features: `rank` numbers per token, where the layer itself sends `d`."""
    base = drawn(shapes(GPT2, CONFIG), 0.1)
    rank, rows = 3, 4

    def forward(adapted):
        deployer = redeqx.Deployer(0, 4, verbose=False)
        model = lora.add(base, rank=rank, where=WHERE, key=KEY) if adapted else base
        plan = deployer.plan(model, lambda model, ids, key: jax.vmap(model)(ids).sum(), jnp.zeros((rows, 8), jnp.int32))
        params, static = eqx.partition(place(model, plan), eqx.is_array)
        step = jax.jit(lambda params, ids: jax.vmap(eqx.combine(params, static))(ids))
        ids = jnp.zeros((rows, 8), jnp.int32)
        return collectives(Module.of(step.lower(params, ids).compile().as_text()))

    plain, adapted = ([(c.kind, c.shape) for c in forward(a) for _ in range(c.n_executions)] for a in (False, True))
    extra = list(adapted)
    for collective in plain:
        extra.remove(collective)
    assert all(kind == "all-reduce" and np.prod(shape) == rows * 8 * rank for kind, shape in extra), extra
    assert len(extra) == 2 * CONFIG.n_layers  # for output and down


# --- folders ------------------------------------------------------------------------------------------------------------


def read(folder):
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def test_the_folder_of_a_users_model(residual, tmp_path):
    model = filled(lora.add(residual, rank=2, alpha=3, where="*", key=KEY))
    assert lora.save_adapter(model, tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    config, tensors = read(tmp_path / "new" / "folder")
    assert config == {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["0", "1", "head", "key_proj", "output_proj", "query_proj", "stacked", "value_proj"],
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    assert {name: tensor.shape for name, tensor in tensors.items() if "stacked" in name or "query" in name} == {
        "base_model.model.attention.query_proj.lora_A.weight": (2, 8),
        "base_model.model.attention.query_proj.lora_B.weight": (8, 2),
        "base_model.model.stacked.lora_A.weight": (3, 2, 8),
        "base_model.model.stacked.lora_B.weight": (3, 8, 2),
    }
    assert_same(lora.load_adapter(residual, tmp_path / "new" / "folder"), model)


@pytest.mark.sweep
def test_different_ranks_and_scales_are_saved_as_patterns(gpt2, residual, tmp_path):
    model = lora.add(residual, rank=2, alpha=2, where="attention.*", key=KEY)
    model = filled(lora.add(lora.add(model, rank=3, alpha=2, where="head", key=KEY), rank=2, where="inner.*", key=KEY))
    lora.save_adapter(model, tmp_path)
    config, _ = read(tmp_path)
    assert (config["r"], config["lora_alpha"]) == (2, 2)
    assert config["rank_pattern"]["head"] == 3 and config["rank_pattern"]["inner\\.layers\\.0"] == 2
    assert config["target_modules"] == [
        "0", "1", "head", "key_proj", "output_proj", "query_proj", "value_proj"
    ]  # fmt: skip
    assert_same(lora.load_adapter(residual, tmp_path), model)

    model = lora.add(gpt2, rank=2, alpha=1, where="*.attention.output", key=KEY)
    model = filled(lora.add(model, rank=3, alpha=2, where="*.down", key=KEY))
    lora.save_adapter(model, tmp_path)
    config, tensors = read(tmp_path)
    assert config["rank_pattern"] == {
        "transformer\\.h\\.\\d+\\.attn\\.c_proj": 2,
        "transformer\\.h\\.\\d+\\.mlp\\.c_proj": 3,
    }
    assert config["alpha_pattern"] == {
        "transformer\\.h\\.\\d+\\.attn\\.c_proj": 1,
        "transformer\\.h\\.\\d+\\.mlp\\.c_proj": 2,
    }
    assert config["target_modules"] == ["c_proj"] and config["fan_in_fan_out"]
    assert len(tensors) == 8
    assert_same(lora.load_adapter(gpt2, tmp_path), model)


@pytest.mark.parametrize("where", ["*.query", ("*.query", "*.value"), ("*.query", "*.key", "*.value")])
def test_layers_stored_as_one_module_round_trip(where, gpt2, tmp_path):
    model = filled(lora.add(gpt2, rank=2, alpha=3, where=where, key=KEY))
    lora.save_adapter(model, tmp_path, base="gpt2")
    config, tensors = read(tmp_path)
    n = 1 if isinstance(where, str) else len(where)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2 * n, 3 * n, ["c_attn"])
    assert config["base_model_name_or_path"] == "gpt2"
    a, b = (tensors[f"base_model.model.transformer.h.1.attn.c_attn.lora_{which}.weight"] for which in "AB")
    assert (a.shape, b.shape) == ((2 * n, 32), (96, 2 * n))
    attention = model.stack.blocks.attention
    np.testing.assert_array_equal(a[:2], attention.query.lora_a[1])
    np.testing.assert_array_equal(b[:32, :2], attention.query.lora_b[1])
    assert not b[32:, :2].any() and not b[:32, 2:].any()
    assert_same(lora.load_adapter(gpt2, tmp_path), model)


@pytest.mark.parametrize("is_one_a", [False, True])
def test_layers_stored_as_one_module_keep_their_scales(is_one_a, gpt2, tmp_path):
    """As PEFT computes it from the folder: `alpha / r * B @ A`."""
    model = lora.add(gpt2, rank=2, alpha=1, where="*.query", key=KEY)
    model = filled(lora.add(model, rank=2, alpha=8, where="*.value", key=jax.random.key(1)))
    if is_one_a:
        attention = model.stack.blocks.attention
        model = eqx.tree_at(lambda m: m.stack.blocks.attention.value.lora_a, model, attention.query.lora_a)
    lora.save_adapter(model, tmp_path)
    config, tensors = read(tmp_path)
    attention, scale = model.stack.blocks.attention, config["lora_alpha"] / config["r"]
    for i in range(CONFIG.n_layers):
        a, b = (tensors[f"base_model.model.transformer.h.{i}.attn.c_attn.lora_{which}.weight"] for which in "AB")
        query, key, value = np.split(scale * b @ a, 3)
        np.testing.assert_allclose(query, 1 / 2 * attention.query.lora_b[i] @ attention.query.lora_a[i], rtol=1e-5)
        np.testing.assert_allclose(value, 8 / 2 * attention.value.lora_b[i] @ attention.value.lora_a[i], rtol=1e-5)
        assert not key.any()
    merged, wanted = (arrays(lora.merge(each)) for each in (lora.load_adapter(gpt2, tmp_path), model))
    for name, leaf in wanted.items():
        np.testing.assert_allclose(merged[name], leaf, rtol=1e-4, atol=1e-5, err_msg=name)


def test_layers_with_a_common_a_are_saved_as_one_adapter(gpt2, tmp_path):
    model = filled(lora.add(gpt2, rank=2, where=("*.query", "*.key", "*.value"), key=KEY))
    same = lambda m: (m.stack.blocks.attention.key.lora_a, m.stack.blocks.attention.value.lora_a)  # noqa: E731
    model = eqx.tree_at(same, model, (model.stack.blocks.attention.query.lora_a,) * 2)
    lora.save_adapter(model, tmp_path)
    config, tensors = read(tmp_path)
    assert config["r"] == 2
    assert tensors["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"].shape == (96, 2)
    assert_same(lora.load_adapter(gpt2, tmp_path), model)
    # A new one, whose `B` is zero, remains an adapter of all three.
    new = eqx.tree_at(
        lambda m: [getattr(m.stack.blocks.attention, role).lora_b for role in ("query", "key", "value")],
        model,
        replace_fn=jnp.zeros_like,
    )
    lora.save_adapter(new, tmp_path)
    assert_same(lora.load_adapter(gpt2, tmp_path), new)


@pytest.mark.sweep
def test_layers_of_a_stack_without_an_adapter_get_one_that_stays_zero(gpt2, tmp_path):
    lora.save_adapter(filled(lora.add(gpt2, rank=2, where="*.down", key=KEY)), tmp_path)
    _, tensors = read(tmp_path)
    kept = {name: tensor for name, tensor in tensors.items() if ".h.1." in name}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    model = lora.load_adapter(gpt2, tmp_path)
    down = model.stack.blocks.mlp.down
    assert not down.lora_a[0].any() and not down.lora_b[0].any() and down.lora_b[1].all()
    params, frozen = eqx.partition(model, lora.trainable(model))
    grads = eqx.filter_jit(jax.grad(lambda params: jnp.mean(eqx.combine(params, frozen)(IDS) ** 2)))(params)
    down = grads.stack.blocks.mlp.down
    assert not down.lora_a[0].any() and not down.lora_b[0].any() and down.lora_b[1].all() and down.lora_a[1].all()


@pytest.mark.sweep
def test_layers_of_several_kinds_are_saved_with_their_own_indices(tmp_path):
    config = Qwen3NextConfig(
        48, 16, d_model=16, n_layers=4, n_heads=2, head_size=8, mixer_layers=(0, 2), state_groups=2, state_heads=4,
        state_size=4, state_value_size=4, n_experts=2, n_chosen=1, d_expert=8, d_shared=8,
    )  # fmt: skip
    base = drawn(shapes(Qwen3Next, config), 0.3)
    model = filled(lora.add(base, rank=2, where=("*.mixer.value", "*.attention.gate"), key=KEY))
    lora.save_adapter(model, tmp_path)
    saved, tensors = read(tmp_path)
    assert saved["target_modules"] == ["in_proj_qkvz", "q_proj"]
    names = [f"{i}.{'self_attn.q_proj' if i % 2 else 'linear_attn.in_proj_qkvz'}" for i in range(4)]
    assert tensors.keys() == {f"base_model.model.model.layers.{name}.lora_{x}.weight" for name in names for x in "AB"}
    assert_same(lora.load_adapter(base, tmp_path), model)


@pytest.mark.sweep
def test_layers_of_a_vit_are_saved_with_module_names_and_load_with_file_names(tmp_path):
    config = ViTConfig(image_size=8, patch_size=4, d_model=16, d_ff=32, n_layers=2, n_heads=2, n_classes=3)
    base = drawn(shapes(ViTForImageClassification, config), 0.3)
    model = filled(lora.add(base, rank=2, where="*", key=KEY))
    lora.save_adapter(model, tmp_path)
    config, tensors = read(tmp_path)
    assert config["target_modules"] == ["classifier", "fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert_same(lora.load_adapter(base, tmp_path), model)
    older = {
        "layers.": "encoder.layer.",
        "o_proj": "output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    older |= {f".{name[0]}_proj": f".attention.{name}" for name in ("query", "key", "value")}

    def spelt(name):
        for new, old in older.items():
            name = name.replace(new, old)
        return name

    renamed = {spelt(name): tensor for name, tensor in tensors.items()}
    assert "base_model.model.vit.encoder.layer.1.attention.attention.query.lora_A.weight" in renamed
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    assert_same(lora.load_adapter(base, tmp_path), model)


@pytest.mark.sweep
def test_a_sharded_model_is_saved_completely(trained, tmp_path):
    base, trainer, _ = trained
    lora.save_adapter(trainer.model, tmp_path)
    again = lora.load_adapter(base, tmp_path)
    for name, leaf in arrays(trainer.model).items():
        np.testing.assert_array_equal(arrays(again)[name], leaf, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_adapters_of_16_bits_are_read_as_float32(dtype, gpt2, tmp_path):
    model = filled(lora.add(gpt2, rank=2, where="*.up", key=KEY))
    lora.save_adapter(jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, model), tmp_path)
    up = lora.load_adapter(gpt2, tmp_path).stack.blocks.mlp.up
    assert up.lora_a.dtype == up.lora_b.dtype == jnp.float32
    np.testing.assert_array_equal(up.lora_b, model.stack.blocks.mlp.up.lora_b.astype(dtype).astype(jnp.float32))


@pytest.fixture(scope="module")
def saved(gpt2, tmp_path_factory):
    model = filled(lora.add(gpt2, rank=2, where=("*.up", "*.down"), key=KEY))
    return lora.save_adapter(model, tmp_path_factory.mktemp("saved"), base="some/base")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("peft_type", "IA3", "LORA"),
        ("peft_type", None, "LORA"),
        ("bias", "lora_only", "none"),
        ("init_lora_weights", "pissa_niter_4", "one that does not change the base"),
        ("lora_bias", True, "none"),
        ("target_parameters", ["mlp.up"], "those of this model's experts"),
        ("layer_replication", [[0, 2]], "none"),
        ("trainable_token_indices", [3], "none"),
    ],
)
def test_unsupported_options_are_refused_with_key_and_value(key, value, expected, gpt2, folder):
    edit(folder, **{key: value})
    assert message(lora.load_adapter, gpt2, folder) == (
        f"`{folder}/adapter_config.json`: `{key}`: expected {expected}, which is implemented, got {value!r}. "
        "Merge the adapter with PEFT (`merge_and_unload`) and load the merged model."
    )


def test_keys_without_effect_are_ignored(gpt2, folder):
    before = lora.load_adapter(gpt2, folder)
    edit(folder, lora_dropout=0.0, init_lora_weights="gaussian", use_dora=False, modules_to_save=None, loftq_config={})
    assert_same(lora.load_adapter(gpt2, folder), before)


def test_rank_stabilised_scales_and_patterns_are_read(gpt2, folder):
    edit(folder, lora_alpha=6, use_rslora=True, alpha_pattern={"c_proj": 4}, rank_pattern={r"mlp\.c_fc": 2, "nothing": 9})
    mlp = lora.load_adapter(gpt2, folder).stack.blocks.mlp
    assert (mlp.up.scale, mlp.down.scale) == (6 / 2**0.5, 4 / 2**0.5)


def test_layers_of_a_stack_keep_their_scales(gpt2, folder):
    """As PEFT computes it from the folder: `alpha / r * B @ A`, with a separate `alpha` for the second layer."""
    edit(folder, lora_alpha=1, alpha_pattern={r"h\.1\.mlp\.c_fc": 6})
    _, tensors = read(folder)
    merged = lora.merge(lora.load_adapter(gpt2, folder)).stack.blocks.mlp.up.weight
    for i, alpha in enumerate((1, 6)):
        a, b = (tensors[f"base_model.model.transformer.h.{i}.mlp.c_fc.lora_{which}.weight"] for which in "AB")
        np.testing.assert_allclose(merged[i], gpt2.stack.blocks.mlp.up.weight[i] + alpha / 2 * b @ a, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
def test_the_error_for_an_adapter_of_another_base_names_the_differences(gpt2, residual, folder):
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    wide = shapes(GPT2, dataclasses.replace(CONFIG, d_model=48))
    head = f"`{weights}`: expected adapters of this GPT2, as `{config}` describes them, got "
    text = message(lora.load_adapter, wide, folder)
    up = "base_model.model.transformer.h.0.mlp.c_fc"
    assert text.startswith(head + "8 that do not match:\n")
    assert f"  - `{up}.lora_A.weight`: expected (2, 48), got (2, 32).\n" in text
    assert f"  - `{up}.lora_B.weight`: expected (192, 2), got (128, 2).\n" in text
    assert text.endswith("\nLoad it over the model that it was trained on, 'some/base'.")

    shallow = shapes(GPT2, dataclasses.replace(CONFIG, n_layers=1))
    text = message(lora.load_adapter, shallow, folder)
    assert text.startswith(head + "2 that do not match:\n")
    assert (
        "  - `base_model.model.transformer.h.1.mlp.c_fc`: expected the name of a layer of this model. "
        "Did you mean `transformer.h.0.mlp.c_fc`?\n"
    ) in text
    assert "`base_model.model.transformer.h.1.mlp.c_fc`: expected the name of a" in message(
        lora.load_adapter, residual, folder
    )

    tensors = load_file(weights)
    del tensors[f"{up}.lora_A.weight"]
    save_file({**tensors, "base_model.model.transformer.wte.lora_C": np.ones((2, 48))}, weights)
    text = message(lora.load_adapter, gpt2, folder)
    assert f"  - `{up}.lora_A.weight`: expected (2, 32), got none.\n" in text
    assert (
        "  - `base_model.model.transformer.wte.lora_C`: expected `base_model.model.<module>.lora_A.weight` or "
        "`.lora_B.weight`, got (2, 48).\n"
    ) in text
    save_file({}, weights)
    assert message(lora.load_adapter, gpt2, folder) == (
        head + "none.\nLoad it over the model that it was trained on, 'some/base'."
    )


def test_the_rank_of_the_config_must_match_the_tensors(gpt2, folder):
    edit(folder, r=4)
    assert "c_fc.lora_A.weight`: expected (4, 32), got (2, 32)." in message(lora.load_adapter, gpt2, folder)
    edit(folder, r=0)
    assert "`r`: expected a number from 1 to 2**31, got 0. Correct the file." in message(lora.load_adapter, gpt2, folder)


def test_base_weights_in_the_folder_must_match_the_model(tmp_path):
    base = drawn(shapes(GPT2, dataclasses.replace(CONFIG, is_tied=False)), 0.3)
    model = filled(lora.add(base, rank=2, where=("head", "*.query"), key=KEY))
    lora.save_adapter(model, tmp_path)
    weights, prefix = tmp_path / "adapter_model.safetensors", "base_model.model"
    tensors = {
        **load_file(weights),
        f"{prefix}.lm_head.base_layer.weight": np.asarray(base.head.weight),
        f"{prefix}.transformer.h.1.mlp.c_fc.base_layer.weight": np.asarray(base.stack.blocks.mlp.up.weight[1].T).copy(),
        f"{prefix}.transformer.h.1.mlp.c_fc.base_layer.bias": np.asarray(base.stack.blocks.mlp.up.bias[1]),
    }
    save_file(tensors, weights)
    assert_same(lora.load_adapter(base, tmp_path), model)
    tensors[f"{prefix}.lm_head.base_layer.weight"] = tensors[f"{prefix}.lm_head.base_layer.weight"] + 1
    save_file(tensors, weights)
    assert (
        f"`{prefix}.lm_head.base_layer.weight`: expected the values that this model has, got others, of shape (48, 32)."
    ) in message(lora.load_adapter, base, tmp_path)


def test_invalid_folders(gpt2, folder, tmp_path):
    assert message(lora.load_adapter, gpt2, tmp_path / "nowhere") == (
        f"`{tmp_path}/nowhere/adapter_config.json`: expected a file, got none. Pass the folder that PEFT's "
        "`save_pretrained` or `save_adapter` wrote; one of the Hub has to be downloaded first."
    )
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "got adapter_model.bin. Convert it with its own library" in message(lora.load_adapter, gpt2, folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "expected a JSON object, got list." in message(lora.load_adapter, gpt2, folder)
    (folder / "adapter_config.json").write_text("{")
    assert "expected JSON, got " in message(lora.load_adapter, gpt2, folder)


@pytest.mark.parametrize(
    "change",
    [
        {"r": [8]},
        {"r": "8"},
        {"r": 1e400},
        {"r": 10**400},
        {"rank_pattern": {"c_fc": "x"}},
        {"rank_pattern": [1]},
        {"rank_pattern": {"(": 3}},
        {"rank_pattern": {"(a+)+$": 2}},
        {"alpha_pattern": {"c_fc": [1]}},
        {"alpha_pattern": {"c_fc": None}},
        {"lora_alpha": {}},
        {"lora_alpha": "8"},
        {"lora_alpha": float("nan")},
        {"use_rslora": "yes"},
        {"bias": ["none"]},
        {"bias": {"none": 1}},
        {"init_lora_weights": [[]]},
        {"init_lora_weights": {}},
        {"peft_type": ["LORA"] * 10**4},
        {"use_dora": "x" * 10**5},
        {"fan_in_fan_out": [True]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_config_with_any_value_gives_a_short_error_or_loads(change, gpt2, folder):
    edit(folder, **change)
    try:
        lora.load_adapter(gpt2, folder)
    except (ValueError, TypeError) as error:
        assert str(folder) in str(error) and len(str(error)) < 1000


PATTERNS = [
    "c_fc", r"mlp\.c_fc", "mlp.c_fc", r"h\.\d+\.mlp\.c_fc", r"^h.0.mlp.c_fc$", r"^transformer.h.1.*", "(c_fc|c_attn)", ".*",
    "c_fc|c_proj", r"transformer\.h\.[12]\..*", r"c_[^a]+", r"h\.\d{2,}.*", r"\w{4}", "fc", "c_fc.", "(?:c_)?fc",
    r"mlp\.(|x)c_fc", "h.1.*?c", "h.1.*?c_fc", r".*h\.(0|1)\..*\.(c_fc|c_attn)", "(?:h|x).(?:0|2).mlp.*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_regular_expressions_do_in_peft(pattern, gpt2, folder):
    names = [f"transformer.h.{i}.mlp.{name}" for i in (0, 1) for name in ("c_fc", "c_proj")]
    matched = [name for name in names if re.match(rf"(.*\.)?({pattern})$", name)]
    edit(folder, rank_pattern={pattern: 3})  # the tensors have rank 2
    text = message(lora.load_adapter, gpt2, folder) if matched else str(lora.load_adapter(gpt2, folder))
    assert [name for name in names if f"{name}.lora_A" in text] == matched


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("rank_pattern", "(a+)+$"),
        ("alpha_pattern", "(a|aa)+x"),
        ("alpha_pattern", "(a*)*b"),
        ("rank_pattern", ".*" * 50 + "x"),
        ("alpha_pattern", "(c_fc|c_fc)" * 70 + "x"),
        ("alpha_pattern", f"({'|' * 10**4})" * 3 + "x"),
        ("alpha_pattern", "(|)?" * 10**4 + "x"),
        ("rank_pattern", "(|a){0,999999999}x"),
        ("alpha_pattern", "a{1000000000}"),
    ],
)
def test_patterns_of_a_foreign_adapter_cannot_hang(key, pattern, gpt2, folder):
    before = time.monotonic()
    edit(folder, **{key: {pattern: 2}})
    with contextlib.suppress(ValueError):
        lora.load_adapter(gpt2, folder)
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("content", ["[" * 10**5, '{"a":' * 10**5, "\xff", '"\\ud800"', "nul", "9" * 10**5])
def test_a_config_that_is_not_an_object_gives_a_short_error(content, gpt2, folder):
    path = folder / "adapter_config.json"
    path.write_bytes(content.encode("latin-1"))
    said = message(lora.load_adapter, gpt2, folder)
    assert said.startswith((f"`{path}`: expected JSON", f"`{path}`: expected a JSON object")) and len(said) < 1000


def test_adapted_layers_cannot_load_a_second_adapter(gpt2, folder):
    model = lora.add(gpt2, rank=4, where="*.up", key=KEY)
    assert message(lora.load_adapter, model, folder).startswith(
        "`stack.blocks.mlp.up`: expected a layer without an adapter, got one of rank 4."
    )
    both = lora.load_adapter(lora.add(gpt2, rank=4, where="*.query", key=KEY), folder)
    assert isinstance(both.stack.blocks.attention.query, LoraLinear) and isinstance(both.stack.blocks.mlp.up, LoraLinear)


def test_adapters_that_a_folder_cannot_store_are_refused(gpt2, tmp_path):
    unstacked = eqx.tree_at(lambda m: m.stack.blocks, gpt2, gpt2.stack.unstack())
    model = lora.add(unstacked, rank=2, where="*.0.mlp.up", key=KEY)
    assert message(lora.save_adapter, model, tmp_path) == (
        "`stack.blocks.0.mlp.up`: expected a layer that folders of GPT2 hold as a matrix, got an adapter on another. "
        "Save it with `Trainer.save_ckpt`, or `lora.merge` the model and save that."
    )
    assert not list(tmp_path.iterdir())


# --- leaves that are trained beside the adapters ------------------------------------------------------------------------


def pull(model, batch, key):
    """A loss that changes every trained leaf, and takes no time to compile."""
    return jnp.mean(batch) * sum(jnp.mean(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


def trained_with(model, also, loss=pull, n_steps=2):
    """Returns the model after a few steps on its adapters and on the leaves that `also` matches."""
    trainer = redeqx.Trainer(
        redeqx.Deployer(0, 2, verbose=False), model=model, trainable=lora.trainable(model, also=also),
        optimizer=optax.adam(0.05), collate_fn=np.stack, loss_fn=loss,
    )  # fmt: skip
    for _ in range(n_steps):
        trainer.update(list(np.random.default_rng(0).integers(1, 48, (8, 6)).astype(np.int32)))
    return trainer.model


@pytest.mark.parametrize(
    ("also", "is_tied", "modules"),
    [
        pytest.param(("norm.*",), True, ["transformer.ln_f"], marks=pytest.mark.sweep),
        pytest.param(("embedding.weight",), True, ["lm_head", "transformer.wte"], marks=pytest.mark.sweep),
        pytest.param(("head.weight",), False, ["lm_head"], marks=pytest.mark.sweep),
        (("stack.blocks.mlp.up.*",), True, ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"]),
        pytest.param((), True, None, marks=pytest.mark.sweep),
    ],
)
def test_leaves_trained_beside_the_adapters_are_saved_in_their_modules(tmp_path, also, is_tied, modules):
    base = drawn(shapes(GPT2, dataclasses.replace(CONFIG, is_tied=is_tied)), 0.3)
    model = trained_with(lora.add(base, rank=2, where="*.query", key=KEY), also)
    folder = lora.save_adapter(model, tmp_path)
    config, tensors = read(folder)
    assert config.get("modules_to_save") == modules
    whole = {name.removeprefix("base_model.model.").rpartition(".")[0] for name in tensors if "lora_" not in name}
    assert sorted(whole) == (modules or [])
    assert_same(lora.load_adapter(base, folder), model)
    # An adapter that is trained further still differs from the base in these leaves.
    again = trained_with(lora.load_adapter(base, folder), ())
    assert_same(lora.load_adapter(base, lora.save_adapter(again, tmp_path / "again")), again)


@pytest.mark.sweep
def test_leaves_trained_in_a_users_model_are_saved(tmp_path, residual):
    def loss(model, batch, key):
        return jax.vmap(model)(batch[..., None] * X[0]).mean()

    model = trained_with(lora.add(residual, rank=2, where="*.query_proj", key=KEY), ("head.*", "stacked.bias"), loss)
    folder = lora.save_adapter(model, tmp_path)
    assert read(folder)[0]["modules_to_save"] == ["head", "stacked"]
    assert_same(lora.load_adapter(residual, folder), model)


@pytest.mark.sweep
def test_averages_of_leaves_beside_the_adapters_are_saved(gpt2, tmp_path):
    model = lora.add(gpt2, rank=2, where="*.query", key=KEY)
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=model, trainable=lora.trainable(model, also="norm.*"),
        optimizer=redeqx.optimizers.ema(optax.adam(0.05), 0.5), collate_fn=np.stack, loss_fn=pull,
    )  # fmt: skip
    trainer.fit(list(np.random.default_rng(0).integers(0, 48, (16, 6)).astype(np.int32)), batch_size=8)
    assert_same(lora.load_adapter(gpt2, lora.save_adapter(trainer.eval_model, tmp_path)), trainer.eval_model)


def test_a_trained_bias_of_an_adapted_layer_is_refused(gpt2, tmp_path):
    model = lora.add(gpt2, rank=2, where="*.query", key=KEY)
    model = trained_with(model, "*.query.bias")
    assert message(lora.save_adapter, model, tmp_path) == (
        "`transformer.h.0.attn.c_attn`: expected trained leaves in modules without an adapter, as folders of GPT2 hold "
        "them, got another one. Save it with `Trainer.save_ckpt`, or `lora.merge` the model and save that."
    )


@pytest.fixture(scope="module")
def adapter_with_a_module(gpt2, tmp_path_factory):
    """The folder of an adapter whose embedding, and with it the tied head, was trained too."""
    model = trained_with(lora.add(gpt2, rank=2, where="*.query", key=KEY), "embedding.weight")
    return lora.save_adapter(model, tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda config, tensors: tensors.pop("base_model.model.lm_head.weight"), "as this model ties it to"),
        (lambda config, tensors: tensors["base_model.model.lm_head.weight"].fill(0), "this model ties it, got others"),
        (lambda config, tensors: config["modules_to_save"].append("score"), "`score`: expected its tensors, got none."),
        (lambda config, tensors: config.update(modules_to_save="score"), "`modules_to_save`: expected names, got 'score'."),
        (
            lambda config, tensors: tensors.update({"base_model.model.lm_head.bias": np.zeros(48, np.float32)}),
            "`base_model.model.lm_head.bias`: expected the name of a tensor of this model.",
        ),
        (
            lambda config, tensors: tensors.update({"base_model.model.transformer.wte.weight": np.zeros((3, 32), "f4")}),
            "`base_model.model.transformer.wte.weight`: expected (48, 32), got (3, 32).",
        ),
    ],
)
def test_modules_that_do_not_fit_the_base_are_refused(gpt2, adapter_with_a_module, tmp_path, change, problem):
    folder = shutil.copytree(adapter_with_a_module, tmp_path / "adapter")
    config, tensors = read(folder)
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    change(config, tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert problem in message(lora.load_adapter, gpt2, folder)


def test_an_adapter_of_a_tied_head_is_refused_with_the_reason(gpt2, tmp_path):
    untied = drawn(shapes(GPT2, dataclasses.replace(CONFIG, is_tied=False)), 0.3)
    folder = lora.save_adapter(lora.add(untied, rank=2, where="head", key=KEY), tmp_path / "adapter")
    text = message(lora.load_adapter, gpt2, folder)
    assert "`base_model.model.lm_head`: expected the name of a layer of this model. It has the weight of `transf" in text


def test_a_tied_module_may_be_saved_without_being_listed(gpt2, adapter_with_a_module, tmp_path):
    folder = shutil.copytree(adapter_with_a_module, tmp_path / "adapter")
    config, tensors = read(folder)
    config["modules_to_save"].remove("lm_head")  # as PEFT writes it, with `ensure_weight_tying`
    assert "base_model.model.lm_head.weight" in tensors
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert_same(lora.load_adapter(gpt2, folder), lora.load_adapter(gpt2, adapter_with_a_module))


def changed(model, where):
    """Returns the model with a leaf as if it had been trained."""
    leaf = where(model) + 1.0
    set_origin(leaf, CHANGED)
    return eqx.tree_at(where, model, leaf)


def test_a_model_with_numbered_experts_has_whole_modules_beside_them(tmp_path):
    sizes = {"d_model": 16, "d_mlp": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "n_experts": 2}
    base = drawn(shapes(Mixtral, MixtralConfig(vocab_size=48, n_positions=16, **sizes)), 0.3)
    model = changed(lora.add(base, rank=2, where="*.query", key=KEY), lambda model: model.norm.weight)
    assert_same(lora.load_adapter(base, lora.save_adapter(model, tmp_path)), model)
    model = changed(model, lambda model: model.stack.blocks.mlp.experts.up.weight)
    assert message(lora.save_adapter, model, tmp_path).startswith(
        "`stack.blocks.mlp.experts.up.weight`: expected trained leaves in modules without an adapter"
    )


@pytest.mark.parametrize("name", ["gpt2", "residual"])
def test_whole_modules_of_a_quantised_base(name, request, tmp_path):
    base, (bias, quantised, where) = request.getfixturevalue(name), {
        "gpt2": (lambda model: model.stack.blocks.mlp.up.bias, "*.mlp.*", "*.query"),
        "residual": (lambda model: model.stacked.bias, "stacked", "*.query_proj"),
    }[name]  # fmt: skip
    rounded = lora.quantise(base, where=quantised, kind="int8")
    model = changed(filled(lora.add(rounded, rank=2, where=where, key=KEY)), bias)
    found = lora.load_adapter(rounded, lora.save_adapter(model, tmp_path))
    assert_same(lora.dequantise(found), lora.dequantise(model))


def test_a_whole_module_replaces_a_quantised_weight(residual, tmp_path):
    model = changed(lora.add(residual, rank=2, where="*.query_proj", key=KEY), lambda model: model.stacked.weight)
    rounded = lora.quantise(residual, where="stacked", kind="int8")
    assert_same(lora.load_adapter(rounded, lora.save_adapter(model, tmp_path)), model)
