"""Resuming from checkpoints: each byte is read once, no device holds two copies of the state, and damaged or missing
checkpoints are skipped for the newest complete one."""

import builtins
import errno
import gc
import io
import json
import os
import shutil

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.checkpoint import CheckpointManager, TensorReader
from redeqx.errors import DamagedError
from tests._checkpoints import edit_manifest

DATA = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def loss_fn(model, batch, key):
    del key
    return ((jax.vmap(model)(batch) - batch) ** 2).mean()


def make_trainer(workdir, *, placed=True):
    deployer = redeqx.Deployer(0, 2, 2, workdir=workdir, verbose=False)

    def make():
        return eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(1))

    model = deployer.init(make) if placed else make()
    options = {"optimizer": optax.adam(1e-2), "collate_fn": np.stack, "loss_fn": loss_fn}
    trainer = redeqx.Trainer(deployer, model=model, **options)
    trainer.given = model  # keeps a reference, as a script's variable does
    return trainer


def fit(trainer, n_epochs=3, **options):
    """Trains two steps per epoch and saves after each step."""
    trainer.fit(DATA, 2, n_epochs, **{"save_every_n_steps": 1, "keep_last": 3, **options})
    return trainer


def arrays(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((eqx.filter(trainer.model, eqx.is_array), trainer.opt_state))]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The workdir of a run stopped after step 4, and the final arrays of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("original")
    fit(make_trainer(folder / "stopped"), 2)
    return folder / "stopped", arrays(fit(make_trainer(folder / "whole")))


@pytest.fixture
def workdir(original, tmp_path):
    shutil.copytree(original[0], tmp_path / "run")
    return tmp_path / "run"


def assert_same_end_state(trainer, original):
    assert trainer.step == 6
    for found, expected in zip(arrays(trainer), original[1], strict=True):
        assert found.tobytes() == expected.tobytes()


def n_bytes(array):
    """Bytes of all shards. Computed from the sharding, because accessing the shards creates arrays that count too."""
    shard = array.sharding.shard_shape(array.shape)
    return int(np.prod(shard)) * array.sharding.num_devices * array.dtype.itemsize


def live_bytes():
    """Bytes of all live arrays on the mesh."""
    return sum(map(n_bytes, (array for array in jax.live_arrays() if array.sharding.num_devices == 8 and is_not_key(array))))


def is_not_key(array):
    return not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


@pytest.fixture
def peak(monkeypatch):
    """The most device bytes in use while tensors are read."""
    found = []
    view = TensorReader.view

    def look(self, name):
        found.append(live_bytes())
        return view(self, name)

    monkeypatch.setattr(TensorReader, "view", look)
    return lambda: max(found)


def state_bytes(trainer):
    leaves = jax.tree.leaves((eqx.filter(trainer.model, eqx.is_array), trainer.opt_state))
    return sum(map(n_bytes, leaves)), max(map(n_bytes, leaves))


@pytest.mark.parametrize(
    "how", ["initialized by the deployer", "initialized on one device", "predicted before", "load_ckpt"]
)
@pytest.mark.sweep
def test_no_device_holds_two_states(how, workdir, peak):
    gc.collect()
    before = live_bytes()
    trainer = make_trainer(workdir, placed=how != "initialized on one device")
    if how == "predicted before":
        trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch)).predict(DATA, 2)
    if how == "load_ckpt":
        trainer.load_ckpt()
    else:
        fit(trainer)
    state, largest = state_bytes(trainer)
    assert state - largest <= peak() - before <= state + 5000  # before the last tensor is read; 5000: the first batches


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def make_unreadable(monkeypatch, folder, name):
    """Makes a file raise an I/O error when it is opened."""
    real = open

    def checked(path, *args, **kwargs):
        if path == folder / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", checked)
    monkeypatch.setattr(io, "open", checked)  # of `Path.read_bytes`


DAMAGE = {
    "no manifest": (lambda folder, patch: (folder / "trainer.json").unlink(), "expected .* got none with a trainer.json"),
    "no folder": (lambda folder, patch: shutil.rmtree(folder), "expected .* got none with a trainer.json"),
    "empty folder": (
        lambda folder, patch: (shutil.rmtree(folder), folder.mkdir()),
        "expected .* got none with a trainer.json",
    ),
    "file instead of a folder": (
        lambda folder, patch: (shutil.rmtree(folder), folder.write_text("")),
        "expected .* got none with a trainer.json",
    ),
    "another version": (
        lambda folder, patch: edit_manifest(folder, lambda record: {**record, "version": 2}),
        r"trainer.json`: expected version 1, .* got 2\.",
    ),
    "another format": (
        lambda folder, patch: edit_manifest(folder, lambda record: {**record, "format": "x"}),
        r"trainer.json`: expected the manifest of a redeqx",
    ),
    "invalid value": (
        lambda folder, patch: edit_manifest(folder, lambda record: {**record, "epoch": "once"}),
        r"trainer.json`: expected `epoch` as a Trainer writes it, got .once.\.",
    ),
    "no tensors": (lambda folder, patch: (folder / "model.safetensors").unlink(), r"model.safetensors`: expected \d+ bytes"),
    "flipped bit": (lambda folder, patch: flip(folder / "model.safetensors"), r"model.safetensors`: expected crc32 \d+"),
    "flipped bit in the optimizer": (
        lambda folder, patch: flip(folder / "optimizer.safetensors"),
        r"optimizer.safetensors`: expected crc32 \d+",
    ),
    "unreadable tensors": (
        lambda folder, patch: make_unreadable(patch, folder, "optimizer.safetensors"),
        r"optimizer.safetensors`: expected a file that can be read, got 'Input/output error'\.",
    ),
    "unreadable manifest": (
        lambda folder, patch: make_unreadable(patch, folder, "trainer.json"),
        r"trainer.json`: expected a file that can be read, got 'Input/output error'\.",
    ),
}


QUICK = ("flipped bit in the optimizer",)


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.sweep) for kind in DAMAGE])
def test_damaged_checkpoint_is_skipped_for_the_previous(kind, workdir, original, monkeypatch):
    damage, message = DAMAGE[kind]
    damage(workdir / "ckpts" / "step_00000004", monkeypatch)
    trainer = make_trainer(workdir)
    with pytest.warns(UserWarning) as caught:
        fit(trainer)
    (reported,) = [str(warning.message) for warning in caught]
    assert reported.endswith(" It is skipped for the previous one.")
    with pytest.raises(AssertionError, match=message):  # the warning names the file and the defect
        raise AssertionError(reported)
    assert "step_00000004" in reported
    assert_same_end_state(trainer, original)
    steps = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_two_checkpoints_damaged_differently(workdir, original):
    flip(workdir / "ckpts" / "step_00000004" / "model.safetensors")
    flip(workdir / "ckpts" / "step_00000003" / "optimizer.safetensors")
    trainer = make_trainer(workdir)
    with pytest.warns(UserWarning) as caught:
        fit(trainer)
    assert ["step_00000004" in str(caught[0].message), "step_00000003" in str(caught[1].message)] == [True, True]
    assert_same_end_state(trainer, original)


def test_pruning_does_not_count_a_damaged_checkpoint(workdir, monkeypatch):
    flip(workdir / "ckpts" / "step_00000004" / "model.safetensors")
    save = CheckpointManager.save

    class Stop(Exception):
        pass

    def stop_after_a_save(self, *args):
        save(self, *args[:-1])  # not in the background
        raise Stop

    with pytest.warns(UserWarning, match="It is skipped"), pytest.raises(Stop), monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", stop_after_a_save)
        fit(make_trainer(workdir), keep_last=2)
    checkpoints = CheckpointManager(workdir / "ckpts")
    # The damaged checkpoint, which could be repaired, is kept but not counted.
    assert checkpoints.names() == ["step_00000003", "step_00000004", "step_00000004_1"]
    assert checkpoints.record(checkpoints.folder / "step_00000003")["step"] == 3
    again = make_trainer(workdir)
    fit(again, keep_last=2)
    steps = sorted(path.name for path in (workdir / "ckpts").glob("step_*"))
    assert steps == ["step_00000005", "step_00000006"]


def test_pruning_does_not_count_a_checkpoint_that_lacks_a_file(tmp_path):
    checkpoints = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, {"model": {"w": np.full(3, step)}}, {"step": step}, keep_last=3)
    (tmp_path / "step_00000003" / "model.safetensors").unlink()
    checkpoints.save(4, {"model": {"w": np.full(3, 4)}}, {"step": 4}, keep_last=2)
    assert checkpoints.names() == ["step_00000002", "step_00000003", "step_00000004"]
    checkpoints.save(5, {"model": {"w": np.full(3, 5)}}, {"step": 5}, keep_last=2)
    assert checkpoints.names() == ["step_00000004", "step_00000005"]


def test_fit_is_refused_if_all_checkpoints_are_damaged(workdir):
    for step in (2, 3, 4):
        flip(workdir / "ckpts" / f"step_{step:08}" / "model.safetensors")
    trainer = make_trainer(workdir)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="It is skipped"),
            pytest.raises(DamagedError, match=r"step_00000004.*crc32"),
        ):
            fit(trainer)
        assert trainer.step == 0
    flip(workdir / "ckpts" / "step_00000003" / "model.safetensors")  # repaired
    with pytest.warns(UserWarning, match="step_00000004"):
        fit(trainer)
    assert trainer.step == 6


def test_failed_load_leaves_no_mixed_state(workdir, monkeypatch):
    trainer = make_trainer(workdir)
    trainer.load_ckpt()
    assert trainer.opt_state  # reads it
    load = CheckpointManager.load

    def fail(self, path, kind, *args, **kwargs):
        if kind == "optimizer":
            raise DamagedError("the disk fails")
        return load(self, path, kind, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "load", fail)
        with pytest.raises(DamagedError, match="the disk fails"):
            trainer.load_ckpt("step_00000003")
    with pytest.raises(ValueError, match=r"`trainer`: expected its values, got none"):
        trainer.train(DATA, 2)
    trainer.load_ckpt("step_00000003")
    assert trainer.step == 3
    trainer.train(DATA, 2)


# --- the index --------------------------------------------------------------------------------------------------------


def delete_index(index):
    index.unlink()


def delete_last_tag(index):
    held = json.loads(index.read_text())
    del held["last"]
    index.write_text(json.dumps(held))


EVALUATED = {"eval_examples": DATA[:4], "save_argmin_ckpt_by_metrics": ["loss"], "keep_last": 2}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder with a run stopped after two epochs and an uninterrupted run, and the final arrays of the latter."""
    folder = tmp_path_factory.mktemp("evaluated")
    fit(make_trainer(folder / "stopped"), 2, **EVALUATED)
    return folder, arrays(fit(make_trainer(folder / "whole"), **EVALUATED))


def cut_index(index):
    index.write_bytes(index.read_bytes()[:20])


@pytest.mark.parametrize(
    "change", [delete_last_tag, *(pytest.param(x, marks=pytest.mark.sweep) for x in (delete_index, cut_index))]
)
def test_without_index_the_newest_complete_checkpoint_is_loaded(change, evaluated, tmp_path):
    folder, whole = evaluated
    shutil.copytree(folder / "stopped", tmp_path / "run")
    index = tmp_path / "run" / "ckpts" / "index.json"
    before = json.loads(index.read_text())
    change(index)
    with pytest.warns(UserWarning, match="It is rebuilt"):
        assert CheckpointManager(index.parent).index() == before  # each manifest also holds the tags of its checkpoint
    trainer = make_trainer(tmp_path / "run")
    message = r"index.json`: expected (the name of the `last` checkpoint, got none|JSON, got Unterminated)"
    with pytest.warns(UserWarning, match=rf"{message}.* It is rebuilt from the checkpoints that are complete\."):
        fit(trainer, **EVALUATED)
    assert_same_end_state(trainer, (None, whole))
    for name in ("ckpts/index.json", "metrics.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (folder / "whole" / name).read_text()


def test_without_index_a_damaged_newest_checkpoint_is_skipped(workdir, original):
    (workdir / "ckpts" / "index.json").unlink()
    (workdir / "ckpts" / "step_00000004" / "trainer.json").unlink()
    trainer = make_trainer(workdir)
    with pytest.warns(UserWarning, match=r"It is rebuilt from the checkpoints that are complete, without step_00000004\."):
        fit(trainer)
    assert_same_end_state(trainer, original)


@pytest.mark.sweep
def test_load_by_path_needs_no_workdir(tmp_path):
    """Loads the saved values and trains on from them without writing to that folder."""
    saved = make_trainer(tmp_path / "run")
    saved.fit(DATA, batch_size=8, n_epochs=2)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    trainer = make_trainer(None)
    trainer.load_ckpt(tmp_path / "run" / "ckpts" / "step_00000004")
    assert trainer.step == 4
    for a, b in zip(arrays(trainer), arrays(saved), strict=True):
        np.testing.assert_array_equal(a, b)
    trainer.fit(DATA, batch_size=8, n_epochs=1)
    assert trainer.step == 6 and sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    with pytest.raises(ValueError, match=r"`workdir`: expected a folder for checkpoints, got None\."):
        make_trainer(None).load_ckpt("last")
    with pytest.raises(ValueError, match=r"a name of its index \(`runs/x/ckpts/last`\), got nothing there\."):
        make_trainer(None).load_ckpt(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"expected one of last, step_00000004, .* got 'lost'\. Did you mean `last`"):
        make_trainer(None).load_ckpt(str(tmp_path / "run/ckpts/lost"))


def test_load_takes_the_paths_that_redeqx_load_takes(tmp_path):
    def make(workdir, value):
        deployer, model = redeqx.Deployer(workdir=workdir, verbose=False), eqx.nn.Linear(2, 2, key=jax.random.key(value))
        options = {"optimizer": optax.sgd(1e-2), "collate_fn": np.stack, "loss_fn": loss_fn}
        return redeqx.Trainer(deployer, model=model, **options)

    run, saved = tmp_path / "run", make(tmp_path / "run", 0)
    saved.save_ckpt()
    for workdir in (None, tmp_path / "own"):
        for path in (run, str(run / "ckpts"), str(run / "ckpts" / "last"), run / "ckpts" / "step_00000000"):
            trainer = make(workdir, 1)
            trainer.load_ckpt(path)
            np.testing.assert_array_equal(trainer.model.weight, saved.model.weight)
