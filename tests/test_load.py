"""`redeqx.load`: models from checkpoints and safetensors files, without a Trainer."""

import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.cli import main


def make_model(key):
    return eqx.nn.MLP(4, 4, 8, 1, key=key)


def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def train(workdir, **shards):
    deployer = redeqx.Deployer(workdir=workdir, verbose=False, **shards)
    trainer = redeqx.Trainer(
        deployer, model=make_model(deployer.next_key()), optimizer=optax.adam(1e-2), collate_fn=np.stack, loss_fn=loss_fn
    )
    examples = list(np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32))
    trainer.fit(examples, batch_size=16, n_epochs=2, eval_examples=examples, save_argmin_ckpt_by_metrics=["loss"])
    return trainer


def same_arrays(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(arrays(a)), jax.tree.leaves(arrays(b)), strict=True))


def arrays(model):
    return eqx.filter(model, eqx.is_array)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, train(workdir, n_model_shards=2, n_fsdp_shards=2)


@pytest.mark.parametrize(
    "path",
    ["", "ckpts", "ckpts/last", "last", "ckpts/argmin_loss", "ckpts/step_00000004", "ckpts/step_00000004/model.safetensors"],
)
def test_loads_the_model_from_every_kind_of_path(run, path):
    workdir, trainer = run
    model = redeqx.load(workdir / path, eqx.filter_eval_shape(make_model, jax.random.key(0)))
    assert same_arrays(model, trainer.model) and model.activation is not None
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(arrays(model)))


@pytest.mark.parametrize("shards", [{}, {"n_model_shards": 4}, {"n_fsdp_shards": 8}])
def test_deployer_places_leaves_by_its_plan(run, shards):
    workdir, trainer = run
    deployer = redeqx.Deployer(verbose=False, **shards)
    like = make_model(jax.random.key(1))
    model = redeqx.load(workdir, like, deployer)
    plan = deployer.plan(like)
    assert same_arrays(model, trainer.model)
    assert model.layers[0].weight.sharding == plan.sharding("layers.0.weight")
    replicated = redeqx.load(workdir, like, deployer, plan=deployer.plan(like, overrides={"layers.0.weight": None}))
    assert replicated.layers[0].weight.sharding.is_fully_replicated


def test_plan_of_another_mesh(run):
    """The specs are the plan's, and the mesh is the deployer's, or without one the plan's."""
    workdir, _ = run
    like = make_model(jax.random.key(1))
    plan = redeqx.Deployer(verbose=False, n_model_shards=4).plan(like)
    deployer = redeqx.Deployer(verbose=False, n_model_shards=2)
    for given, mesh in ((deployer, deployer.mesh), (None, plan.mesh)):
        model = redeqx.load(workdir, like, given, plan=plan)
        assert model.layers[0].weight.sharding == jax.sharding.NamedSharding(mesh, plan["layers.0.weight"].spec)
    other = eqx.nn.MLP(4, 4, 16, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`plan`: expected the plan of this model, whose `layers\.0\.weight` has shape"):
        redeqx.load(workdir, other, deployer, plan=plan)


def test_missing_index_is_rebuilt(run, tmp_path):
    workdir, trainer = run
    shutil.copytree(workdir, tmp_path / "run")
    (tmp_path / "run" / "ckpts" / "index.json").unlink()
    with pytest.warns(UserWarning, match=r"index\.json.* It is rebuilt from the checkpoints that are complete"):
        loaded = redeqx.load(tmp_path / "run", eqx.filter_eval_shape(make_model, jax.random.key(0)))
    assert same_arrays(loaded, trainer.model)


def test_predictor_loads_without_a_trainer(run):
    workdir, trainer = run

    def pred_fn(model, batch, key):
        return jax.vmap(model)(batch)

    examples = list(np.eye(4, dtype=np.float32))
    predictor = redeqx.Predictor.load(
        workdir / "ckpts" / "argmin_loss", redeqx.Deployer(n_model_shards=2, verbose=False),
        like=eqx.filter_eval_shape(make_model, jax.random.key(0)), collate_fn=np.stack, pred_fn=pred_fn,
    )  # fmt: skip
    expected = trainer.get_default_predictor(pred_fn).predict(examples, batch_size=4)
    np.testing.assert_allclose(predictor.predict(examples, batch_size=4), expected, rtol=1e-6)


def test_predictor_reads_by_the_plan_of_pred_fn(tmp_path):
    """The tensors are read when the first batch is there, and are checked when the predictor is made."""

    class Arrays(eqx.Module):
        down: jax.Array
        up: jax.Array

        def __call__(self, x):
            return jax.nn.relu(x @ self.up) @ self.down

    def pred_fn(model, batch, key):
        return jax.vmap(model)(batch)

    rng = np.random.default_rng(0)
    saved = {"down": rng.normal(size=(16, 4)).astype(np.float32), "up": rng.normal(size=(4, 16)).astype(np.float32)}
    file, examples = tmp_path / "model.safetensors", list(rng.normal(size=(4, 4)).astype(np.float32))
    save_file(saved, file)
    deployer = redeqx.Deployer(verbose=False, n_model_shards=4)
    like = Arrays(**{name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in saved.items()})
    options = {"like": like, "collate_fn": np.stack, "pred_fn": pred_fn}
    expected = pred_fn(Arrays(**saved), np.stack(examples), None)
    predictor = redeqx.Predictor.load(file, deployer, **options)
    assert predictor.plan is None
    planned = redeqx.Predictor.load(file, deployer, plan=deployer.plan(like), **options)
    np.testing.assert_allclose(predictor.predict(examples, batch_size=4), expected, rtol=1e-5, atol=1e-6)
    specs = {name: tuple(leaf.spec) for name, leaf in predictor.plan.leaves.items()}
    assert specs == {"down": ("model", None), "up": (None, "model")}
    file.unlink()  # with a plan it was read at once, and without one by the first batch
    for each in (planned, predictor):
        np.testing.assert_allclose(each.predict(examples, batch_size=4), expected, rtol=1e-5, atol=1e-6)
    save_file({"down": saved["down"]}, file)
    with pytest.raises(ValueError, match=r"expected the tensors of this model, got 1 that differ:\n  - `up`"):
        redeqx.Predictor.load(file, deployer, **options)


def test_a_damaged_file_is_refused(run, tmp_path):
    workdir, _ = run
    shutil.copytree(workdir / "ckpts/step_00000004", tmp_path / "step_00000004")
    file = tmp_path / "step_00000004/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    options = {"collate_fn": np.stack, "pred_fn": lambda model, batch, key: jax.vmap(model)(batch)}
    like = make_model(jax.random.key(0))
    with pytest.raises(ValueError, match=r"model\.safetensors.*crc32"):
        redeqx.load(tmp_path / "step_00000004", like)
    with pytest.raises(ValueError, match=r"model\.safetensors.*crc32"):
        redeqx.Predictor.load(tmp_path / "step_00000004", redeqx.Deployer(verbose=False), like=like, **options)


def test_casts_to_the_dtypes_of_like(run, tmp_path):
    workdir, _ = run
    tensors = load_file(workdir / "ckpts/step_00000004/model.safetensors")
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, tmp_path / "half.safetensors")
    model = redeqx.load(tmp_path / "half.safetensors", make_model(jax.random.key(0)))
    assert model.layers[0].weight.dtype == jnp.float32


def test_loads_the_model_state(tmp_path):
    def make_model():
        return eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(4, "batch", mode="batch"))()

    def loss_fn(model, state, batch, key):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
        return jnp.mean(out**2), state

    model, state = make_model()
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=model, model_state=state, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn
    )
    trainer.fit(list(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)), batch_size=16)
    model, state = make_model()
    loaded = redeqx.load(tmp_path, state, kind="model_state")
    assert same_arrays(loaded, trainer.model_state) and not same_arrays(loaded, state)


def test_invalid_arguments_raise(run, tmp_path):
    workdir, _ = run
    like = make_model(jax.random.key(0))
    with pytest.raises(ValueError, match=r"expected a checkpoint .* got nothing there"):
        redeqx.load(tmp_path / "nowhere", like)
    with pytest.raises(ValueError, match="got a folder without one"):
        redeqx.load(tmp_path, like)
    with pytest.raises(ValueError, match=r"got 'argmin_los'\. Did you mean `argmin_loss`"):
        redeqx.load(workdir / "ckpts" / "argmin_los", like)
    with pytest.raises(ValueError, match=r"`layers\.2\.weight`: expected float32 .*, got none"):
        redeqx.load(workdir, eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="expected one of model, optimizer, got 'ema'"):
        redeqx.load(workdir, like, kind="ema")


def test_damaged_tensor_raises(run, tmp_path):
    workdir, _ = run
    shutil.copytree(workdir / "ckpts/step_00000004", tmp_path / "step_00000004")
    file = tmp_path / "step_00000004/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors.*crc32"):
        redeqx.load(tmp_path / "step_00000004", make_model(jax.random.key(0)))


class WithTable(eqx.Module):
    weight: jax.Array
    table: np.ndarray  # int64 and complex128, as NumPy makes them
    phases: np.ndarray

    def __init__(self):
        self.weight, self.table, self.phases = jnp.ones(3), np.arange(2**30, 2**30 + 6), np.exp(1j * np.arange(3))

    def __call__(self, x):
        return x @ self.weight + self.table[0] * 1e-9 + jnp.real(self.phases[0])


def test_numpy_tables_among_the_leaves_are_read_back(tmp_path):
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=WithTable(), optimizer=optax.sgd(1e-2), collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(model(batch) ** 2),
    )  # fmt: skip
    trainer.fit([np.ones(3, np.float32)] * 16, batch_size=8, n_epochs=1)
    assert trainer.model.table.dtype == np.int32  # JAX holds 32 bits
    for given in (None, deployer):
        model = redeqx.load(tmp_path, WithTable(), given)
        assert model.table.dtype == np.int64 and model.phases.dtype == np.complex128
        assert model.table.tolist() == WithTable().table.tolist()
        assert np.array_equal(model.phases, trainer.model.phases)
        assert np.array_equal(model.weight, trainer.model.weight)
    predictor = redeqx.Predictor.load(
        tmp_path, deployer, like=WithTable(), collate_fn=np.stack, pred_fn=lambda model, batch, key: model(batch)
    )
    expected = np.asarray(trainer.model(jnp.ones((1, 3))))
    np.testing.assert_allclose(predictor.predict([np.ones(3, np.float32)], batch_size=1), expected, rtol=1e-6)


def test_integers_are_never_narrowed(tmp_path):
    model = eqx.tree_at(lambda model: model.table, WithTable(), np.array([2**40 + 1, 5]))
    wide = r"`model` leaf `table`: expected integers that int32 holds, got up to 1099511627777\. Enable JAX's 64-bit mode"
    with pytest.raises(ValueError, match=wide):
        redeqx.Deployer(verbose=False).plan(model)
    with pytest.raises(ValueError, match=wide):
        redeqx.Predictor(
            redeqx.Deployer(verbose=False), model=model, collate_fn=np.stack, pred_fn=lambda model, batch, key: model(batch)
        )
    save_file({"table": np.array([2**40])}, tmp_path / "wide.safetensors")
    with pytest.raises(ValueError, match=r"`table`: expected int32 \(1,\), got int64 \(1,\)\."):
        redeqx.load(tmp_path / "wide.safetensors", {"table": np.zeros(1, np.int32)})
    save_file({"table": np.array([5], np.int32)}, tmp_path / "signed.safetensors")
    with pytest.raises(ValueError, match=r"`table`: expected uint64 \(1,\), got int32 \(1,\)\."):
        redeqx.load(tmp_path / "signed.safetensors", {"table": np.zeros(1, np.uint64)})


def test_names_of_the_index_may_have_slashes(tmp_path, capsys):
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=make_model(deployer.next_key()), optimizer=optax.sgd(1e-2), collate_fn=np.stack, loss_fn=loss_fn
    )
    examples = list(np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32))
    trainer.fit(
        examples, batch_size=16, n_epochs=2, eval_examples=examples,
        eval_metric_fn=lambda examples, outputs: {"val/f1/macro": 1 - trainer.step / 100},
        eval_predictor=trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch)),
        save_argmax_ckpt_by_metrics=["val/f1/macro"],
    )  # fmt: skip
    like = eqx.filter_eval_shape(make_model, jax.random.key(0))
    path = tmp_path / "ckpts" / "argmax_val/f1/macro"
    best = redeqx.load(tmp_path / "ckpts" / "step_00000002", like)
    assert not same_arrays(best, trainer.model)
    for each in (path, tmp_path / "argmax_val/f1/macro"):
        assert same_arrays(redeqx.load(each, like), best)
    assert main(["inspect", str(path)]) == 0
    assert "step_00000002" in capsys.readouterr().out
    with pytest.raises(ValueError, match="argmax_val/f1/micro`: expected a checkpoint"):
        redeqx.load(tmp_path / "ckpts" / "argmax_val/f1/micro", like)
    trainer.load_ckpt("argmax_val/f1/macro")
    assert same_arrays(trainer.model, best)


@pytest.mark.parametrize(
    "dtype, error, message",
    [
        ("nonsense", TypeError, "expected a floating dtype or None, got 'nonsense'"),
        ("float8_e4m3fn", ValueError, "expected a floating dtype of 16 bits or more, got float8_e4m3fn"),
        ("int32", ValueError, "expected a floating dtype, got int32"),
    ],
)
def test_dtypes_to_save_are_checked_before_training(tmp_path, dtype, error, message):
    deployer = redeqx.Deployer(workdir=tmp_path, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=make_model(deployer.next_key()), optimizer=optax.sgd(1e-2), collate_fn=np.stack, loss_fn=loss_fn
    )
    with pytest.raises(error, match=f"`save_float_dtype`: {message}"):
        trainer.fit([np.ones(4, np.float32)] * 8, batch_size=8, n_epochs=1, save_float_dtype=dtype)
    assert trainer.step == 0
    with pytest.raises(error, match=f"`save_float_dtype`: {message}"):
        trainer.save_ckpt(save_float_dtype=dtype)
    assert not (tmp_path / "ckpts").exists()
