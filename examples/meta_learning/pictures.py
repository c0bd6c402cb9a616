"""Pictures of a meta-learning run: networks before and after their steps, and errors over steps."""

from pathlib import Path

import numpy as np
from einops import rearrange
from matplotlib.figure import Figure

from .._images import draw_grid
from .tasks import AFTER, SHOWN, Batch


def interval(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns means over tasks, and the half-widths of their 95 % confidence intervals."""
    return errors.mean(0), 1.96 * errors.std(0, ddof=1) / len(errors) ** 0.5


def draw_sinusoids(path: Path, batch: Batch, outputs: dict[str, list], errors: dict[str, np.ndarray]) -> None:
    """Draws each network on a few tasks, before and after steps on the points, as in the paper's Figure 2; and errors over
    steps."""
    figure = Figure(figsize=(15, 6.5), layout="constrained")
    columns = len(batch["query_x"])
    grid = figure.add_gridspec(len(outputs), columns + 1)
    for i, (name, found) in enumerate(outputs.items()):
        for j, out in enumerate(found):
            axes = figure.add_subplot(grid[i, j])
            axes.plot(batch["query_x"][j], batch["query_y"][j], color="black", linewidth=3, alpha=0.25, label="truth")
            axes.plot(batch["support_x"][j], batch["support_y"][j], "k^", label="points")
            for step, color in zip(SHOWN, ("0.6", "C1", "C0", "C2"), strict=True):
                label = f"{step} step{'' if step == 1 else 's'}" if step else "before"
                axes.plot(
                    batch["query_x"][j], out["outputs"][step], color=color, linestyle="-" if step else ":", label=label
                )
            axes.set(title=f"{name}, task {j + 1}", xlabel="x", ylim=(-5.5, 5.5))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    axes = figure.add_subplot(grid[:, columns])
    for name, found in errors.items():
        mean, half = interval(found)
        axes.plot(mean, marker="o", label=name)
        axes.fill_between(range(len(mean)), mean - half, mean + half, alpha=0.3)
    axes.set(title="mean squared error, test tasks", xlabel="gradient steps", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_characters(path: Path, batch: Batch, out: dict[str, np.ndarray], n_ways: int) -> None:
    """Draws a task: the support drawing of each character, and below it query drawings with their predicted class before and
    after.

    The heading explains how to read it.
    """
    said = out["outputs"][[0, AFTER]].argmax(-1)
    order = rearrange(np.arange(len(batch["query_x"][0])), "(n k) -> (k n)", n=n_ways)
    images = [*batch["support_x"][0][:: len(batch["support_x"][0]) // n_ways], *batch["query_x"][0][order]]
    titles = [f"class {i + 1}" for i in range(n_ways)]
    titles += [f"{before + 1} \N{RIGHTWARDS ARROW} {after + 1}" for before, after in said[:, order].T]
    heading = (
        "Top: the drawing of each class to adapt on. Below it: others of that class.\n"
        f"2 \N{RIGHTWARDS ARROW} 1: taken for class 2 before adapting, for class 1 after {AFTER} gradient steps"
    )
    draw_grid(path, images, titles, n_columns=n_ways, heading=heading)
