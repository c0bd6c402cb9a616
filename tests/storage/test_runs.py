"""A run whose workdir is in an object store: metrics, resuming, prediction and loading."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.checkpoint import CheckpointManager
from redeqx.storage import Staging, location

DATA = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)


def make_model():
    return eqx.nn.MLP(6, 1, 16, 2, key=jax.random.key(0))


def loss_fn(model, batch, key):
    noise = 1 + 0.1 * jax.random.normal(key, batch.shape)
    return (jax.vmap(model)(batch * noise)[:, 0] ** 2).mean()


def run(workdir, n_epochs=2, shards=2, stop=None, **kwargs):
    """Fits six steps, or `stop` steps, and returns the trainer."""
    deployer = redeqx.Deployer(0, shards, workdir=workdir, verbose=False)
    trainer = redeqx.Trainer(
        deployer, model=make_model(), optimizer=optax.adam(1e-2), collate_fn=np.stack, loss_fn=loss_fn
    )  # fmt: skip
    options = {"save_every_n_steps": 2, "save_last_ckpt": True, **kwargs}
    if stop is not None:
        options["max_steps"] = stop
    trainer.fit(DATA, None, n_epochs, batch_size=8, **options)
    return trainer


def bits_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def bits(trainer):
    return bits_of((trainer.model, trainer.opt_state))


def pred_fn(model, batch, key):
    return jax.vmap(model)(batch)


@pytest.mark.sweep
def test_run_in_a_store_matches_a_local_run(bucket, tmp_path):
    """Compares values, files and metrics; the run in the store is stopped and resumed."""
    alone = run(tmp_path / "run")
    first = run(f"{bucket}/run", stop=3)
    assert str(first.deployer.workdir) == f"{bucket}/run"
    assert first.deployer.local_workdir.name == "run"  # the name of the run for trackers
    again = run(f"{bucket}/run")
    assert bits(again) == bits(alone)
    there, here = location(f"{bucket}/run"), tmp_path / "run"
    again.deployer.save_outputs([{"a": 1}])
    assert (there / "outputs" / "outputs.jsonl").read_bytes() == b'{"a": 1}\n'
    assert (there / "metrics.jsonl").read_bytes() == (here / "metrics.jsonl").read_bytes()
    names = {path.name for path in (there / "ckpts").iterdir()}
    assert names == {path.name for path in (here / "ckpts").iterdir()}
    step = "ckpts/step_00000006/model.safetensors"
    assert (there / step).read_bytes() == (here / step).read_bytes()


@pytest.mark.sweep
def test_run_in_a_failing_store_has_the_same_bits(bucket, server, short_pauses, tmp_path):
    """A third of all requests fail: during the first fit, after the restart, and while the result is loaded."""
    alone = run(tmp_path / "run")
    count, faults = itertools.count(), itertools.cycle((500, "cut", 503))
    server.fault = lambda method, path: next(faults) if next(count) % 3 == 0 else None
    run(f"{bucket}/run", stop=3)
    again = run(f"{bucket}/run")
    assert bits(again) == bits(alone) and again.step == 6
    loaded = redeqx.load(f"{bucket}/run", like=make_model())
    assert bits_of(loaded) == bits_of(alone.model)
    assert next(count) > 100


@pytest.mark.sweep
def test_saved_model_is_loaded_from_its_address(bucket, capsys):
    trainer = run(f"{bucket}/run", stop=2)
    like = eqx.filter_eval_shape(make_model)
    for path in ("run", "run/ckpts/last", "run/ckpts/step_00000002", "run/ckpts/step_00000002/model.safetensors"):
        model = redeqx.load(f"{bucket}/{path}", like, trainer.deployer)
        assert bits_of(model) == bits_of(trainer.model)
    with pytest.raises(ValueError, match=rf"`{bucket}/none`: expected a checkpoint .* got nothing there"):
        redeqx.load(f"{bucket}/none", like)
    deployer = trainer.deployer
    predictor = redeqx.Predictor.load(f"{bucket}/run", deployer, like=like, collate_fn=np.stack, pred_fn=pred_fn)
    assert len(predictor.predict(DATA, batch_size=8)) == len(DATA)


@pytest.mark.sweep
def test_second_run_is_locked_out(bucket):
    run(f"{bucket}/run", stop=2)
    checkpoints = CheckpointManager(location(f"{bucket}/run/ckpts"))
    with checkpoints.writing():
        code = f"""
from redeqx.checkpoint import CheckpointManager
from redeqx.storage import location
CheckpointManager(location({f"{bucket}/run/ckpts"!r})).save(9, {{}}, {{}})
"""
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "LockedError: `workdir`: expected a folder that no other run writes into, got" in found.stderr
    assert checkpoints.names() == ["step_00000002"]
    assert not location(f"{bucket}/run/ckpts.lock").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/run", r"expected a folder, or an address that begins with s3://, gs://, got ftp://host/run"),
        ("s3://", r"expected `s3://bucket/key`, got s3://\. Pass the name of a bucket"),
        ("s3://bucket/a/../b", r"expected `s3://bucket/key`, got s3://bucket/a/\.\./b"),
        ("s3://a bucket/run", r"expected `s3://bucket/key`, got s3://a bucket/run\. Pass the name of a bucket"),
        ("s3://bucket/a\nrun", r"expected `s3://bucket/key`, got .* a key without control characters"),
    ],
)
def test_invalid_address_is_refused(path, message):
    with pytest.raises(ValueError, match=f"`workdir`: {message}"):
        redeqx.Deployer(workdir=path, verbose=False)


def test_missing_obstore_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r'expected obstore, .* got no such package\. Run `pip install "redeqx\[stores\]"`'
    ):
        redeqx.Deployer(workdir="gs://bucket/run", verbose=False)
    assert location(str(tmp_path)) == tmp_path
    with pytest.raises(
        ValueError, match=r"expected the address of an object store as a string, got PosixPath\('s3:/bucket'\)"
    ):
        location(Path("s3://bucket"))
    with pytest.raises(ValueError, match=r"got 's3:/bucket', with one slash"):  # `str` of that Path
        location("s3:/bucket")
    with pytest.raises(ImportError, match="expected obstore"):  # an address, not a folder of that name
        location("S3://bucket")


def test_a_path_below_a_workdir_is_a_workdir(bucket):
    deployer = redeqx.Deployer(workdir=f"{bucket}/run", verbose=False)
    assert deployer.workdir is not None
    below = redeqx.Deployer(workdir=deployer.workdir / "stage 2", verbose=False)
    assert str(below.workdir) == f"{bucket}/run/stage 2"


def test_missing_bucket_is_reported_at_the_start(bucket):
    with pytest.raises(OSError, match=f"{bucket}-none`: expected a bucket, got none of that name"):
        redeqx.Deployer(workdir=f"{bucket}-none/run", verbose=False)


def test_metrics_of_a_step_are_uploaded_before_its_manifest(bucket, server):
    """A resumed run then has all lines up to its step."""
    run(f"{bucket}/run", stop=2)
    puts = [path for method, path in server.requests if method == "PUT"]
    manifest = next(i for i, path in enumerate(puts) if path.endswith("step_00000002/trainer.json"))
    assert any(path.endswith("/metrics.jsonl") for path in puts[:manifest])
    lines = location(f"{bucket}/run/metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_two_deployers_of_one_run_keep_each_others_records(bucket):
    """As on a disk: while both live, and after one is gone, whose end uploads in a thread."""
    make = lambda: redeqx.Deployer(workdir=f"{bucket}/run", verbose=False)  # noqa: E731
    first, second = make(), make()
    for step, deployer in enumerate((first, second, first)):
        deployer.log_metrics({"loss": 0.5}, step)
    second.upload()
    del first, second, deployer
    make().log_metrics({"loss": 0.5}, 3)
    third = make()
    third.log_metrics({"loss": 0.5}, 4)
    third.upload()
    lines = location(f"{bucket}/run/metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_large_outputs_are_uploaded_in_parts(bucket, server):
    """A store refuses a single request of more than 5 GiB, and a large one takes longer than a request may."""
    deployer = redeqx.Deployer(workdir=f"{bucket}/run", verbose=False)
    path = deployer.save_outputs(["x" * 2**23] * 2)
    assert path.read_bytes() == 2 * (b'"' + b"x" * 2**23 + b'"\n')
    assert [method for method, path in server.requests if "outputs.jsonl?partNumber=" in path] == ["PUT"] * 3


def test_file_that_a_tracker_renames_does_not_end_an_upload(bucket, monkeypatch):
    staging = Staging(location(f"{bucket}/run"))
    read_bytes = Path.read_bytes

    def rename_first(path):
        if path.suffix == ".tmp":
            path.rename(path.with_suffix(".json"))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", rename_first)
    (staging.folder / "metrics.jsonl").write_text("a line\n")
    (staging.folder / "a_tracker.tmp").write_text("{}")
    staging.upload()
    staging.upload()
    assert staging.to.sizes() == {"a_tracker.json": 2, "metrics.jsonl": 7}


ENDS = """
import os, sys, warnings
import redeqx
from redeqx.checkpoint import Lock
warnings.filterwarnings("ignore", message=".*fork")
deployer = redeqx.Deployer(workdir=sys.argv[1], verbose=False)
deployer.log_metrics({"loss": 0.5}, 3)
lock = Lock(deployer.workdir / "ckpts", print)
if (child := os.fork()) == 0:
    deployer.peers.end("a child ends", 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.path.exists(), deployer.local_workdir.exists(), flush=True)
deployer.peers.end("process 1 of 2 is gone", 75)
"""


def test_a_process_that_must_leave_uploads_its_records_and_releases_its_lock(bucket):
    """As after the failure of another process. A child that it has forked leaves both as they are."""
    ended = subprocess.run([sys.executable, "-c", ENDS, f"{bucket}/run"], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (75, "3 True True\n"), ended.stderr
    assert location(f"{bucket}/run/metrics.jsonl").read_bytes() == b'{"step": 3, "loss": 0.5}\n'
    assert not location(f"{bucket}/run/ckpts.lock").exists()


TRAIN = """
import hashlib, sys
import redeqx
redeqx.simulate_devices(8)
from tests.storage.test_runs import Waits, bits, run
print("ended with", hashlib.sha256(b"".join(bits(run(sys.argv[1], callbacks=[Waits()])))).hexdigest())
"""


class Waits(redeqx.Callback):
    """Lets training go on only after each save, which `on_save` waits for. Else the metrics of step 4 may be uploaded with
    step 3, and the save of step 4 has none to upload."""

    def on_save(self, trainer, path):
        pass


def start(folder):
    command = [sys.executable, "-c", TRAIN, folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def final_digest(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return next(line for line in out.splitlines() if line.startswith("ended with"))


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_run_killed_while_saving_ends_with_the_same_bits(bucket, server):
    """SIGKILL when a request of the save at step 4 reaches the store; then the script runs again."""
    expected = final_digest(start(f"{bucket}/whole"))
    for stage in ("model.safetensors", "metrics.jsonl", "trainer.json", "index.json"):
        folder, seen = f"{bucket}/{stage.partition('.')[0]}", []
        process = start(folder)

        def kill(method, path, stage=stage, seen=seen, process=process):
            seen.append(path)
            is_second = any("step_00000004" in each for each in seen)  # its model is the first request
            if method == "PUT" and path.endswith(f"/{stage}") and is_second and process.poll() is None:
                process.kill()
                process.wait(60)  # it sends no other request

        server.fault = kill
        process.communicate(timeout=300)
        server.fault = lambda method, path: None
        assert process.returncode == -9, stage
        last = json.loads(location(f"{folder}/ckpts/index.json").read_bytes())["last"]
        assert last == "step_00000003" or (stage == "index.json" and last == "step_00000004")
        assert final_digest(start(folder)) == expected, stage
        assert location(f"{folder}/metrics.jsonl").read_bytes() == location(f"{bucket}/whole/metrics.jsonl").read_bytes()
