"""The command line of an example: the flags of all examples, and a `main` that is called with them."""

import dataclasses
import inspect
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import tyro

import redeqx

# With other values of these flags a run continues where it stopped. Any other flag makes another run.
CONTINUES = {
    "n_epochs", "n_model_shards", "n_fsdp_shards", "n_sequence_shards", "simulate_devices", "per_device_batch_size",
    "accumulate_grad_batches", "eval_every_n_steps", "save_every_n_steps", "n_beams", "length_penalty", "n_samples",
    "guidance", "n_denoising_steps", "n_test", "n_test_tasks", "centralised_epochs", "epsilons",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags that all examples have."""

    n_model_shards: int = 1  # Devices over which each layer is sharded.
    n_fsdp_shards: int = 1  # Devices over which the rows of parameters and optimizer state are sharded.
    simulate_devices: int = 1  # CPU devices to simulate on a machine without an accelerator.
    seed: int = 0

    def check_positive(self, *names: str) -> None:
        """Raises ValueError for a flag below 1."""
        for name in names:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"`--{flag}`: expected at least 1, got {getattr(self, name)}. Pass a positive number.")


def start(main: Callable[[Any], Any]) -> None:
    """Calls `main(args)` with the arguments of the command line.

    The flags are the fields of the dataclass that annotates `main`'s argument. The comments beside the fields are their
    help.
    """
    module = inspect.getmodule(main)
    assert module is not None
    name = module.__name__.removesuffix(".main")
    args = tyro.cli(get_type_hints(main)["args"], prog=f"python -m {name}", description=module.__doc__)
    # This has no effect on a machine with an accelerator, where all of its devices are used.
    redeqx.simulate_devices(args.simulate_devices)
    main(with_own_workdir(args))


def with_own_workdir(args: Any) -> Any:
    """Returns the arguments with a `workdir` named by the flags that make another run, such as
    `workdir/classification_regression-task=diabetes`, so that none resumes another's. One that was passed is kept."""
    fields = {field.name: field for field in dataclasses.fields(args)}
    if args.workdir != fields["workdir"].default:
        return args
    values = {name: getattr(args, name) for name in fields if name != "workdir" and name not in CONTINUES}
    parts = [f"-{name}={_short(value)}" for name, value in values.items() if value != fields[name].default]
    suffix = "".join(parts)
    if len(suffix) > 120:
        suffix = f"-{zlib.crc32(suffix.encode()):08x}"
    return dataclasses.replace(args, workdir=args.workdir.with_name(args.workdir.name + suffix))


def _short(value: Any) -> str:
    """Returns a value as a part of a file name. Two paths have different ones."""
    if isinstance(value, Path):
        return f"{_short(value.name)}.{zlib.crc32(str(value.absolute()).encode()):08x}"
    return re.sub(r"[^\w.,+-]+", "_", str(value))
