"""The arguments of commands that run a script, in Python's own form: a path, or `-m` and a module's name."""

import argparse
from pathlib import Path


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds `-m`, the script and its arguments, which come last."""
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    rest.required = False  # a usage error would name it too


def check_script(args: argparse.Namespace) -> None:
    """Raises ValueError if the script does not exist."""
    if not (args.is_module or Path(args.script).is_file()):
        raise ValueError(f"`{args.script}`: expected a script, got no such file. For a module write `-m {args.script}`.")
