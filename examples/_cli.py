"""The command line of an example: parses flags from its `Args`, sets up devices, and calls its `main`."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import tyro

import redeqx


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
    main(args)
