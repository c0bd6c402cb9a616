"""Output that cannot be printed or recorded: a run goes on, and says once what is missing."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from redeqx.monitor import Console

SCRIPT = """
import sys
import numpy as np, jax, jax.numpy as jnp, equinox as eqx, optax, redeqx
deployer = redeqx.Deployer(workdir=sys.argv[1])
trainer = redeqx.Trainer(
    deployer, model=eqx.nn.Linear(3, 1, key=deployer.next_key()), optimizer=optax.sgd(1e-2), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
)
deployer.log_info("\\u00fcber \\u2192 \\u2713")
trainer.fit(list(np.eye(3, dtype=np.float32)) * 100, batch_size=3, n_epochs=1)
deployer.log_info("x" * 20_000)
"""


@contextmanager
def file_limit(n_bytes):
    """A context in which no file can grow beyond this size: a write is cut there, then refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(workdir, stdout, **environment):
    root = str(Path(__file__).parents[2])
    given = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    command = [sys.executable, "-c", SCRIPT, str(workdir)]
    return subprocess.run(command, env=given, stdout=stdout, stderr=subprocess.PIPE, timeout=120, check=False)


def assert_complete(workdir):
    assert [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()] == list(range(1, 101))
    assert json.loads((workdir / "ckpts" / "index.json").read_text())["last"] == "step_00000100"


@pytest.mark.sweep
def test_full_disk_of_logs_does_not_end_a_run(tmp_path):
    with open("/dev/full", "w") as full:
        ended = run(tmp_path, full)
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stderr.decode().count("expected to print, got No space left on device. Training goes on") == 1
    assert_complete(tmp_path)


@pytest.mark.parametrize(
    "setting", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
@pytest.mark.sweep
def test_letters_that_a_stream_lacks_do_not_end_a_run(tmp_path, setting):
    ended = run(tmp_path, subprocess.PIPE, **setting)
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.decode("ascii").startswith("?ber ? ?\n")
    assert_complete(tmp_path)


def test_metrics_that_a_full_disk_refused_are_written_later(tmp_path):
    console = Console(tmp_path, verbose=False)
    path = tmp_path / "metrics.jsonl"
    console.records.metrics({"loss": 0.5}, 1)
    with file_limit(path.stat().st_size + 10):  # room for a part of a line
        with pytest.warns(UserWarning, match="metrics.jsonl`: expected to record, got File too large. Training goes on"):
            console.records.metrics({"loss": 0.25}, 2)
        console.records.metrics({"loss": 0.125}, 3)  # says nothing again
        assert path.read_text() == '{"step": 1, "loss": 0.5}\n'
    console.records.metrics({"loss": 0.0625}, 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": i, "loss": 0.5**i} for i in (1, 2, 3, 4)]


def test_full_disk_at_a_rewind_only_needs_room_to_shorten(tmp_path):
    console = Console(tmp_path, verbose=False)
    for step in (1, 2, 3):
        console.records.metrics({"loss": 0.5}, step)
    with file_limit(0):
        Console(tmp_path, verbose=False).records.rewind(2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_media_that_a_full_disk_refuses_do_not_end_a_run(tmp_path):
    console = Console(tmp_path, verbose=False)
    with file_limit(0):
        with pytest.warns(UserWarning, match="media`: expected to record, got File too large. Training goes on"):
            console.records.text("note", "hello", 1)
        console.records.text("note", "hello", 2)
    console.records.text("note", "hello", 3)
    assert [path.name for path in (tmp_path / "media").iterdir()] == ["step_00000003_note.txt"]


@pytest.mark.parametrize(
    ("error", "n_said"), [(OSError(errno.ENOSPC, "No space left on device"), 1), (BrokenPipeError(32, "Broken pipe"), 0)]
)
def test_stream_without_a_descriptor_that_fails_does_not_end_a_run(monkeypatch, capsys, error, n_said):
    class Refuses(io.TextIOBase):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, "stdout", Refuses())
    for _ in range(2):
        Console(None).info("step 1")
    assert capsys.readouterr().err.count("expected to print, got No space left on device. Training goes on") == n_said
