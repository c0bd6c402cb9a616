"""`python -m examples` includes every example, and all examples take the common flags."""

import dataclasses
import importlib
import json
import subprocess
import types
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints
from unittest import mock

import pytest

from examples.__main__ import RUNS, Args, Run, execute, main, read_scores
from examples._cli import CONTINUES, with_own_workdir
from tests.examples._run import ROOT, refusal

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/main.py"))
COMMON = {"pretrained", "workdir", "n_model_shards", "n_fsdp_shards", "simulate_devices", "learning_rate", "seed"}


def test_every_example_is_registered():
    assert {run.name for run in RUNS} == set(EXAMPLES)
    assert all((ROOT / "examples" / name / "__main__.py").is_file() for name in EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_takes_the_common_flags_and_documents_its_command(name):
    assert f"python -m examples.{name}" in importlib.import_module(f"examples.{name}.main").__doc__
    for choice in variants(name):
        fields = {field.name for field in dataclasses.fields(choice)}
        assert fields >= COMMON
        assert fields & {"data", "env"}  # the user's own data or environment


def variants(name):
    """The argument classes of an example: several for subcommands."""
    hint = get_type_hints(importlib.import_module(f"examples.{name}.main").main)["args"]
    hint = get_args(hint)[0] if get_origin(hint) not in (Union, types.UnionType, None) else hint  # an Annotated union
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def other_value(value):
    """A value that differs from a default, without a meaning."""
    return value + 1 if isinstance(value, int | float) else Path("a") if value is None else f"{value}2"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_flag_that_makes_another_run_makes_another_workdir(name):
    for cls in variants(name):
        default = with_own_workdir(cls())
        assert default.workdir == cls().workdir
        others = {
            field.name: with_own_workdir(dataclasses.replace(cls(), **{field.name: other_value(field.default)})).workdir
            for field in dataclasses.fields(cls)
            if field.name not in CONTINUES | {"workdir"}
        }
        assert len({default.workdir, *others.values()}) == len(others) + 1
        assert all(path.parent == default.workdir.parent and len(path.name) < 200 for path in others.values())
        # The same run, with more epochs, on another mesh, or in a folder that the user chose.
        for same in ({"n_model_shards": 2, "n_fsdp_shards": 2}, {"n_epochs": 99}):
            if set(same) <= {field.name for field in dataclasses.fields(cls)}:
                assert with_own_workdir(cls(**same)).workdir == default.workdir
        assert with_own_workdir(cls(workdir=Path("mine"), seed=3)).workdir == Path("mine")


def test_workdirs_are_named_by_flags():
    args = variants("classification_regression")[0]
    assert with_own_workdir(args(task="diabetes")).workdir == Path("workdir/classification_regression-task=diabetes")
    one, other = (with_own_workdir(args(task="cola", data=Path(folder, "data"))).workdir for folder in ("a", "b"))
    assert one != other and one.name.startswith("classification_regression-task=cola-data=data.")


def test_run_is_scored_by_its_last_recorded_scores(tmp_path):
    lines = [{"step": 1, "loss": 2.0}, {"step": 9, "test_accuracy": 0.5}, {"step": 9, "test_accuracy": 0.9}, {"step": 10}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_scores(tmp_path) == {"step": 9, "test_accuracy": 0.9}


@pytest.mark.sweep
def test_runs_an_example_and_reports_whether_it_reached_its_goal(tmp_path, capsys):
    flags = "bring_your_own --n-epochs 1 --batch-size 419"  # three steps
    run = Run(flags, "accuracy {test_accuracy:.3f}", "-", lambda scores: 0 <= scores["test_accuracy"] <= 1)
    result, reached = execute(run, tmp_path / "run")
    assert result.startswith("accuracy 0.") and reached and (tmp_path / "run" / "log.txt").read_text()

    result, reached = execute(dataclasses.replace(run, command=f"{flags} --pretrained nowhere"), tmp_path / "failed")
    assert result == f"failed: see {tmp_path / 'failed' / 'log.txt'}" and not reached
    assert (tmp_path / "failed" / "log.txt").read_text()

    missed = dataclasses.replace(run, command="bring_your_own", reaches=lambda scores: scores["test_accuracy"] > 0.5)
    with (
        mock.patch("examples.__main__.subprocess.run", return_value=subprocess.CompletedProcess([], 0)),
        mock.patch("examples.__main__.read_scores", return_value={"test_accuracy": 0.4}),
    ):
        assert execute(missed, tmp_path / "missed") == ("accuracy 0.400", False)


def test_unknown_example_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"`names`: expected some of adversarial_training, .*text_to_text, got meta_lerning\.",
    ):
        main(Args(("meta_lerning",), Path(tmp_path)))


@pytest.mark.parametrize("name", [name.replace("reinforcement_learning", "reinforcement_learning ppo") for name in EXAMPLES])
def test_a_misspelt_flag_suggests_the_nearest(name):
    run = refusal(name, "--n-model-shrads=1")
    assert run.status == 2
    assert "Perhaps you meant" in run.output and "--n-model-shards" in run.output
