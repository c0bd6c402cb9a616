"""The parser of the command line, and the errors of all commands. Each command is a file of its own."""

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from . import _convert, _dry_run, _inspect, _launch

COMMANDS = (_dry_run, _launch, _inspect, _convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 for an error, and what else the command's help says.

    **Arguments:**

    - `argv`: the arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="redeqx", description="Train any Equinox model on any mesh: what needs no script.")
    parser.add_argument("--version", action="version", version=f"redeqx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    try:
        args = parser.parse_args(argv)  # which looks at paths
        return args.run(args)
    except (ValueError, ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
