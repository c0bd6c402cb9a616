"""Where a function needs rows of other devices: equations over which XLA cannot split rows, so that it gathers them.

What is computed from their results is then computed for all rows on every device. `compiled` measures whether it is.
"""

from ._atoms import Dim, Step, flat, steps_of
from ._names import Names

_BY_INDEX = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")


def gathers_of(names: Names) -> tuple[tuple[str, str], ...]:
    """Returns pairs of a line and the reason why the rows are gathered there."""
    rows = names.rows
    return tuple(dict.fromkeys((step.line, why) for step in steps_of(names.root) if (why := _why(rows, step))))


def _why(rows: Dim, step: Step) -> str:
    def has_rows(dim: Dim, rows: Dim = rows) -> bool:
        return any(atom in rows for atom in flat(dim))

    if has_rows(step.scanned):
        return "a loop takes one after the other"
    hows = {how for how, dim in step.mixes if has_rows(dim)}
    if "order" in hows:
        return f"`{step.name}` depends on their order"
    if hows and step.name.startswith(_BY_INDEX):
        return f"`{step.name}` looks them up by index"
    is_some = any(how == "part" and has_rows(dim, rows[:1]) for how, dim in step.mixes)
    return f"`{step.name}` takes some of them" if is_some else ""
