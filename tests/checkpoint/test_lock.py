"""Only one run may write into a checkpoint folder: others are refused, and the lock of a dead run is taken over."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.checkpoint import CheckpointManager, Lock, LockedError

HOLD = """
import sys, time
from pathlib import Path
from redeqx.checkpoint import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""

# Several processes find a stale lock at the same moment; only one takes it over.
RACE = """
import os, sys, time, warnings
from pathlib import Path
from redeqx.checkpoint import Lock, LockedError
warnings.simplefilter("ignore")
Lock.grace = 0.1
folder, n = Path(sys.argv[1]), 6
begin = time.monotonic() + 0.2
tried = lambda i: (folder.parent / f"tried_{i}").touch()
children = []
for i in range(n):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            while time.monotonic() < begin:
                pass
            lock = Lock(folder)
            code = 0
            tried(i)
            while len(list(folder.parent.glob("tried_*"))) < n:
                time.sleep(0.01)
            lock.check()
        except LockedError:
            code = 3
        except OSError:
            code = 4
        finally:
            tried(i)
            os._exit(code)
    children.append(pid)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    monkeypatch.setattr(Lock, "grace", 0.2)
    monkeypatch.setattr(Lock, "stale", 1.0)


def start_python(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def save(checkpoints, step):
    checkpoints.save(step, {"model": {"w": np.full(3, step)}}, {"step": step})


def write_lock(path, **changes):
    """Writes the lock file as another process would: as this one does, with changes."""
    lock = Lock(path.parent / "another")
    owner = {**json.loads(lock.path.read_text()), "token": "another", **changes}
    lock.release()
    path.write_text(json.dumps(owner))
    return owner


def started(pid):
    """The start time of a process in kernel ticks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.sweep
def test_second_run_is_refused_until_the_first_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(Lock, "stale", 600.0)
    folder = tmp_path / "ckpts"
    with start_python(HOLD, folder) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(LockedError) as raised:
                save(CheckpointManager(folder), 1)
            assert re.fullmatch(
                rf"`workdir`: expected a folder that no other run writes into, got {re.escape(str(folder))}, which process "
                rf"{other.pid} on \S+ \(since \d{{4}}-\S+ \S+ UTC\) does\. Wait for its end, or choose another workdir; if "
                rf"it is gone, delete {re.escape(str(folder))}\.lock\.",
                str(raised.value),
            )
            assert CheckpointManager(folder).names() == []  # reading needs no lock
        finally:
            other.kill()
            other.wait(timeout=20)
    checkpoints = CheckpointManager(folder)
    began = time.monotonic()
    save(checkpoints, 1)
    assert time.monotonic() - began < 60  # without waiting for a heartbeat
    assert json.loads((tmp_path / "ckpts.lock").read_text())["pid"] == os.getpid()
    del checkpoints
    assert not (tmp_path / "ckpts.lock").exists()  # without waiting for the garbage collector


@pytest.mark.sweep
def test_one_of_several_processes_takes_over_a_stale_lock(tmp_path):
    write_lock(tmp_path / "ckpts.lock", pid=2**22 + 1)  # larger than any pid on Linux
    with start_python(RACE, tmp_path / "ckpts") as race:
        out, _ = race.communicate(timeout=60)
    codes = json.loads(out)
    assert codes.count(0) == 1 and set(codes) <= {0, 3, 4}, codes


def test_reused_pid_does_not_hold_the_lock(tmp_path):
    write_lock(tmp_path / "ckpts.lock", pid=os.getppid(), started="1")
    Lock(tmp_path / "ckpts").release()
    write_lock(tmp_path / "ckpts.lock", pid=os.getppid(), started=started(os.getppid()))
    with pytest.raises(LockedError, match=rf"process {os.getppid()} on "):
        Lock(tmp_path / "ckpts")


def test_check_raises_after_another_run_took_over_and_ended(tmp_path):
    """As when this process was suspended in the meantime."""
    lock = Lock(tmp_path / "ckpts")
    lock.check()
    (tmp_path / "ckpts.lock").unlink()
    with pytest.raises(OSError, match=r"lock ckpts.lock is gone: .* Start this run again"):
        lock.check()


def test_lock_that_cannot_be_written_is_skipped(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    lock = Lock(tmp_path / "ckpts")
    assert not (tmp_path / "ckpts.lock").exists()
    lock.check()
    lock.release()


def test_zombie_process_does_not_hold_the_lock(tmp_path):
    with start_python("") as child:
        while not is_zombie(child.pid):
            time.sleep(0.05)
        write_lock(tmp_path / "ckpts.lock", pid=child.pid, started="1")
        Lock(tmp_path / "ckpts").release()


def test_remote_lock_is_held_while_its_heartbeat_continues(tmp_path, monkeypatch):
    path, messages = tmp_path / "ckpts.lock", []
    monkeypatch.setattr(Lock, "stale", 60.0)
    write_lock(path, machine="another", host="node7\x1b[2J", pid=12)
    ended = threading.Event()
    beat = threading.Thread(target=lambda: [os.utime(path) for _ in iter(lambda: ended.wait(0.3), True)])
    beat.start()
    with pytest.raises(LockedError, match=r"which process 12 on node7\\x1b\[2J \(since "):
        Lock(tmp_path / "ckpts", messages.append)
    ended.set()
    beat.join()
    monkeypatch.setattr(Lock, "stale", 1.0)
    began = time.monotonic()
    Lock(tmp_path / "ckpts", messages.append).release()  # the heartbeat has stopped
    assert 1.0 <= time.monotonic() - began < 60
    assert messages[0].replace("60 s", "1 s") == messages[1]
    assert re.search(r"process 12 on node7.* wrote here; waiting up to 60 s to see whether it still does", messages[0])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": "x", "machine": 3}', "[" * 3000])
def test_unreadable_lock_is_taken_over_when_stale(tmp_path, content, monkeypatch):
    monkeypatch.setattr(Lock, "stale", 0.2)
    (tmp_path / "ckpts.lock").write_text(content)
    Lock(tmp_path / "ckpts").release()
    assert not list(tmp_path.iterdir())


def test_run_that_lost_its_lock_stops_writing(tmp_path):
    """As when a suspended process resumes after a takeover."""
    checkpoints = CheckpointManager(tmp_path / "ckpts")
    save(checkpoints, 1)
    write_lock(tmp_path / "ckpts.lock", pid=12)
    with pytest.raises(OSError, match=r"expected a folder that is this run's own, got one that process 12 on .* has taken"):
        save(checkpoints, 2)
    assert checkpoints.names() == ["step_00000001"]
    del checkpoints
    gc.collect()
    assert json.loads((tmp_path / "ckpts.lock").read_text())["pid"] == 12  # the other run's lock remains


def test_owner_refreshes_the_lock_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Lock, "beat", 0.05)
    lock = Lock(tmp_path / "ckpts")
    os.utime(lock.path, (0, 0))
    for _ in range(100):
        if lock.path.stat().st_mtime > 0:
            break
        time.sleep(0.05)
    assert lock.path.stat().st_mtime > 0
    lock.release()


def test_no_lock_where_the_file_cannot_be_created(tmp_path, monkeypatch):
    folder = tmp_path / "no" / "such" / "ckpts"
    lock = Lock(folder)
    lock.check()
    lock.release()


# --- trainers ---------------------------------------------------------------------------------------------------------

DATA = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def make_trainer(deployer):
    return redeqx.Trainer(
        deployer,
        model=eqx.nn.Linear(4, 4, key=jax.random.key(1)),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
    )


def make_deployer(workdir, **kwargs):
    return redeqx.Deployer(0, 2, workdir=workdir, verbose=False, **kwargs)


REFUSED = (
    r"`workdir`: expected a folder that no other trainer writes into, got .*/ckpts, into which another Trainer of this "
    r"script saves\. Give each a name: `Trainer\(name=\.\.\.\)`\."
)


def test_two_trainers_cannot_save_to_one_folder(tmp_path):
    deployer = make_deployer(tmp_path)
    one, two = make_trainer(deployer), make_trainer(deployer)
    one.train(DATA, 2)
    one.save_ckpt()
    two.train(DATA, 2)
    for act in (two.save_ckpt, lambda: two.fit(DATA, 2, 1)):
        with pytest.raises(LockedError, match=REFUSED):
            act()
    two.load_ckpt()  # reading needs no lock
    before = CheckpointManager(tmp_path / "ckpts").index()
    one.save_ckpt("best")
    assert CheckpointManager(tmp_path / "ckpts").index()["last"] != before["last"]
    del one, act
    gc.collect()
    two.save_ckpt()


def test_rerun_in_the_same_process_takes_over_the_lock(tmp_path):
    first = make_trainer(make_deployer(tmp_path))
    first.fit(DATA, 2, 1, save_last_ckpt=True)
    again = make_trainer(make_deployer(tmp_path))
    again.fit(DATA, 2, 2, save_last_ckpt=True)
    assert again.step == 2 * first.step
    with pytest.raises(LockedError, match=REFUSED):
        first.save_ckpt()
    saved = CheckpointManager(tmp_path / "ckpts")
    assert saved.record(saved.resolve("last"))["step"] == again.step


class LockTracker:
    """Tracker that records whether the lock exists and, if given an `error`, raises it."""

    def __init__(self, path, error=None):
        self.path, self.error, self.seen = path, error, []

    def log(self, metrics, step):
        self.seen.append(self.path.exists())
        if self.error is not None:
            raise self.error


def test_fit_holds_the_lock_until_it_returns(tmp_path):
    tracker = LockTracker(tmp_path / "ckpts.lock")
    trainer = make_trainer(make_deployer(tmp_path, loggers=[tracker]))
    trainer.fit(DATA, 2, 1, save_last_ckpt=True)
    assert tracker.seen and all(tracker.seen)
    assert not tracker.path.exists()
    tracker.error = KeyboardInterrupt()
    again = make_trainer(make_deployer(tmp_path, loggers=[tracker]))
    with pytest.raises(KeyboardInterrupt):
        again.fit(DATA, 2, 2, save_last_ckpt=True)
    assert not tracker.path.exists()


def test_refused_fit_leaves_the_folder_unchanged(tmp_path):
    make_trainer(make_deployer(tmp_path)).fit(DATA, 2, 1, save_last_ckpt=True)
    gc.collect()
    recorded = (tmp_path / "metrics.jsonl").read_bytes()
    with start_python("import time; time.sleep(60)") as other:
        write_lock(tmp_path / "ckpts.lock", pid=other.pid, started=started(other.pid))
        trainer = make_trainer(make_deployer(tmp_path))
        with pytest.raises(LockedError, match=f"which process {other.pid} on "):
            trainer.fit(DATA, 2, 2)
        assert (tmp_path / "metrics.jsonl").read_bytes() == recorded
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=20)
    trainer.fit(DATA, 2, 2)
    assert trainer.step > 2
