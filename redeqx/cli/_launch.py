"""`redeqx launch`: runs a script as several processes of one run, on this machine."""

import argparse
import sys
from typing import Any

from ..distributed import launch
from ._scripts import add_script, check_script


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "launch",
        help="run a script as several processes on this machine",
        description="Start a script several times on this machine, as the processes of one run. Their output is prefixed "
        "with their index. If one fails, the others end, and its exit code is returned.",
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="the number of processes")
    parser.add_argument("--port", type=int, help="the port of process 0; a free one by default")
    add_script(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.processes < 1:
        raise ValueError(f"`--processes`: expected at least 1, got {args.processes}. Pass the number.")
    check_script(args)
    script = ["-m", args.script] if args.is_module else [args.script]
    if args.port is not None and not 0 < args.port < 2**16:
        raise ValueError(f"`--port`: expected 1 to 65535, got {args.port}. Leave it out for a free one.")
    return launch(args.processes, [sys.executable, *script, *args.args], args.port)
