"""Links, pipes and folders that others planted in a run's folder: nothing is written, read or deleted through them."""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.checkpoint import CheckpointManager, Lock

SECRET = "not to be overwritten\n"


class Notes(redeqx.Callback):
    every = 1

    def on_step(self, trainer, metrics):
        trainer.deployer.log_text("note", f"step {trainer.step}")


def fit(workdir, n_epochs, **options):
    deployer = redeqx.Deployer(workdir=workdir, verbose=False, **options)
    trainer = redeqx.Trainer(
        deployer, model=eqx.nn.Linear(3, 1, key=deployer.next_key()), optimizer=optax.sgd(1e-2), collate_fn=np.stack,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
    )  # fmt: skip
    trainer.fit(list(np.eye(3, dtype=np.float32)) * 4, batch_size=6, n_epochs=n_epochs, callbacks=[Notes()], keep_last=5)
    deployer.save_outputs([{"a": 1}])
    return trainer


def steps(workdir):
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def outside(tmp_path):
    file = tmp_path / "outside" / "secret"
    file.parent.mkdir()
    file.write_text(SECRET)
    yield file
    assert file.read_text() == SECRET
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("is_dangling", [False, True])
def test_files_are_not_written_through_links(tmp_path, outside, is_dangling):
    workdir = tmp_path / "run"
    fit(workdir, 1)
    for i, name in enumerate((
        "metrics.jsonl.tmp", "speed.jsonl.tmp", "ckpts/.tmp_probe", "ckpts/.tmp_index.json", "ckpts/index.json.tmp",
        "ckpts/.tmp_step_00000004", "media/step_00000004_note.txt", "outputs/outputs.jsonl",
    )):  # fmt: skip
        (workdir / name).unlink(missing_ok=True)
        (workdir / name).symlink_to(outside.parent / f"new {i}" if is_dangling else outside)
    trainer = fit(workdir, 2)
    assert trainer.step == 4 and steps(workdir) == [1, 2, 3, 4]
    assert sorted(path.name for path in (workdir / "ckpts").glob("step_*")) == ["step_00000002", "step_00000004"]
    assert (workdir / "media" / "step_00000004_note.txt").read_text() == "step 4"
    assert (workdir / "outputs" / "outputs.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize(("link", "pipe"), [("metrics.jsonl", "speed.jsonl"), ("speed.jsonl", "metrics.jsonl")])
def test_records_are_not_links_or_pipes(tmp_path, outside, link, pipe):
    workdir = tmp_path / "run"
    fit(workdir, 1)
    for name in (link, pipe):
        (workdir / name).unlink(missing_ok=True)
    (workdir / link).symlink_to(outside)
    os.mkfifo(workdir / pipe)
    said = "`: expected a file that an earlier run wrote, got"
    with (
        pytest.warns(UserWarning, match=f"{link}{said} a link to '.*secret'.*removed"),
        pytest.warns(UserWarning, match=f"{pipe}{said} a pipe.*removed"),
    ):
        fit(workdir, 2)
    assert not (workdir / link).is_symlink()
    assert steps(workdir) == [3, 4]


def test_linked_folder_of_media_costs_the_media_only(tmp_path, outside):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "media").symlink_to(outside.parent)
    with pytest.warns(UserWarning, match="media`: expected a folder, got a link to '.*outside'.*Training goes on"):
        fit(workdir, 1)
    assert steps(workdir) == [1, 2]


@pytest.mark.parametrize(("name", "target"), [("ckpts", "outside"), ("ckpts", "gone"), ("outputs", "outside")])
def test_linked_folders_are_refused(tmp_path, outside, name, target):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / name).symlink_to(outside.parent.with_name(target))
    with pytest.raises(OSError, match=f"{name}`: expected a folder, got a link to '.*{target}'. Remove it"):
        fit(workdir, 1)
    assert name == "outputs" or not (workdir / "metrics.jsonl").exists()  # before the first step


def test_workdir_and_its_parents_may_be_links(tmp_path):
    (tmp_path / "scratch" / "real").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "run").symlink_to("real")
    for n_epochs in (1, 2):
        fit(tmp_path / "runs" / "run", n_epochs)
    assert steps(tmp_path / "scratch" / "real") == [1, 2, 3, 4]
    assert redeqx.load(tmp_path / "runs" / "run", eqx.nn.Linear(3, 1, key=jax.random.key(0))) is not None


def test_lock_is_no_link(tmp_path, outside):
    (tmp_path / "ckpts.lock").symlink_to(outside)
    lock = Lock(tmp_path / "ckpts")
    assert not lock.path.is_symlink() and "pid" in json.loads(lock.path.read_text())
    lock.release()


def test_checkpoint_reads_no_linked_file(tmp_path, outside):
    checkpoints = CheckpointManager(tmp_path / "ckpts")
    folder = checkpoints.save(1, {"model": {"weight": np.ones(3)}}, {})
    assert isinstance(folder, Path)
    moved = (folder / "trainer.json").rename(tmp_path / "trainer.json")
    (folder / "trainer.json").symlink_to(moved)
    with pytest.raises(ValueError, match="expected an entry that a save created, got a link to"):
        checkpoints.record(folder)


def test_paths_keep_their_meaning_when_a_script_changes_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    class Move(redeqx.Callback):
        every = 1

        def on_step(self, trainer, metrics):
            os.chdir(tmp_path / "elsewhere")

    for n_epochs in (1, 2):
        monkeypatch.chdir(tmp_path)
        deployer = redeqx.Deployer(workdir="run", verbose=False)
        assert deployer.workdir == tmp_path / "run"
        trainer = redeqx.Trainer(
            deployer, model=eqx.nn.Linear(3, 1, key=deployer.next_key()), optimizer=optax.sgd(1e-2), collate_fn=np.stack,
            loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
        )  # fmt: skip
        trainer.fit(list(np.eye(3, dtype=np.float32)) * 4, batch_size=6, n_epochs=n_epochs, callbacks=[Move()])
    assert steps(tmp_path / "run") == [1, 2, 3, 4] and not list((tmp_path / "elsewhere").iterdir())


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fit("~/run", 1)
    assert steps(tmp_path / "home" / "run") == [1, 2]
    like = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    assert redeqx.load("~/run", like).weight.shape == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_dangling_links_are_named(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    for workdir in (tmp_path / "runs", tmp_path / "runs" / "a"):
        with pytest.raises(
            ValueError, match=r"`workdir`: expected a folder, got `.*runs` is a link to '.*unmounted', which is"
        ):
            redeqx.Deployer(workdir=workdir, verbose=False)
