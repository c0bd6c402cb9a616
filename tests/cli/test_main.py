"""The command's parser: its help, its version, and the errors of scripts that are not there."""

import pytest

import redeqx
from redeqx.cli import main
from tests.cli.commands import error


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("    ") and line[4] != " "] == [
        "dry-run", "launch", "inspect", "convert",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["dry-run", "launch", "inspect", "convert"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and f"usage: redeqx {command} " in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"redeqx {redeqx.__version__}\n"


@pytest.mark.parametrize("options", [("dry-run", "--topology", "cpu:8"), ("launch", "--processes", "2")])
def test_a_script_that_is_not_there(options, capsys):
    said = "`train`: expected a script, got no such file. For a module write `-m train`."
    assert error(capsys, *options, "train") == said


def test_no_process(capsys):
    said = error(capsys, "launch", "--processes", "0", "x.py")
    assert said == "`--processes`: expected at least 1, got 0. Pass the number."
