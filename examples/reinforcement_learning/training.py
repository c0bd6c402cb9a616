"""Code shared by the three algorithms: the replay buffer, the rounds of playing and training, the report."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import redeqx
from examples._records import Curve, checkpoint, draw_curves

# The first seeds of the episodes for selection and for testing. Training uses seeds near 0.
VALIDATION_SEED, TEST_SEED = 1_000_000, 2_000_000


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
        self.trainer, self.play, self.score = trainer, play, -np.inf

    def validate(self, n_played: int) -> None:
        score = float(self.play(VALIDATION_SEED).mean())
        self.trainer.deployer.log_metrics({"eval_return": score, "n_played": n_played}, self.trainer.step)
        if score >= self.score:  # the later one of equal scores
            self.score = score
            self.trainer.save_ckpt("argmax_return", metrics={"return": score})

    def test(self) -> np.ndarray:
        """Tests the best checkpoint in episodes other than those that selected it. Returns the episodes' returns."""
        self.trainer.load_ckpt("argmax_return")
        return self.play(TEST_SEED)


def learn(best: Best, title: str, n_rounds: int, n_a_round: int, every: int, play_and_train: Callable[[int], Any]) -> None:
    """Runs the rounds of an algorithm, and validates its policy at the start, after every `every` steps and at the end.

    **Arguments:**

    - `n_a_round`: the steps (or episodes) of a round.
    - `play_and_train`: runs a round, given the number of steps played at its end. Returns metrics to show.
    """
    best.validate(0)
    with best.trainer.deployer.progress(title=title, n_steps=n_rounds * n_a_round) as progress:
        for n_played in range(n_a_round, n_rounds * n_a_round + 1, n_a_round):
            metrics = play_and_train(n_played)
            if n_played % every < n_a_round or n_played == n_rounds * n_a_round:
                with progress.pause("evaluating"):
                    best.validate(n_played)
            progress.update(n_played, metrics=metrics, n_examples=n_a_round)


def report(best: Best, name: str, returns: Mapping[str, np.ndarray], curves: Mapping[str, Curve]) -> dict[str, float]:
    """Reports the returns of test episodes, those of the algorithm first, and draws them with the validation curves.
    Returns the means."""
    deployer, workdir, (first, *others) = best.trainer.deployer, best.trainer.deployer.workdir, returns
    means = {name: float(x.mean()) for name, x in returns.items()}
    scores = {"test_return": means[first], **{f"test_{other.split()[0]}_return": means[other] for other in others}}
    deployer.log_metrics(scores, best.trainer.step)
    assert isinstance(workdir, Path)
    levels = {f"{name}, test: {score:.1f}": score for name, score in means.items()}
    draw_curves(workdir / "returns.png", curves, levels, xlabel="updates", ylabel="return of an episode")

    def line(name: str, returns: np.ndarray) -> str:
        return f"{name:32}{returns.mean():8.2f} +- {returns.std() / np.sqrt(len(returns)):.2f}"

    lines = [line(name, x) for name, x in returns.items()]
    # All play the same episodes, so the error of a difference is smaller than the two errors suggest.
    lines += [line(f"{first} minus {other}", returns[first] - returns[other]) for other in others]
    lines += [str(workdir / "returns.png"), f"best checkpoint: {checkpoint(workdir, 'argmax_return')}"]
    n = len(returns[first])
    deployer.log_info("\n".join(lines), title=f"{name}: mean return of {n} test episodes +- its error")
    return scores
