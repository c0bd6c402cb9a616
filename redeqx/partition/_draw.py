"""Draws a plan: each array as a rectangle, divided where mesh axes split it, with one device's part in full colour.

It takes names, shapes and specs, and is independent of plans. matplotlib is imported only when a picture is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

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
# All sizes are in inches.
_WIDTH, _MARGIN, _GAP = 10.0, 0.25, 0.28  # of the picture, at its border, between arrays
_MIN_SIDE, _MAX_SIDE = 0.09, 1.2  # of rectangles
_TITLE, _LINE, _LETTER = 0.3, 0.135, 0.062  # heights of a title and a line, width of a letter
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
    """Draws the arrays, in rows for each layer, and writes the picture in the format of the path's suffix.

    `sizes` are those of the mesh axes. Raises ImportError without matplotlib, and ValueError for a suffix that it does not
    write.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would change the caller's figures and backend
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            '`Plan.draw`: expected matplotlib, got no such package. Run `pip install "redeqx[draw]"`, or print '
            "`plan.explain()`."
        ) from error
    longest = max(len(line) for picture in pictures for line in picture.lines)
    cell = _GAP + max(_MAX_SIDE, _LETTER * longest)
    n_columns = max(1, int((_WIDTH - 2 * _MARGIN) / cell))
    rows: list[tuple[str, list[Picture]]] = []  # at most `n_columns` arrays of one layer, whose name stands above the first
    for layer, group in groupby(pictures, lambda picture: picture.layer):
        of_layer = list(group)
        rows += [(layer if i == 0 else "", of_layer[i : i + n_columns]) for i in range(0, len(of_layer), n_columns)]
    scale = _MAX_SIDE / max(max(picture.shape, default=1) for picture in pictures) ** 0.25
    tallest = [max(picture.size(scale)[1] for picture in row) for _, row in rows]
    width = 2 * _MARGIN + max(cell * max(len(row) for _, row in rows), 1.2 * _LETTER * len(title))
    height = (
        3 * _TITLE + _TITLE * sum(layer != "" for layer, _ in rows) + sum(side + _N_LINES * _LINE + _GAP for side in tallest)
    )
    fig = Figure(figsize=(width, height))
    formats = fig.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"`{path}`: expected a suffix among {', '.join(sorted(formats))}, got {path.suffix!r}. Pass `plan.png`."
        )
    ax: Any = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))  # inches, counted from the top
    ax.axis("off")
    ax.text(_MARGIN, _TITLE, title, fontsize=9)
    bottom = 1.5 * _TITLE
    for (layer, row), side in zip(rows, tallest, strict=True):
        ax.text(_MARGIN, bottom + 0.7 * _TITLE, layer, fontsize=9, weight="bold")
        bottom += (_TITLE if layer else 0) + side
        for i, picture in enumerate(row):
            left = _MARGIN + i * cell
            _draw_one(ax, picture, left, bottom, scale, sizes)
            ax.text(left, bottom + _LINE / 2, "\n".join(picture.lines), fontsize=7, va="top")
        bottom += _N_LINES * _LINE + _GAP
    colors = {picture.axes: picture.color for picture in sorted(pictures, key=lambda picture: picture.axes, reverse=True)}
    keys = [Patch(color=color, label=f"split by {' and '.join(by)}" if by else "replicated") for by, color in colors.items()]
    if any(colors):
        keys += [Patch(color="#000000", label="one device's part"), Patch(color="#000000", alpha=_PALE, label="the others'")]
    fig.legend(handles=keys, loc="lower left", ncols=len(keys), fontsize=8, frameon=False)
    fig.savefig(path, dpi=150)


def _draw_one(ax: Any, picture: Picture, left: float, bottom: float, scale: float, sizes: Mapping[str, int]) -> None:
    """Draws an array above its lower left corner: a rectangle, the first device's part of it, and the dividing lines."""
    from matplotlib.patches import Rectangle

    width, height = picture.size(scale)
    top = bottom - height
    parts = [math.prod(sizes[axis] for axis in axes_of(picture.spec[dim])) for dim in picture.shown]
    n_rows, n_columns = [*parts, 1, 1][:2]
    alpha = _PALE if picture.axes else 1.0
    ax.add_patch(Rectangle((left, top), width, height, facecolor=picture.color, alpha=alpha, edgecolor="none"))
    if picture.axes:
        part = width / n_columns, height / n_rows
        ax.add_patch(Rectangle((left, top), *part, facecolor=picture.color, edgecolor="none"))
    style = {"colors": "#ffffff", "linewidth": 0.8}
    if 1 < n_rows <= _MAX_CUTS:
        ax.hlines([top + i * height / n_rows for i in range(1, n_rows)], left, left + width, **style)
    if 1 < n_columns <= _MAX_CUTS:
        ax.vlines([left + i * width / n_columns for i in range(1, n_columns)], top, bottom, **style)
