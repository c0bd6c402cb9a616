"""Shows the arguments of a method that takes a dataclass of options (`Trainer.fit`), and those of a class that takes its
base's `__init__` by name, as Python's `help` does.

mkdocstrings reads the sources without running them, and would show `fit(options)` and `Llama()`.
"""

import importlib
import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Replaces the parameters of each method whose decorator has set another signature, and inherits each `__init__` that is
    an assignment."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called for each class whose members were read."""
        del kwargs
        if "__init__" in cls.members and cls.members["__init__"].is_attribute:
            del cls.members["__init__"]

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for each function that is read."""
        del kwargs
        if not func.decorators or not isinstance(func.parent, griffe.Class):
            return
        owner = getattr(importlib.import_module(func.parent.module.path), func.parent.name)
        if not hasattr(getattr(owner, func.name), "__signature__"):
            return
        signature = inspect.signature(getattr(owner, func.name))
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    kind=griffe.ParameterKind(each.kind.description),
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in signature.parameters.values()
            )
        )
