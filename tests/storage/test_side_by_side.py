"""Two trainers of one run, with checkpoints in `ckpts` and `ckpts/critic`: neither locks, prunes or removes the other's."""

import shutil
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from redeqx.checkpoint import CheckpointManager, find_checkpoint
from redeqx.distributed import Peers
from redeqx.storage import location

SECOND = """
import sys
import numpy as np
from redeqx.checkpoint import CheckpointManager, LockedError
from redeqx.storage import location
root = location(sys.argv[1])
for folder in (root / "ckpts" / "critic", root / "ckpts"):
    try:
        CheckpointManager(folder, root=root).save(9, {"model": {"w": np.zeros(3)}}, {})
        print("saved")
    except LockedError:
        print("locked")
"""


def save(checkpoints, step, keep_last=1):
    checkpoints.save(step, {"model": {"w": np.full(3, step, np.float32)}}, {"step": step}, keep_last=keep_last)


def value(checkpoints, which):
    folder = checkpoints.resolve(which)
    checkpoints.record(folder)
    return checkpoints.load(folder, "model", {"w": np.zeros(3, np.float32)})["w"][0]


@pytest.fixture
def root(request, tmp_path, medium):
    if medium == "disk":
        (tmp_path / "run").mkdir()
        return tmp_path / "run"
    return location(request.getfixturevalue("bucket") + "/run")


@pytest.mark.parametrize(
    ("medium", "names"), [("disk", ("actor", "critic")), pytest.param("store", ("critic", "actor"), marks=pytest.mark.sweep)]
)
def test_two_trainers_save_side_by_side(root, names):
    run = object()
    folders = {"actor": root / "ckpts", "critic": root / "ckpts" / "critic"}
    both = {name: CheckpointManager(folders[name], run=run, root=root) for name in names}
    with both[names[0]].writing(), both[names[1]].writing():
        other = subprocess.run([sys.executable, "-c", SECOND, str(root)], capture_output=True, text=True, timeout=120)
        assert other.stdout.split() == ["locked", "locked"], other.stderr
        for step in (1, 2, 3):
            save(both["actor"], step)
            save(both["critic"], 10 * step, keep_last=2)
    actor, critic = both["actor"], both["critic"]
    assert actor.names() == ["step_00000003"] and critic.names() == ["step_00000020", "step_00000030"]
    assert (value(actor, "last"), value(critic, "last")) == (3, 30)
    assert [path.name for path in actor.newest()] == ["step_00000003"]
    for path, expected in ((root, "3"), (folders["critic"], "30"), (folders["critic"] / "last", "30")):
        assert find_checkpoint(path, Peers())[1].name == f"step_{expected:>08}"
    (folders["actor"] / "index.json").unlink()
    with pytest.warns(UserWarning, match="It is rebuilt"):
        assert CheckpointManager(folders["actor"]).index() == {"last": "step_00000003"}
    assert {path.name for path in folders["actor"].iterdir()} == {"critic", "step_00000003"}  # no lock is left


def test_their_saves_do_not_answer_each_other(tmp_path):
    """Each may save in a thread of its own: processes that do so in different orders must not mix up what they exchange."""

    class Recording(Peers):
        topics: ClassVar[list[str]] = []

        def together(self, topic, act, **kwargs):
            self.topics.append(topic)
            return super().together(topic, act, **kwargs)

    seen = []
    for folder in ("ckpts", "ckpts/critic"):
        Recording.topics.clear()
        save(CheckpointManager(tmp_path / folder, Recording(), root=tmp_path), 1)
        seen.append({topic for topic in Recording.topics if topic.startswith("save")})
    assert len(seen[0]) > 4 and not seen[0] & seen[1]


def test_a_folder_deeper_down_is_not_made_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "ckpts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="expected a folder, got a link to"):
        save(CheckpointManager(tmp_path / "run" / "ckpts" / "critic", root=tmp_path / "run"), 1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_whose_folder_is_gone_is_not_continued_in_its_place(tmp_path):
    """As when a disk is unmounted: the folder below its mount point is another one."""
    (tmp_path / "run").mkdir()
    checkpoints = CheckpointManager(tmp_path / "run" / "ckpts" / "critic", root=tmp_path / "run")
    save(checkpoints, 1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match="expected the run's folder, which existed at its start, got none"):
        save(checkpoints, 2)
    assert not (tmp_path / "run").exists()
