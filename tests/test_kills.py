"""SIGKILL of either or both of two processes, before every system call of a save and every word between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redeqx._checkpoint import Checkpoints
from redeqx._launch import _free_port
from redeqx._safetensors import TensorFile

SCRIPT = Path(__file__).parent / "scripts" / "saving.py"
pytestmark = pytest.mark.timeout(600)


class Trials:
    """The script under way: trials in, what became of them out."""

    def __init__(self, folder):
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "NPROC": "16"}
        command = [sys.executable, str(SCRIPT), str(folder), str(_free_port())]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name, kills):
        self.process.stdin.write(json.dumps([name, kills]) + "\n")
        self.process.stdin.flush()
        found, codes, passed = json.loads(self.process.stdout.readline())
        assert found == name
        return codes, passed


@pytest.fixture
def trials(tmp_path):
    trials = Trials(tmp_path)
    with trials.process:
        yield trials
        trials.process.stdin.close()
        trials.process.wait(timeout=30)


def check_whole(folder, steps):
    """The index names a complete checkpoint of one of those steps, so does every other folder that is called one; the next
    save takes up from there, and clears what the kill left."""
    checkpoints = Checkpoints(folder / "ckpts")
    path = checkpoints.resolve("last")
    step = checkpoints.record(path)["step"]
    assert step in steps
    for name in checkpoints.names():
        saved = checkpoints.record(checkpoints.folder / name)["step"]
        file = TensorFile(checkpoints.folder / name / "model.safetensors")
        for tensor in file.names:
            np.testing.assert_array_equal(file.read(tensor), np.full((4, 8), saved) + np.arange(8))
        assert TensorFile(checkpoints.folder / name / "optimizer.safetensors").read("count") == saved
    checkpoints.save(3, {"model": {"w": np.ones(3)}}, {"step": 3}, keep_last=1)
    left = sorted(entry.name for entry in checkpoints.folder.iterdir())
    assert left == ["index.json", "step_00000003"]
    return step


def test_killed_anywhere_the_index_names_a_complete_checkpoint(tmp_path, trials):
    codes, (hub, other) = trials.run("undisturbed", [])
    assert codes == [0, 0], (tmp_path / "undisturbed" / "errors_0").read_text()[-2000:]
    assert check_whole(tmp_path / "undisturbed", {2}) == 2
    assert {"posix_fallocate", "pwrite", "fsync", "rename", "replace", "rmtree", "give"} <= set(hub)
    assert {"pwrite", "fsync", "give"} <= set(other)
    kills = [[[0, i]] for i in range(len(hub))] + [[[1, i]] for i in range(len(other))]
    # Both: the other one where it is about when the hub is there, and at its end.
    kills += [[[0, i], [1, len(other) * i // len(hub)]] for i in range(len(hub))]
    seen = set()
    for number, each in enumerate(kills):
        name = f"kill_{number}"
        codes, _ = trials.run(name, each)
        killed = [index for index, _ in each]
        # The other leaves by itself, unless it had ended, or was killed first.
        assert all(codes[index] in (-9, 75) for index in killed), (each, codes)
        assert all(code in (-9, 75, 0) for code in codes), (each, codes)
        assert -9 in codes
        seen.add(check_whole(tmp_path / name, {1, 2}))
    assert seen == {1, 2}
