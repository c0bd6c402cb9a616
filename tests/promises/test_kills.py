"""SIGKILL of one or both of two processes, before each system call of a save and each message between them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redeqx.checkpoint import CheckpointManager, TensorReader
from tests._processes import free_port

SCRIPT = Path(__file__).parents[1] / "scripts" / "saving.py"
pytestmark = pytest.mark.timeout(600)


class Trials:
    """The running script, which reads trials and writes their results."""

    def __init__(self, folder, way):
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "NPROC": "16"}
        command = [sys.executable, str(SCRIPT), str(folder), way]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name, kills):
        self.process.stdin.write(json.dumps([name, free_port(), kills]) + "\n")
        self.process.stdin.flush()
        found, codes, passed = json.loads(self.process.stdout.readline())
        assert found == name
        return codes, passed


@pytest.fixture
def trials(tmp_path, request):
    trials = Trials(tmp_path, request.param)
    with trials.process:
        yield trials
        trials.process.stdin.close()
        trials.process.wait(timeout=30)


def check_complete_folder(folder, steps):
    """Checks that the index names a complete checkpoint of one of those steps, and that all other folders are complete."""
    checkpoints = CheckpointManager(folder / "ckpts" / "ckpts")
    step = check_complete(checkpoints, checkpoints.index()["last"])
    assert step in steps
    for name in checkpoints.names():
        check_complete(checkpoints, name)
    check_leftovers_are_removed(checkpoints)
    return step


def check_complete_in_two_folders(folder, steps):
    """As `check_complete_folder`, for two folders: a checkpoint that either index names is complete in both combined."""
    each = [CheckpointManager(folder / str(index) / "ckpts") for index in (0, 1)]
    both = CheckpointManager(folder / "both")
    found = []
    for name in {checkpoints.index()["last"] for checkpoints in each}:
        for checkpoints in each:
            shutil.copytree(checkpoints.folder / name, both.folder / name, dirs_exist_ok=True)
        found.append(check_complete(both, name))
    assert set(found) <= steps
    for checkpoints in each:
        check_leftovers_are_removed(checkpoints)
    return max(found)


def check_complete(checkpoints, name):
    """Checks the files and values of a checkpoint; returns its step."""
    saved = checkpoints.record(checkpoints.folder / name)["step"]
    source = TensorReader.find(checkpoints.folder / name, "model")
    assert len(list(source.names())) == 4
    for tensor in source.names():
        np.testing.assert_array_equal(source.read(tensor), np.full((4, 8), saved) + np.arange(8))
    assert TensorReader.find(checkpoints.folder / name, "optimizer").read("count") == saved
    return saved


def check_leftovers_are_removed(checkpoints):
    """Checks that the next save succeeds, and removes the files of the killed one."""
    checkpoints.save(3, {kind: {"w": np.ones(3)} for kind in ("model", "optimizer")}, {"step": 3}, keep_last=1)
    left = sorted(entry.name for entry in checkpoints.folder.iterdir())
    assert left == ["index.json", "step_00000003"]


@pytest.mark.parametrize(
    ("trials", "check"),
    [
        pytest.param("in_place", check_complete_folder, id="in place"),
        pytest.param("apart", check_complete_in_two_folders, id="apart"),
    ],
    indirect=["trials"],
)
@pytest.mark.sweep
def test_the_index_names_a_complete_checkpoint_after_any_kill(tmp_path, trials, check):
    codes, (coordinator, other) = trials.run("undisturbed", [])
    assert codes == [0, 0], (tmp_path / "undisturbed" / "errors_0").read_text()[-2000:]
    assert check(tmp_path / "undisturbed", {2}) == 2
    both, commit = {"fsync", "contribute"}, {"rename", "replace", "rmtree"}
    if check is check_complete_folder:
        assert {*both, *commit, "posix_fallocate", "pwrite"} <= set(coordinator)
        assert {*both, "pwrite"} <= set(other)
    else:
        assert {*both, *commit} <= set(coordinator) & set(other)
    kills = [[[0, i]] for i in range(len(coordinator))] + [[[1, i]] for i in range(len(other))]
    # Both: the coordinator at every second point, and the other process at about the same time.
    kills += [[[0, i], [1, len(other) * i // len(coordinator)]] for i in range(0, len(coordinator), 2)]
    seen = set()
    for number, each in enumerate(kills):
        name = f"kill_{number}"
        codes, _ = trials.run(name, each)
        killed = [index for index, _ in each]
        said = [(tmp_path / name / f"errors_{index}").read_text()[-2000:] for index in (0, 1)]
        # The other process exits by itself, unless it had ended or was killed before.
        assert all(codes[index] in (-9, 75) for index in killed), (each, codes, said)
        assert all(code in (-9, 75, 0) for code in codes), (each, codes, said)
        assert -9 in codes
        seen.add(check(tmp_path / name, {1, 2}))
    assert seen == {1, 2}
