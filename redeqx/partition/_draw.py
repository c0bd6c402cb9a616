"""Draws a plan: each array as a rectangle, divided where mesh axes split it, with one device's part in full colour.

It takes names, shapes and numbers, and is independent of plans. matplotlib is imported only when a picture is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from ..machine import FSDP, MODEL

# From Okabe and Ito: colour-blind readers can distinguish them. The axes are also written below each array.
_COLORS = {(): "#7f7f7f", (MODEL,): "#0072b2", (FSDP,): "#e69f00", (FSDP, MODEL): "#009e73"}
_OTHER = "#cc79a7"  # for the axes of an override that are not listed above
_PALE = 0.25  # opacity of the other devices' parts
# All sizes are in inches.
_WIDTH, _MARGIN = 10.0, 0.25  # maximal width of the picture, and its border
_MEDIAN_SIDE, _MIN_SIDE, _MAX_SIDE = 0.75, 0.09, 1.5  # sides of rectangles
_GAP = 0.28  # between arrays
_TITLE, _LINE, _LETTER = 0.3, 0.135, 0.062  # heights of a title and a line, width of a letter
_TOP, _LEGEND = 0.45, 0.45  # height of the first line, and width of a legend entry without its text
_SHEET = 0.05  # offset between the sheets of a stack
_MAX_CUTS = 32  # more lines would merge into a grey area


@dataclass(frozen=True)
class Picture:
    """An array to draw, or several that are split alike.

    **Arguments:**

    - `layer`, `name`: the first and the last components of its path.
    - `axes`: for each dim, the mesh axes that split it, with their sizes.
    - `text`: the reason in one word.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[tuple[str, int], ...], ...]
    text: str = ""

    @property
    def shown(self) -> tuple[int, ...]:
        """The dims that are drawn: at most two, preferring split dims, then large ones."""
        order = sorted(range(len(self.shape)), key=lambda dim: (not self.axes[dim], -self.shape[dim], dim))
        return tuple(sorted(order[:2]))

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes that split the array, sorted."""
        return tuple(sorted({axis for split in self.axes for axis, _ in split}))

    @property
    def lines(self) -> list[str]:
        """The lines of text below the rectangle."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        split = ", ".join(f"dim {dim}: {' and '.join(axis for axis, _ in by)}" for dim, by in enumerate(self.axes) if by)
        return [self.name, shape, *([self.text] if self.text else []), *([split] if split else [])]

    def n_parts(self, dim: int) -> int:
        """Returns the number of parts that a dim is split into."""
        return math.prod(n for _, n in self.axes[dim])


def draw(pictures: Sequence[Picture], path: Path, *, title: str) -> None:
    """Draws the arrays, in a row for each layer, and writes the picture in the format of the path's suffix.

    Raises ImportError without matplotlib, and ValueError for a suffix that it does not write.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would change the caller's figures and backend
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            '`Plan.draw`: expected matplotlib, got no such package. Run `pip install "redeqx[draw]"`, or print '
            "`plan.explain()`."
        ) from error
    side = _Side(pictures)
    rows = [row for layer, group in groupby(pictures, lambda each: each.layer) for row in _rows(layer, list(group), side)]
    keys = _keys(pictures, side)
    width = max(
        _MARGIN + max(row.right for row in rows),
        _LEGEND + sum(_LEGEND + 0.95 * _LETTER * len(text) for *_, text in keys),
        2 * _MARGIN + 1.2 * _LETTER * len(title),
    )
    height = _TOP + sum(row.height for row in rows) + _TOP
    fig = Figure(figsize=(width, height))
    formats = fig.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"`{path}`: expected a suffix among {', '.join(sorted(formats))}, got {path.suffix!r}. Pass `plan.png`, say."
        )
    ax: Any = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))  # inches, counted from the top
    ax.axis("off")
    ax.text(_MARGIN, 0.28, title, fontsize=9)
    top = _TOP
    for row in rows:
        if row.title is not None:
            ax.plot([_MARGIN, width - _MARGIN], [top, top], color="#d8d8d8", linewidth=0.6)
        _draw_row(ax, row, top, side)
        top += row.height
    left = _MARGIN
    for color, alpha, text in keys:
        ax.add_patch(Rectangle((left, height - 0.26), 0.2, 0.12, facecolor=color, alpha=alpha, edgecolor="none"))
        ax.text(left + 0.27, height - 0.155, text, fontsize=8)
        left += _LEGEND + 0.95 * _LETTER * len(text)
    fig.savefig(path, dpi=150)


def _keys(pictures: Sequence[Picture], side: "_Side") -> list[tuple[str, float, str]]:
    """Returns the entries of the legend: colour, opacity and text."""
    found = sorted({picture.over for picture in pictures}, key=lambda over: (not over, len(over), over != (MODEL,), over))
    keys = [(_color(over), 1.0, f"split by {' and '.join(over)}" if over else "replicated") for over in found]
    if any(found):
        keys += [("#000000", 1.0, "full colour: one device's part"), ("#000000", _PALE, "pale: the others'")]
    if any(side.is_cut_short(picture.shape[dim]) for picture in pictures for dim in picture.shown):
        keys.append(("#ffffff", 1.0, "gap: longer than drawn"))
    return keys


def _color(over: tuple[str, ...]) -> str:
    return _COLORS.get(over, _OTHER)


class _Side:
    """Converts the size of a dim to inches, by its square root, so that small dims stay visible beside large ones."""

    def __init__(self, pictures: Sequence[Picture]):
        largest = [max(picture.shape) for picture in pictures if len(picture.shape) > 1]
        self._inches = _MEDIAN_SIDE / median(largest or [1]) ** 0.5

    def __call__(self, size: int) -> float:
        return min(max(self._inches * size**0.5, _MIN_SIDE), _MAX_SIDE)

    def is_cut_short(self, size: int) -> bool:
        """Whether a dim is drawn shorter than its size requires."""
        return self._inches * size**0.5 > _MAX_SIDE

    def of(self, picture: Picture) -> tuple[float, float]:
        """Returns width and height. A vector is drawn as a column."""
        height, width = [*(self(picture.shape[dim]) for dim in picture.shown), _MIN_SIDE, _MIN_SIDE][:2]
        return width, height

    def n_sheets(self, picture: Picture) -> int:
        """Returns the number of stacked rectangles, at most 3. They represent the dims that are not drawn."""
        return min(3, math.prod(size for dim, size in enumerate(picture.shape) if dim not in picture.shown))


@dataclass(frozen=True)
class _Row:
    """A row of arrays, with their distances from the left."""

    title: str | None
    placed: list[tuple[float, Picture]]
    tallest: float  # the largest height of the rectangles, with their sheets
    right: float  # the right edge of the last one

    @property
    def height(self) -> float:
        n_lines = max(len(picture.lines) for _, picture in self.placed)
        return (_TITLE if self.title else _SHEET * 2) + self.tallest + n_lines * _LINE + _GAP


def _rows(layer: str, pictures: Sequence[Picture], side: _Side) -> list[_Row]:
    """Arranges the arrays of one layer in rows, with as many in a row as fit."""
    rows: list[list[tuple[float, Picture]]] = [[]]
    rights, left = [0.0], _MARGIN
    for picture in pictures:
        width = max(side.of(picture)[0] + 2 * _SHEET, _LETTER * max(map(len, picture.lines)))
        if rows[-1] and left + width > _WIDTH - _MARGIN:
            rows.append([])
            rights.append(0.0)
            left = _MARGIN
        rows[-1].append((left, picture))
        rights[-1] = left + width
        left += width + _GAP
    tallest = [max(side.of(picture)[1] for _, picture in row) + 2 * _SHEET for row in rows]
    titles = [layer, *[None] * (len(rows) - 1)]
    return [_Row(*row) for row in zip(titles, rows, tallest, rights, strict=True)]


def _draw_row(ax: Any, row: _Row, top: float, side: _Side) -> None:
    if row.title:
        ax.text(_MARGIN, top + 0.18, row.title, fontsize=9, weight="bold")
    top += _TITLE if row.title else _SHEET * 2
    for left, picture in row.placed:
        height = side.of(picture)[1]
        _draw_one(ax, picture, left, top + row.tallest - height, side)
        for i, line in enumerate(picture.lines):
            ax.text(left, top + row.tallest + (i + 1) * _LINE, line, fontsize=7, color="#000000" if i == 0 else "#4d4d4d")


def _draw_one(ax: Any, picture: Picture, left: float, top: float, side: _Side) -> None:
    """Draws an array: its sheets, the part of the first device, the dividing lines, and a gap in a side that is too long."""
    from matplotlib.patches import Rectangle

    width, height = side.of(picture)
    color = _color(picture.over)
    rows, columns = [*(picture.n_parts(dim) for dim in picture.shown), 1, 1][:2]
    pale = _PALE if picture.over else 1.0
    for i in reversed(range(side.n_sheets(picture))):
        at = (left + i * _SHEET, top - i * _SHEET)
        ax.add_patch(Rectangle(at, width, height, facecolor="#ffffff", edgecolor="none"))
        ax.add_patch(Rectangle(at, width, height, facecolor=color, alpha=pale, edgecolor="none"))
        ax.add_patch(Rectangle(at, width, height, facecolor="none", edgecolor="#ffffff", linewidth=1))
    if picture.over:
        ax.add_patch(Rectangle((left, top), width / columns, height / rows, facecolor=color, edgecolor="none"))
    style = {"color": "#ffffff", "linewidth": 0.8, "solid_capstyle": "butt"}
    for i in range(1, rows) if rows <= _MAX_CUTS else ():
        ax.plot([left, left + width], [top + i * height / rows] * 2, **style)
    for i in range(1, columns) if columns <= _MAX_CUTS else ():
        ax.plot([left + i * width / columns] * 2, [top, top + height], **style)
    for dim, is_rows in zip(picture.shown, (True, False), strict=False):
        if side.is_cut_short(picture.shape[dim]):
            x, y = ([left - 0.05, left + width + 0.05], [top + 0.6 * height] * 2)
            if not is_rows:
                x, y = [left + 0.6 * width] * 2, [top - 0.05, top + height + 0.05]
            ax.plot(x, y, color="#ffffff", linewidth=5)
            shift = 0.03
            for sign in (-1, 1):
                moved = ([x_ + sign * shift * (not is_rows) for x_ in x], [y_ + sign * shift * is_rows for y_ in y])
                ax.plot(*moved, color="#7f7f7f", linewidth=0.6)
