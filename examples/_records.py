"""What a run has written to its workdir, the metrics over steps and its best checkpoint; and pictures of curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Any]  # steps, and a value for each


def curve(workdir: Path, name: str) -> Curve:
    """Returns the steps at which a metric was recorded in `metrics.jsonl`, and its values."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["step"] for line in lines if name in line], [line[name] for line in lines if name in line]


def checkpoint(workdir: Path, tag: str) -> Path:
    """Returns the folder of a checkpoint by its name in the index, such as `argmin_loss`."""
    return workdir / "ckpts" / json.loads((workdir / "ckpts/index.json").read_text("utf-8"))[tag]


def draw_curves(path: Path, curves: Mapping[str, Curve], levels: Mapping[str, float], **options: Any) -> None:
    """Draws curves, and levels as dashed lines, by their labels, to a PNG file.

    **Arguments:**

    - `options`: of the axes, such as `xlabel`.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, linewidth=1, marker="." if len(steps) <= 200 else "", label=name)
    for i, (name, level) in enumerate(levels.items(), start=len(curves)):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{i}", label=name)
    axes.set(**options)
    axes.legend()
    figure.savefig(path, dpi=150)
