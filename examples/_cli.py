"""The command line of an example: flags from the fields of its `Args`, devices, then its `main`."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import tyro

import redeqx


def start(main: Callable[[Any], Any]) -> None:
    """Run `main(args)` with what the command line says.

    The flags are the fields of the dataclass that `main` is annotated with, the comments beside them their help.
    """
    module = inspect.getmodule(main)
    assert module is not None
    name = module.__name__.removesuffix(".main")
    args = tyro.cli(get_type_hints(main)["args"], prog=f"python -m {name}", description=module.__doc__)
    # On a machine with an accelerator this changes nothing: all of its devices are used.
    redeqx.simulate_devices(args.simulate_devices)
    main(args)
