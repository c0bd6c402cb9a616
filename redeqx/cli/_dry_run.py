"""`redeqx dry-run`: compiles a script's first fit for a described machine, and reports whether it fits its memory."""

import argparse
import os
import resource
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import jax

from ..compiled import SavedPrograms
from ..dry_run import OPTIMIZATIONS, SEARCHES, DryRunDone
from ..machine import GPUS, TPUS, Machine, describe, dry_for, host_memory, simulate_devices
from ..memory import bytes_of
from ..monitor import Console, size_text
from ..storage import check_writable, disk_path
from ._scripts import add_script, check_script

_EPILOG = f"""
topologies:
  v4:2x2x2              chips of a TPU slice; kinds {", ".join(TPUS)}   (pip install "redeqx[topology-tpu]")
  gpu:a100-40gb:4       GPUs of one host; gpu:h100-80gb:2x8 is two hosts of eight   (pip install "redeqx[topology-gpu]")
                        kinds {", ".join(list(GPUS)[:6])},
                        {", ".join(list(GPUS)[6:])}
  cpu:8                 eight simulated devices
  this                  the devices at hand

exit code: 0 if it fits (with --search fastest: if a strategy does), 3 if it does not,
2 for a script that never trains, 1 for one that fails
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "dry-run",
        help="compile a training script's first fit for described devices, and report whether it fits",
        description="Run a training script, unchanged, up to its first `fit`; compile that for the described devices, and "
        "print its memory, communication and computation. No model is allocated, and nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topology", required=True, help="the machine, see below")
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="the memory of a device, such as 10GB or 9.5GiB, if not its actual one",
    )
    parser.add_argument(
        "--optimization",
        choices=OPTIMIZATIONS,
        help="the compiler's optimization level: UNKNOWN is that of a run; for TPUs the default is O2, which gives the same "
        "memory in half the time; O1 takes seconds and gives less memory (for a run set jax_optimization_level to O1); none "
        "compiles nothing, and estimates the memory from the trace",
    )
    parser.add_argument("--json", type=disk_path, metavar="FILE", help="also write the report to this file")
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        default="fits",
        help="fits, the default: if the script does not fit, try other strategies (shards, micro-batches, recomputation in "
        "loops) until one does; fastest: search for the fastest one that fits, and print the line to use; none: try none. "
        "Every candidate is compiled",
    )
    parser.add_argument(
        "--save",
        type=disk_path,
        metavar="FOLDER",
        help="also save the compiled programs: a run on that machine with `Compiler(cache=FOLDER)`, or with "
        "REDEQX_COMPILATION_CACHE=FOLDER, loads them, and compiles nothing before its first step",
    )
    add_script(parser)
    parser.set_defaults(run=_dry_run)


def _bytes(text: str) -> int:
    if not (n_bytes := bytes_of(text)):
        raise argparse.ArgumentTypeError(f"expected bytes above 0, such as 10GB or 9.5GiB, got {text!r}")
    return n_bytes


def _dry_run(args: argparse.Namespace) -> int:
    check_script(args)
    _check_json(args.json)
    _check_save(args)
    machine = _describe_machine(args.topology, args.memory)
    console, progress = Console(None), Console(None, file=sys.stderr)
    saved = None if args.save is None else SavedPrograms(args.save)
    got, code = "none before the end of the script", 2
    options = {"optimization": args.optimization, "search": args.search, "save": saved}
    try:
        with dry_for(machine, **options, log=progress.info, line=progress.progress(unit="compiled")) as run:
            _run(args.script, args.args, args.is_module)
    except DryRunDone:
        pass
    except SystemExit as error:
        if error.code not in (None, 0) and not run.done:
            if not isinstance(error.code, int):  # a text, which Python prints
                print(error.code, file=sys.stderr)
            # The command's own codes say whether a run fits.
            got, code = f"`sys.exit({error.code!r})` before", 1
    except BaseException as error:
        if not run.done:
            _explain(error, args.script, run.zeros)
            return 1
    if run.done:  # even if the script has caught `DryRunDone`, or failed after it
        done = run.done[0]
        done.run.show(console)
        if args.json is not None:
            done.run.save(args.json)
        if saved is not None:
            _report_saved(saved, console)
        return int(done.code or 0)
    print(
        f"`{args.script}`: expected a call of `Trainer.fit` or `Trainer.train`, got {got}. Pass the script's arguments for "
        "training.",
        file=sys.stderr,
    )
    return code


def _check_json(path: Path | None) -> None:
    """Raises ValueError for a file that cannot be written, before anything is compiled."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"`--json`: expected a file in a folder that exists, got {path}. Create the folder, or pass another."
        )
    check_writable(path.parent, "--json")


def _check_save(args: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go with `--save`; creates its folder."""
    if args.save is None:
        return
    if args.topology.startswith("gpu:"):
        raise ValueError(
            f"`--save`: expected TPUs or CPUs, got `{args.topology}`: the compiler chooses the kernels of a GPU by timing "
            "them on it. Let the first run on the GPUs fill the folder: `Compiler(cache=FOLDER)`."
        )
    changes = {"search": args.search == "fastest" and args.search, "optimization": args.optimization}
    for name, value in changes.items():
        if value:
            raise ValueError(
                f"`--save`: expected the programs of a run as the script is, got `--{name} {value}`. Leave one of the two "
                "out."
            )
    check_writable(args.save, "--save")
    args.save.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, since its contents are executed


def _report_saved(saved: SavedPrograms, console: Console) -> None:
    if saved.facts:
        files = [path.stat().st_size for path in saved.folder.iterdir() if path.name.endswith("-cache")]
        text = f"{len(files)} programs, {size_text(sum(files))}, for `Compiler(cache={str(saved.folder)!r})`"
        console.header({"folder": text}, title="saved")


def _explain(error: BaseException, script: str, zeros: set[str]) -> None:
    """Prints the traceback as Python does, without the frames of this command, and what may be the cause."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)
    if zeros:
        print(
            f"`{script}`: expected a script that needs no values before its first `fit`, got an error while "
            f"{' and '.join(sorted(zeros))} are zeros. If that is the cause, skip that code with `if not "
            "deployer.is_dry_run:`.",
            file=sys.stderr,
        )
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        print(
            f"`{script}`: expected models without values, got one whose arrays do not fit this machine's memory. "
            "Make it with `deployer.init(lambda: Model(key=key))` or `from_pretrained(folder, deployer=deployer)`: in a "
            "dry run these allocate nothing.",
            file=sys.stderr,
        )


def _describe_machine(topology: str, memory: int | None) -> Machine:
    kind, _, size = topology.partition(":")
    if kind == "cpu" and size.isdecimal() and int(size):
        simulate_devices(int(size))
    if topology != "this":
        jax.config.update("jax_platforms", "cpu")  # for the script's own arrays; the steps are compiled for `topology`
        # A script that allocates a model too large for this host gets an error instead of exhausting the host's memory.
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        limit = host_memory() if soft_limit < 0 else min(host_memory(), soft_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    return describe(topology, memory=memory)


def _run(script: str, args: list[str], is_module: bool) -> None:
    sys.argv = [script, *args]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(str(Path(script).resolve()), run_name="__main__")
