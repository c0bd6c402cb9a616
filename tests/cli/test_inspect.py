"""`redeqx inspect`: its output for runs, checkpoints, files and folders, and each of its errors."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import redeqx
from redeqx.cli import main
from redeqx.models import gpt2, save_pretrained
from tests.cli.commands import error_of, output_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The workdir of a run with two checkpoints."""
    workdir = tmp_path_factory.mktemp("run")
    deployer = redeqx.Deployer(workdir=workdir, n_model_shards=2, verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=[eqx.nn.Linear(4, 8, key=jax.random.key(0)) for _ in range(11)],
        optimizer=optax.sgd(0.1, momentum=0.9),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: sum(jnp.sum(jax.vmap(layer)(batch) ** 2) for layer in model),
    )
    trainer.save_ckpt("first", metrics={"loss": 0.5})
    trainer.update(np.ones((8, 4), np.float32))
    trainer.save_ckpt(metrics={"loss": 0.25, "accuracy": 1.0})
    return workdir


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with shards."""
    config = gpt2.GPT2Config(vocab_size=32, n_positions=8, d_model=16, n_layers=2, n_heads=2)
    return save_pretrained(gpt2.GPT2(config, key=jax.random.key(0)), config, tmp_path / "folder", max_shard_size="10KB")


def test_workdir_shows_its_checkpoints_and_the_last_one(run, capsys):
    lines = output_of(capsys, "inspect", run).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["checkpoints", "of", f"{run}/ckpts"],
        ["name", "named", "size", "metrics"],
        ["step_00000000", "first", "6.42", "KiB", "loss", "0.5"],
        ["step_00000001", "last", "6.42", "KiB", "loss", "0.25,", "accuracy", "1"],
    ]
    assert [line.split() for line in lines[4:9]] == [
        [f"{run}/ckpts/step_00000001"],
        ["step", "1"],
        ["metrics", "loss", "0.25,", "accuracy", "1"],
        ["named", "last"],
        ["saved", "by", "redeqx", redeqx.__version__, "on", "data=4", "x", "fsdp=1", "x", "model=2"],
    ]
    names = [line.split()[0] for line in lines if line.startswith("  1")]
    assert names == ["1.bias", "1.weight", "10.bias", "10.weight"]
    assert ["2.weight", "float32", "8", "x", "4", "128", "B"] in [line.split() for line in lines]
    assert lines[-1].split() == ["22", "tensors", "float32", "440", "numbers", "1.72", "KiB"]


def test_checkpoint_by_tag_kind_and_pattern(run, capsys):
    options = ("--kind", "optimizer", "--match", "*.trace.3.*", "--match", "*.trace.1.bias", "--check")
    lines = output_of(capsys, "inspect", run / "ckpts" / "first", *options).splitlines()
    assert lines[0] == f"{run}/ckpts/step_00000000" and "  checksums  as they were written" in lines
    at = lines.index("optimizer.safetensors")
    assert [line.split()[0] for line in lines[at + 2 : -1]] == ["0.trace.1.bias", "0.trace.3.bias", "0.trace.3.weight"]
    assert lines[-1].split()[:4] == ["3", "of", "22", "tensors"]


def test_json_is_complete(run, capsys):
    report = json.loads(output_of(capsys, "inspect", run, "--json", "--kind", "all"))
    assert {"step", "seed", "mesh"} < report["record"].keys() and report["record"]["metrics"] == {
        "loss": 0.25,
        "accuracy": 1.0,
    }
    assert report["path"] == f"{run}/ckpts/step_00000001" and report["tags"] == ["last"] and report["checked"] is False
    assert [of["step"] for of in report["checkpoints"]] == [0, 1]
    assert report["files"] == {path.name: path.stat().st_size for path in (run / "ckpts" / "step_00000001").iterdir()}
    assert report["tensors"]["model"]["0.weight"] == {"dtype": "float32", "shape": [8, 4], "bytes": 128}
    totals = {"tensors": 22, "numbers": 440, "bytes": 1760, "dtypes": {"float32": 440}}
    assert report["totals"] == {"model": totals, "optimizer": totals}


def test_file_with_several_dtypes(tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    save_file({"a": np.ones((), np.float32), "b.10": np.ones((2, 3), jnp.bfloat16), "b.9": np.ones(4, np.int8)}, path)
    lines = output_of(capsys, "inspect", path).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["weights.safetensors"],
        ["tensor", "dtype", "shape", "size"],
        ["a", "float32", "scalar", "4", "B"],
        ["b.9", "int8", "4", "4", "B"],
        ["b.10", "bfloat16", "2", "x", "3", "12", "B"],
        ["3", "tensors", "bfloat16,", "int8,", "float32", "11", "numbers", "20", "B"],
    ]


@pytest.mark.sweep
def test_folder_of_shards_shows_its_config(folder, capsys):
    lines = output_of(capsys, "inspect", folder).splitlines()
    assert [line.split() for line in lines[:4]] == [
        [str(folder)], ["model_type", "gpt2"], ["architectures", "GPT2LMHeadModel"], ["dtype", "float32"],
    ]  # fmt: skip
    assert "model.safetensors.index.json" in lines and lines[-1].split()[:2] == ["28", "tensors"]
    report = json.loads(output_of(capsys, "inspect", folder / "model.safetensors.index.json", "--json"))
    assert report["totals"]["model"]["tensors"] == 28 and "config" not in report


def test_single_file_takes_precedence_over_an_index(folder, capsys):
    save_file({"x": np.ones(2, np.float32)}, folder / "model.safetensors")
    assert list(json.loads(output_of(capsys, "inspect", folder, "--json"))["tensors"]["model"]) == ["x"]


def test_lost_index_is_rebuilt(run, capsys):
    (run / "ckpts" / "index.json").unlink()
    with pytest.warns(UserWarning, match=r"index\.json.* It is rebuilt from the checkpoints that are complete"):
        assert f"{run}/ckpts/step_00000001" in output_of(capsys, "inspect", run).splitlines()


def test_damaged_checkpoint_is_named(run, capsys):
    (run / "ckpts" / "step_00000000" / "model.safetensors").unlink()
    row = output_of(capsys, "inspect", run).splitlines()[2]
    assert row.split() == ["step_00000000", "first", "damaged"]
    report = error_of(capsys, "inspect", run / "ckpts" / "first")
    assert report.startswith(f"`{run}/ckpts/step_00000000/model.safetensors`: expected ") and "bytes, got no file." in report


def test_check_verifies_checksums(run, capsys):
    path = run / "ckpts" / "step_00000001" / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    output_of(capsys, "inspect", run)
    report = error_of(capsys, "inspect", run, "--check")
    assert report.startswith(f"`{path}`: expected crc32 ") and report.endswith("load another checkpoint.")


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            ("--kind", "optimiser"),
            "`--kind`: expected model, optimizer or all, got 'optimiser'. Did you mean `optimizer`? Pass one of them.",
        ),
        (
            ("--match", "1.wait"),
            "`1.wait`: expected a pattern of tensor names, got one that matches none of 22. Did you mean `1.weight`? "
            'Quote it, and write "*" for any text.',
        ),
    ],
)
def test_options_without_a_match(run, capsys, options, expected):
    assert error_of(capsys, "inspect", run, *options) == expected


def test_paths_without_tensors(tmp_path, run, folder, capsys):
    assert error_of(capsys, "inspect", tmp_path / "x") == (
        f"`{tmp_path}/x`: expected a checkpoint (`runs/x/ckpts/step_00000100`), a workdir that holds some, or a name of its "
        "index (`runs/x/ckpts/last`), got nothing there. Pass one of those. `redeqx.load` reads a safetensors file too, "
        "`redeqx.models.from_pretrained` a folder of Hugging Face."
    )
    for i in range(100):
        (tmp_path / "many" / f"run{i:03}" / "ckpts").mkdir(parents=True)
    many = error_of(capsys, "inspect", tmp_path / "many")
    assert "got one with run000, run001, " in many and "run099" not in many and "and 90 more. Pass another path" in many
    (tmp_path / "empty").mkdir()
    assert error_of(capsys, "inspect", tmp_path / "empty") == (
        f"`{tmp_path}/empty`: expected a workdir with a complete checkpoint, a checkpoint, or a folder of safetensors "
        "files, got one with nothing. Pass another path; `redeqx inspect --help` lists the supported ones."
    )
    (tmp_path / "begun" / "ckpts").mkdir(parents=True)
    assert "expected a workdir with a complete checkpoint, " in error_of(capsys, "inspect", tmp_path / "begun")
    assert error_of(capsys, "inspect", run / "ckpts" / "frist").endswith(
        "expected one of last, first, step_00000000, step_00000001, or the path of a checkpoint, got 'frist'. Did you mean "
        "`first`? Pass one of those."
    )
    assert error_of(capsys, "inspect", folder, "--check") == (
        f"`--check`: expected a checkpoint of redeqx, whose trainer.json has checksums, got {folder}. Leave it out: the "
        "headers are checked in any case."
    )
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert error_of(capsys, "inspect", tmp_path / "metrics.jsonl") == (
        f"`{tmp_path}/metrics.jsonl`: expected a safetensors file or an index of some, got a file of another kind. Pass one "
        "of those, or a folder."
    )
    (folder / "config.json").write_text("{")
    report = error_of(capsys, "inspect", folder)
    assert report.startswith(f"`{folder}/config.json`: expected JSON, got ") and report.endswith("Correct the file.")


def test_control_characters_in_names_are_escaped(tmp_path, capsys):
    save_file({"a\x1b[31m\nb": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    assert "  a\\x1b[31m\\nb  float32" in output_of(capsys, "inspect", tmp_path / "x.safetensors")


@pytest.mark.sweep
def test_module_runs_as_a_command(run, tmp_path):
    """A reader that closes the pipe early (`| head -1`) is not an error."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    line = f'"{sys.executable}" -m redeqx inspect "{run}" --json | head -c 9; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"path": ', "")


def test_invalid_arguments_are_reported_before_any_work(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "expected obstore" in error_of(capsys, "inspect", "s3://bucket/run")
    for argv, message in (
        (("inspect", "file:///tmp/x"), "expected a folder, or an address that begins with"),
        (
            ("dry-run", "--topology", "cpu:8", "--memory", "1.2.3GB", "train.py"),
            "expected bytes above 0, such as 10GB or 9.5GiB",
        ),
    ):
        with pytest.raises(SystemExit):
            main([*argv])
        assert message in capsys.readouterr().err
    assert "`--port`: expected 1 to 65535, got 99999" in error_of(
        capsys, "launch", "--processes", "2", "--port", "99999", __file__
    )


def test_checkpoint_from_inside_its_folder(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved / "ckpts" / "step_00000001")
    assert "last" in output_of(capsys, "inspect", ".").split("named")[1].split("\n")[0]
