"""Failing, slow or refusing stores and killed processes: no checkpoint is lost, and no damaged one is loaded."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from redeqx.checkpoint import CheckpointManager, Lock
from redeqx.errors import DamagedError
from redeqx.storage import StoreError, StorePath, limits, location

SCRIPT = Path(__file__).parents[1] / "scripts" / "saving_to_a_store.py"
TREE = {"w": np.arange(3 * 2**20, dtype=np.float32).reshape(3, -1), "b": np.ones(5, np.int32)}  # two multipart parts


def save_checkpoint(folder, step, **kwargs):
    checkpoints = CheckpointManager(location(folder))
    checkpoints.save(step, {"model": {**TREE, "step": np.full(2, step)}}, {"step": step}, **kwargs)
    return checkpoints


def verified_step(checkpoints):
    """Verifies the newest checkpoint and returns its step."""
    path = checkpoints.newest()[0]
    step = checkpoints.record(path)["step"]
    like = {**TREE, "step": np.zeros(2, np.int64)}
    tree = checkpoints.load(path, "model", like)
    assert all(np.array_equal(tree[name], TREE[name]) for name in TREE)
    assert tree["step"].tolist() == [step] * 2
    return step


@pytest.mark.parametrize("status", [500, *(pytest.param(status, marks=pytest.mark.sweep) for status in (503, "cut"))])
def test_failed_requests_are_retried(bucket, server, status, short_pauses):
    assert verified_step(save_checkpoint(f"{bucket}/other", 1)) == 1
    n_requests, count = len(server.requests), itertools.count()
    server.requests.clear()
    server.fault = lambda method, path: status if next(count) % 3 == 0 else None
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    assert verified_step(checkpoints) == 1
    assert len(server.requests) > n_requests  # some were retried
    server.fault = lambda method, path: None
    assert verified_step(save_checkpoint(f"{bucket}/ckpts", 2)) == 2


@pytest.mark.parametrize("n_lost", [1, 2])
def test_upload_is_retried_if_the_last_response_is_lost(bucket, server, short_pauses, n_lost):
    """The store has completed the upload and forgotten it, so it refuses the retried request."""
    lost = iter([True] * n_lost)
    server.fault = lambda method, path: "cut" if method == "POST" and "uploadId" in path and next(lost, False) else None
    assert verified_step(save_checkpoint(f"{bucket}/ckpts", 1)) == 1
    assert next(lost, None) is None


@pytest.mark.sweep
def test_slow_response_is_requested_again(bucket, server, short_pauses, monkeypatch):
    monkeypatch.setattr(limits, "timeout", 1.0)
    monkeypatch.setattr(limits, "retries", 6)
    slow = iter([True] * 3)
    server.fault = lambda method, path: time.sleep(3) if next(slow, False) else None
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    slow = iter([True] * 3)
    assert verified_step(checkpoints) == 1


def test_unavailable_store_loses_nothing(bucket, server, short_pauses):
    """The save fails with the store's error; the earlier checkpoint is not treated as damaged and remains available."""
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    server.fault = lambda method, path: 503 if method in ("PUT", "POST") else None
    with pytest.raises(OSError, match=r"expected the store to answer, got: .*503.*Earlier checkpoints are complete: run"):
        checkpoints.save(2, {"model": TREE}, {"step": 2})
    server.fault = lambda method, path: 503 if "trainer.json" in path or "list-type" in path else None
    for act in (checkpoints.newest, lambda: checkpoints.record(location(f"{bucket}/ckpts/step_00000001"))):
        with pytest.raises(StoreError, match=r"expected the store to answer, got: .*503"):
            act()
    server.fault = lambda method, path: None
    assert verified_step(checkpoints) == 1
    assert verified_step(save_checkpoint(f"{bucket}/ckpts", 2)) == 2


def test_refusal_is_reported_immediately(bucket, server):
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    server.fault = lambda method, path: 403
    server.requests.clear()
    with pytest.raises(StoreError, match=r"expected the store to answer, got: .*403.*Check the address, the credentials"):
        checkpoints.newest()
    assert len(server.requests) == 1


def test_missing_objects_count_as_deleted_in_every_store(monkeypatch, tmp_path):
    """S3 ignores them; Google's store stops with an error, as this one does."""
    from obstore import store

    monkeypatch.setattr(store, "GCSStore", lambda bucket, **options: store.LocalStore(tmp_path))
    folder = StorePath("gs", "a-local-folder", "run")
    for name in "abc":
        (folder / name).write_bytes(b"content")
    folder.delete(["none", "a", "b"])
    assert list(folder.sizes()) == ["c"]
    (folder / "none").unlink()
    (folder / "c").unlink()
    assert not folder.exists()
    folder.delete([])


def test_a_version_that_is_deleted_is_not_replaced(bucket):
    """As when the owner of a lock ends while another process takes it over."""
    path = location(f"{bucket}/x")
    path.write_bytes(b"old")
    _, version = path.version()
    path.unlink()
    assert path.write_bytes(b"new", replacing=version) is None
    assert not path.exists()


@pytest.mark.parametrize("change", ["flipped", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("short", "missing"))])
def test_damage_is_detected_and_skipped(bucket, change):
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    checkpoints.save(2, {"model": TREE}, {"step": 2})
    file = location(f"{bucket}/ckpts/step_00000002/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.unlink()
    if change != "missing":
        file.write_bytes(bytes(content) if change == "flipped" else bytes(content[:-8]))
    last, before = checkpoints.newest()
    with pytest.raises(DamagedError, match=r"model\.safetensors`: expected (crc32|\d+ bytes)"):
        checkpoints.record(last)
    assert checkpoints.record(before)["step"] == 1


def test_leftovers_of_a_killed_save_are_removed(bucket):
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    leftovers = location(f"{bucket}/ckpts/step_00000007")
    (leftovers / "model.safetensors").write_bytes(b"unfinished")
    location(f"{bucket}/ckpts/notes.txt").write_bytes(b"a user's")
    location(f"{bucket}/ckpts/other/notes.txt").write_bytes(b"a user's")
    assert checkpoints.names() == ["step_00000001"] and verified_step(checkpoints) == 1
    checkpoints.save(2, {"model": TREE}, {"step": 2})
    assert not leftovers.exists()
    assert sorted(path.name for path in location(f"{bucket}/ckpts").iterdir()) == [
        "index.json", "notes.txt", "other", "step_00000001", "step_00000002",
    ]  # fmt: skip


def test_a_removal_that_is_cut_off_leaves_no_partial_checkpoint(bucket, monkeypatch):
    delete = StorePath.delete

    def cut_off(path, names):
        if "model.safetensors" in (names := [*names]):
            raise KeyboardInterrupt
        delete(path, names)

    save_checkpoint(f"{bucket}/ckpts", 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StorePath, "delete", cut_off)
        save_checkpoint(f"{bucket}/ckpts", 2, keep_last=1)
    assert CheckpointManager(location(f"{bucket}/ckpts")).names() == ["step_00000002"]


def test_a_store_that_refuses_to_delete_keeps_old_checkpoints(bucket, server):
    """As with credentials that may write and read. It is logged once, and neither a save nor a rerun fails."""
    (location(f"{bucket}/ckpts/step_00000004") / "model.safetensors").write_bytes(b"unfinished")
    refused = []

    def refuse(method, path):
        if method != "DELETE" and not path.endswith("?delete"):
            return None
        if f"/{bucket.removeprefix('s3://')}?" in path:  # not the lock of an earlier test
            refused.append(path)
        return 403

    server.fault = refuse
    logged = []
    checkpoints = CheckpointManager(location(f"{bucket}/ckpts"), log=logged.append)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"model": {**TREE, "step": np.full(2, step)}}, {"step": step}, keep_last=1)
    [line] = logged
    assert "s3://" in line and "old checkpoints stay, as the store did not remove them. expected the store to" in line
    assert checkpoints.names() == [f"step_0000000{step}" for step in (1, 2, 3, 4)] and verified_step(checkpoints) == 4
    assert len(refused) == 4 + 3  # remains of a crash at each save, and each of three old checkpoints once
    del checkpoints
    # a crash before the index was written: this step's checkpoint stays, and a rerun takes another name
    (location(f"{bucket}/ckpts") / "index.json").write_bytes(b'{"last": "step_00000003"}')
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 4, keep_last=1)
    assert checkpoints.names()[-2:] == ["step_00000004", "step_00000004_1"] and verified_step(checkpoints) == 4
    server.fault = lambda method, path: None
    save_checkpoint(f"{bucket}/ckpts", 5, keep_last=1)
    assert checkpoints.names() == ["step_00000005"]


def test_a_truncated_object_is_not_read(bucket):
    path = location(f"{bucket}/file")
    path.write_bytes(b"12345")
    assert path.read(2, 5) == b"345"
    with pytest.raises(OSError, match=r"expected 7 bytes from 2 on, got 3\. The object is truncated"):
        path.read(2, 9)


def test_run_that_loses_its_lock_during_a_save_commits_nothing(bucket):
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    lock = location(f"{bucket}/ckpts.lock")

    class Weight:
        """An array that is made while the files are written."""

        shape, dtype = (3,), np.dtype(np.float32)

        def __array__(self, dtype=None, copy=None):
            lock.write_bytes(json.dumps({"pid": 12, "host": "node7", "machine": "another"}).encode())
            return np.zeros(self.shape, self.dtype)

    with pytest.raises(OSError, match=r"expected a folder that is this run's own, got one that process 12 on node7"):
        checkpoints.save(3, {"model": {"w": Weight()}}, {"step": 3})
    assert checkpoints.names() == ["step_00000001"] == [*checkpoints.index().values()]


def test_a_lock_that_is_being_released_is_not_taken_over(bucket, server):
    """By another trainer of this process, whose own lock would then be deleted."""
    deleting, seen = threading.Event(), threading.Event()

    def wait(method, path):
        if method == "DELETE" or path.endswith("?delete"):
            deleting.set()
            seen.wait(2)
        elif "step_00000002/model" in path:
            seen.set()

    server.fault = wait
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    del checkpoints
    gc.collect()
    assert deleting.wait(20)
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 2)
    assert verified_step(checkpoints) == 2 and location(f"{bucket}/ckpts.lock").exists()


def test_run_that_lost_its_lock_stops_writing_and_cleaning(bucket):
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    lock = location(f"{bucket}/ckpts.lock")
    lock.write_bytes(json.dumps({"pid": 12, "host": "node7", "machine": "another"}).encode())
    leftovers = location(f"{bucket}/ckpts/step_00000002/model.safetensors")  # written by the other run, which is saving
    leftovers.write_bytes(b"unfinished")
    with pytest.raises(OSError, match=r"expected a folder that is this run's own, got one that process 12 on node7"):
        checkpoints.save(3, {"model": TREE}, {"step": 3})
    assert leftovers.is_file() and checkpoints.names() == ["step_00000001"]
    del checkpoints
    assert json.loads(lock.read_bytes())["pid"] == 12


def test_run_that_loses_its_lock_during_a_save_says_so(bucket, server):
    """The store is not at fault, and the other run's checkpoints are its own."""
    checkpoints = save_checkpoint(f"{bucket}/ckpts", 1)
    lock = location(f"{bucket}/ckpts.lock")

    def take_over(method, path):
        if "step_00000002" in path and lock.exists():
            lock.unlink()

    server.fault = take_over
    with pytest.raises(OSError, match=r"step_00000002`: expected a folder that is this run's own") as error:
        checkpoints.save(2, {"model": TREE}, {"step": 2})
    assert str(error.value).endswith("over and ended. Start this run again: it continues from the newest checkpoint.")
    assert checkpoints.names() == ["step_00000001"]


# Several processes find an abandoned lock at the same moment.
RACE = """
import json, os, sys, time, warnings
from redeqx.checkpoint import Lock, LockedError
from redeqx.storage import location
warnings.simplefilter("ignore")
Lock.stale, Lock.beat, Lock.grace = 0.5, 0.1, 0.1
children = []
for i in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            lock = Lock(location(sys.argv[1]))
            time.sleep(5)  # until the others have tried
            lock.check()
            os._exit(0)
        except LockedError:
            os._exit(3)
        finally:
            os._exit(1)
    children.append(pid)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.mark.sweep
def test_one_of_several_takes_over_a_lock(bucket):
    location(f"{bucket}/ckpts.lock").write_bytes(b'{"pid": 12, "host": "node7", "machine": "another"}')
    found = subprocess.run([sys.executable, "-c", RACE, f"{bucket}/ckpts"], capture_output=True, text=True, timeout=120)
    assert found.stdout == "[0, 3, 3, 3]\n", found.stderr


def test_lock_is_renewed_and_released(bucket, monkeypatch):
    monkeypatch.setattr(Lock, "beat", 0.05)
    messages = []
    lock = Lock(location(f"{bucket}/ckpts"), messages.append)
    first = lock.path.version()
    until = time.monotonic() + 20
    while lock.path.version() == first and time.monotonic() < until:
        time.sleep(0.05)
    assert lock.path.version() != first
    lock.check()
    lock.release()
    assert not lock.path.exists() and not messages


class Trials:
    """Runs `saving_to_a_store.py`, which forks one or more processes for each trial."""

    def __init__(self, server, n):
        environment = {**os.environ, **server.environment(), "PYTHONPATH": str(SCRIPT.parents[2]), "NPROC": "16"}
        command = [sys.executable, str(SCRIPT), str(n)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, folder, step, pids=None, n_saves=1):
        """Saves a checkpoint, or `n_saves`, and returns the exit codes. Fills `pids` once the processes have started."""
        self.process.stdin.write(json.dumps([folder, step, n_saves]) + "\n")
        self.process.stdin.flush()
        started = json.loads(self.process.stdout.readline())
        if pids is not None:
            pids.extend(started)
        return json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


@pytest.mark.sweep
def test_a_request_that_one_process_is_refused_fails_in_all(bucket, server):
    """At another request of each save and look-up; the script catches the error, and tries again."""
    count, period = itertools.count(1), 37  # a save takes about 30 requests
    refused = []

    def refuse(method, path):
        if "ckpts.lock" not in path and next(count) % period == 0:
            refused.append((method, path))
            return 403
        return None

    server.fault = refuse
    with Trials(server, 2) as trials:
        assert trials.run(f"{bucket}/ckpts", 1, n_saves=30) == [0, 0]
    server.fault = lambda method, path: None
    assert len(refused) > 20
    checkpoints = CheckpointManager(location(f"{bucket}/ckpts"))
    assert checkpoints.record(checkpoints.newest()[0])["step"] == 30


def kill_at(server, folder, point, pids, victims, when):
    """Kills processes at request `point` of a save, not counting requests for the lock. Returns the requests seen."""
    seen, busy = [], threading.Lock()

    def look(method, path):
        if "ckpts.lock" in path or folder not in path:
            return
        with busy:
            seen.append((method, path))
            if len(seen) - 1 == point:
                until = time.monotonic() + 20
                while not pids and time.monotonic() < until:
                    time.sleep(0.01)
                for index in victims:
                    os.kill(pids[index], signal.SIGKILL)

    setattr(server, when, look)
    return seen


@pytest.mark.sweep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("n", "victims"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])])
def test_save_killed_at_any_request_leaves_the_old_or_new_checkpoint(bucket, server, n, victims):
    """SIGKILL before or after each request is handled. The next run resumes, and leftovers are removed."""
    name = bucket.removeprefix("s3://")
    whole = f"{bucket}/whole/ckpts"
    with Trials(server, n) as trials:
        assert trials.run(whole, 1) == [0] * n
        first = {key: (location(whole) / key).read_bytes() for key in location(whole).sizes()}
        seen = kill_at(server, name, -1, [], [], "fault")
        assert trials.run(whole, 2) == [0] * n
        server.fault = lambda method, path: None
        n_points = len(seen)
        assert n_points > 8, seen
        # After a request is nearly before the next one. Two processes take longer to start: before every third request.
        points = [("fault", point) for point in range(n_points + 1)] + [("after", point) for point in range(0, n_points, 3)]
        if n > 1:
            some = (*range(victims[-1], n_points - 3, 3), *range(n_points - 3, n_points + 1))
            points = [("fault", point) for point in some]
        found = set()
        for when, point in points:
            folder = f"{bucket}/{when}{point}/ckpts"
            for key, content in first.items():
                (location(folder) / key).write_bytes(content)
            pids = []
            kill_at(server, name, point, pids, victims, when)
            codes = trials.run(folder, 2, pids)
            server.fault = server.after = lambda method, path: None
            checkpoints = CheckpointManager(location(folder))
            step = checkpoints.record(checkpoints.newest()[0])["step"]
            assert step in (1, 2)
            assert step == 2 or any(codes)
            for each in checkpoints.names():
                checkpoints.record(location(folder) / each)
            found.add(step)
            # The next run resumes from that step and removes everything else.
            if point % 4 == 3:
                assert trials.run(folder, 3) == [0] * n
                assert {key.partition("/")[0] for key in location(folder).sizes()} == {"index.json", "step_00000003"}
                assert checkpoints.record(checkpoints.newest()[0])["step"] == 3
        assert found == {1, 2}
