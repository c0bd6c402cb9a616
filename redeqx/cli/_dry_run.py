"""`redeqx dry-run`: compiles a script's first fit for a machine that need not be there, and reports whether it fits."""

import argparse
import os
import re
import resource
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import jax

from ..dry_run import DryRunDone
from ..machine import GPUS, TPUS, Machine, describe, dry_for, simulate_devices
from ..monitor import Console
from ._scripts import add_script, check_script

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_EPILOG = f"""
topologies:
  v4:2x2x2              chips of a TPU slice; kinds {", ".join(TPUS)}   (pip install "redeqx[topology-tpu]")
  gpu:a100-40gb:4       GPUs of one host; gpu:h100-80gb:2x8 is two hosts of eight   (pip install "redeqx[topology-gpu]")
                        kinds {", ".join(list(GPUS)[:6])},
                        {", ".join(list(GPUS)[6:])}
  cpu:8                 eight simulated devices
  this                  the devices at hand

exit code: 0 where it fits (with --fit: where a setting does), 3 where it does not,
2 for a script that never trains, 1 for one that fails
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "dry-run",
        help="compile a training script's first fit for described devices, and say whether they hold it",
        description="Run a training script, unchanged, up to its first `fit`; compile that for the devices described, and "
        "print what it holds, sends and computes. No model is made, and nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topology", required=True, help="the machine, see below")
    parser.add_argument(
        "--memory", type=_bytes, metavar="SIZE", help="of a device, as 10GB or 9.5GiB, in place of what it has"
    )
    parser.add_argument(
        "--effort",
        choices=("O0", "O1", "O2", "O3", "UNKNOWN"),
        help="the compiler's optimization level: UNKNOWN is a run's; for TPUs the default is O2, which takes the same "
        "memory in half the time; O1 takes seconds, and less memory (for a run set jax_optimization_level to O1)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="search for the fastest setting that fits (shards, micro-batches, what loops compute again), and print the "
        "line to use; every setting that could be it is compiled",
    )
    parser.add_argument("--no-search", action="store_true", help="do not try other settings where it does not fit")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compile all of a list of equal layers that the loss computes one by one; by default a few are compiled, "
        "and what all take is extrapolated",
    )
    add_script(parser)
    parser.set_defaults(run=_dry_run)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]I?B)?", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected bytes such as 10GB or 9.5GiB, got {text!r}")
    return int(float(found.group(1)) * _UNITS[found.group(2) or ""])


def _dry_run(args: argparse.Namespace) -> int:
    check_script(args)
    machine = _machine(args.topology, args.memory)
    console = Console(None)
    try:
        with dry_for(
            machine, optimization=args.effort, search=not args.no_search, fit=args.fit, exact=args.exact, say=console.info
        ) as run:
            _run(args.script, args.args, args.is_module)
    except DryRunDone:
        pass
    except SystemExit as error:
        if error.code not in (None, 0) and not run.done:
            raise
    except BaseException as error:
        if run.done:
            return _shown(run.done[0], args, console)
        _print_own_traceback(error)
        if run.zeros or "is not a valid JAX type" in str(error):
            zeros = "".join(f", `{what}` returned zeros" for what in sorted(run.zeros))
            print(
                f"`{args.script}`: expected a script that needs no values before its first `fit`, got an error where models "
                f"are shapes{zeros}. Where that is the cause, leave it out with `if not deployer.is_dry_run:`.",
                file=sys.stderr,
            )
        if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
            print(
                f"`{args.script}`: expected models that are shapes, got one whose arrays this machine does not hold. "
                "Make it with `deployer.init(lambda: Model(key=key))` or `from_pretrained(folder, deployer=deployer)`: in a "
                "dry run these allocate nothing.",
                file=sys.stderr,
            )
        return 1
    if run.done:  # also where the script has caught what ends it
        return _shown(run.done[0], args, console)
    print(
        f"`{args.script}`: expected a call of `Trainer.fit` or `Trainer.train`, got to its end without one. "
        "Give it the arguments with which it trains.",
        file=sys.stderr,
    )
    return 2


def _shown(done: DryRunDone, args: argparse.Namespace, console: Console) -> int:
    """Show and save the report; returns the exit code."""
    done.run.show(console)
    if args.json is not None:
        done.run.save(args.json)
    return int(done.code or 0)


def _machine(topology: str, memory: int | None) -> Machine:
    kind, _, size = topology.partition(":")
    if kind == "cpu" and size.isdecimal() and int(size):
        simulate_devices(int(size))
    if topology != "this":
        jax.config.update("jax_platforms", "cpu")  # for the script's own arrays; the steps are compiled for `topology`
        # A script that allocates a model too large for this host raises an error, instead of exhausting the host's memory.
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_DATA, (there if limit < 0 else min(there, limit), most))
    return describe(topology, memory=memory)


def _run(script: str, args: list[str], is_module: bool) -> None:
    sys.argv = [script, *args]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")


def _print_own_traceback(error: BaseException) -> None:
    """Prints the traceback as Python does, without the frames above the script's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)
