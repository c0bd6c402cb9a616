"""Code shared by the three algorithms: the replay buffer, the selection of the best checkpoint, the plots."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import redeqx

from .._records import checkpoint
from .environments import Act, film, play_episodes

Curve = list[tuple[int, float]]  # environment steps, mean return

# The first seeds of the episodes for selection and for testing. Training uses seeds near 0.
VALIDATION_SEED, TEST_SEED = 1_000_000, 2_000_000


def check_sizes(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"`--{flag}`: expected at least 1, got {getattr(args, name)}. Pass a positive number.")


class Replay:
    """A replay buffer of the latest transitions: rows of a structured array. When it is full, the oldest are overwritten."""

    def __init__(self, capacity: int, dtype: np.dtype):
        self.rows, self.n_added = np.zeros(capacity, dtype), 0

    def __len__(self) -> int:
        return min(self.n_added, len(self.rows))

    def add(self, rows: np.ndarray) -> None:
        self.rows[np.arange(self.n_added, self.n_added + len(rows)) % len(self.rows)] = rows
        self.n_added += len(rows)

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return self.rows[rng.integers(len(self), size=n)]


def collate_fn(examples: list[np.void]) -> dict[str, np.ndarray]:
    """Converts rows of a structured array to one array for each field."""
    rows = np.array(examples, examples[0].dtype)
    return {name: rows[name] for name in examples[0].dtype.names or ()}


class Best:
    """Evaluates the policy from time to time, and keeps the checkpoint with the highest mean return.

    **Arguments:**

    - `play`: a function from a seed to the returns of episodes that start with it.
    """

    def __init__(self, trainer: redeqx.Trainer, play: Callable[[int], np.ndarray]):
        self.trainer, self.play = trainer, play
        self.curve: Curve = []

    def validate(self, n_played: int) -> None:
        score = float(self.play(VALIDATION_SEED).mean())
        self.curve.append((n_played, score))
        self.trainer.deployer.log_metrics({"eval_return": score, "env_steps": n_played}, self.trainer.step)
        if score >= max(score for _, score in self.curve):  # the later one of equal scores
            self.trainer.save_ckpt("argmax_return", metrics={"return": score})

    @property
    def path(self) -> str:
        """The folder of the best checkpoint."""
        workdir = self.trainer.deployer.workdir
        assert isinstance(workdir, Path)
        return str(checkpoint(workdir, "argmax_return"))

    def test(self) -> np.ndarray:
        """Tests the best checkpoint in episodes other than those that selected it. Returns the episodes' returns."""
        self.trainer.load_ckpt("argmax_return")
        return self.play(TEST_SEED)


def mean(returns: np.ndarray) -> str:
    """Returns the mean and its standard error, as text."""
    return f"{returns.mean():8.2f} +- {returns.std() / np.sqrt(len(returns)):.2f}"


def report(best: Best, name: str, algorithm: str, act: Act, envs: VectorEnv, curve: Curve) -> dict[str, float]:
    """Tests the best checkpoint and random actions, and draws the returns and an episode."""
    deployer = best.trainer.deployer
    returns = {
        algorithm: best.test(),
        "random actions": play_episodes(envs, lambda _: envs.action_space.sample(), TEST_SEED),
    }
    means = {name: float(x.mean()) for name, x in returns.items()}
    scores = {"test_return": means[algorithm], "test_random_return": means["random actions"]}
    deployer.log_metrics(scores, best.trainer.step)
    levels = {f"{name}, test": score for name, score in means.items()}
    if (target := gymnasium.spec(name).reward_threshold) is not None:
        levels["solved"] = target
    assert deployer.local_workdir is not None
    picture = deployer.local_workdir / "returns.png"
    curves = {"training, last 100 episodes": curve, "validation": best.curve}
    draw(picture, curves, levels, [partial(show, frame) for frame in film(name, algorithm, act, TEST_SEED)])
    lines = [f"{name:16}{mean(x)}" for name, x in returns.items()]
    lines += [f"an episode: {picture}", f"best checkpoint: {best.path}"]
    deployer.log_info("\n".join(lines), title=f"{name}: mean return of {envs.num_envs} test episodes +- its error")
    return scores


def show(frame: np.ndarray, axes: Axes) -> None:
    axes.imshow(frame)


def draw(
    path: Path,
    curves: dict[str, Curve],
    levels: dict[str, float],
    panels: Sequence[Callable[[Axes], object]],
) -> None:
    """Draws the returns over environment steps, with the other panels below them."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, max(len(panels), 1), height_ratios=(2, 1) if panels else (1, 0.01))
    axes = figure.add_subplot(grid[0, :])
    for name, curve in curves.items():
        if curve:
            axes.plot(*np.array(curve).T, linewidth=1.5, label=name)
    for i, (name, level) in enumerate(levels.items(), start=len(curves)):
        axes.axhline(level, linestyle="--", linewidth=1, color=f"C{i}", label=f"{name}: {level:.1f}")
    axes.set(xlabel="environment steps", ylabel="return of an episode")
    axes.legend()
    for i, panel in enumerate(panels):
        below = figure.add_subplot(grid[1, i], xticks=[], yticks=[])
        panel(below)
    figure.savefig(path, dpi=150)
