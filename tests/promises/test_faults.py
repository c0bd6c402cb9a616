"""After a fault in a run of two processes, both exit in time and report the reason; the last checkpoint is complete."""

import re
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest

from redeqx.checkpoint import CheckpointManager, TensorReader
from tests._processes import train, trained_on

N = 101  # examples, with `--rest`
# A heartbeat of 3 s and a hang limit of 4 s, so that the tests do not wait for the longer defaults.
QUICK = ("--heartbeat", 3, "--hang", 4)
SOON = 25.0  # seconds, below the heartbeat of 30 s: one second on an idle machine, more on busy cores


def last_complete_step(workdir):
    """Returns the step of the newest checkpoint in the index, after verifying its checksums."""
    checkpoints = CheckpointManager(workdir / "ckpts")
    return checkpoints.record(checkpoints.resolve("last"))["step"]


def leftovers(workdir):
    return [path.name for path in (workdir / "ckpts").iterdir() if path.name.startswith(".tmp_")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of which process 1 was killed, and the run."""
    # Without dropout: its masks depend on how devices share the last, smaller step of an epoch.
    folder = tmp_path_factory.mktemp("killed")
    return folder, train(folder, "--fault", "kill", "--at", 10, "--rest", "--dropout", 0)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.sweep
def test_the_others_leave_when_a_peer_is_killed(tmp_path, killed, culprit):
    folder, run = killed if culprit else (tmp_path, train(tmp_path, "--fault", "kill", "--in", culprit))
    assert run.code == 137  # 128 + SIGKILL
    assert run.seconds_after_fault() < SOON
    assert run.lines[-1] == (
        f"[{1 - culprit}] redeqx: process {culprit} of 2 is gone: its connection was closed; the last committed step is "
        f"{last_complete_step(folder)}. Leaving with exit code 75: run it again to go on."
    )
    assert "Terminating process" not in run.text  # JAX's client prints it when it loses its coordinator


@pytest.mark.sweep
def test_the_others_leave_after_the_heartbeat_when_a_peer_is_frozen(tmp_path):
    run = train(tmp_path, "--fault", "stop", "--heartbeat", 3)
    assert "[0] redeqx: process 1 of 2 is gone: no message from it for 3 s; the last committed step is " in run.lines[-1]


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
static int (*read_clock)(clockid_t, struct timespec *);
static volatile long long *step;
__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("CLOCK_STEP"), O_RDONLY);
  if (file >= 0) step = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t which, struct timespec *at) {
  if (!read_clock) read_clock = dlsym(RTLD_NEXT, "clock_gettime");  // other libraries read it before `begin`
  int failed = read_clock(which, at);
  if (!failed && which == CLOCK_REALTIME && step) at->tv_sec += *step;
  return failed;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a small library")
@pytest.mark.sweep
def test_a_step_of_the_wall_clock_ends_nothing(tmp_path, monkeypatch):
    """As NTP makes one when a host wakes up; JAX's own heartbeats take it for a lost process."""
    source, library, step = (tmp_path / name for name in ("clock.c", "clock.so", "step"))
    source.write_text(CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    step.write_bytes(bytes(8))
    monkeypatch.setenv("CLOCK_STEP", str(step))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    run = train(tmp_path / "run", "--fault", "clock", "--heartbeat", 3)
    assert run.code == 0, run.text
    assert "fault clock" in run.text and run.result["metrics"]


@pytest.mark.sweep
def test_a_peer_that_hangs_is_named(tmp_path):
    run = train(tmp_path, "--fault", "hang", "--hang", 4)
    assert run.code == 75
    for i in (0, 1):
        (line,) = [
            line for line in run.lines if line.startswith(f"[{i}] redeqx: no progress for 4 s: ") and "exit code" in line
        ]
        assert f"process 1 of 2 is behind, after step {last_complete_step(tmp_path)}; the last committed step is " in line
    stacks = [line for line in run.lines if line.startswith("[1] ")]
    assert any("in hangs" in line for line in stacks), run.text  # the thread's stack
    assert any(line.startswith("[0] ") and "in updates" in line for line in run.lines)


@pytest.mark.sweep
def test_an_exception_in_one_process_ends_all_and_is_printed_once_and_last(tmp_path):
    """In process 0, which the others need for theirs."""
    culprit = 0
    run = train(tmp_path, "--fault", "raise", "--in", culprit)
    assert run.code == 1
    assert run.seconds_after_fault() < SOON
    *above, raised, note = run.lines
    assert raised == f"[{culprit}] RuntimeError: the loader is broken"
    assert note.startswith(f"[{culprit}] Raised in reading example ")
    assert run.text.count("Traceback (most recent call last)") == 1
    assert "in fails" in above[-1] or "in fails" in above[-2]
    assert last_complete_step(tmp_path) >= 3


@pytest.mark.sweep
def test_signals_of_the_scheduler_save_the_same_step(tmp_path):
    """SIGTERM twice, and SIGUSR1. This checkpoint contains the optimizer state, although the others are saved without it."""
    run = train(tmp_path, "--fault", "twice", "--params-only")
    assert run.code == 75
    step = last_complete_step(tmp_path)
    assert f"[0] preempted: step {step} is saved; run the script again to go on from it" in run.lines
    assert not leftovers(tmp_path)
    assert 8 <= step <= 13
    again = train(tmp_path)
    assert again.code == 0
    assert f"[0] resuming from {tmp_path}/ckpts/step_{step:08d}, step {step}" in again.lines
    assert last_complete_step(tmp_path) == 14


@pytest.mark.sweep
def test_ctrl_c_saves_the_same_step_and_shows_no_traceback(tmp_path):
    run = train(tmp_path, "--fault", "int", "--params-only")
    assert run.code == 130
    step = last_complete_step(tmp_path)
    assert f"[0] stopped by Ctrl-C: step {step} is saved; run the script again to go on from it" in run.lines
    assert "[1] redeqx: Ctrl-C: stopping after this step, to save it; a second one leaves at once" in run.lines
    assert "Traceback" not in run.text
    assert TensorReader.find(CheckpointManager(tmp_path / "ckpts").resolve("last"), "optimizer").read("0.count") == step


@pytest.mark.sweep
def test_a_second_ctrl_c_exits_at_once(tmp_path):
    """Also while the loader hangs."""
    run = train(tmp_path, "--fault", "int_twice", n_processes=1)
    assert run.code == 130
    assert run.seconds_after_fault() < SOON
    assert "Traceback" not in run.text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of two epochs in one shared folder, and the run. What process 1 does there changes nothing."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    run = train(workdir, "--fault", "forks", "--stop-at", 4)
    assert run.code == 0, run.text
    return workdir, run


@pytest.mark.sweep
def test_forked_children_do_not_affect_the_run(undisturbed):
    """A terminated child ends. A failing child prints its error, and the run continues."""
    workdir, run = undisturbed
    assert "[1] children -15 1" in run.lines
    assert "[1] RuntimeError: the child's own" in run.lines
    assert last_complete_step(workdir) == 14


@pytest.mark.sweep
def test_only_process_0_can_stop_a_fit(undisturbed, tmp_path):
    assert last_complete_step(undisturbed[0]) == 14
    run = train(tmp_path, "--stop-at", 4, "--in", 0)
    assert run.code == 0, run.text
    assert last_complete_step(tmp_path) == 4


@pytest.mark.parametrize(
    ("fault", "culprit", "why"),
    [
        ("disk", 1, "'No space left on device (process 1)' with"),
        ("readonly", 0, "'Read-only file system (process 0)' with"),
        (
            "vanished",
            1,
            "expected the run's folder, which existed at its start, got none. Mount it again, or save elsewhere",
        ),
    ],
)
@pytest.mark.sweep
def test_a_disk_failure_ends_all_processes_with_the_same_error(tmp_path, fault, culprit, why):
    workdir = tmp_path / "run"
    workdir.mkdir()
    run = train(workdir, "--fault", fault, "--in", culprit)
    assert run.code == 1
    assert len({line[:4] for line in run.lines if "Traceback (most recent call last)" in line}) == 1  # from one process
    assert why in run.lines[-1], run.text
    if fault != "vanished":
        assert re.search(r"expected to write \d+ bytes, got .* with \d+ bytes free", run.lines[-1])
        assert last_complete_step(workdir) == 3
        assert not leftovers(workdir)


@pytest.mark.sweep
def test_a_script_that_ends_before_the_others_is_named(tmp_path):
    culprit = 1
    run = train(tmp_path, "--fault", "ends", "--in", culprit)
    assert run.code == 1
    assert "Leaving with exit code 75" not in run.text
    assert f"redeqx: process {culprit} of 2 has come to the end of its script, while others wait for it; " in run.lines[-1]


@pytest.mark.sweep
def test_rows_of_another_shape_are_named(tmp_path):
    run = train(tmp_path, "--fault", "shape", *QUICK)
    assert run.code == 1
    assert (
        "ValueError: `collate_fn`: expected `x` to be float32 [16] a row, as in process 0, got float32 [20] a row in "
        "process 1. Pad to one length, the same in every batch: a process collates the rows that its devices need, "
    ) in run.lines[-1]


@pytest.mark.sweep
def test_arguments_that_differ_are_named(tmp_path):
    run = train(tmp_path, "--fault", "seed", *QUICK)
    assert run.code == 1
    assert (
        "ValueError: `Deployer`: expected `jax_seed` to be 0, as in process 0, got 1 in process 1. "
        "Every process must run the same script with the same arguments."
    ) in run.lines[-1]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            "rate",
            r"`train step`: expected `line \d+` to be .*0\.01|0\.00999.*, as in process 0, got .* in process ",
        ),
        ("init", r"`init`: expected `line \d+` to be .*"),
        (
            "weights",
            r"`model`: expected `up\.weight` to have the same values in all processes, got crc32 [0-9a-f]{8} in process 0, ",
        ),
    ],
)
@pytest.mark.sweep
def test_a_process_with_another_program_or_other_values_is_refused(tmp_path, fault, why):
    """It is refused before its first step is used."""
    run = train(tmp_path, "--fault", fault, *QUICK)
    assert run.code == 1
    assert re.search("ValueError: " + why, run.lines[-1]), run.text
    assert "Every process must run the same script" in run.lines[-1]
    assert not (tmp_path / "ckpts").exists()


@pytest.mark.sweep
def test_process_0_decides_if_a_metric_differs(tmp_path):
    run = train(tmp_path, "--fault", "metric", *QUICK)
    assert run.code == 0, run.text
    assert CheckpointManager(tmp_path / "ckpts").resolve("argmax_score").name == "step_00000014"
    said = [line for line in run.lines if "UserWarning" in line]
    assert all(line.startswith("[0] ") for line in said)
    assert re.search(
        r"`eval_metric_fn`: expected `score` to be 3\.0, as in process 0, got -3\.0 in process 1\. Process 0's is used: "
        r"compute it from all the outputs\.",
        run.text,
    )


@pytest.mark.parametrize(
    "options",
    [(), ("--ragged",), ("--centred",), ("--centred", "--fsdp", 1, "--model", 4, "--batch", 2)],  # the last: a row a process
)
@pytest.mark.sweep
def test_two_processes_train_like_one(tmp_path, options):
    """Both runs have eight devices: the order of data and the random numbers are equal; only the order of sums differs."""
    two = train(tmp_path / "two", "--fsdp", 2, "--rest", *options)
    one = train(tmp_path / "one", "--fsdp", 2, "--rest", *options, n_processes=1, n_devices=8)
    assert (two.code, one.code) == (0, 0), two.text
    assert two.text.count("every process collates whole batches") == bool(options)  # not in each epoch and evaluation
    np.testing.assert_allclose(two.result["metrics"]["loss"], one.result["metrics"]["loss"], rtol=1e-6)
    np.testing.assert_allclose(two.result["outputs"], one.result["outputs"], rtol=1e-6)
    files = [CheckpointManager(tmp_path / name / "ckpts") for name in ("two", "one")]
    for kind in ("model", "optimizer"):
        a, b = (TensorReader.find(each.resolve("last"), kind) for each in files)
        assert set(a.names()) == set(b.names())
        for name in a.names():
            np.testing.assert_allclose(a.read(name), b.read(name), rtol=2e-6, atol=1e-7, err_msg=name)
            assert np.linalg.norm(a.read(name) - b.read(name)) <= 1e-6 * np.linalg.norm(b.read(name)), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the same run in one process, which nothing ends, and the run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, "--rest", "--dropout", 0, n_processes=1, n_devices=8)


@pytest.mark.sweep
@pytest.mark.parametrize(("n_devices", "mesh"), [(8, ()), (4, ("--model", 1, "--fsdp", 4))])
def test_a_run_continues_on_other_devices(killed, whole, tmp_path, n_devices, mesh):
    """A single process resumes it on as many or fewer devices, with another mesh."""
    whole_folder, whole = whole
    shutil.copytree(killed[0], tmp_path / "run")
    step = last_complete_step(tmp_path / "run")
    assert 3 <= step < 14
    again = train(tmp_path / "run", *mesh, "--rest", "--dropout", 0, n_processes=1, n_devices=n_devices)
    assert again.code == 0, again.text
    steps = trained_on(tmp_path / "run", N)
    seen = Counter(number for numbers in [*steps["2"][:step], *steps["1"]] for number in numbers)
    assert seen == dict.fromkeys(range(N), 2)  # in two epochs
    assert trained_on(whole_folder, N)["1"][step:] == steps["1"]
    np.testing.assert_allclose(again.result["metrics"]["loss"], whole.result["metrics"]["loss"], rtol=1e-5)


# --- where files cannot be written in place, or the folder is not shared -----------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted_checkpoint(undisturbed):
    """The newest checkpoint of a run of two epochs without interruption, in one shared folder."""
    return CheckpointManager(undisturbed[0] / "ckpts").resolve("last")


def check_same_bits(path, uninterrupted_checkpoint):
    for kind in ("model", "optimizer"):
        found, expected = TensorReader.find(path, kind), TensorReader.find(uninterrupted_checkpoint, kind)
        assert set(found.names()) == set(expected.names())
        for name in expected.names():
            np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)


FILES = {f"{kind}-0000{i}-of-00002.safetensors" for kind in ("model", "optimizer") for i in (1, 2)}
INDEXES = {"model.safetensors.index.json", "optimizer.safetensors.index.json"}


@pytest.mark.sweep
def test_without_writes_at_a_position_each_process_writes_its_own_file(tmp_path, uninterrupted_checkpoint):
    """A second run resumes from these files, writes in place again, and ends bitwise equal to an uninterrupted one."""
    first = train(tmp_path, "--fault", "sequential", "--epochs", 1)
    assert first.code == 0, first.text
    assert f"[0] {tmp_path}/ckpts: several processes cannot write one file there, so each writes its own" in first.lines
    path = CheckpointManager(tmp_path / "ckpts").resolve("last")
    assert {file.name for file in path.iterdir()} == {*FILES, *INDEXES, "trainer.json"}
    assert not leftovers(tmp_path)
    again = train(tmp_path)
    assert again.code == 0, again.text
    assert any("resuming from" in line for line in again.lines)
    check_same_bits(CheckpointManager(tmp_path / "ckpts").resolve("last"), uninterrupted_checkpoint)


@pytest.fixture(scope="module")
def on_separate_disks(tmp_path_factory):
    """The folder of both disks after an epoch, and its run."""
    folder = tmp_path_factory.mktemp("disks")
    return folder, train(folder / "run", "--fault", "unshared", "--epochs", 1)


@pytest.mark.sweep
def test_on_separate_disks_each_process_keeps_its_part(on_separate_disks, tmp_path, uninterrupted_checkpoint):
    """When all processes resume together, each gets the parts that it lacks from the others."""
    folder, first = on_separate_disks
    assert first.code == 0, first.text
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (said,) = [line for line in first.lines if "not shared" in line]
    assert said.startswith(f"[0] {folder}/run/ckpts: not shared by all 2 processes, so each keeps its part of every ")
    folders = [CheckpointManager(tmp_path / name / "ckpts") for name in ("run", "elsewhere")]
    parts = [{file.name for file in each.resolve("last").iterdir()} for each in folders]
    assert parts[0] & parts[1] == {*INDEXES, "trainer.json"}
    assert parts[0] | parts[1] == {*FILES, *INDEXES, "trainer.json"}
    again = train(tmp_path / "run", "--fault", "unshared")
    assert again.code == 0, again.text
    copied = [line for line in again.lines if "copied from process" in line]
    assert len(copied) == 4
    paths = [each.resolve("last") for each in folders]
    for file in paths[1].iterdir():
        if not (paths[0] / file.name).exists():
            (paths[0] / file.name).write_bytes(file.read_bytes())
    check_same_bits(paths[0], uninterrupted_checkpoint)
    assert not [file for each in folders for file in each.folder.iterdir() if file.name.startswith(".tmp_")]


@pytest.mark.sweep
def test_all_processes_detect_a_damaged_part_on_one_disk(on_separate_disks, tmp_path):
    shutil.copytree(on_separate_disks[0], tmp_path, dirs_exist_ok=True)
    path = CheckpointManager(tmp_path / "elsewhere" / "ckpts").resolve("last")
    (file,) = path.glob("model-*")
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    again = train(tmp_path / "run", "--fault", "unshared")
    assert again.code == 0, again.text
    assert any(
        f"{path.name}/{file.name}`: expected crc32 " in line and "It is skipped for the previous one." in line
        for line in again.lines
    )
    assert any("resuming from" in line and path.name not in line for line in again.lines)
