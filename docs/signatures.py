"""Shows the arguments of a class that takes its base's `__init__` by name, as Python's `help` does.

mkdocstrings reads the sources without running them, and would show `Llama()`.
"""

from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Inherits each `__init__` that is an assignment."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called for each class whose members were read."""
        del kwargs
        if "__init__" in cls.members and cls.members["__init__"].is_attribute:
            del cls.members["__init__"]
