"""Parses the command line and prints errors. Each command has its own file."""

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import printable
from . import _dry_run, _inspect, _launch

COMMANDS = (_dry_run, _launch, _inspect)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 for an error, or a code listed in the command's help. The arguments are
    those of the process by default."""
    parser = argparse.ArgumentParser(
        prog="redeqx", description="Command-line tools of redeqx: train any Equinox model on any mesh."
    )
    parser.add_argument("--version", action="version", version=f"redeqx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    try:
        args, unknown = parser.parse_known_args(argv)  # may raise, since it checks paths
        if unknown:  # `parse_args` would show the usage without a command, which lists none of its options
            commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return args.run(args)
    except (ValueError, ImportError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
