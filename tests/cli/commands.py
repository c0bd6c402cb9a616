"""Commands of `redeqx`, called in this process."""

from redeqx.cli import main


def printed(capsys, *argv):
    """What a command prints, after it has succeeded."""
    code = main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def error(capsys, *argv):
    """The error of a command that prints nothing else."""
    code = main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    return err.removesuffix("\n")
