"""Formats numbers for people."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(n_bytes: int | float) -> str:
    """Formats bytes in the largest unit that fits, with three digits: `"9.54 MiB"`, `"95.4 MiB"`, `"80 B"`."""
    for unit, size in _UNITS:
        if n_bytes >= size:
            return f"{n_bytes / size:,.{2 if n_bytes < 10 * size else 1}f} {unit}"
    return f"{n_bytes:.0f} B"
