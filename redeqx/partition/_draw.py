"""Draws a plan: each array as a rectangle, divided where mesh axes split it, with one device's part in full colour.

It takes names, shapes and specs, writes SVG, and is independent of plans.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from jax.sharding import PartitionSpec as P

from ..machine import FSDP, MODEL, SEQUENCE, axes_of

# From Okabe and Ito: colour-blind readers can distinguish them. The axes are also written below each array.
_COLORS = {
    (): "#7f7f7f",
    (MODEL,): "#0072b2",
    (FSDP,): "#e69f00",
    (FSDP, MODEL): "#009e73",
    (SEQUENCE,): "#f0e442",
    (FSDP, SEQUENCE): "#d55e00",
    (MODEL, SEQUENCE): "#56b4e9",
}
_OTHER = "#cc79a7"  # for the axes of an override that are not listed above
_PALE = 0.25  # opacity of the other devices' parts
# All sizes are in pixels.
_WIDTH, _MARGIN, _GAP = 720, 18, 20  # of the picture, at its border, between arrays
_MIN_SIDE, _MAX_SIDE = 6, 86  # of rectangles
_TITLE, _LINE, _LETTER = 22, 10, 4.5  # heights of a title and a line, width of a letter
_N_LINES = 4  # below each rectangle, at most
_MAX_CUTS = 32  # more lines would merge into a grey area


@dataclass(frozen=True)
class Picture:
    """An array to draw, or several that are split alike."""

    layer: str  # the first components of its path
    name: str  # the last ones
    shape: tuple[int, ...]
    spec: P  # with one entry for each dim
    text: str = ""  # the reason in one word

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the array, sorted."""
        return tuple(sorted({axis for entry in self.spec for axis in axes_of(entry)}))

    @property
    def color(self) -> str:
        return _COLORS.get(self.axes, _OTHER)

    @property
    def shown(self) -> list[int]:
        """The dims that are drawn: at most two, preferring split dims, then large ones. A vector is drawn as a column."""
        order = sorted(range(len(self.shape)), key=lambda dim: (not axes_of(self.spec[dim]), -self.shape[dim], dim))
        return sorted(order[:2])

    def size(self, scale: float) -> tuple[float, float]:
        """Returns width and height, by the fourth roots of the dims' sizes, so that small dims stay visible."""
        sides = [max(scale * self.shape[dim] ** 0.25, _MIN_SIDE) for dim in self.shown]
        height, width = [*sides, _MIN_SIDE, _MIN_SIDE][:2]
        return width, height

    @property
    def lines(self) -> list[str]:
        """The lines of text below the rectangle."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        split = ", ".join(f"dim {i}: {' and '.join(axes_of(entry))}" for i, entry in enumerate(self.spec) if axes_of(entry))
        return [line for line in (self.name, shape, self.text, split) if line]


def draw(pictures: Sequence[Picture], sizes: Mapping[str, int], path: Path, *, title: str) -> None:
    """Draws the arrays, in rows for each layer, and writes the picture. `sizes` are those of the mesh axes. Raises
    ValueError for a path with another suffix than `.svg`."""
    if path.suffix.lower() != ".svg":
        raise ValueError(f"`{path}`: expected the suffix .svg, got {path.suffix!r}. Pass `plan.svg`.")
    longest = max(len(line) for picture in pictures for line in picture.lines)
    cell = _GAP + max(_MAX_SIDE, _LETTER * longest)
    n_columns = max(1, int((_WIDTH - 2 * _MARGIN) / cell))
    scale = _MAX_SIDE / max(max(picture.shape, default=1) for picture in pictures) ** 0.25
    drawn, bottom = [_text(_MARGIN, _TITLE, title, 9)], 1.5 * _TITLE
    for layer, group in groupby(pictures, lambda picture: picture.layer):
        of_layer = list(group)
        drawn.append(_text(_MARGIN, bottom + 0.7 * _TITLE, layer, 9))
        bottom += _TITLE if layer else 0
        for start in range(0, len(of_layer), n_columns):
            row = of_layer[start : start + n_columns]
            bottom += max(picture.size(scale)[1] for picture in row)
            for i, picture in enumerate(row):
                left = _MARGIN + i * cell
                drawn += _rectangles(picture, left, bottom, scale, sizes)
                drawn += [_text(left, bottom + (1 + j) * _LINE, line, 7) for j, line in enumerate(picture.lines)]
            bottom += _N_LINES * _LINE + _GAP
    legend = {picture.axes: picture.color for picture in sorted(pictures, key=lambda picture: picture.axes, reverse=True)}
    for i, (axes, color) in enumerate(legend.items()):
        left, said = _MARGIN + 10 * i * _TITLE, f"split by {' and '.join(axes)}" if axes else "replicated"
        drawn += [_rectangle(left, bottom - _LINE, _LINE, _LINE, color), _text(left + 1.5 * _LINE, bottom - 2, said, 8)]
    width = max(_WIDTH, 2 * _MARGIN + cell, 6 * len(title), 10 * _TITLE * len(legend))
    size = f'width="{width:g}" height="{bottom + _MARGIN:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" style="background:#fff">',
        *drawn,
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, color: str, opacity: float = 1) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}" opacity="{opacity:g}"/>'


def _rectangles(picture: Picture, left: float, bottom: float, scale: float, sizes: Mapping[str, int]) -> list[str]:
    """Returns an array above its lower left corner: a rectangle, the first device's part of it, and the dividing lines."""
    width, height = picture.size(scale)
    top = bottom - height
    if not picture.axes:
        return [_rectangle(left, top, width, height, picture.color)]
    parts = [math.prod(sizes[axis] for axis in axes_of(picture.spec[dim])) for dim in picture.shown]
    n_rows, n_columns = [*parts, 1, 1][:2]
    rows = range(1, n_rows if n_rows <= _MAX_CUTS else 1)
    columns = range(1, n_columns if n_columns <= _MAX_CUTS else 1)
    lines = [f"M{left:g} {top + i * height / n_rows:g}h{width:g}" for i in rows]
    lines += [f"M{left + i * width / n_columns:g} {top:g}v{height:g}" for i in columns]
    return [
        _rectangle(left, top, width, height, picture.color, _PALE),
        _rectangle(left, top, width / n_columns, height / n_rows, picture.color),
        f'<path d="{"".join(lines)}" stroke="#ffffff" stroke-width="0.8"/>',
    ]
