"""The command's parser: help, version, and errors for missing scripts."""

import pytest

import redeqx
from redeqx.cli import main
from tests.cli.commands import error_of


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("    ") and line[4] != " "] == [
        "dry-run", "launch", "inspect",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["dry-run", "launch", "inspect"])
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and f"usage: redeqx {command} " in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"redeqx {redeqx.__version__}\n"


@pytest.mark.parametrize("options", [("dry-run", "--topology", "cpu:8"), ("launch", "--processes", "2")])
def test_missing_script_is_reported(options, capsys):
    expected = "`train`: expected a script, got no such file. For a module write `-m train`."
    assert error_of(capsys, *options, "train") == expected


def test_a_usage_error_names_what_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["launch"])
    assert capsys.readouterr().err.endswith("error: the following arguments are required: SCRIPT\n")


@pytest.mark.parametrize("file", ["", "missing/report.json"])
def test_a_report_that_cannot_be_written_is_an_error_before_the_script_runs(file, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    path = tmp_path / file
    expected = f"`--json`: expected a file in a folder that exists, got {path}. Create the folder, or pass another."
    assert error_of(capsys, "dry-run", "--topology", "this", "--json", path, script) == expected


@pytest.mark.parametrize("size", ["0", "0GiB", "much"])
def test_memory_must_be_positive(size, capsys):
    with pytest.raises(SystemExit):
        main(["dry-run", "--topology", "cpu:8", "--memory", size, "x.py"])
    assert f"argument --memory: expected bytes above 0, such as 10GB or 9.5GiB, got {size!r}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["processes", "nodes", "gpus"])
def test_counts_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        main(["launch", f"--{option}", "0", "x.py"])
    assert f"argument --{option}: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "unknown", "option"),
    [(("launch", "-n", "2", "x.py"), "-n", "[--processes N]"), (("inspect", "run", "other"), "other", "[--match PATTERN]")],
)
def test_an_unknown_option_shows_those_of_the_command(command, unknown, option, capsys):
    with pytest.raises(SystemExit) as left:
        main(command)
    err = capsys.readouterr().err
    assert left.value.code == 2 and option in err
    assert err.endswith(f"redeqx {command[0]}: error: unrecognized arguments: {unknown}\n")
