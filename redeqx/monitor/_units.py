"""Formats numbers and tables for people."""

from collections.abc import Sequence

_SHORT_NAMES = {"learning_rate": "lr", "grad_norm": "grad norm"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(n_bytes: int | float) -> str:
    """Formats bytes in the largest unit that fits, with three digits: `"9.54 MiB"`, `"95.4 MiB"`, `"80 B"`."""
    for unit, size in _UNITS:
        if n_bytes >= size:
            return f"{n_bytes / size:,.{2 if n_bytes < 10 * size else 1}f} {unit}"
    return f"{n_bytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row of a table, with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def count_text(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def short_name(name: str) -> str:
    """Returns the name of a metric as the line shows it; that of a trainer with a name is `critic/learning_rate`."""
    trainer, slash, metric = name.rpartition("/")
    return f"{trainer}{slash}{_SHORT_NAMES.get(metric, metric)}"


def number_text(name: str, value: float) -> str:
    if name.rpartition("/")[2] == "learning_rate":
        return f"{value:.2e}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def rate_text(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def flops_text(per_second: float) -> str:
    for unit, factor in (("T", 1e12), ("G", 1e9)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {unit}FLOP/s"
    return f"{per_second / 1e6:.3g} MFLOP/s"


def duration_text(seconds: float) -> str:
    """Formats hours, minutes and seconds, such as `1:23` or `27:01:23`; below ten seconds, `4.2s`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
