"""Runs `redeqx` commands in this process."""

from redeqx.cli import main


def output_of(capsys, *argv):
    """The output of a command that must succeed."""
    code = main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def error_of(capsys, *argv):
    """The error message of a command that must fail without other output."""
    code = main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    return err.removesuffix("\n")
